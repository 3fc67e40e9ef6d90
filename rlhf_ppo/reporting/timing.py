"""Seconds spent in the phases of an update."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

_TO_LOWER = {
    "generate": "generation: lower generation_batch_size (or local_rollout_forward_batch_size) or response_length",
    "score": "the rewards: lower per_device_train_batch_size or response_length, or set offload_frozen=True",
    "evaluate": "the forward passes over the responses: lower local_rollout_forward_batch_size or response_length, or "
    "set offload_frozen=True",
    "learn": "learning: lower per_device_train_batch_size and raise gradient_accumulation_steps as many times, which "
    "keeps the rollout as it is; or set max_tokens_per_micro_batch or gradient_checkpointing=True",
}
_NOTE = "Out of memory in "
_OUT_OF_MEMORY = ("out of memory", "can't allocate memory", "not enough memory", "CUBLAS_STATUS_ALLOC_FAILED")


@contextmanager
def noting_out_of_memory(phase: str) -> Iterator[None]:
    """Note on an error of too little memory in which phase it came and which arguments to lower.

    The error keeps its type, so that `except torch.OutOfMemoryError` still catches it.

    Args:
        phase: A phase of an update.
    """
    try:
        yield
    except (MemoryError, RuntimeError) as error:  # of which torch.OutOfMemoryError is one
        lowered = _TO_LOWER.get(phase)
        if lowered is not None and (
            isinstance(error, MemoryError) or any(words in str(error) for words in _OUT_OF_MEMORY)
        ):
            error.add_note(f"{_NOTE}{lowered}. `rlhf-ppo estimate` tells how much memory a run takes.")
        raise


def note_on_memory(error: BaseException) -> str | None:
    """Return the note that `noting_out_of_memory` has added to an error, if any."""
    return next((note for note in getattr(error, "__notes__", ()) if note.startswith(_NOTE)), None)


def rate(name: str, number: float, seconds: float) -> dict[str, float]:
    """Return `number / seconds` under a metric's name; nothing where the clock has not moved."""
    return {name: number / seconds} if seconds > 0 else {}


@dataclass
class PhaseTimer:
    """Adds up the wall-clock seconds of named phases.

    Attributes:
        seconds: Seconds by phase since the last `drain`.
        running: The phase that runs now; empty between phases.
    """

    seconds: dict[str, float] = field(default_factory=dict)
    running: str = ""

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count the block's time under `name`; an error of too little memory gets a note on the phase."""
        start, self.running = time.perf_counter(), name
        try:
            with noting_out_of_memory(name):
                yield
        finally:
            self.running = ""
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start

    def drain(self) -> dict[str, float]:
        """Return `time/<phase>` in seconds and start anew."""
        result = {f"time/{name}": seconds for name, seconds in self.seconds.items()}
        self.seconds = {}
        return result
