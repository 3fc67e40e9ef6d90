"""What `TrainerBase` needs from `PPOTrainer`: the steps of an update that the run around the updates calls."""

from __future__ import annotations

from abc import ABC, abstractmethod

from torch import Tensor, nn
from transformers import GenerationConfig

from rlhf_ppo.data.rollout import Experience, Prompts, Responses, Rollout
from rlhf_ppo.reporting.metrics import UpdateStatistics
from rlhf_ppo.rewards.scorer import PendingScores, Scores


class Steps(ABC):
    """The steps of an update; `PPOTrainer` documents them."""

    @abstractmethod
    def collect_rollout(
        self, prompts: Prompts, responses: Responses | None = None, scores: Scores | None = None
    ) -> Rollout:
        """Sample, score and evaluate."""

    @abstractmethod
    def generate_responses(
        self, prompts: Prompts, config: GenerationConfig | None = None, policy: nn.Module | None = None
    ) -> Responses:
        """Sample a response to each prompt."""

    @abstractmethod
    def score_responses(self, responses: Responses, prompts: Prompts, pending: PendingScores | None = None) -> Scores:
        """Score responses with all reward sources."""

    @abstractmethod
    def estimate_advantages(self, rollout: Rollout) -> Experience:
        """Compute rewards, advantages and returns."""

    @abstractmethod
    def shape_rewards(self, rollout: Rollout) -> Tensor:
        """Compute each token's reward."""

    @abstractmethod
    def learn(self, experience: Experience) -> UpdateStatistics:
        """Take the optimizer steps of an update."""

    @abstractmethod
    def _end_update(self, rollout: Rollout, experience: Experience, statistics: UpdateStatistics) -> dict[str, float]:
        """Count an update and report."""
