"""Sums and rows over all ranks."""

from __future__ import annotations

from collections.abc import Callable

from accelerate import Accelerator
from torch import Tensor


def sum_over_ranks(accelerator: Accelerator) -> Callable[[Tensor], Tensor]:
    """Return a function that adds a small tensor up over all ranks, the same result on each.

    Args:
        accelerator: Knows the process group; with one process the tensor comes back as it is.

    Returns:
        `reduce_sum(tensor) -> tensor`.
    """

    def reduce_sum(tensor: Tensor) -> Tensor:
        return accelerator.reduce(tensor, reduction="sum")  # pyright: ignore[reportReturnType]

    return reduce_sum


def gather_over_ranks(accelerator: Accelerator) -> Callable[[Tensor], Tensor]:
    """Return a function that concatenates a tensor's rows over all ranks, the same result on each.

    Args:
        accelerator: Knows the process group; with one process the tensor comes back as it is.

    Returns:
        `gather(tensor) -> tensor`.
    """

    def gather(tensor: Tensor) -> Tensor:
        return accelerator.gather(tensor)  # pyright: ignore[reportReturnType]

    return gather
