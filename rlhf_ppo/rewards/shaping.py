"""What becomes of a rollout's scores before they are paid, in this order: scaling, clipping, the missing stop token.

1. Each reward source's scores are weighted and added up (`rlhf_ppo.rewards.scorer`).
2. `score_scaling` divides by the standard deviation of all scores of the run so far; rewards of single tokens too.
3. `score_clip` limits the score's absolute value; rewards of single tokens stay.
4. `missing_eos_penalty` lowers, or `missing_eos_score` replaces, the score of a response without the stop token.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from rlhf_ppo.algorithm.penalties import clip_scores, penalize_missing_eos, replace_missing_eos
from rlhf_ppo.batch import Rollout
from rlhf_ppo.config import PPOConfig


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

        Args:
            scores: This rank's scores, `(N,)`; may be empty.
            reduce_sum: Sums over all ranks, each of which makes the same call.
        """
        scores = scores.float()
        sums = torch.stack((torch.tensor(float(len(scores)), device=scores.device), scores.sum()))
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


def shape_scores(rollout: Rollout, args: PPOConfig, std: float | None = None) -> tuple[Tensor, Tensor]:
    """Scale, clip, and apply what is said about responses without the stop token.

    Args:
        rollout: `B` scored responses.
        args: Gives `score_scaling`, `score_clip`, `missing_eos_penalty` and `missing_eos_score`.
        std: What scores are divided by; None leaves them in their own unit, in which an evaluation states them. A
            `score_clip` that is meant for scaled scores is then left out.

    Returns:
        The scores to pay at the last token, float32 `(B,)`, NaN for responses that no source scored; and the rewards
        of single tokens, float32 `(B, T)`.
    """
    unit = 1.0 if std is None else std
    clip = None if std is None and args.score_scaling else args.score_clip
    scores = clip_scores(rollout.scores / unit, clip)
    scores = penalize_missing_eos(scores, rollout.stopped, args.missing_eos_penalty)
    return replace_missing_eos(scores, rollout.stopped, args.missing_eos_score), rollout.token_scores / unit


def whole_scores(rollout: Rollout) -> Tensor:
    """Return what each scored response is worth in all, before shaping, float32 `(num_scored,)`."""
    total = rollout.scores + rollout.token_scores.sum(dim=1)
    return total[~total.isnan()]
