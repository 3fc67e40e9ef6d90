"""Mean and spread of all scores of a run."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from rlhf_ppo.algorithm.masked import exact_type


@dataclass(frozen=True)
class ScoreMoments:
    """Mean and spread of all scores of a run, updated batch by batch (Chan et al., 1979, *Updating formulae*).

    Attributes:
        count: Number of scores.
        mean: Their mean.
        squares: Sum of their squared distances from the mean.
    """

    count: float = 0.0
    mean: float = 0.0
    squares: float = 0.0

    def including(self, scores: Tensor, reduce_sum: Callable[[Tensor], Tensor]) -> Self:
        """Return the moments with a batch added.

            d = mean_batch - mean        mean' = mean + d n_batch / n'        S' = S + S_batch + d^2 n n_batch / n'

        In float64 (see `exact_type`) sums of equal float32 scores are exact, so their spread is 0.

        Args:
            scores: This rank's scores, `(N,)`; may be empty.
            reduce_sum: Sums over all ranks, each of which makes the same call.
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
        """Their unbiased standard deviation; 1 where there is none to divide by."""
        deviation = math.sqrt(self.squares / (self.count - 1)) if self.count > 1 else 0.0
        return deviation if deviation > 0 else 1.0


class RunningMoments:
    """`ScoreMoments` of the run so far, with the state that a checkpoint keeps."""

    def __init__(self) -> None:
        self.moments = ScoreMoments()

    @property
    def std(self) -> float:
        """The scores' unbiased standard deviation; 1 where there is none to divide by."""
        return self.moments.std

    def add(self, scores: Tensor, reduce_sum: Callable[[Tensor], Tensor]) -> None:
        """Count a batch in, with the arguments of `ScoreMoments.including`."""
        self.moments = self.moments.including(scores, reduce_sum)

    def state_dict(self) -> dict[str, float]:
        """Return the moments' fields."""
        return dataclasses.asdict(self.moments)

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Go on from what `state_dict` returned."""
        self.moments = ScoreMoments(**state)
