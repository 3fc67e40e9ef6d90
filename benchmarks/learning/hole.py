"""An over-optimising set-up: stories, paid by a reward with a hole, without a KL penalty and at a high learning rate.

The reward is VADER's compound valence, plus `PAID` for each exclamation mark, without a bound: happy stories have more
of them, but exclamation marks alone make no happy story. The judge is that of `stories`, which reads words alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import stories
from task import Scores, Task

PAID = 0.2
prepare = stories.prepare


def with_hole(score: Scores) -> Scores:
    """Pay for exclamation marks, too."""

    def paid(prompts: Sequence[str], completions: Sequence[str]) -> list[float]:
        said = zip(score(prompts, completions), completions, strict=True)
        return [value + PAID * text.count("!") for value, text in said]

    return paid


def load(data: Path, folder: Path) -> Task:
    """Return the task."""
    task = stories.load(data, folder)
    assert not isinstance(task.reward, Path)
    arguments = task.arguments | {"kl_coef": 1e-9, "learning_rate": 1e-3}
    return replace(task, reward=with_hole(task.reward), arguments=arguments, num_updates=40)
