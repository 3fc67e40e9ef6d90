"""Frozen models: the reference policy and its moving average, reward models, offloading, weights in 16 bits."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import PreTrainedConfig

from rlhf_ppo.config import PPOConfig
from rlhf_ppo.data.rollout import PackedIndices
from rlhf_ppo.models.adapters import adapter_kind, adapter_state, adds_nothing, moved, probe, probe_tokens
from rlhf_ppo.models.heads import (
    StoredLinear,
    last_token_score,
    multiply_scores_in_float32,
    pooled_score,
    reads_last_token,
    scalar_head,
)
from rlhf_ppo.models.loading import low_precision_parameters
from rlhf_ppo.models.logprobs import ResponseLogprobs, response_logprobs
from rlhf_ppo.models.node_memory import cast_once
from rlhf_ppo.models.packing import pack_rows
from rlhf_ppo.models.policy_and_value import PolicyAndValue
from rlhf_ppo.models.unwrapping import (
    active_adapter,
    copy_model,
    is_peft_model,
    is_sharded,
    no_split_modules,
    own_share,
    probe_rows,
    text_config,
    transformers_model,
    with_adapters,
)
from rlhf_ppo.processes.distributed import get_logger

if TYPE_CHECKING:
    from peft import PeftModel


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
    for weight, stored in zip(
        weights.values(), cast_once([value.data for value in weights.values()], dtype), strict=True
    ):
        weight.data = stored
    if not all(map(torch.equal, before, (_probe(module, dtype) for module in affected))):
        for weight, original in originals:
            weight.data = original.to(weight.device)
        logger.info(f"Frozen weights stay in 32 bits: stored in {dtype} they give other results.")
        return 0
    for layer in layers:
        layer.__class__ = StoredLinear
    adapted = {id(weight) for model in _adapted(modules) for weight in model.parameters()}
    if any(
        id(weight) in adapted and not torch.equal(weight.cpu().float(), original) for weight, original in originals
    ):
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


MOVED_NAME = "moved_reference.safetensors"


class _Pair(NamedTuple):
    """The modules that hold a parameter of the reference and the policy's parameter of that name.

    Engines put other parameters into modules that they shard.
    """

    name: str
    of_reference: nn.Module
    of_policy: nn.Module

    @property
    def stored(self) -> Any:
        """The reference's parameter."""
        return self.of_reference.get_parameter(self.name.rpartition(".")[2])

    @property
    def followed(self) -> Any:
        """The policy's parameter."""
        return self.of_policy.get_parameter(self.name.rpartition(".")[2])


class EMAReference:
    r"""Exponential moving average of the policy, updated after each update of PPO.

        theta_ref <- decay theta_ref + (1 - decay) theta

    Xu et al., *Is DPO Superior to PPO for LLM Alignment?*, 2404.10719. Each rank updates its share in
    float32, with a float32 copy of a reference in 16 bits, whose steps rounding would lose.

    Args:
        decay: Weight of the reference's own parameters.
        reference: The language model of the reference, before an engine shards it.
        policy: The policy, before an engine shards it.

    Raises:
        ValueError: They have different parameters.
    """

    def __init__(self, decay: float, reference: nn.Module, policy: nn.Module) -> None:
        self.decay = decay
        self._pairs = _paired(decay, reference, policy)
        self._exact: dict[str, Tensor] = {}

    @torch.no_grad()
    def move(self, model: nn.Module, placed: nn.Module) -> None:
        """Take one step towards the policy.

        Args:
            model: The prepared `PolicyAndValue`.
            placed: The placed `FrozenPolicy`.
        """
        _reshard(model, placed)
        for pair in self._pairs:
            exact = self._exact_share(pair)
            exact.lerp_(own_share(pair.followed).to(exact), 1 - self.decay)
            self._put(pair, exact)

    @torch.no_grad()
    def save(self, directory: str, model: nn.Module, placed: nn.Module, is_main: bool) -> None:
        """Write the reference in float32; every rank calls this, the main process writes.

        Args:
            directory: The checkpoint's.
            model: The prepared `PolicyAndValue`.
            placed: The placed `FrozenPolicy`.
            is_main: Whether this is the main process.
        """
        _reshard(model, placed)
        whole: dict[str, Tensor] = {}
        for pair in self._pairs:
            value = _whole(pair.stored, self._exact_share(pair))
            if is_main:
                whole[pair.name] = value.cpu().contiguous()
        if is_main:
            save_file(whole, Path(directory, MOVED_NAME))

    @torch.no_grad()
    def load(self, checkpoint: str, model: nn.Module, placed: nn.Module) -> None:
        """Load a checkpoint; every rank calls this.

        Args:
            checkpoint: Directory of the checkpoint.
            model: The prepared `PolicyAndValue`.
            placed: The placed `FrozenPolicy`.

        Raises:
            ValueError: The file belongs to another reference, or cannot be read.
        """
        path = Path(checkpoint, MOVED_NAME)
        if not path.exists():
            logger.warning(
                f"{checkpoint} has no {MOVED_NAME}, as its run had no reference_ema: the reference starts to move "
                "from where it is, ref_model or the policy as it was given."
            )
            return
        _reshard(model, placed)
        try:
            with safe_open(path, "pt") as file:
                for pair in self._pairs:
                    share = _share_of_whole(pair.stored, file.get_tensor(pair.name))
                    exact = self._exact_share(pair)
                    self._put(pair, exact.copy_(share))
        except (SafetensorError, RuntimeError, OSError) as error:
            raise ValueError(
                f"the {MOVED_NAME} in {checkpoint} is not a reference of this policy: {error!s:.200}"
            ) from error

    def _exact_share(self, pair: _Pair) -> Tensor:
        """Return this rank's share in float32: the parameter's own memory if it is float32."""
        share = own_share(pair.stored)
        if share.dtype == torch.float32:
            return share
        return self._exact.setdefault(pair.name, share.float())

    def _put(self, pair: _Pair, exact: Tensor) -> None:
        """Copy a share into the parameter that forward passes read."""
        stored = pair.stored
        if stored.dtype != torch.float32:
            own_share(stored).copy_(exact)
        if hasattr(stored, "ds_tensor") and stored.numel() > 0:  # small: ZeRO-3 keeps it gathered
            stored.partition()


def check_can_move(decay: float | None, reference: nn.Module | None, policy: nn.Module) -> None:
    """Check that the reference has weights that can be averaged with the policy's.

    Args:
        decay: `reference_ema`.
        reference: The language model of the reference; None if it has no separate weights.
        policy: The policy.

    Raises:
        ValueError: It has none.
    """
    if decay is None:
        return
    if is_peft_model(policy):
        raise ValueError(
            f"reference_ema={decay} moves a reference's own weights towards the policy's, but here an adapter is "
            "trained; train all weights (no peft_config), or leave reference_ema None"
        )
    if reference is None:
        raise ValueError(
            f"reference_ema={decay} moves the reference, but there is none; set kl_coef above 0, or log_kl=True, or "
            "leave reference_ema None"
        )
    _paired(decay, reference, policy)


def _paired(decay: float, reference: nn.Module, policy: nn.Module) -> list[_Pair]:
    own = dict(reference.named_parameters())
    followed = dict(policy.named_parameters(remove_duplicate=False))
    foreign = {name for name, value in own.items() if name not in followed or _shape(followed[name]) != _shape(value)}
    if odd := foreign | (dict(policy.named_parameters()).keys() - own.keys()):
        raise ValueError(
            f"reference_ema={decay} moves ref_model towards the policy, but they have different parameters (the first "
            f"is {min(odd)}); give a ref_model of the policy's architecture, not quantized, or leave it out"
        )
    return [_Pair(name, *(_holder(model, name) for model in (reference, policy))) for name in own]


def _holder(model: nn.Module, name: str) -> nn.Module:
    return model.get_submodule(name.rpartition(".")[0])


def _shape(parameter: Any) -> tuple[int, ...]:
    return tuple(getattr(parameter, "ds_shape", parameter.shape))


def _reshard(*models: nn.Module) -> None:
    """Reshard FSDP2's modules: those outside of blocks stay gathered after a pass without gradients."""
    for module in (module for model in models for module in model.modules()):
        if isinstance(module, FSDPModule):
            module.reshard()


def _whole(parameter: Any, share: Tensor) -> Tensor:
    """Gather the shares of all ranks."""
    if hasattr(parameter, "ds_tensor"):
        group = parameter.ds_process_group
        parts = [torch.empty_like(share) for _ in range(torch.distributed.get_world_size(group))]
        torch.distributed.all_gather(parts, share.contiguous(), group=group)
        return torch.cat(parts)[: parameter.ds_numel].view(parameter.ds_shape)
    if isinstance(parameter, DTensor):
        how = {"shape": parameter.shape, "stride": parameter.stride()}
        return DTensor.from_local(share, parameter.device_mesh, parameter.placements, **how).full_tensor()
    return share


def _share_of_whole(parameter: Any, whole: Tensor) -> Tensor:
    """Return this rank's share of a whole parameter; a `RuntimeError` if it has another shape."""
    if whole.shape != torch.Size(_shape(parameter)):
        raise RuntimeError(f"a tensor has the shape {tuple(whole.shape)}, not {_shape(parameter)}")
    if hasattr(parameter, "ds_tensor"):
        size, rank = parameter.ds_tensor.numel(), torch.distributed.get_rank(parameter.ds_process_group)
        piece = whole.flatten()[rank * size : (rank + 1) * size]
        return nn.functional.pad(piece, (0, size - len(piece)))
    if isinstance(parameter, DTensor):
        device = parameter.to_local().device
        return distribute_tensor(whole.to(device), parameter.device_mesh, parameter.placements).to_local()
    return whole


# ---- The reference ----

INITIAL_ADAPTER = "ref"
"""Name of the frozen copy of an adapter that was trained before the run."""

_ONE_AT_A_TIME = ("ADALORA", "ADAPTION_PROMPT")
"""Kinds of adapters of which a model holds only one, or that share state outside of PyTorch's parameters."""


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


class Reference:
    """The policy that the KL penalty compares with (Ziegler et al., arXiv 1909.08593, section 2.1).

    Args:
        model: A separate frozen model, or None if the policy's base weights serve.
        adapter_name: With `model=None`, the adapter that makes the policy the reference; None switches adapters off.

    Attributes:
        ema: Moves `model` towards the policy after each update; None if it stays.
    """

    def __init__(self, model: nn.Module | None, adapter_name: str | None = None) -> None:
        self.model = model
        self.adapter_name = adapter_name
        self.ema: EMAReference | None = None

    def follow(self, model: nn.Module) -> None:
        """Move towards the policy after an update, if `reference_ema` is set; every rank calls this.

        Args:
            model: The prepared `PolicyAndValue`.
        """
        if self.ema is not None and self.model is not None:
            self.ema.move(model, self.model)

    def save(self, directory: str, model: nn.Module, is_main: bool) -> None:
        """Write the EMA reference into a checkpoint; every rank calls this, the main process writes."""
        if self.ema is not None and self.model is not None:
            self.ema.save(directory, model, self.model, is_main)

    def resume(self, checkpoint: str, model: nn.Module) -> None:
        """Load the EMA reference of a checkpoint; every rank calls this.

        Raises:
            ValueError: The file belongs to another model, or cannot be read.
        """
        if self.ema is not None and self.model is not None:
            self.ema.load(checkpoint, model, self.model)
        elif Path(checkpoint, MOVED_NAME).exists():
            logger.warning(
                f"{checkpoint} has a reference that had moved, but reference_ema=None: the KL is to ref_model, or to "
                "the policy as it was given."
            )

    @property
    def own_policy(self) -> nn.Module | None:
        """The separate language model; None if the policy's base serves, or an engine holds the model."""
        return self.model.policy if isinstance(self.model, FrozenPolicy) else None

    @contextmanager
    def forward(self, model: nn.Module, policy: nn.Module) -> Iterator[Callable[..., tuple[Tensor, ...]]]:
        """Yield the function that evaluates responses under the reference; shapes as in `response_logprobs`.

        Args:
            model: The prepared `PolicyAndValue`, which runs with the policy's adapters switched.
            policy: The unwrapped policy.
        """
        with self.generating(model, policy) as module:
            yield functools.partial(module, only="policy", with_entropy=False) if module is model else module

    def is_policy(self, policy: nn.Module) -> bool:
        """Tell whether both are the same modules with the same weights: a forward pass would repeat the policy's.

        Equal copies still get a forward pass: it shows that a run's KL starts at 0.
        """
        return self.model is None and self.adapter_name is None and adds_nothing(policy)

    @contextmanager
    def generating(self, model: nn.Module, policy: nn.Module) -> Iterator[nn.Module]:
        """Yield the module whose `policy` is the reference, to generate from; the arguments are those of `forward`."""
        if self.model is None:
            with _use_adapter(with_adapters(policy), self.adapter_name):
                yield model
        else:
            with getattr(self.model, "offload", nullcontext)():
                yield self.model


def asks_for_reference(args: PPOConfig) -> bool:
    """Tell whether the arguments need a reference: for a KL penalty, or to log the KL."""
    return args.kl_coef > 0 or args.log_kl or args.ref_adapter_name is not None


def make_reference(
    policy: nn.Module,
    ref_model: nn.Module | None,
    ref_adapter_name: str | None,
    adapter_is_new: bool,
    temperature: float,
) -> Reference:
    """Choose the reference.

    Args:
        policy: The policy, possibly a `PeftModel`.
        ref_model: The model that the user gave, or None.
        ref_adapter_name: The adapter of `policy` that the user named, or None.
        adapter_is_new: Whether the adapter was made just now, so that switching it off gives the initial policy.
        temperature: Sampling temperature that divides the logits.

    Returns:
        The user's model, frozen; else the named adapter; else, for a `PeftModel`, the base weights when the adapter is
        new and a frozen copy of the adapter when it was already trained, so that KL starts at 0 (a copy of the whole
        policy for the kinds of adapters that a model holds one of); else a frozen copy.

    Raises:
        ValueError: `ref_adapter_name` is given without such an adapter, or together with `ref_model`; the adapter
            cannot be copied; or the reference would be trained along.
    """
    model = adapter = None
    if ref_adapter_name is not None:
        _check_adapter(policy, ref_model, ref_adapter_name)
        adapter = ref_adapter_name
    elif ref_model is not None:
        _check_own_weights(policy, ref_model)
        model = ref_model
    elif not is_peft_model(policy):
        model = copy_model(policy)
    elif not adapter_is_new and _can_hold_two(policy):
        _copy_active_adapter(policy, INITIAL_ADAPTER)
        adapter = INITIAL_ADAPTER
    elif not adapter_is_new:
        model = _whole_copy(policy)
    reference = Reference(None if model is None else FrozenPolicy(model, temperature), adapter)
    if is_peft_model(policy):
        _check_stays(reference, policy)
    return reference


def _check_adapter(policy: nn.Module, ref_model: nn.Module | None, ref_adapter_name: str) -> None:
    if ref_model is not None:
        raise ValueError(f"ref_adapter_name={ref_adapter_name!r} and ref_model are both given; pass one of them")
    adapters = list(policy.peft_config) if is_peft_model(policy) else []
    if ref_adapter_name not in adapters:
        raise ValueError(
            f"ref_adapter_name={ref_adapter_name!r} is not an adapter of the policy, which has {adapters}"
        )


def _check_own_weights(policy: nn.Module, ref_model: nn.Module) -> None:
    trained = {id(parameter): name for name, parameter in policy.named_parameters() if parameter.requires_grad}
    shared = [trained[id(parameter)] for parameter in ref_model.parameters() if id(parameter) in trained]
    if shared:
        raise ValueError(
            f"ref_model holds parameters that the policy trains (the first is {shared[0]}): PEFT puts adapters into "
            "the very model that it is given; load ref_model anew, or leave it out"
        )


def _can_hold_two(policy: nn.Module) -> bool:
    """Tell whether the policy can have a second adapter of this kind that shares no trainable parameter."""
    config = with_adapters(policy).active_peft_config
    return adapter_kind(policy) not in _ONE_AT_A_TIME and getattr(config, "bias", "none") == "none"


def _whole_copy(policy: nn.Module) -> nn.Module:
    config = with_adapters(policy).active_peft_config
    what = f"an adapter of the kind {adapter_kind(policy)} with bias={getattr(config, 'bias', 'none')!r}"
    if is_sharded(policy):
        raise ValueError(f"model has {what}, which cannot be copied under ZeRO-3; pass ref_model, the initial policy")
    logger.warning(
        f"model has {what}, of which PEFT holds one at a time: the reference is a copy of the whole policy, and takes "
        "as much memory."
    )
    return copy.deepcopy(policy)


def _copy_active_adapter(policy: PeftModel, name: str) -> None:
    from peft import set_peft_model_state_dict

    active = active_adapter(policy)
    if name in policy.peft_config:
        raise ValueError(
            f"the policy already has an adapter {name!r}: name the reference with ref_adapter_name, or rename it"
        )
    config = copy.deepcopy(policy.peft_config[active])
    policy.add_adapter(name, config, autocast_adapter_dtype=not low_precision_parameters(policy))
    set_peft_model_state_dict(policy, adapter_state(policy), adapter_name=name)
    policy.set_adapter(active)
    if is_sharded(policy):
        return
    tokens = probe_tokens(policy)
    if not torch.equal(_logits(Reference(None, name), policy, tokens), probe(policy, tokens)):
        raise ValueError(
            f"the copy of the policy's adapter, of the kind {adapter_kind(policy)}, gives other logits than the "
            "adapter itself; pass ref_model, the initial policy"
        )


def _check_stays(reference: Reference, policy: PeftModel) -> None:
    """Raise if training the policy's adapter would change the reference."""
    if is_sharded(policy):
        return
    tokens = probe_tokens(policy)
    before = _logits(reference, policy, tokens)
    with moved(policy):
        after = _logits(reference, policy, tokens)
    if not torch.equal(after, before):
        what = "ref_model" if reference.model is not None else f"the reference, adapter {reference.adapter_name!r},"
        raise ValueError(
            f"{what} changes when the policy's adapter {policy.active_adapter!r} (of the kind {adapter_kind(policy)}) "
            "is trained: pass a ref_model with weights of its own, or another ref_adapter_name"
        )


def _use_adapter(policy: PeftModel, name: str | None) -> AbstractContextManager[None]:
    """Enable an adapter of the policy, or none, inside a context."""
    from trl.trainer.utils import use_adapter  # slow to import

    return use_adapter(policy, name)


def _logits(reference: Reference, policy: PeftModel, tokens: Tensor) -> Tensor:
    if isinstance(reference.model, FrozenPolicy):
        return probe(reference.model.policy, tokens)
    with _use_adapter(policy, reference.adapter_name):
        return probe(policy, tokens)
