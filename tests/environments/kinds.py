"""Environments and tools for tests."""

import asyncio
import time
from typing import Any


class Counter:
    """Counts; the text of `reset` shows the row."""

    def __init__(self) -> None:
        self.turn_rewards: list[float | None] = []

    def reset(self, seed: int | None = None, **row: Any) -> str:
        self.turn_rewards.clear()
        self.turn_rewards.append(100.0)  # not paid: no turn caused it
        self.done, self.total = False, 0
        return f"{sorted(row.items())} {seed}"

    def add(self, amount: int) -> int:
        """Add.

        Args:
            amount: How much.
        """
        self.total += amount
        self.turn_rewards.append(float(amount))
        return self.total

    async def slow(self, amount: int) -> dict[str, int]:
        """Add later.

        Args:
            amount: How much.
        """
        await asyncio.sleep(0.01)
        return {"slow": amount}

    def stop(self) -> None:
        """End the episode."""
        self.done = True

    def boom(self) -> str:
        """Fail."""
        raise KeyError("no")

    def hang(self) -> None:
        """Never return."""
        time.sleep(1e6)

    async def block(self) -> None:
        """Block the event loop."""
        time.sleep(1e6)

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


class Derived(Counter):
    """Inherits all tools."""

    flag = "no tool"


class Plain:
    """No tools, no reward; shows its columns."""

    def reset(self, **row: Any) -> str:
        if row.get("spoil"):
            row["prompt"][0]["content"] = "spoiled"
        return str(row)


class Parrot:
    """Takes whole messages."""

    takes_messages = True

    def reset(self) -> None:
        self.turn_rewards: list[float] = []

    def respond(self, text: str) -> str:
        if text == "bad":
            raise ValueError("bad word")
        self.turn_rewards.append(len(text))
        return text * 2


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


async def never() -> None:
    """Never return."""
    await asyncio.sleep(1e6)


def sleep() -> None:
    """Never return."""
    time.sleep(1e6)
