"""Where a run stands: Trainer's state with the number of episodes, and what the loop needs beyond it."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self, get_type_hints

from transformers import TrainerState
from transformers.trainer import TRAINER_STATE_NAME

from rlhf_ppo.checkpoints.jsonfile import check_values, read_object, replacing, write_json
from rlhf_ppo.config.validation import Interval, check_range, check_type

PROGRESS_NAME = "ppo_state.json"
_COUNT = Interval(0, 2.0**63)
_SKIPPED = frozenset({"rows", "updates", "in_a_row", "overflows_in_a_row"})


class PPOTrainerState(TrainerState):
    """Trainer's state, with the number of episodes, written in one piece.

    Attributes:
        episode: Episodes generated so far, on all ranks.
    """

    episode: int = 0

    @classmethod
    def of(cls, state: TrainerState, episode: int = 0) -> Self:
        """Take over another state's fields."""
        own = cls(**{item.name: getattr(state, item.name) for item in dataclasses.fields(state)})
        own.episode = episode
        return own

    def save_to_json(self, json_path: str) -> None:
        """Write the state to a temporary file and move it into place."""
        with replacing(json_path) as temporary:
            super().save_to_json(str(temporary))


@dataclass
class Progress:
    """Where the loop stands, beyond what Trainer keeps.

    Attributes:
        episode: Episodes generated so far, on all ranks.
        epoch: Index of the current pass over the data.
        batches_in_epoch: Batches taken from that pass.
        num_prompts: Rows of the data; 0 if unknown.
        loss: Sum of the losses since the last log, the mean over the ranks.
        losses: The same sum of each rank, which adds to its own.
        last_logged_step: Update at which the last log was written.
        num_logged: Entries of the whole log, of which `trainer_state.json` has the last ones.
        pending_metrics: Metrics of the updates since the last log.
        score_moments: Fields of the `ScoreMoments` that `score_scaling` divides by.
        batch_size: Episodes of an update, on all ranks.
        num_processes: Number of processes of the run.
        num_generations: Responses to each prompt of an update.
        optimization: What optimizer and scheduler were set to, by name.
        skipped: Fields of the `Skipped` that `on_divergence` counts.
        due: What a signal has cut short after the last update, "samples" or "evaluation": resumed runs begin with it.
    """

    episode: int = 0
    epoch: int = 0
    batches_in_epoch: int = 0
    num_prompts: int = 0
    loss: float = 0.0
    losses: list[float] = field(default_factory=list)
    last_logged_step: int = 0
    num_logged: int = 0
    pending_metrics: list[dict[str, float]] = field(default_factory=list)
    score_moments: dict[str, float] = field(default_factory=dict)
    batch_size: int = 0
    num_processes: int = 0
    num_generations: int = 1
    optimization: dict[str, Any] = field(default_factory=dict)
    skipped: dict[str, int] = field(default_factory=dict)
    due: list[str] = field(default_factory=list)

    def keep_losses(self, losses: list[float]) -> None:
        """Keep what each rank has summed up since the last log."""
        self.losses, self.loss = losses, math.fsum(losses) / len(losses)

    def loss_of(self, rank: int, num_processes: int) -> float:
        """Return what a rank goes on summing up from; with another number of processes each takes the mean."""
        return self.losses[rank] if len(self.losses) == num_processes else self.loss

    def save(self, directory: str) -> None:
        """Write `ppo_state.json`."""
        write_json(Path(directory, PROGRESS_NAME), dataclasses.asdict(self))

    @classmethod
    def load(cls, directory: str) -> Self:
        """Read `ppo_state.json`.

        Raises:
            ValueError: A value has another type, or is none that a run can have; the message names the file.
        """
        values = read_object(Path(directory, PROGRESS_NAME))
        known = get_type_hints(cls)
        if unknown := values.keys() - known.keys():
            raise ValueError(f"its {PROGRESS_NAME} has {sorted(unknown)[0]}, which this version does not know")
        _check(PROGRESS_NAME, values, known)
        skipped, optimization = values.get("skipped", {}), values.get("optimization", {})
        if skipped.keys() - _SKIPPED or not all(map(_COUNT.holds, skipped.values())):
            raise ValueError(f"its {PROGRESS_NAME} has skipped={skipped!r:.80}")
        if "learning_rate" in optimization:
            check_values(f"{PROGRESS_NAME}: optimization", optimization, {"learning_rate": list[float]})
        return cls(**values)


def check_state(directory: str, progress: Progress) -> None:
    """Check that `trainer_state.json` holds what a run can have, and the same run as `ppo_state.json`.

    Raises:
        ValueError: It does not; the message names the file.
    """
    values = read_object(Path(directory, TRAINER_STATE_NAME))
    _check(TRAINER_STATE_NAME, values, _state_types())
    if unknown := sorted(values.keys() - {field.name for field in dataclasses.fields(TrainerState)}):
        raise ValueError(
            f"its {TRAINER_STATE_NAME} has {unknown[0]}, which this version of transformers does not know"
        )
    step = values["global_step"]
    if progress.episode != step * progress.batch_size:
        raise ValueError(
            f"its {PROGRESS_NAME} has episode={progress.episode}, but {TRAINER_STATE_NAME} has global_step={step} of "
            f"{progress.batch_size} episodes each"
        )
    if progress.epoch > step or progress.batches_in_epoch > step:
        raise ValueError(
            f"its {PROGRESS_NAME} has epoch={progress.epoch} and batches_in_epoch={progress.batches_in_epoch}, more "
            f"than the global_step={step} of {TRAINER_STATE_NAME} allows"
        )


def _check(name: str, values: Mapping[str, Any], types: Mapping[str, Any]) -> None:
    """Check types, and that numbers are none that counts or times cannot be."""
    for key in values.keys() & types.keys():
        try:
            check_type(key, values[key], types[key], "")
            if types[key] is int:
                check_range(key, values[key], _COUNT, "")
        except (TypeError, ValueError):
            raise ValueError(f"its {name} has {key}={values[key]!r}") from None
    if missing := {"global_step", "episode"} & types.keys() - values.keys():
        raise ValueError(f"its {name} lacks {missing.pop()}")


@functools.cache
def _state_types() -> dict[str, Any]:
    hints = get_type_hints(TrainerState)
    names = (
        *("epoch", "global_step", "num_input_tokens_seen", "best_metric", "best_global_step"),
        "best_model_checkpoint",
    )
    of_callbacks = dict[str, dict | list] | None
    return {name: hints[name] for name in names} | {"log_history": list[dict], "stateful_callbacks": of_callbacks}
