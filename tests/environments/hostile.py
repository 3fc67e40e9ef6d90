"""Tools and environments that misbehave; worker processes import them from here."""

import asyncio
import ctypes
import os
import re
import signal
import sys
import time
from pathlib import Path
from typing import Any


class Unreadable(Exception):
    def __str__(self) -> str:
        raise ValueError("no text")


class Hidden:
    """An object without text."""

    def __str__(self) -> str:
        raise ValueError("no text")


class Slow:
    """An object whose text takes forever."""

    def __str__(self) -> str:
        time.sleep(1e6)
        return ""


def spin() -> None:
    while True:
        pass


def spin_loudly() -> None:
    """Write a line to stdout, then spin."""
    os.write(1, b"spins\n")
    spin()


def fork() -> int:
    """Leave a process that uses a core."""
    if (child := os.fork()) == 0:
        spin()
    return child


def raised(error: BaseException) -> Any:
    raise error


# What a tool does, by name.
DEEDS: dict[str, Any] = {
    "SystemExit": lambda: sys.exit(3),
    "KeyboardInterrupt": lambda: raised(KeyboardInterrupt()),
    "CancelledError": lambda: raised(asyncio.CancelledError()),
    "GeneratorExit": lambda: raised(GeneratorExit()),
    "StopIteration": lambda: next(iter([])),
    "TimeoutError": lambda: raised(TimeoutError("mine")),
    "Unreadable": lambda: raised(Unreadable()),
    "recursion": lambda: DEEDS["recursion"](),
    "object without text": Hidden,
    "image": lambda: [{"type": "image", "image": b""}],
    "1 MB": lambda: "x" * 2**20,
    "100 MB": lambda: "x" * 100 * 2**20,
    "NUL": lambda: "a\0b",
    "surrogate": lambda: "a\ud800b",
    "bytes": lambda: b"\xff",
    "object whose text hangs": Slow,
    "sleep": lambda: time.sleep(1e6),
    "spin": spin,
    "spins loudly": spin_loudly,
    "prints": lambda: print("from a tool"),
    "closes stdout": lambda: os.close(1),
    "forks and returns": os.fork,
    "forks": fork,
    "exits": lambda: os._exit(7),
    "kills itself": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "segfault": lambda: ctypes.string_at(0),
    "takes 4 GB": lambda: len(b"x" * (4 << 30)),
    "power": lambda: 9 ** (9**9),
    "regex": lambda: re.match(r"(a+)+$", "a" * 60 + "b"),
    "closes the pipe": lambda: os.closerange(3, 100),
    "fine": lambda: "fine",
}


def do(what: str) -> Any:
    """Do it.

    Args:
        what: The deed.
    """
    return DEEDS[what]()


async def do_async(what: str) -> Any:
    """Do it on the event loop.

    Args:
        what: The deed; `wait` waits without blocking.
    """
    if what == "wait":
        await asyncio.sleep(1e6)
    return DEEDS[what]()


class Hostile:
    """An environment that does it as a tool, in `reset` or in `get_reward`."""

    def reset(self, at: str = "", what: str = "", **row: Any) -> str | None:
        self.at, self.what = at, what
        self.turn_rewards = [1.0]
        self.done = False
        return DEEDS[what]() if at == "reset" else None

    def act(self, what: str) -> Any:
        """Do it.

        Args:
            what: The deed.
        """
        self.turn_rewards.append(0.5)
        return DEEDS[what]()

    async def act_async(self, what: str) -> Any:
        """Do it on the event loop.

        Args:
            what: The deed.
        """
        return await do_async(what)

    def get_reward(self) -> float:
        return DEEDS[self.what]() if self.at == "get_reward" else 1.0


class HostileAsync(Hostile):
    """An environment whose `reset` and `get_reward` are coroutines; `wait` waits without blocking their loop."""

    async def reset(self, at: str = "", what: str = "", **row: Any) -> str | None:  # pyright: ignore
        super().reset()
        self.at, self.what = at, what
        return await do_async(what) if at == "reset" else None

    async def get_reward(self) -> float:  # pyright: ignore
        return await do_async(self.what) if self.at == "get_reward" else 1.0


class Meeting:
    """Its tools return once all episodes are in them; the directory of the row counts."""

    def reset(self, folder: str, name: str, number: int) -> None:
        self.folder, self.name, self.number = Path(folder), name, number

    def _arrive(self) -> None:
        (self.folder / self.name).touch()

    def _all_here(self) -> bool:
        return len(os.listdir(self.folder)) >= self.number

    def meet(self) -> str:
        """Wait for all."""
        self._arrive()
        while not self._all_here():
            time.sleep(0.01)
        return "met"

    async def meet_async(self) -> str:
        """Wait for all."""
        self._arrive()
        while not self._all_here():
            await asyncio.sleep(0.01)
        return "met"
