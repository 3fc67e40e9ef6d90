"""Saved state of a run's loop, beyond Trainer's own state."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from transformers import TrainerState, TrainingArguments

from rlhf_ppo.checkpoints.files import read_object, write_json
from rlhf_ppo.terminal import is_secret

PROGRESS_NAME = "ppo_state.json"

_NOT_COMPARED = {
    *("output_dir", "overwrite_output_dir", "resume_from_checkpoint", "run_name", "logging_dir", "local_rank"),
    *("local_batch_size", "micro_batch_size", "batch_size", "local_mini_batch_size", "mini_batch_size"),
    *("num_total_batches", "total_episodes", "disable_tqdm", "log_level", "log_level_replica", "log_console"),
    *("health_checks", "learning_rate", "lr_scheduler_type", "lr_scheduler_kwargs", "warmup_steps", "warmup_ratio"),
    *("weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon"),
}
"""Paths, derived sizes, display options, and arguments that are compared with `Progress.optimization` instead."""


class PPOTrainerState(TrainerState):
    """Trainer's state with the number of episodes.

    Attributes:
        episode: Episodes generated so far, on all ranks.
    """

    episode: int = 0

    @classmethod
    def of(cls, state: TrainerState, episode: int = 0) -> Self:
        """Return a state with the fields of another one."""
        own = cls(**{item.name: getattr(state, item.name) for item in dataclasses.fields(state)})
        own.episode = episode
        return own


@dataclass
class Progress:
    """State of the training loop beyond `TrainerState`.

    Attributes:
        episode: Episodes generated so far, on all ranks.
        epoch: Index of the current pass over the data.
        batches_in_epoch: Batches taken from that pass.
        num_prompts: Rows of the data; 0 if unknown.
        losses: Each rank's sum of the losses since the last log.
        last_logged_step: Update of the last log.
        pending_metrics: Metrics of the updates since the last log.
        batch_size: Episodes of an update, on all ranks.
        num_processes: Number of processes of the run.
        num_generations: Responses to each prompt of an update.
        optimization: Settings of optimizer and scheduler, by name.
        arguments: The other arguments, as JSON values and without secrets.
    """

    episode: int = 0
    epoch: int = 0
    batches_in_epoch: int = 0
    num_prompts: int = 0
    losses: list[float] = field(default_factory=list)
    last_logged_step: int = 0
    pending_metrics: list[dict[str, float]] = field(default_factory=list)
    batch_size: int = 0
    num_processes: int = 0
    num_generations: int = 1
    optimization: dict[str, Any] = field(default_factory=dict)
    arguments: dict[str, Any] = field(default_factory=dict)

    def loss_of(self, rank: int, num_processes: int) -> float:
        """Return a rank's sum of losses; after a change of the number of processes, the mean over the ranks."""
        if len(self.losses) == num_processes:
            return self.losses[rank]
        return math.fsum(self.losses) / max(1, len(self.losses))

    def save(self, directory: str) -> None:
        """Write `ppo_state.json`."""
        write_json(Path(directory, PROGRESS_NAME), dataclasses.asdict(self))

    @classmethod
    def load(cls, directory: str) -> Self:
        """Read `ppo_state.json`."""
        return cls(**read_object(Path(directory, PROGRESS_NAME)))


def comparable_arguments(args: TrainingArguments) -> dict[str, Any]:
    """Return the arguments that a resumed run is compared in, as JSON values and without secrets."""
    values = {
        name: value for name, value in args.to_dict().items() if name not in _NOT_COMPARED and not is_secret(name)
    }
    return json.loads(json.dumps(values, default=str))


def describe_changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """Return the arguments that have changed, with both values; empty if none has."""
    changed = [name for name in sorted(before.keys() & now.keys()) if before[name] != now[name]]
    return ", ".join(f"{name}={now[name]!r} (was {before[name]!r})" for name in changed)
