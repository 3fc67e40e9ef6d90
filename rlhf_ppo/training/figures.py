"""What is noted of the update that a run is at, for its logs and for a checkpoint in the middle of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from accelerate import Accelerator
from torch import Tensor
from transformers import PreTrainedTokenizerBase, TrainerControl

from rlhf_ppo.algorithm.controllers import FixedKLController, KLController
from rlhf_ppo.algorithm.moments import ScoreMoments
from rlhf_ppo.checkpoints.half_learned import HalfLearned
from rlhf_ppo.checkpoints.progress import PPOTrainerState
from rlhf_ppo.config import PPOConfig
from rlhf_ppo.data.rollout import Rollout
from rlhf_ppo.reporting.kept_completions import KeptCompletions
from rlhf_ppo.reporting.metrics import (
    critic_metrics,
    gather_columns,
    response_metrics,
    rollout_columns,
    sampling_metrics,
    warn_of_unscored,
)
from rlhf_ppo.reporting.timing import PhaseTimer
from rlhf_ppo.rewards.logged import LoggedByFunctions
from rlhf_ppo.training.advantages import valued_tokens
from rlhf_ppo.training.divergence import DivergenceGuard
from rlhf_ppo.training.run_directory import RunDirectory
from rlhf_ppo.training.saving import CheckpointWriter


class UpdatedTrainer(Protocol):
    """What is noted of a trainer's update."""

    accelerator: Accelerator
    args: PPOConfig
    control: TrainerControl
    kl_controller: KLController
    state: PPOTrainerState
    _checkpoints: CheckpointWriter
    _directory: RunDirectory
    _gather: Callable[[Tensor], Tensor]
    _guard: DivergenceGuard
    _logged: LoggedByFunctions
    _metrics: dict[str, float]
    _sum: Callable[[Tensor], Tensor]
    _timer: PhaseTimer
    _tokenizer: PreTrainedTokenizerBase


class UpdateFigures:
    """Metrics, counts and first responses of an update.

    Args:
        run: The trainer.

    Attributes:
        completions: Responses of the latest update.
        num_response_tokens: Tokens of the responses of all ranks.
    """

    def __init__(self, run: UpdatedTrainer) -> None:
        self.run, self.num_response_tokens = run, 0
        self.completions = KeptCompletions(run.args, run._tokenizer, run.accelerator.num_processes)

    def take(
        self,
        rollout: Rollout,
        score_unit: ScoreMoments | None,
        of_tokens: tuple[Tensor, Tensor, Tensor],
        weights: Tensor | None,
    ) -> Tensor:
        """Take the metrics of a rollout, note its first responses and count its tokens.

        Args:
            rollout: This rank's.
            score_unit: What scores are scaled by; None leaves them in their own unit.
            of_tokens: What each token was paid before whitening, what the value model is to expect, and whitened
                advantages, `(B, T)` each.
            weights: Importance weights, `(B, T)`, or None.

        Returns:
            What each of this rank's responses is paid in all, float32 `(B,)`, NaN without a score.
        """
        run, args, logged = self.run, self.run.args, self.run._logged.columns
        paid, returns, advantages = of_tokens
        own = rollout_columns(rollout, args, run.kl_controller.coef, score_unit)
        columns = gather_columns(own, run._gather)
        valued = valued_tokens(rollout.loss_mask, args)
        warn_of_unscored(columns["scores"])
        run._metrics |= response_metrics(rollout, columns, run._gather) | run._logged.drain()
        run._metrics |= critic_metrics(rollout.values, returns, valued, run._sum, run._gather)
        run._metrics |= sampling_metrics(rollout, weights, run._sum, run._gather)
        if not isinstance(run.kl_controller, FixedKLController):
            run._metrics["objective/kl_coef"] = float(run.kl_controller.coef)
        self.num_response_tokens = int(columns["length"].sum())
        self._count_input_tokens(rollout.attention_mask)
        self.completions.note(run.state.global_step + 1, rollout, advantages, paid, own, logged)
        return own["scores"]

    def _count_input_tokens(self, attention_mask: Tensor) -> None:
        run, counted = self.run, self.run.args.include_num_input_tokens_seen
        if counted != "no":
            tokens = attention_mask.sum() if counted == "non_padding" else torch.tensor(attention_mask.numel())
            run.state.num_input_tokens_seen += int(run._sum(tokens.to(run.args.device)))

    def keep(self, learned: HalfLearned) -> None:
        """Note what a resumed run needs of an update beside the experience."""
        run = self.run
        learned.metrics, learned.num_response_tokens = run._metrics, self.num_response_tokens
        learned.seconds = run._timer.seconds
        learned.completions = self.completions.rows(run.state.global_step + 1)
        learned.left_out, learned.num_steps = run._guard.left_out, run._guard.num_steps
        learned.wishes = run.control.state()["args"]

    def restore(self, learned: HalfLearned) -> None:
        """Go on with an update that a run before has begun to learn."""
        run = self.run
        run._metrics, self.num_response_tokens = dict(learned.metrics), learned.num_response_tokens
        run._timer.seconds = dict(learned.seconds)
        self.completions.take(learned.completions)
        run._guard.left_out, run._guard.num_steps = list(learned.left_out), learned.num_steps
        for name, value in learned.wishes.items():
            setattr(run.control, name, value)

    def write_logged(self) -> None:
        """Write the log as far as it goes, and responses of the update that was logged."""
        run = self.run
        with run._checkpoints.naming_full_log():
            run._directory.write_logged(run.state.log_history, self.completions.rows(run.state.global_step))
