"""One copy of a model's weights in the memory of a node, which its processes map until they change or shard them."""

from __future__ import annotations

import copy
import functools
import os
from collections.abc import Callable, Sequence
from typing import Any

import torch
from accelerate import PartialState, init_empty_weights
from accelerate.utils import gather_object
from torch import Tensor, nn
from transformers import PreTrainedConfig
from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled

from rlhf_ppo.processes.distributed import any_rank, raise_on_all_ranks

_AT_ONCE = 64
"""Tensors of one exchange; each is an open file of the first process until the others have mapped it."""


@functools.cache
def is_shared() -> bool:
    """Return whether processes of this node load the same models whole, and can map each other's memory.

    Every rank must call this.
    """
    several = torch.distributed.is_initialized() and PartialState().num_processes > 1 < _processes_of_node()
    if not several or not hasattr(os, "memfd_create") or is_deepspeed_zero3_enabled():
        return False
    file = os.memfd_create("rlhf_ppo")
    others = [path for node, path in gather_object([(_node(), _path(file))]) if node == _node()]
    can_map = not any_rank(not all(os.access(path, os.R_OK | os.W_OK) for path in others))
    os.close(file)
    return can_map


def hold_once(values: Sequence[Tensor]) -> list[Tensor]:
    """Return the values that the first process of the node has, in memory that all of its processes map.

    A process that writes to a tensor gets its own copy of the written pages. Every rank calls this.

    Args:
        values: Tensors in host memory; in other processes only their number is read.

    Raises:
        OSError: A process cannot open the first one's memory; on all ranks.
    """
    held: list[Tensor] = []
    for start in range(0, len(values), _AT_ONCE):
        held += _hold_some(values[start : start + _AT_ONCE])
    return held


def _hold_some(values: Sequence[Tensor]) -> list[Tensor]:
    state = PartialState()
    files: list[int] = []
    with raise_on_all_ranks(state):
        if state.is_local_main_process:
            files = [_written(value) for value in values]
    places = [(_path(file), *_form(value)) for file, value in zip(files, values, strict=False)]
    try:
        of_nodes = gather_object([(_node(), places)])
        with raise_on_all_ranks(state):
            return [_mapped(*place) for node, found in of_nodes if node == _node() for place in found]
    finally:  # all have mapped them
        for file in files:
            os.close(file)


def _written(value: Tensor) -> int:
    file = os.memfd_create("rlhf_ppo")
    _mapped(_path(file), *_form(value), is_written=True).copy_(value.detach())
    return file


def _mapped(path: str, shape: torch.Size, dtype: torch.dtype, is_written: bool = False) -> Tensor:
    size = shape.numel() * dtype.itemsize
    if size == 0:
        return torch.empty(shape, dtype=dtype)
    storage: Any = torch.UntypedStorage.from_file(path, shared=is_written, nbytes=size)
    return torch.empty(0, dtype=dtype).set_(storage).view(shape)


def _path(file: int) -> str:
    return f"/proc/{os.getpid()}/fd/{file}"


def _form(value: Tensor) -> tuple[torch.Size, torch.dtype]:
    return value.shape, value.dtype


def _processes_of_node() -> int:
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def _node() -> int:
    return PartialState().process_index // _processes_of_node()


# ---- Models ----


def copy_once(model: nn.Module) -> nn.Module:
    """Copy a model; the processes of a node hold one copy of its weights."""
    parameters = list(model.parameters())
    if not is_shared() or not _are_plain(parameters):
        return copy.deepcopy(model)
    held = zip(parameters, hold_once([value.data for value in parameters]), strict=True)
    return copy.deepcopy(model, {id(value): nn.Parameter(same, value.requires_grad) for value, same in held})


def load_once(load: Callable[..., Any], dtype: torch.dtype | str) -> Any:
    """Load a model; the processes of a node hold one copy of its weights.

    `from_pretrained` maps the files of a checkpoint. Weights that it converts would be in the memory of each process.

    Args:
        load: Calls `from_pretrained` with a `dtype`, perhaps with `output_loading_info`.
        dtype: The type of the weights.

    Returns:
        The result of `load`.
    """
    if not isinstance(dtype, torch.dtype) or not is_shared():
        return load(dtype)
    state = PartialState()
    with raise_on_all_ranks(state):
        loaded = load(dtype if state.is_local_main_process else "auto")
    model = loaded[0] if isinstance(loaded, tuple) else loaded
    parameters = list(model.parameters()) if isinstance(model, nn.Module) else []
    if any_rank(not _are_plain(parameters)):  # quantized
        return loaded if state.is_local_main_process else load(dtype)
    if any_rank(any(value.dtype != dtype for value in parameters)):  # the first converted them
        for part in model.modules():
            if isinstance(config := getattr(part, "config", None), PreTrainedConfig):
                config.dtype = dtype
        _take_from_first(model)
    return loaded


def make_once(make: Callable[[], nn.Module]) -> nn.Module:
    """Make a model with new weights; the processes of a node hold one copy of them."""
    if not is_shared():
        return make()
    if PartialState().is_local_main_process:
        model = make()
    else:
        with init_empty_weights(include_buffers=False):
            model = make()
        getattr(model, "tie_weights", lambda: None)()
    _take_from_first(model)
    return model


def cast_once(values: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """Convert tensors that all processes have; those of a node hold one copy of each that is in host memory."""
    if not is_shared() or any_rank(any(value.device.type != "cpu" for value in values)):
        return [value.to(dtype) for value in values]
    is_first, found = PartialState().is_local_main_process, list[Tensor]()
    for start in range(0, len(values), _AT_ONCE):
        some = values[start : start + _AT_ONCE]
        found += hold_once([value.to(dtype) for value in some] if is_first else some)
    return found


def _take_from_first(model: nn.Module) -> None:
    """Give a model the parameters of the first process of the node, and the generator its state."""
    (state,) = hold_once([torch.get_rng_state()])
    torch.set_rng_state(state.clone())
    instead: dict[int, nn.Parameter] = {}
    parameters = list(model.parameters())
    for start in range(0, len(parameters), _AT_ONCE):  # the first process has few tensors twice
        some = parameters[start : start + _AT_ONCE]
        for value, mapped in zip(some, hold_once([value.data for value in some]), strict=True):
            if value.is_meta:
                instead[id(value)] = nn.Parameter(mapped, value.requires_grad)
            else:
                value.data = mapped
    for part in model.modules():
        for name, value in part._parameters.items():
            if value is not None:
                part._parameters[name] = instead.get(id(value), value)


def _are_plain(parameters: Sequence[Tensor]) -> bool:
    return all(type(value) is nn.Parameter and value.device.type == "cpu" for value in parameters)
