"""Environments and tools for tests; worker processes import them from here."""

import asyncio
from typing import Any


class Counter:
    """Counts; the text of `reset` shows the row."""

    def __init__(self) -> None:
        self.turn_rewards: list[float | None] = []
        self.done = False
        self.log: list[Any] = []
        self.thing = {"holds": object()}

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


class Derived(Counter):
    """Inherits all tools."""

    flag = "no tool"

    @classmethod
    def built(cls) -> None:
        """No function of the class."""


class Plain:
    """No tools, no reward; shows its columns."""

    def reset(self, **row: Any) -> str:
        if row.get("spoil"):
            row["prompt"][0]["content"] = "spoiled"
            row["prompt"].clear()
        return str(row)


class Base:
    """Counts its resets."""

    def __init__(self) -> None:
        self.resets = 0

    def reset(self) -> str:
        self.resets += 1
        return f"reset {self.resets}"


class Broken:
    """Reports nonsense when told to."""

    def reset(self, observation: Any = None, reward: Any = 1.0) -> Any:
        self.turn_rewards: Any = [1.0, 2.0]
        self.done: Any = False
        self.reward, self.fault = reward, "none"
        return observation

    def do(self, fault: str) -> str:
        """Break.

        Args:
            fault: The fault.
        """
        self.fault = fault
        faults: dict[str, Any] = {"text": ["much"], "nan": [float("nan")]}
        self.turn_rewards = self.turn_rewards + faults.get(fault, [])
        if fault == "object":
            self.turn_rewards = 5
        if fault == "shorter":
            self.turn_rewards = [1.0]
        if fault == "done":
            self.done = "yes"
        return "done"

    def blocks(self) -> list[Any]:
        """Return a list."""
        return [{"type": "text", "text": "a\ud800"}, 1, 2.5j, ("b",)]

    def get_reward(self) -> Any:
        return self.reward

    @property
    def truncated(self) -> bool:
        if self.fault == "property":
            raise KeyError("mine")
        return False
