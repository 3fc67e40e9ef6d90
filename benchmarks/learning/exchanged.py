"""The task `preferences` with its halves exchanged; a task by which no option was chosen.

The judge's model is the reward model, on the prompts of its half of the pairs, and the reward model is the judge.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import preferences
from task import Task


def prepare(data: Path, folder: Path) -> None:
    """Train the models of `preferences` in its folder, where they are not there yet."""
    preferences.prepare(data, folder.parent / "preferences")


def load(data: Path, folder: Path) -> Task:
    """Return the task."""
    folder = folder.parent / "preferences"
    models = folder / "runs/human_text"
    prompts = list(dict.fromkeys(preferences.prompts_of(folder / "human_text/judge_pairs.jsonl")))
    return replace(
        preferences.load(data, folder),
        reward=models / "judge_reward",
        judge=preferences.scores_of(models / "reward"),
        prompts=[prompt for prompt in prompts if prompt.strip()],
    )
