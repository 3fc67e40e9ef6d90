"""A batch in passes of a few rows each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from rlhf_ppo.data.rollout import Responses, pad_right

R = TypeVar("R", bound=Responses)


def in_passes(
    responses: R, evaluate: Callable[[R], Sequence[Tensor]], max_rows: int, is_packed: bool
) -> tuple[Tensor, ...]:
    """Evaluate a few rows at a time, trimmed, and put the results together, padded on the right to `T`.

    Padded rows share a pass with rows of about their length; packed ones, which have no padding, stay in their order.

    Args:
        responses: `B` responses behind their prompts.
        evaluate: Gives tensors `(b, T')` or `(b,)` of `b` rows whose longest response has `T'` tokens.
        max_rows: Most rows of a pass.
        is_packed: Whether the models see real tokens only.

    Returns:
        Tensors `(B, T)` or `(B,)`.
    """
    is_sorted, length = not is_packed and len(responses) > max_rows, responses.response_mask.shape[1]
    order = responses.longest_first() if is_sorted else []
    outputs = [evaluate(part) for part in (responses[order] if is_sorted else responses).parts(max_rows)]
    whole = tuple(
        pad_right(list(results), length) if results[0].dim() == 2 else torch.cat(results)
        for results in zip(*outputs, strict=True)
    )
    return tuple(_in_order(values, order) for values in whole) if is_sorted else whole


def _in_order(values: Tensor, order: Sequence[int]) -> Tensor:
    """Put back what was computed in another order: `values[i]` belongs to row `order[i]`."""
    return torch.empty_like(values).index_copy_(0, torch.tensor(order, device=values.device), values)
