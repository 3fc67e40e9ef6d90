"""Statistics over the real tokens of a batch, and over all scores of a run; of this process or of all ranks."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

ReduceSum = Callable[[Tensor], Tensor]
"""Sums a small tensor elementwise over all ranks, with the same result on each."""


def exact_type(device: torch.device) -> torch.dtype:
    """Return float64, in which sums of up to 2^29 equal float32 values are exact; float32 on Apple's GPUs."""
    return torch.float32 if device.type == "mps" else torch.float64


def zero_outside(values: Tensor, mask: Tensor) -> Tensor:
    """Replace values outside the mask by 0, in float32: `x_i if m_i else 0`.

    By selection, not multiplication: NaN and inf in the padding are removed, and its gradient is 0 even if the
    upstream gradient is not finite.

    Args:
        values: Any shape, any dtype, any unit.
        mask: True on the values to keep, bool, same shape.

    Returns:
        float32, same shape.
    """
    return torch.where(mask, values.float(), 0.0)


def masked_mean(values: Tensor, mask: Tensor, reduce_sum: ReduceSum | None = None) -> Tensor:
    """Average over real tokens: `mean = sum_i m_i x_i / sum_i m_i`, 0 if no rank has a real token.

    Args:
        values: Any shape, any unit.
        mask: True on real tokens, bool, same shape.
        reduce_sum: Sums over all ranks, each of which must call this; None for one process.

    Returns:
        float32 scalar in the unit of `values`, the same on every rank.
    """
    sums = torch.stack([zero_outside(values, mask).sum(), mask.sum().float()])
    total, num_tokens = sums if reduce_sum is None else reduce_sum(sums)
    return total / num_tokens.clamp(min=1)


def masked_var(values: Tensor, mask: Tensor, reduce_sum: ReduceSum | None = None) -> Tensor:
    """Compute the unbiased variance of real tokens: `sum_i m_i (x_i - mean)^2 / (sum_i m_i - 1)`, 0 below two tokens.

    In two passes, to avoid cancellation with a large mean. Equal values have a variance of exactly 0.

    Args:
        values: Any shape, any unit.
        mask: True on real tokens, bool, same shape.
        reduce_sum: Sums over all ranks, each of which must call this; None for one process.

    Returns:
        float32 scalar in the squared unit of `values`, the same on every rank.
    """
    return _mean_and_var(values, mask, reduce_sum)[1]


def masked_range(values: Tensor, mask: Tensor, gather: Callable[[Tensor], Tensor]) -> tuple[float, float]:
    """Find the lowest and the highest value of the real tokens of all ranks; inf and -inf if there are none.

    Args:
        values: Any shape, any unit.
        mask: True on real tokens, bool, same shape.
        gather: Concatenates over ranks along the first dimension; every rank calls this.
    """
    numbers = values.float()
    ends = torch.stack([-numbers.masked_fill(~mask, torch.inf).min(), numbers.masked_fill(~mask, -torch.inf).max()])
    negated, highest = gather(ends[None]).amax(dim=0)
    return -float(negated), float(highest)


def masked_whiten(
    values: Tensor, mask: Tensor, shift_mean: bool = True, reduce_sum: ReduceSum | None = None
) -> Tensor:
    """Scale to unit variance over real tokens: `(x - mean) / sqrt(var + 1e-8)`, plus `mean` unless `shift_mean`.

    Advantages are whitened with the mean removed, rewards with the mean kept (N+ implementation details, 2403.17031,
    section 7). Mean and variance are over the tokens of all ranks: the result does not depend on the split into ranks.
    Equal values become exactly 0, or do not change with `shift_mean=False`.

    Args:
        values: `(B, T)`, any unit.
        mask: True on real tokens, bool `(B, T)`.
        shift_mean: Whether the result has mean 0; False restores the original mean.
        reduce_sum: Sums over all ranks, each of which must call this; None for one process.

    Returns:
        float32 `(B, T)`, in standard deviations, 0 outside the mask.
    """
    mean, var = _mean_and_var(values, mask, reduce_sum)
    whitened = (values.float() - mean) * torch.rsqrt(var + 1e-8)
    return zero_outside(whitened if shift_mean else whitened + mean, mask)


def _mean_and_var(values: Tensor, mask: Tensor, reduce_sum: ReduceSum | None) -> tuple[Tensor, Tensor]:
    """Return mean and unbiased variance over the real tokens of all ranks; for equal values exactly the value and 0.

    The float32 mean of equal values may differ from them by rounding, which whitening would multiply by up to 1e4.
    Their mean in `exact_type` is exact, so a comparison with it detects them.
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


@dataclass(frozen=True)
class ScoreMoments:
    """Mean and squared deviations of all scores of a run, updated per batch (Chan et al., 1979, *Updating formulae*).

    Attributes:
        count: Number of scores.
        mean: Mean score.
        squares: Sum of squared deviations from the mean.
    """

    count: float = 0.0
    mean: float = 0.0
    squares: float = 0.0

    def including(self, scores: Tensor, reduce_sum: ReduceSum) -> Self:
        """Return the moments with a batch added.

            d = mean_batch - mean        mean' = mean + d n_batch / n'        S' = S + S_batch + d^2 n n_batch / n'

        In float64 (see `exact_type`) sums of equal float32 scores are exact, and their deviation is 0.

        Args:
            scores: This rank's scores, `(N,)`; may be empty.
            reduce_sum: Sums over all ranks, each of which must call this.
        """
        scores = scores.to(exact_type(scores.device))
        sums = torch.stack((scores.new_tensor(len(scores)), scores.sum()))
        added, total = (float(value) for value in reduce_sum(sums))
        if added == 0:
            return self
        mean, count = total / added, self.count + added
        squares = float(reduce_sum((scores - mean).square().sum()))
        distance = mean - self.mean
        return dataclasses.replace(
            self,
            count=count,
            mean=self.mean + distance * added / count,
            squares=self.squares + squares + distance**2 * self.count * added / count,
        )

    @property
    def std(self) -> float:
        """Unbiased standard deviation; 1 if it would be 0 or undefined."""
        deviation = math.sqrt(self.squares / (self.count - 1)) if self.count > 1 else 0.0
        return deviation if deviation > 0 else 1.0


class RunningMoments:
    """`ScoreMoments` of the run so far, with a state for checkpoints."""

    def __init__(self) -> None:
        self.moments = ScoreMoments()

    def add(self, scores: Tensor, reduce_sum: ReduceSum) -> None:
        """Add a batch, with the arguments of `ScoreMoments.including`."""
        self.moments = self.moments.including(scores, reduce_sum)

    def state_dict(self) -> dict[str, float]:
        """Return the moments' fields."""
        return dataclasses.asdict(self.moments)

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Restore a result of `state_dict`."""
        self.moments = ScoreMoments(**state)
