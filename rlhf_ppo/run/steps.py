"""What `TrainerBase` needs from `PPOTrainer`: the steps of an update that the run around the updates calls."""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, Self

from torch import Tensor, nn
from transformers import GenerationConfig

from rlhf_ppo.config import PPOConfig
from rlhf_ppo.config.checks import METHOD_HINTS, reject_call
from rlhf_ppo.data.prompts import Prompts
from rlhf_ppo.data.rollout import Experience, Responses, Rollout
from rlhf_ppo.reporting.metrics import UpdateStatistics
from rlhf_ppo.rewards.scorer import Scores


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
    def score_responses(self, responses: Responses, prompts: Prompts) -> Scores:
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


class ExplainsTrainer:
    """Base of a trainer that explains unknown arguments, and attributes that older trainers have."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        """Explain unknown arguments."""
        known = inspect.signature(cls).parameters
        if not any(each.kind is each.VAR_KEYWORD for each in known.values()):
            own = dict.fromkeys(PPOConfig.__dataclass_fields__, "PPOConfig")
            reject_call(cls.__name__, args, kwargs, known, own)
        return super().__new__(cls)

    if not TYPE_CHECKING:  # type checkers know the attributes

        def __getattr__(self, name: str) -> Any:
            """Explain missing attributes that older trainers have; raise the error of a property that lacks one."""
            if isinstance(inspect.getattr_static(type(self), name, None), property):
                return object.__getattribute__(self, name)
            hint = f" ({METHOD_HINTS[name]})" if name in METHOD_HINTS else ""
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}{hint}")
