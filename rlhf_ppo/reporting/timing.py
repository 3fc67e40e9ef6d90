"""Seconds spent in the phases of an update."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field


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
        """Count the block's time under `name`."""
        start, self.running = time.perf_counter(), name
        try:
            yield
        finally:
            self.running = ""
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start

    def drain(self) -> dict[str, float]:
        """Return `time/<phase>` in seconds and start anew."""
        result = {f"time/{name}": seconds for name, seconds in self.seconds.items()}
        self.seconds = {}
        return result
