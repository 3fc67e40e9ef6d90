"""A game in which a signal can be sent in each phase; worker processes import it from here."""

from __future__ import annotations

import os
import random
import time
from pathlib import Path
from typing import Any

from rlhf_ppo.environments.tools import TextEnvironment


def reached(phase: str) -> None:
    """Send the signal that the environment variable KILL names when a phase is reached for the n-th time.

    A file counts, because environments may run in other processes.
    """
    if os.environ.get("KILL", "").partition(" ")[0] != phase:
        return
    _, at, number, process, file = os.environ["KILL"].split(" ")
    with Path(file).open("ab", buffering=0) as counter:
        counter.write(b".")
        if counter.tell() == int(at):
            os.kill(int(process), int(number))
            if phase not in ("generate", "learn"):
                time.sleep(3600)


class Game:
    """Depends on its seed and on the moves alone."""

    def reset(self, seed: int | None = None) -> tuple[str, dict[str, Any]]:
        reached("reset")
        self.dice, self.moves = random.Random(seed), 0
        return str(self.dice.randrange(10)), {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        reached("tool")
        self.moves += 1
        done = self.dice.random() < 0.3
        return str(self.dice.randrange(10)), float("a" in action) + self.dice.random(), done, self.moves == 4, {}


class Scored(TextEnvironment):
    """A text environment that scores its episodes."""

    def get_reward(self) -> float:
        reached("get_reward")
        return sum(reward or 0.0 for reward in self.turn_rewards)
