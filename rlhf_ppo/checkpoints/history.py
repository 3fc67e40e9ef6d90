"""The log of a run, written once: a line for each time that it logged, beside the checkpoints.

A checkpoint's own `trainer_state.json` has the last lines only, so that a save stays as large as it was.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from transformers import TrainerState

from rlhf_ppo.checkpoints.jsonfile import opened_without_links, parsed_json, write_text
from rlhf_ppo.terminal.foreign import visible_logger

HISTORY_NAME = "log_history.jsonl"
NUM_KEPT = 100
"""Most entries of the log in a checkpoint."""

logger = visible_logger(__name__)
Entry = dict[str, Any]


class History:
    """Keeps `log_history.jsonl` at what a run has logged.

    Args:
        directory: The run's directory.
        logged: What the run has logged before, in this process or in one that it goes on from; the file holds that
            and nothing else from now on.
    """

    def __init__(self, directory: str | Path, logged: Sequence[Entry]) -> None:
        self.path, self.num_written = Path(directory, HISTORY_NAME), 0
        self.path.unlink(missing_ok=True) if not logged else self._write(logged, afresh=True)

    def write(self, logged: Sequence[Entry]) -> None:
        """Append what is new among all that the run has logged."""
        self._write(logged[self.num_written :], afresh=False)

    def _write(self, entries: Sequence[Entry], afresh: bool) -> None:
        lines = "".join(f"{json.dumps(entry)}\n" for entry in entries)
        if afresh:
            write_text(self.path, lines)
        else:
            with open(self.path, "a", encoding="utf-8", opener=opened_without_links) as file:
                file.write(lines)
                file.flush()
                os.fsync(file.fileno())
        self.num_written += len(entries)


@contextmanager
def last_entries(state: TrainerState) -> Iterator[None]:
    """Leave only the last entries of the log in the state while a checkpoint is written."""
    whole = state.log_history
    state.log_history = whole[-NUM_KEPT:]
    try:
        yield
    finally:
        state.log_history = whole


def whole_history(checkpoint: str | Path, last: list[Entry], num_logged: int) -> list[Entry]:
    """Return all that a run had logged when it wrote a checkpoint.

    Args:
        checkpoint: The checkpoint's directory, beside `log_history.jsonl`.
        last: The entries in its `trainer_state.json`.
        num_logged: How many there were in all; 0 for checkpoints of before, which have them all.

    Returns:
        All entries; the last ones, with a warning, where the file is missing, cut off or of another run.
    """
    if num_logged <= len(last):
        return last
    path = Path(checkpoint).absolute().parent / HISTORY_NAME
    try:
        with open(path, encoding="utf-8") as file:
            entries = [parsed_json(line) for line, _ in zip(file, range(num_logged), strict=False)]
    except (OSError, ValueError):
        entries = []
    are_entries = all(isinstance(entry, dict) for entry in entries)
    if are_entries and len(entries) == num_logged and _text(entries[-len(last) :]) == _text(last):
        return entries
    logger.warning(f"{path} does not hold the {num_logged} entries that were logged; the last {len(last)} are kept.")
    return last


def _text(entries: list[Entry]) -> str:
    return json.dumps(entries, sort_keys=True)  # in which NaN equals NaN
