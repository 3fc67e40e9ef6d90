"""Costs of a forward pass, counted on tensors without storage: nothing is computed or allocated."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count

from rlhf_ppo.models.heads import Float32Linear
from rlhf_ppo.models.unwrapping import autocast_dtype, backbone, in_eval_mode, no_split_modules

_CPU_ATTENTION = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: (
        lambda query, key, value, *_, **__: sdpa_flop_count(query, key, value)
    )
}
"""The attention that torch's counter does not know."""


class NoStorage(FakeTensorMode):
    """A context in which new tensors have shapes and a device, and no storage; a copy of one stays in its context.

    torch would copy the context too, with weak references that are then released twice: later, the program crashes.
    """

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self


@dataclass(frozen=True)
class PassCost:
    """Costs of one forward pass of a model's backbone, without its head.

    Attributes:
        saved_bytes: Bytes that autograd keeps for the backward pass, without parameters.
        flops: Floating-point operations, two per multiply-add.
    """

    saved_bytes: int
    flops: int


def count_pass(
    model: nn.Module,
    rows: int,
    length: int,
    autocast: Callable[[], AbstractContextManager[Any]] = nullcontext,
    stored: torch.dtype | None = None,
) -> PassCost:
    """Count memory and arithmetic of a forward pass over `rows` full rows, in the model's current mode.

    Args:
        model: A transformers model, or a `PeftModel` around one; activation checkpointing counts as it is set.
        rows: Number of rows.
        length: Tokens of each.
        autocast: Makes the context of the pass.
        stored: The engine's type of floating-point parameters; None: their own.
    """
    body = backbone(model)
    saved: dict[int, int] = {}
    kept: list[Tensor] = []  # a storage that was freed could give its address to another
    with NoStorage(allow_non_fake_inputs=True), autocast():
        state = _state_without_storage(body, stored)
        own = {value.untyped_storage()._cdata for value in state.values()}

        def keep(value: Tensor) -> Tensor:
            if value.untyped_storage()._cdata not in own:
                kept.append(value)
                saved[value.untyped_storage()._cdata] = value.untyped_storage().nbytes()
            return value

        with (
            FlopCounterMode(display=False, custom_mapping=_CPU_ATTENTION) as counter,
            torch.autograd.graph.saved_tensors_hooks(keep, lambda value: value),
        ):
            _run(body, state, rows, length, use_cache=False)
    return PassCost(sum(saved.values()), counter.get_total_flops())


@torch.no_grad()
def count_cache_bytes(
    model: nn.Module,
    rows: int,
    length: int,
    autocast: Callable[[], AbstractContextManager[Any]] = nullcontext,
    stored: torch.dtype | None = None,
) -> int:
    """Count the key-value cache of `rows` full rows, under autocast in its type; arguments: those of `count_pass`."""
    body, device = backbone(model), next(model.parameters()).device.type
    # With recomputed activations, training mode makes no cache.
    with in_eval_mode(body), NoStorage(allow_non_fake_inputs=True), autocast():
        output = _run(body, _state_without_storage(body, stored), rows, length, use_cache=True)
        dtype = autocast_dtype(device)
    return _cache_bytes(getattr(output, "past_key_values", None), dtype)


def _run(body: nn.Module, state: dict[str, Tensor], rows: int, length: int, use_cache: bool) -> Any:
    ids = torch.zeros(rows, length, dtype=torch.long, device=next(body.parameters()).device)
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "use_cache": use_cache, "return_dict": True}
    return functional_call(body, state, kwargs=inputs)


def cast_bytes(model: nn.Module, dtype: torch.dtype) -> int:
    """Count autocast's 16-bit copies of the weights of a model's trained linear layers."""
    return sum(
        num_elements(module.weight) * dtype.itemsize
        for module in model.modules()
        if isinstance(module, nn.Linear)
        and not isinstance(module, Float32Linear)
        and module.weight.requires_grad
        and module.weight.dtype == torch.float32
    )


def outside_blocks(*models: nn.Module) -> set[nn.Parameter]:
    """Return the parameters outside the blocks that ZeRO-3 and FSDP2 gather one by one: embeddings, norms, heads."""
    return {value for model in models for value in model.parameters()} - {
        value for model in models for block in _blocks(model) for value in block.parameters()
    }


def _blocks(model: nn.Module) -> list[nn.Module]:
    names = no_split_modules(model)
    return [part for part in model.modules() if type(part).__name__ in names]


def gathered_bytes(model: nn.Module, dtype: torch.dtype | None) -> int:
    """Count the gathered parameters of a sharded model in a pass: all outside its blocks, a block and the next one.

    Args:
        model: The model.
        dtype: The type of gathered parameters; None: their own.
    """
    blocks = [stored_bytes(block.parameters(), dtype) for block in _blocks(model)]
    return stored_bytes(model.parameters(), dtype) - sum(blocks) + 2 * max(blocks, default=0)


def stored_bytes(parameters: Iterable[nn.Parameter], dtype: torch.dtype | None = None) -> int:
    """Return the bytes of parameters, each counted once.

    Args:
        parameters: The parameters, also sharded by ZeRO-3.
        dtype: The stored type of floating-point parameters; None: their own.
    """
    return sum(num_elements(value) * _type_in(value, dtype).itemsize for value in set(parameters))


def _type_in(value: Tensor, dtype: torch.dtype | None) -> torch.dtype:
    return value.dtype if dtype is None or not value.is_floating_point() else dtype


def _state_without_storage(body: nn.Module, stored: torch.dtype | None) -> dict[str, Tensor]:
    parameters = {name: _without_storage(value, stored) for name, value in body.named_parameters()}
    return parameters | {name: _without_storage(value, None) for name, value in body.named_buffers()}


def num_elements(parameter: Tensor) -> int:
    """Return the number of elements of a parameter, also if ZeRO-3 has sharded it."""
    return int(getattr(parameter, "ds_numel", parameter.numel()))


def copy_without_storage(model: nn.Module, kept: Iterable[Tensor]) -> nn.Module:
    """Copy a model for counting, before an engine shards it: its tensors have shapes, types and a device only.

    Args:
        model: The model.
        kept: Parameters that it may share with another model; the copy shares them too.
    """
    own = {id(value): value for value in kept}
    with NoStorage():
        for value in (*model.parameters(), *model.buffers()):
            if id(value) not in own:
                empty = _without_storage(value, None)
                own[id(value)] = nn.Parameter(empty, value.requires_grad) if isinstance(value, nn.Parameter) else empty
    return copy.deepcopy(model, own)


def _without_storage(value: Tensor, dtype: torch.dtype | None) -> Tensor:
    shape = getattr(value, "ds_shape", value.shape)
    return torch.empty(shape, dtype=_type_in(value, dtype), device=value.device, requires_grad=value.requires_grad)


def _cache_bytes(cache: Any, dtype: torch.dtype | None) -> int:
    storages = {
        value.untyped_storage()._cdata: value.untyped_storage().nbytes()
        // value.dtype.itemsize
        * _type_in(value, dtype).itemsize
        for layer in getattr(cache, "layers", ())
        for value in vars(layer).values()
        if isinstance(value, Tensor) and value.is_floating_point()
    }
    return sum(storages.values())
