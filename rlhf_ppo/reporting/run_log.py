"""The log that Trainer keeps in `trainer_state.json`, and `log_history.jsonl` beside checkpoints, found and read."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from transformers import TrainerState

from rlhf_ppo.checkpoints.history import whole_history
from rlhf_ppo.checkpoints.progress import PROGRESS_NAME, Progress
from rlhf_ppo.checkpoints.run import numbered

Log = Sequence[Mapping[str, Any]]
"""A log history: one mapping of metric to value for each time that Trainer logged."""

Run = str | os.PathLike[str] | TrainerState | Log
"""A run: its output directory, its `trainer_state.json`, a `TrainerState` or a log history."""


def read_log(run: Run) -> Log:
    """Return the log history of a run.

    Args:
        run: An output directory (its own state, or else that of its newest checkpoint), a `trainer_state.json`, a
            `TrainerState` or a log history.

    Returns:
        The log history.

    Raises:
        TypeError: If `run` is none of these.
        ValueError: If the file is damaged.
        FileNotFoundError: If there is no such file.
    """
    if isinstance(run, TrainerState):
        return run.log_history
    if isinstance(run, (str, os.PathLike)):
        return _read_state(_existing_state(run))
    if isinstance(run, Mapping) or not all(isinstance(entry, Mapping) for entry in run):
        raise TypeError(
            f"a run is a path, a TrainerState or a list of log entries, got {type(run).__name__}; "
            "runs must be a list of runs, or a mapping of label to a list of runs"
        )
    return run


def find_state(directory: str | os.PathLike[str]) -> Path | None:
    """Return a run's own `trainer_state.json`, else that of its newest checkpoint, else None."""
    own = Path(directory, "trainer_state.json")
    if own.is_file():
        return own
    states = (checkpoint / "trainer_state.json" for checkpoint in numbered(Path(directory)))
    return next(filter(Path.is_file, states), None)


def _read_state(path: Path) -> Log:
    try:
        return _with_earlier(path.parent, json.loads(path.read_text(encoding="utf-8"))["log_history"])
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is no trainer_state.json that Trainer wrote: {error!r}") from error


def _with_earlier(directory: Path, last: list[dict[str, Any]]) -> Log:
    """Return the whole log of a checkpoint, which has its last entries only."""
    progress = directory / PROGRESS_NAME
    num_logged = Progress.load(str(directory)).num_logged if progress.is_file() else 0
    return whole_history(directory, last, num_logged)


def _existing_state(path: str | os.PathLike[str]) -> Path:
    found = Path(path) if Path(path).is_file() else find_state(path)
    if found is None:
        raise FileNotFoundError(
            f"no trainer_state.json in {path} or its checkpoints; "
            "call trainer.save_state() after training, or set save_strategy"
        )
    return found
