"""A process group of one process, in which every collective copies.

Call `install()` before accelerate makes its state.

It stands in for NCCL and gloo on the pretend device, so that DDP, FSDP2 and DeepSpeed run as under
`accelerate launch --num_processes 1`. It cannot show the order of collectives, deadlocks or sums over ranks.
"""

from __future__ import annotations

import collections
import sys
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _create_work_from_future
from torch.distributed import distributed_c10d as c10d

CALLS: collections.Counter[tuple[str, str, str]] = collections.Counter()
"""Collectives so far, by name, device and type of the tensors."""


def _done(result: Any) -> Any:
    future = torch.futures.Future(devices=[torch.device("cuda", 0)])
    future.set_result(result)
    return _create_work_from_future(future)


def _copy(to: torch.Tensor, source: torch.Tensor) -> None:
    if to.device != source.device:
        raise RuntimeError(f"a collective from {source.device} to {to.device}")
    if to.numel() != source.numel():
        raise RuntimeError(f"a collective of a world of one from {tuple(source.shape)} to {tuple(to.shape)}")
    with torch.no_grad():
        to.detach().copy_(source.detach().reshape(to.shape))


class _Several(int):
    """One process that FSDP2 takes for several: for one it skips the all-gather and the reduce-scatter."""

    def __eq__(self, other: object) -> bool:
        return False

    def __ne__(self, other: object) -> bool:
        return True

    def __gt__(self, other: int) -> bool:
        return other == 1 or int(self) > other

    __hash__ = int.__hash__


class WorldOfOne(dist.ProcessGroup):
    """Refuses what NCCL refuses: tensors of the CPU, unless gloo was asked for too, and non-contiguous ones."""

    def __init__(self, rank: int, size: int, devices: set[str]) -> None:
        assert (rank, size) == (0, 1), f"a world of one, not rank {rank} of {size}"
        super().__init__(rank, size)
        self.devices = devices

    def size(self) -> int:
        asker = sys._getframe(1).f_code.co_filename
        return _Several(1) if asker.endswith(("_fsdp_param_group.py", "_fsdp_collectives.py")) else 1

    def rank(self) -> int:
        return 0

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device(name) for name in sorted(self.devices)]  # objects travel by the first

    def getBackendName(self) -> str:
        return "nccl"

    def name(self) -> str:
        return "nccl"

    @property
    def pg_name(self) -> str:
        return c10d._world.pg_names[self]

    @property
    def group_name(self) -> str:
        return self.pg_name

    def __repr__(self) -> str:
        return "WorldOfOne()"

    def _count(self, name: str, tensors: Sequence[torch.Tensor]) -> None:
        for tensor in tensors:
            kind = tensor.device.type
            if kind not in self.devices:  # the message of a group of NCCL alone
                raise RuntimeError(f"No backend type associated with device type {kind} ({name})")
            if not tensor.is_contiguous() and tensor.numel() > 1:
                raise ValueError("Tensors must be contiguous")
            CALLS[(name, kind, str(tensor.dtype).removeprefix("torch."))] += 1

    def _in_place(self, name: str, tensors: Any) -> Any:
        self._count(name, tensors)
        return _done(tensors)

    def _each(self, name: str, outputs: Any, sources: Any) -> Any:
        self._count(name, [*outputs, *sources])
        for to, source in zip(outputs, sources, strict=True):
            _copy(to, source)
        return _done(outputs)

    # ---- One tensor each ----

    def allreduce(self, tensors: Any, opts: Any = None) -> Any:
        return self._in_place("allreduce", tensors)

    allreduce_coalesced = allreduce

    def broadcast(self, tensors: Any, opts: Any = None) -> Any:
        return self._in_place("broadcast", tensors)

    def reduce(self, tensors: Any, opts: Any = None) -> Any:
        return self._in_place("reduce", tensors)

    def barrier(self, opts: Any = None) -> Any:
        return _done(None)

    def all_gather_single(self, output: Any, source: Any, opts: Any = None) -> Any:
        return self._each("all_gather_single", [output], [source])

    def reduce_scatter_single(self, output: Any, source: Any, opts: Any = None) -> Any:
        return self._each("reduce_scatter_single", [output], [source])

    def all_to_all_single(self, output: Any, source: Any, *splits: Any, **options: Any) -> Any:
        return self._each("all_to_all_single", [output], [source])

    _allgather_base, _reduce_scatter_base, alltoall_base = all_gather_single, reduce_scatter_single, all_to_all_single

    def all_gather_single_coalesced(self, outputs: Any, sources: Any, opts: Any = None) -> Any:
        return self._each("all_gather_single", outputs, sources)

    def reduce_scatter_single_coalesced(self, outputs: Any, sources: Any, opts: Any = None) -> Any:
        return self._each("reduce_scatter_single", outputs, sources)

    allgather_into_tensor_coalesced = all_gather_single_coalesced
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def alltoall(self, outputs: Any, sources: Any, opts: Any = None) -> Any:
        return self._each("alltoall", outputs, sources)

    # ---- One list for each rank ----

    def allgather(self, outputs: Any, sources: Any, opts: Any = None) -> Any:
        return self._each("allgather", [one for (one,) in outputs], sources)

    def allgather_coalesced(self, outputs: Any, sources: Any, opts: Any = None) -> Any:
        return self._each("allgather", outputs[0], sources)

    def gather(self, outputs: Any, sources: Any, opts: Any = None) -> Any:
        return self._each("gather", [one for (one,) in outputs], sources)

    def scatter(self, outputs: Any, sources: Any, opts: Any = None) -> Any:
        return self._each("scatter", outputs, [one for (one,) in sources])

    def reduce_scatter(self, outputs: Any, sources: Any, opts: Any = None) -> Any:
        return self._each("reduce_scatter", outputs, [one for (one,) in sources])

    def _start_coalescing(self, device: Any = None) -> None: ...
    def _end_coalescing(self, device: Any = None) -> Any:
        return _done(None)

    def _set_sequence_number_for_group(self) -> None: ...
    def _get_sequence_number_for_group(self) -> int:
        return 0


def _devices(backend: Any) -> set[str]:
    asked = str(backend or "cuda:nccl,cpu:gloo").lower()
    return {device for device, name in (("cuda", "nccl"), ("cpu", "gloo")) if name in asked} or {"cuda", "cpu"}


def install() -> None:
    """Make `init_process_group` and `new_group` return this group, for the devices of the asked backend.

    What accelerate and FSDP2 skip for one process runs too: DDP wraps the model, FSDP2 gathers and scatters.
    """
    from accelerate import Accelerator

    Accelerator.multi_device = property(lambda self: self.distributed_type.value == "MULTI_GPU")  # type: ignore
    asked: list[set[str]] = [{"cuda", "cpu"}]

    def make(store: Any, rank: int, size: int, timeout: Any) -> WorldOfOne:
        return WorldOfOne(rank, size, asked[-1])

    dist.Backend.register_backend("copies", make, devices=["cpu", "cuda"])
    init_process_group, new_group = dist.init_process_group, c10d.new_group

    def init(backend: Any = None, *given: Any, **options: Any) -> Any:
        asked[0] = _devices(backend)
        return init_process_group(backend="copies", rank=0, world_size=1, store=dist.HashStore())

    def new(ranks: Any = None, timeout: Any = None, backend: Any = None, *given: Any, **options: Any) -> Any:
        options.pop("device_id", None)
        if backend is not None:
            asked.append(_devices(backend))
        try:
            return new_group(ranks, timeout, "copies", *given, **options)
        finally:
            del asked[1:]

    dist.init_process_group = c10d.init_process_group = init
    dist.new_group = c10d.new_group = new
    dist.is_nccl_available = c10d.is_nccl_available = lambda: True
