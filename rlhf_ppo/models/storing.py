"""Frozen weights in the type that autocast multiplies them in: it casts them at every pass and token otherwise."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from rlhf_ppo.models.frozen import Frozen
from rlhf_ppo.models.heads import FrozenScorer, scalar_head
from rlhf_ppo.models.policy_and_value import PolicyAndValue
from rlhf_ppo.models.stored_linear import StoredLinear
from rlhf_ppo.models.unwrapping import is_peft_model, transformers_model
from rlhf_ppo.processes.logs import get_logger

logger = get_logger(__name__)

_LENGTHS = (4, 7)
"""Tokens of the rows of a probe; the last two are the response."""


@torch.no_grad()
def store_frozen(given: Sequence[nn.Module | None], dtype: torch.dtype | None) -> int:
    """Store frozen linear layers in the type that autocast casts them to, if all results stay the same to the bit.

    Stored are the layers of wholly frozen models and of the bases under adapters, in place. Others keep their type:
    what an embedding shares, what is saved with the model, scalar heads, which compute in float32, and what an adapter
    other than plain LoRA wraps, which may read the weight itself. If a probe then differs, everything is put back.

    Args:
        given: The `PolicyAndValue`, and each `FrozenPolicy` and `FrozenScorer`, none of them sharded; or None.
        dtype: What autocast computes in, or None where it does not.

    Returns:
        Number of layers that were stored.
    """
    modules = [module for module in given if module is not None]
    layers = [] if dtype is None else _frozen_layers(modules)
    if dtype is None or not layers:
        return 0
    before = [_probe(module, dtype) for module in modules]
    weights = {id(weight): weight for layer in layers for weight in layer.parameters(recurse=False)}
    originals = [(weight, weight.data.cpu()) for weight in weights.values()]  # off the device, which may be short
    for weight in weights.values():
        weight.data = weight.data.to(dtype)
    if not all(map(torch.equal, before, (_probe(module, dtype) for module in modules))):
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
    """List the linear layers whose parameters are frozen, in 32 bits, and read by nothing but linear layers."""
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
    """Yield the parameters that are read, or saved, in another way than multiplied by a linear layer."""
    for part in module.modules():
        wrapped = getattr(part, "base_layer", None)
        if isinstance(wrapped, nn.Module) and not _is_plain_lora(part):
            yield from wrapped.parameters()
        if type(part) is not nn.Linear:
            yield from part.parameters(recurse=False)
    for model in _models(module):
        head = scalar_head(model)
        embeddings = transformers_model(model).get_output_embeddings()
        # An adapter's checkpoint has the head along that it wraps.
        kept = [head, embeddings if hasattr(embeddings, "base_layer") else None]
        yield from (weight for layer in kept if layer is not None for weight in layer.parameters())


def _is_plain_lora(layer: Any) -> bool:
    from peft.tuners.lora import Linear

    return type(layer) is Linear and not layer.lora_variant


def _models(module: Any) -> list[nn.Module]:
    return [module.policy, module.value_model] if isinstance(module, PolicyAndValue) else [module.model]


def _probe(module: nn.Module, dtype: torch.dtype) -> Tensor:
    """Return what a module says about two short rows, as one vector."""
    weight = next(module.parameters())
    vocabulary = min(transformers_model(model).config.get_text_config().vocab_size for model in _models(module))
    width = max(_LENGTHS)
    ids = (torch.arange(2 * width, device=weight.device).view(2, width) * 7 + 1) % vocabulary
    mask = torch.arange(width, device=weight.device) >= width - torch.tensor(_LENGTHS, device=weight.device)[:, None]
    batch = (ids, mask) if isinstance(module, FrozenScorer) else (ids, mask, mask[:, -2:])
    with torch.autocast(weight.device.type, dtype):
        outputs = module(*batch)
    parts = [outputs] if isinstance(outputs, Tensor) else outputs
    return torch.cat([part.nan_to_num().flatten() for part in parts])
