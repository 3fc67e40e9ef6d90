"""An environment that adds numbers, pays for them, and ends, cuts or hangs as its calls say."""

from __future__ import annotations

import time
from typing import Any


class Box:
    """An environment that adds numbers, pays for them, and ends as its calls say."""

    def reset(self, **row: Any) -> str:
        self.turn_rewards: list[float | None] = []
        self.done = self.truncated = False
        return "OBS"

    def add(self, x: float) -> str:
        """Add a number.

        Args:
            x: A number.
        """
        self.turn_rewards.append(x)
        return f"got {x}"

    def end(self) -> str:
        """End."""
        self.done = True
        return "end"

    def cut(self) -> str:
        """Cut."""
        self.truncated = True
        return "cut"

    def long(self) -> str:
        """Answer at length."""
        return "long " * 200

    def hang(self) -> None:
        """Never return."""
        time.sleep(1e6)

    def get_reward(self) -> float:
        return 1.0
