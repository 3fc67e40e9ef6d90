"""The log of a run, from `trainer_state.json` and from `log_history.jsonl`, to which a run that goes on adds."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from transformers import TrainerState

from rlhf_ppo.checkpoints.history import HISTORY_NAME, whole_history
from rlhf_ppo.checkpoints.jsonfile import check_values, parsed_json, read_object
from rlhf_ppo.checkpoints.progress import PROGRESS_NAME, Progress
from rlhf_ppo.checkpoints.run import numbered
from rlhf_ppo.config.validation import Interval

_LARGEST = 2.0**63
_COUNT = Interval(0, _LARGEST)

Log = Sequence[Mapping[str, Any]]
"""A log history: one mapping of metric to value for each time that Trainer logged."""

Run = str | os.PathLike[str] | TrainerState | Log
"""A run: its output directory, its `trainer_state.json`, a `TrainerState` or a log history."""


def read_log(run: Run) -> Log:
    """Return the log history of a run.

    Args:
        run: An output directory (its `log_history.jsonl`, its own state, or that of its newest checkpoint: what goes
            furthest), a `trainer_state.json`, a `TrainerState` or a log history.

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
        return _read_path(Path(run))
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


def has_log(directory: str | os.PathLike[str]) -> bool:
    """Tell whether a run in a directory has logged anything."""
    return Path(directory, HISTORY_NAME).is_file() or find_state(directory) is not None


def _read_path(path: Path) -> Log:
    if path.is_file():
        return _read_state(path)
    state, lines = find_state(path), path / HISTORY_NAME
    if state is None and not lines.is_file():
        what = "no trainer_state.json or log_history.jsonl" if path.is_dir() else "no such directory"
        raise FileNotFoundError(
            f"{path} holds no run: there is {what}; pass the output_dir of a run that has logged something"
        )
    written = _read_lines(lines)
    if state is None:
        return written
    log = _read_state(state)
    # A state of before the run went on, or of another run, does not begin with what the run has logged.
    return log if _text(log[: len(written)]) == _text(written) else written


def _read_state(path: Path) -> Log:
    try:
        log = _with_earlier(path.parent, read_object(path, {"log_history": list[dict]})["log_history"])
        for entry in log:
            _check_entry(path.name, entry)
    except ValueError as error:
        raise ValueError(f"{path} is no trainer_state.json that Trainer wrote: {error}") from error
    return log


def _read_lines(path: Path) -> list[dict[str, Any]]:
    """Read `log_history.jsonl`, without a last line that is being written."""
    if not path.is_file():
        return []
    entries = []
    for number, line in enumerate(path.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True), 1):
        try:
            entries.append(_entry(line))
        except ValueError as error:
            if line.endswith("\n"):
                raise ValueError(f"{path} is damaged: line {number} is no entry of a log: {error}") from error
    return entries


def _entry(line: str) -> dict[str, Any]:
    entry = parsed_json(line)
    if not isinstance(entry, dict):
        raise ValueError("it is no object")
    _check_entry(HISTORY_NAME, entry)
    return entry


def _check_entry(file: str, entry: Mapping[str, Any]) -> None:
    """Check what a log's entry counts by, and that its numbers can be drawn.

    Raises:
        ValueError: A number is impossible; the message names file, key and value.
    """
    check_values(file, entry, {name: _COUNT for name in ("step", "episode") if name in entry})
    for name, value in entry.items():
        if isinstance(value, int) and abs(value) > _LARGEST:
            raise ValueError(f"its {file} has {name}={value!s:.20}...")


def _text(log: Log) -> str:
    return json.dumps(list(log), sort_keys=True)  # in which NaN equals NaN


def _with_earlier(directory: Path, last: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the whole log of a checkpoint, which has its last entries only."""
    progress = directory / PROGRESS_NAME
    num_logged = Progress.load(str(directory)).num_logged if progress.is_file() else 0
    return whole_history(directory, last, num_logged)
