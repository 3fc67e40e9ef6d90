"""A reward model as a reward source."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn

from rlhf_ppo.rewards.scorer import ScoringBatch


class RewardModel:
    """Scores prompt and response with a one-label sequence-classification model that shares the policy's vocabulary.

    Args:
        scorer: Gives scores `(B,)` of token ids and mask `(B, L)`: a `FrozenScorer`, placed where it runs.
        rows_per_pass: Number of rows in one forward pass.
        autocast: Makes the context of the forward passes.
    """

    name = "reward_model"

    def __init__(
        self,
        scorer: nn.Module,
        rows_per_pass: int,
        autocast: Callable[[], AbstractContextManager[object]] = nullcontext,
    ) -> None:
        if rows_per_pass < 1:
            raise ValueError(f"rows_per_pass={rows_per_pass} must be at least 1")
        self.scorer, self.rows_per_pass, self.autocast = scorer, rows_per_pass, autocast

    @torch.no_grad()
    def __call__(self, batch: ScoringBatch) -> Tensor:
        """Score every row.

        Args:
            batch: `B` prompts and truncated responses.

        Returns:
            Scores, float32 `(B,)`.

        Raises:
            ValueError: The model's score of a row is not finite.
        """
        scores: list[Tensor] = []
        with self.autocast():
            for start in range(0, len(batch), self.rows_per_pass):
                rows = slice(start, start + self.rows_per_pass)
                mask = batch.attention_mask[rows].bool()
                used = mask.any(dim=0)  # columns that are padding in every row of this pass cost time only
                scores.append(self.scorer(batch.query_responses[rows][:, used], mask[:, used]))
        score = torch.cat(scores).float()
        if not score.isfinite().all():
            row = int((~score.isfinite()).nonzero()[0])
            raise ValueError(
                f"the reward model's score of row {row} is {score[row].item()}: load it in float32 or bfloat16, "
                "and check its weights"
            )
        return score
