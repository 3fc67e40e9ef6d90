"""Sums and rows over all ranks."""

from __future__ import annotations

from collections.abc import Callable

import torch
from accelerate import Accelerator, PartialState
from accelerate.utils import reduce
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


def on_any_rank(is_so: bool) -> bool:
    """Tell whether something is so on any rank; every rank calls this.

    Asked before objects are exchanged, which are mostly empty: an exchange of objects makes the host wait for its
    device several times, this once.
    """
    state = PartialState()
    if state.num_processes == 1:
        return is_so
    told = torch.full((), float(is_so), device=state.device)  # filled there, not copied
    return bool(reduce(told) > 0)  # pyright: ignore[reportOperatorIssue]
