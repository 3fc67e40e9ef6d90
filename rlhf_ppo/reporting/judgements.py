"""What judges have found about a run's policy, for its model card."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

WIN_RATES = "win_rate*.json"
"""The files that `rlhf-ppo judge` writes."""


@dataclass(frozen=True)
class Judgement:
    """A win rate.

    Attributes:
        win_rate: Share of the judged prompts that the policy won, a tie counting half.
        interval: Its bootstrap interval of 95%.
        num_prompts: How many were judged.
        opponent: Whose responses were the others: a model, or a column of the data set.
        judge: Who judged.
    """

    win_rate: float
    interval: tuple[float, float]
    num_prompts: int
    opponent: str
    judge: str

    @classmethod
    def of(cls, said: dict[str, Any]) -> Judgement:
        """Read what a file holds."""
        options = said["options"]
        low, high = said["interval"]
        column, reward = options.get("opponent_column"), options.get("reward_model_path")
        return cls(
            win_rate=said["win_rate"],
            interval=(low, high),
            num_prompts=said["wins"] + said["losses"] + said["ties"],
            opponent=options.get("opponent") or f"the column {column}",
            judge=options.get("judge") or options.get("judge_model") or reward or "a judge",
        )


def found_judgements(output_dir: str | Path) -> list[Judgement]:
    """Read the win rates that were written into a run's directory, or into `judged/` in it.

    Args:
        output_dir: The run's directory, such as was the judge's `--model`; give the judge
            `--output_dir <output_dir>/judged`.

    Returns:
        Those of the files that hold one, in the order of their names.
    """
    found = []
    for path in sorted([*Path(output_dir).glob(WIN_RATES), *Path(output_dir, "judged").glob(WIN_RATES)]):
        try:
            found.append(Judgement.of(json.loads(path.read_text())))
        except (ValueError, KeyError, TypeError, AttributeError):
            continue
    return found
