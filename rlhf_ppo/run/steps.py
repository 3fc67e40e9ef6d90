"""What `TrainerBase` needs from `PPOTrainer`: the steps of an update that evaluations call too."""

from __future__ import annotations

from abc import ABC, abstractmethod

from torch import Tensor, nn
from transformers import GenerationConfig

from rlhf_ppo.data.rollout import Prompts, Responses, Rollout
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
    def _respond(self, prompts: Prompts, config: GenerationConfig | None = None) -> tuple[Responses, Prompts]:
        """Sample responses, or play episodes."""

    @abstractmethod
    def score_responses(self, responses: Responses, prompts: Prompts, pending: PendingScores | None = None) -> Scores:
        """Score responses with all reward sources."""

    @abstractmethod
    def shape_rewards(self, rollout: Rollout) -> Tensor:
        """Compute each token's reward."""
