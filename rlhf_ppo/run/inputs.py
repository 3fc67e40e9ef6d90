"""The arguments of `PPOTrainer`, as one object."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import nn
from transformers import PreTrainedTokenizerBase, ProcessorMixin, TrainerCallback

from rlhf_ppo.algorithm.advantages import KLController
from rlhf_ppo.config import PPOConfig
from rlhf_ppo.generation.protocol import GenerationEngine
from rlhf_ppo.rewards.resolve import RewardSpec
from rlhf_ppo.run.learning import PolicyLossFunction
from rlhf_ppo.run.optimization import Optimizers

if TYPE_CHECKING:
    from peft import PeftConfig

ModelOrPath = nn.Module | str | os.PathLike[str]
"""A model, a directory or a hub name."""


@dataclass(frozen=True, kw_only=True)
class TrainerInputs:
    """The arguments of `PPOTrainer`, which documents them."""

    args: PPOConfig
    processing_class: PreTrainedTokenizerBase | ProcessorMixin | None
    model: ModelOrPath
    ref_model: ModelOrPath | None
    reward_model: ModelOrPath | Sequence[ModelOrPath] | None
    train_dataset: Any
    value_model: ModelOrPath | None
    data_collator: Callable[[list[dict[str, Any]]], dict[str, Any]] | None
    eval_dataset: Any
    optimizers: Optimizers
    callbacks: list[TrainerCallback] | None
    peft_config: PeftConfig | None
    reward_funcs: RewardSpec | Sequence[RewardSpec] | None
    reward_processing_classes: PreTrainedTokenizerBase | Sequence[PreTrainedTokenizerBase | None] | None
    value_peft_config: PeftConfig | None
    kl_controller: KLController | None
    engine: GenerationEngine | None
    policy_loss: PolicyLossFunction | None
    ptx_dataset: Any
    tools: Sequence[Callable[..., Any]] | None
    rollout_func: Callable[..., Any] | None
    environment_factory: Callable[[], Any] | Mapping[str, Callable[[], Any]] | None

    def own_parts(self, trainer: object) -> dict[str, dict[str, str]]:
        """Name a trainer subclass, and the user's parts of PPO by class or function, as `RunSettings.made_of` does."""
        given = {"trainer": None if type(trainer).__name__ == "PPOTrainer" else type(trainer)}
        names = ("kl_controller", "engine", "policy_loss", "rollout_func", "environment_factory")
        parts = {**given, **{name: getattr(self, name) for name in names}}
        own = {
            name: getattr(part, "__name__", type(part).__name__) for name, part in parts.items() if part is not None
        }
        if self.tools:
            own["tools"] = ", ".join(sorted(tool.__name__ for tool in self.tools))
        return {"own_parts": own} if own else {}
