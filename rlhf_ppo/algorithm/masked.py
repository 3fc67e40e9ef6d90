"""Statistics over the real tokens of a batch, of this process or of all ranks."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

ReduceSum = Callable[[Tensor], Tensor]
"""Sums a small tensor elementwise over all ranks and returns the sum on each of them."""


def exact_type(device: torch.device) -> torch.dtype:
    """Return the type in which up to 2^29 equal float32 values have an exact sum: float64.

    Apple's GPUs have no float64. On them it is float32, and the last bits of a sum are rounded.
    """
    return torch.float32 if device.type == "mps" else torch.float64


def zero_outside(values: Tensor, mask: Tensor) -> Tensor:
    """Replace what is outside the mask by 0, in float32: `x_i if m_i else 0`.

    Selected, not multiplied: NaN and inf in the padding vanish, and its gradient is 0 even where that of what follows
    is not finite.

    Args:
        values: Any shape, any dtype, any unit.
        mask: True on the values to keep, bool, same shape.

    Returns:
        float32, same shape.

    Raises:
        TypeError: `mask` is not bool.
        ValueError: The shapes differ.
    """
    if mask.dtype != torch.bool:
        raise TypeError(f"mask has dtype {mask.dtype}, expected torch.bool; convert it with mask.bool()")
    if mask.shape != values.shape:
        raise ValueError(f"mask has shape {tuple(mask.shape)}, expected that of the values, {tuple(values.shape)}")
    return torch.where(mask, values.float(), 0.0)


def masked_mean(values: Tensor, mask: Tensor, reduce_sum: ReduceSum | None = None) -> Tensor:
    """Average over real tokens: `mean = sum_i m_i x_i / sum_i m_i`, 0 where no rank has a real token.

    Args:
        values: Any shape, any unit.
        mask: True on real tokens, bool, same shape.
        reduce_sum: Sums over all ranks, each of which must make the same call; None when there is one process.

    Returns:
        float32 scalar in the unit of `values`, the same on every rank.
    """
    sums = torch.stack([zero_outside(values, mask).sum(), mask.sum().float()])
    total, num_tokens = sums if reduce_sum is None else reduce_sum(sums)
    return total / num_tokens.clamp(min=1)


def masked_var(values: Tensor, mask: Tensor, reduce_sum: ReduceSum | None = None) -> Tensor:
    """Unbiased variance over real tokens: `var = sum_i m_i (x_i - mean)^2 / (sum_i m_i - 1)`, 0 below two tokens.

    Two passes, the mean first: a large common offset does not cancel the digits that matter. Equal values have exactly
    the variance 0.

    Args:
        values: Any shape, any unit.
        mask: True on real tokens, bool, same shape.
        reduce_sum: Sums over all ranks, each of which must make the same call; None when there is one process.

    Returns:
        float32 scalar in the squared unit of `values`, the same on every rank.
    """
    return _mean_and_var(values, mask, reduce_sum)[1]


def masked_whiten(
    values: Tensor, mask: Tensor, shift_mean: bool = True, reduce_sum: ReduceSum | None = None
) -> Tensor:
    """Scale to unit variance over real tokens: `(x - mean) / sqrt(var + 1e-8)`, plus `mean` unless `shift_mean`.

    Advantages are whitened with the mean removed, rewards with the mean kept (N+ implementation details, 2403.17031,
    section 7). Mean and variance are those of all ranks' tokens, so the result does not depend on how rows are spread.
    Equal values become exactly 0, or stay exactly as they are with `shift_mean=False`.

    Args:
        values: `(B, T)`, any unit.
        mask: True on real tokens, bool `(B, T)`.
        shift_mean: Whether the result has mean 0; False gives back the mean it had.
        reduce_sum: Sums over all ranks, each of which must make the same call; None when there is one process.

    Returns:
        float32 `(B, T)`, in standard deviations, 0 outside the mask.
    """
    mean, var = _mean_and_var(values, mask, reduce_sum)
    whitened = (values.float() - mean) * torch.rsqrt(var + 1e-8)
    return zero_outside(whitened if shift_mean else whitened + mean, mask)


def _mean_and_var(values: Tensor, mask: Tensor, reduce_sum: ReduceSum | None) -> tuple[Tensor, Tensor]:
    """Return mean and unbiased variance over the real tokens of all ranks; of equal values exactly the value and 0.

    The rounded float32 mean of equal values differs from them in its last bits, which whitening would multiply by up
    to 1e4. Their mean in `exact_type` is exact, so comparing with it finds them.
    """
    values, exact = zero_outside(values, mask), exact_type(values.device)
    sums = torch.stack([values.sum().to(exact), values.to(exact).sum(), mask.sum().to(exact)])
    total, exact_total, num_tokens = sums if reduce_sum is None else reduce_sum(sums)
    mean = total.float() / num_tokens.clamp(min=1).float()
    exact_mean = exact_total / num_tokens.clamp(min=1)
    squares = zero_outside(values - mean, mask).square()
    sums = torch.stack([squares.sum().to(exact), ((values.to(exact) != exact_mean) & mask).sum().to(exact)])
    total, num_others = sums if reduce_sum is None else reduce_sum(sums)
    var = total.float() / (num_tokens - 1).clamp(min=1).float()
    are_equal = num_others == 0
    return torch.where(are_equal, exact_mean.float(), mean), torch.where(are_equal, 0.0, var)
