"""Environments and tools for tests; worker processes import them from here."""

import asyncio
from typing import Any


class Counter:
    """Counts; the text of `reset` shows the row."""

    def __init__(self) -> None:
        self.turn_rewards: list[float | None] = []
        self.done = False
        self.log: list[Any] = []

    def reset(self, seed: int | None = None, **row: Any) -> str:
        self.turn_rewards.clear()
        self.turn_rewards.append(100.0)  # not paid: no turn caused it
        self.done, self.seed, self.total = False, seed, 0
        return f"{sorted(row.items())} {seed}"

    def add(self, amount: int) -> int:
        """Add.

        Args:
            amount: How much.
        """
        self.total += amount
        self.turn_rewards.append(float(amount))
        self.log.append(("add", amount))
        return self.total

    async def slow(self, amount: int) -> dict[str, int]:
        """Add later.

        Args:
            amount: How much.
        """
        await asyncio.sleep(0.01)
        self.log.append(("slow", amount))
        return {"slow": amount}

    def stop(self) -> None:
        """End the episode."""
        self.done = True

    def boom(self) -> str:
        """Fail."""
        raise KeyError("no")

    def get_reward(self) -> float:
        return self.total * 1.5

    def _hidden(self) -> None:
        """Not a tool."""

    @staticmethod
    def echo(text: str) -> str:
        """Echo.

        Args:
            text: Any text.
        """
        return text

    @property
    def expensive(self) -> str:
        raise AssertionError("properties are not evaluated")


def multiply(left: int, right: int) -> int:
    """Multiply.

    Args:
        left: A number.
        right: Another number.
    """
    return left * right


async def later(text: str) -> str:
    """Return a text later.

    Args:
        text: Any text.
    """
    await asyncio.sleep(0.01)
    return text
