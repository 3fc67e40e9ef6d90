"""Rewards of environments: `get_reward` of a whole episode, and `turn_rewards` of its turns."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from rlhf_ppo.data.conversation import EPISODE_COLUMN
from rlhf_ppo.environments.calls import ask_rewards
from rlhf_ppo.environments.pool import Kind
from rlhf_ppo.rewards.scorer import RewardSource, ScoringBatch, WrongRewardError


class EnvironmentReward(RewardSource):
    """Scores an episode with its environment's `get_reward`, asked once, after the episode.

    Args:
        kind: The environment. Episodes of other classes get no score.
    """

    reads_columns = is_of_environment = True

    def __init__(self, kind: Kind) -> None:
        self.name, self.class_key = kind.class_name, kind.class_key

    def __call__(self, batch: ScoringBatch) -> Tensor:
        """Return the scores, float32 `(B,)`, NaN where `get_reward` returned None or the class is another one.

        Raises:
            WrongRewardError: `get_reward` returned something other than a number or None.
        """
        episodes = [record.episode for record in batch.columns[EPISODE_COLUMN]]
        own = [row for row, episode in enumerate(episodes) if episode.kind.class_key == self.class_key]
        scores = torch.full((len(batch),), math.nan)
        for row, value in zip(own, ask_rewards([episodes[row] for row in own]), strict=True):
            scores[row] = math.nan if value is None else self._number(value, row)
        return scores

    def _number(self, value: object, row: int) -> float:
        try:
            return float(value)  # pyright: ignore[reportArgumentType]
        except (TypeError, ValueError, OverflowError):
            raise WrongRewardError(
                f"get_reward of {self.name} returned {value!r:.60} for row {row}: return a number or None"
            ) from None


class TurnRewards(RewardSource):
    """Pays what an environment appended to `turn_rewards` in a round at the last token of the turn that caused it."""

    name = "turns"
    reads_columns = is_of_environment = True

    def __call__(self, batch: ScoringBatch) -> Tensor:
        """Return the rewards, float32 `(B, T)`; NaN in rows whose environment has no `turn_rewards`."""
        rewards = torch.zeros(batch.response_mask.shape)
        for row, record in enumerate(batch.columns[EPISODE_COLUMN]):
            if not record.episode.kind.has_turn_rewards:
                rewards[row] = math.nan
                continue
            for end, reward in zip(record.turn_ends, record.turn_rewards, strict=True):
                rewards[row, end - 1] += reward
        return rewards


def rewards_of(kinds: Iterable[Kind]) -> list[RewardSource]:
    """Return the rewards of environments: one for each class with `get_reward`, and one for the rewards of turns."""
    kinds = list(kinds)
    own = {kind.class_key: kind for kind in kinds if kind.has_reward}
    sources: list[RewardSource] = [EnvironmentReward(kind) for kind in own.values()]
    return sources + [TurnRewards()] * any(kind.has_turn_rewards for kind in kinds)
