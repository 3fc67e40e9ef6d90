"""Frozen models: reference policies and reward models without gradients, offloading, and the cast of their weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Self

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

from rlhf_ppo.data.rollout import PackedIndices
from rlhf_ppo.models.heads import (
    StoredLinear,
    last_token_score,
    multiply_scores_in_float32,
    pooled_score,
    reads_last_token,
    scalar_head,
)
from rlhf_ppo.models.packing import pack_rows
from rlhf_ppo.models.policy_and_value import PolicyAndValue, ResponseLogprobs, response_logprobs
from rlhf_ppo.models.unwrapping import (
    cast_once,
    is_peft_model,
    no_split_modules,
    probe_rows,
    text_config,
    transformers_model,
)
from rlhf_ppo.processes.distributed import get_logger


class Offload:
    """Keeps a frozen model's weights on the CPU, and on a device inside a context.

    Nothing is copied back: frozen weights never change.

    Args:
        model: The model; its weights move to the CPU.
        device: The device on which it runs.
    """

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self.device = device
        self._weights = [*model.parameters(), *model.buffers()]
        self._at_home = [weight.data.cpu() for weight in self._weights]
        if torch.cuda.is_available():
            self._at_home = [weight.pin_memory() for weight in self._at_home]
        self._return()

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """Copy the weights to the device for a context."""
        try:
            for weight, at_home in zip(self._weights, self._at_home, strict=True):
                weight.data = at_home.to(self.device, non_blocking=True, copy=True)
            yield
        finally:
            self._return()

    def _return(self) -> None:
        for weight, at_home in zip(self._weights, self._at_home, strict=True):
            weight.data = at_home


class Frozen(nn.Module):
    """A model in eval mode, without gradients, in the form that engines shard.

    Only `forward` of a subclass runs the model: ZeRO-3 and FSDP2 gather parameters around it.

    Args:
        model: A transformers model, or a `PeftModel` around one; it is changed in place.

    Attributes:
        offload: Makes a context that has the weights on the device; `Offload` where they are on the CPU between uses.
    """

    offload: Callable[[], AbstractContextManager[None]] = nullcontext

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        pack_rows(model)
        self.model = model.requires_grad_(False)
        self.eval()

    def train(self, mode: bool = True) -> Self:
        """Stay in eval mode."""
        return super().train(False)

    @property
    def config(self) -> PreTrainedConfig:
        """The model's configuration, which sharding engines read."""
        return transformers_model(self.model).config

    @property
    def _no_split_modules(self) -> list[str]:
        return no_split_modules(self.model)


class FrozenScorer(Frozen):
    """A reward model whose forward pass gives one score per text.

    A causal model scores with its head at the last real token, found from the mask; an encoder with its own pooling.

    Args:
        model: A sequence-classification model with one label; it is frozen.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self._score = last_token_score if reads_last_token(model) else pooled_score
        multiply_scores_in_float32(model)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Score texts.

        Args:
            input_ids: Token ids, long `(B, L)`, padded on either side or both.
            attention_mask: True on real tokens, bool `(B, L)`.

        Returns:
            One score per row, float32 `(B,)`.
        """
        return self._score(self.model, input_ids, attention_mask)


class FrozenPolicy(Frozen):
    """A language model whose forward pass gives the log-probabilities of responses.

    Args:
        policy: The model; it is frozen.
        temperature: Sampling temperature that divides the logits.
    """

    def __init__(self, policy: nn.Module, temperature: float) -> None:
        super().__init__(policy)
        self.temperature = temperature

    @property
    def policy(self) -> nn.Module:
        """The language model, as `PolicyAndValue` calls its own."""
        return self.model

    def on_policy(self, function: Callable[[nn.Module], Any]) -> Any:
        """Call `function` with the language model; FSDP registers this method to run the way it runs `forward`."""
        return function(self.model)

    def forward(
        self,
        query_responses: Tensor,
        attention_mask: Tensor,
        response_mask: Tensor,
        places: PackedIndices | None = None,
    ) -> ResponseLogprobs:
        """Evaluate responses, without entropy; shapes as in `response_logprobs`."""
        batch = query_responses, attention_mask, response_mask
        return response_logprobs(self.model, *batch, self.temperature, with_entropy=False, places=places)


# ---- Frozen-weight cast ----

logger = get_logger(__name__)

_LENGTHS = (4, 7)
"""Tokens of the rows of a probe; the last two tokens are the response."""


@torch.no_grad()
def cast_frozen_weights(given: Sequence[nn.Module | None], dtype: torch.dtype | None) -> int:
    """Cast frozen linear layers to the type that autocast casts them to, if all results stay the same to the bit.

    Casts the layers of wholly frozen models and of bases under adapters, in place. These keep their type: weights that
    are tied to an embedding or saved with the model, scalar heads, which compute in float32, and layers inside an
    adapter other than plain LoRA, which may read the weight. If a probe then differs, all weights are restored.

    Args:
        given: The `PolicyAndValue`, and each `FrozenPolicy` and `FrozenScorer`, none of them sharded; or None.
        dtype: The type of autocast, or None without autocast.

    Returns:
        Number of layers that were cast.
    """
    modules = [module for module in given if module is not None]
    layers = [] if dtype is None else _frozen_layers(modules)
    if dtype is None or not layers:
        return 0
    weights = {id(weight): weight for layer in layers for weight in layer.parameters(recurse=False)}
    affected = [module for module in modules if not weights.keys().isdisjoint(map(id, module.parameters()))]
    before = [_probe(module, dtype) for module in affected]
    originals = [(weight, weight.data.cpu()) for weight in weights.values()]  # the device may be short of memory
    stored = cast_once([weight.data for weight in weights.values()], dtype)
    for weight, data in zip(weights.values(), stored, strict=True):
        weight.data = data
    if not all(map(torch.equal, before, (_probe(module, dtype) for module in affected))):
        for weight, original in originals:
            weight.data = original.to(weight.device)
        logger.info(f"Frozen weights stay in 32 bits: stored in {dtype} they give other results.")
        return 0
    for layer in layers:
        layer.__class__ = StoredLinear
    adapted = {id(weight) for model in _adapted(modules) for weight in model.parameters()}
    under_adapters = [(weight, original) for weight, original in originals if id(weight) in adapted]
    if any(not torch.equal(weight.cpu().float(), original) for weight, original in under_adapters):
        logger.warning_once(
            f"The frozen weights under the adapters are stored in {dtype}, in which this run multiplies them, rounded "
            "from float32. To merge an adapter, load its base again from where it came from."
        )
    return len(layers)


def _frozen_layers(modules: Sequence[nn.Module]) -> list[nn.Linear]:
    """List the linear layers whose parameters are frozen, in 32 bits, and read by linear layers only."""
    left_out = {id(weight) for module in modules for weight in _read_elsewhere(module)}
    wholly = [module for module in modules if isinstance(module, Frozen)]
    found = {id(layer): layer for model in (*wholly, *_adapted(modules)) for layer in model.modules()}
    return [
        layer
        for layer in found.values()
        if type(layer) is nn.Linear
        and all(
            not weight.requires_grad and weight.dtype == torch.float32 and id(weight) not in left_out
            for weight in layer.parameters(recurse=False)
        )
    ]


def _adapted(modules: Sequence[nn.Module]) -> list[nn.Module]:
    trained = (model for module in modules if isinstance(module, PolicyAndValue) for model in _models(module))
    return [model for model in trained if is_peft_model(model)]


def _read_elsewhere(module: nn.Module) -> Iterator[Tensor]:
    """Yield the parameters that are saved, or read other than by a linear layer's product."""
    for part in module.modules():
        wrapped = getattr(part, "base_layer", None)
        if isinstance(wrapped, nn.Module) and not _is_plain_lora(part):
            yield from wrapped.parameters()
        if type(part) is not nn.Linear:
            yield from part.parameters(recurse=False)
    for model in _models(module):
        head = scalar_head(model)
        embeddings = transformers_model(model).get_output_embeddings()
        # An adapter's checkpoint contains the head that it wraps.
        kept = [head, embeddings if hasattr(embeddings, "base_layer") else None]
        yield from (weight for layer in kept if layer is not None for weight in layer.parameters())


def _is_plain_lora(layer: Any) -> bool:
    from peft.tuners.lora import Linear

    return type(layer) is Linear and not layer.lora_variant


def _models(module: Any) -> list[nn.Module]:
    return [module.policy, module.value_model] if isinstance(module, PolicyAndValue) else [module.model]


def _probe(module: nn.Module, dtype: torch.dtype) -> Tensor:
    """Return a module's outputs for two short rows as one vector."""
    reader = min(_models(module), key=lambda model: text_config(model).vocab_size)
    ids, mask = probe_rows(reader, _LENGTHS, left=True)
    batch = (ids, mask) if isinstance(module, FrozenScorer) else (ids, mask, mask[:, -2:])
    with torch.autocast(ids.device.type, dtype):
        outputs = module(*batch)
    parts = [outputs] if isinstance(outputs, Tensor) else outputs
    return torch.cat([part.nan_to_num().flatten() for part in parts if part is not None])
