"""What judges have found about a run's policy, for its model card."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

JUDGED = "judged"
"""How the name of a table of verdicts begins, and the directory in a run's that may hold such."""


def win_rate_beside(judged: Path) -> Path:
    """Return where the win rate of a table is kept.

    Args:
        judged: The table, such as `judged-2.parquet`.
    """
    return judged.with_name(f"win_rate{judged.stem.removeprefix(JUDGED)}.json")


def judge_of(options: Mapping[str, Any]) -> str | None:
    """Return who judged, of the options of `rlhf-ppo judge`."""
    return options.get("judge_model") or options.get("judge")


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
        """Read what a file holds.

        Raises:
            KeyError: It holds something else.
            ValueError: Nothing was judged.
        """
        options = said["options"]
        if said["win_rate"] is None:
            raise ValueError("nothing was judged")
        low, high = said["interval"]
        return cls(
            win_rate=said["win_rate"],
            interval=(low, high),
            num_prompts=said["wins"] + said["losses"] + said["ties"],
            opponent=options.get("opponent") or f"the column {options.get('opponent_column')}",
            judge=judge_of(options) or "a judge",
        )


def found_judgements(output_dir: str | Path) -> list[Judgement]:
    """Read the win rates that were written into a run's directory, or into `judged/` in it.

    Args:
        output_dir: The run's directory, such as was the judge's `--model`; give the judge
            `--output_dir <output_dir>/judged`.

    Returns:
        Those of the files that hold one, in the order of their names.
    """
    found, folders = [], (Path(output_dir), Path(output_dir, JUDGED))
    for path in sorted(path for folder in folders for path in folder.glob("win_rate*.json")):
        try:
            found.append(Judgement.of(json.loads(path.read_text())))
        except (ValueError, KeyError, TypeError, AttributeError):
            continue
    return found
