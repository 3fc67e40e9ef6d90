"""Count on a CPU what costs time on an accelerator: waits of the host, casts, and bytes that operations move."""

from __future__ import annotations

import traceback
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

aten = torch.ops.aten
_WAITING = (aten._local_scalar_dense, aten.nonzero, aten.masked_select, aten._unique2, aten.equal)
MOVING_NOTHING = (aten.empty, aten.empty_like, aten.new_empty, aten._unsafe_view)
_COPIES_TO_HOST = ("tolist", "cpu")
_HERE = str(Path(__file__))


class Waits(TorchDispatchMode):
    """Counts where the host would wait for an accelerator: numbers read, and shapes that depend on them.

    Attributes:
        places: How often each line of the package waited.
    """

    def __init__(self) -> None:
        super().__init__()
        self.places: Counter[str] = Counter()
        self.is_off = False

    @property
    def total(self) -> int:
        """How often the host waited."""
        return sum(self.places.values())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Count one operation, and do it."""
        if _waits(func, args, kwargs or {}):
            self.note(func)
        return func(*args, **(kwargs or {}))

    def note(self, what: Any) -> None:
        """Count one wait where the package asked for it."""
        frames = [frame for frame in traceback.extract_stack() if "rlhf_ppo/" in frame.filename]
        where = f"{Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else "elsewhere"
        if not self.is_off:
            self.places[f"{where} {what}"] += 1


def _waits(func: Any, args: Any, kwargs: Any) -> bool:
    packet = func.overloadpacket
    if packet is aten.repeat_interleave:
        return kwargs.get("output_size") is None and isinstance(args[-1], Tensor)
    if packet in (aten.index, aten.index_put, aten.index_put_):
        return any(isinstance(index, Tensor) and index.dtype == torch.bool for index in args[1])
    return packet in _WAITING


@contextmanager
def waits() -> Iterator[Waits]:
    """Count the host's waits while a context lasts, those of `Tensor.tolist` and `cpu` among them.

    What an optimizer reads is left out: the numbers of its steps are kept on the host.
    """
    counter = Waits()

    def noted(name: str) -> Any:
        own = getattr(Tensor, name)

        def method(self: Tensor, *args: Any, **kwargs: Any) -> Any:
            counter.note(name)
            return own(self, *args, **kwargs)

        return method

    step = torch.optim.AdamW.step

    def uncounted(*args: Any, **kwargs: Any) -> Any:
        counter.is_off = True
        try:
            return step(*args, **kwargs)
        finally:
            counter.is_off = False

    patches = [mock.patch.object(Tensor, name, noted(name)) for name in _COPIES_TO_HOST]
    with mock.patch.object(torch.optim.AdamW, "step", uncounted), patches[0], patches[1], counter:
        yield counter


class Moves(TorchDispatchMode):
    """Counts the casts between floating-point types, and the bytes that operations read and write.

    Views move nothing; every other operation reads its inputs and writes its outputs once.

    Attributes:
        casts: Number of casts.
        cast_bytes: What they read and wrote.
        bytes: What all operations read and wrote, by operation.
    """

    def __init__(self) -> None:
        super().__init__()
        self.casts = self.cast_bytes = 0
        self.bytes: Counter[str] = Counter()

    @property
    def total(self) -> int:
        """Bytes of all operations."""
        return sum(self.bytes.values())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Count one operation, and do it."""
        result = func(*args, **(kwargs or {}))
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        made = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        if func.is_view or not made or func.overloadpacket in MOVING_NOTHING:
            return result
        read = made if func.overloadpacket is aten.embedding else given  # of a table, the rows that are chosen
        moved = sum(map(_bytes, read)) + sum(map(_bytes, made))
        self.bytes[str(func.overloadpacket)] += moved
        if func.overloadpacket is aten._to_copy and given[0].is_floating_point() and given[0].dtype != made[0].dtype:
            self.casts += 1
            self.cast_bytes += moved
        return result


def _bytes(tensor: Tensor) -> int:
    """Bytes that are there to be read: an expanded dimension has one entry."""
    sizes = [size for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride]
    count = 1
    for size in sizes:
        count *= size
    return count * tensor.element_size()
