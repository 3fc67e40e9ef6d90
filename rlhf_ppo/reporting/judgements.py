"""What judges have found about a run's policy, for its model card."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlhf_ppo.checkpoints.jsonfile import check_values, read_object, replacing
from rlhf_ppo.config.validation import Interval

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


_SHARE, _COUNT = Interval(0, 1), Interval(0, math.inf)
FIGURES = ("win_rate", "interval", "wins", "losses", "ties", "failed")
"""What every `win_rate.json` holds; `win_rate` and `interval` are null if all verdicts failed."""
_NAMES = ("model", "model_column", "opponent", "opponent_column", "judge_model", "judge")


def read_win_rate(path: Path, required: Sequence[str] = FIGURES) -> dict[str, Any]:
    """Read the figures that `rlhf-ppo judge` has kept.

    Args:
        path: A `win_rate.json`.
        required: Keys that it must have.

    Raises:
        ValueError: There is no such file, or a figure is missing or impossible; see `read_object`.
    """
    said = read_object(path, dict.fromkeys(required, Any))
    of_figures = dict.fromkeys(FIGURES[2:], int) | {"interval": list[float], "options": dict}
    none = {name for name in ("interval", "options") if said.get(name) is None}
    given = {name: kind for name, kind in of_figures.items() if name in said and name not in none}
    shares = [name for name in ("win_rate", "length_controlled", "agreement") if said.get(name) is not None]
    check_values(path.name, said, given | dict.fromkeys(shares, _SHARE))
    check_values(path.name, said, {name: _COUNT for name in given if name in FIGURES[2:]})
    ends = said["interval"] or []
    if (len(ends) != 2 and said["win_rate"] is not None) or not all(map(_SHARE.holds, ends)):
        raise ValueError(f"its {path.name} has interval={said['interval']!r:.80}")
    options = said.get("options") or {}
    check_values(path.name, options, {name: str for name in _NAMES if options.get(name) is not None})
    return said


def keep(table: Any, folder: Path, name: str) -> Path:
    """Write a table under a name that is free, which no other process that writes there takes meanwhile.

    Args:
        table: The table.
        folder: Where.
        name: The file's name without its ending; `-2`, `-3` ... come behind it where there is one.

    Returns:
        Its path.
    """
    numbers = itertools.chain([""], (f"-{number}" for number in itertools.count(2)))
    path = next(path for number in numbers if _claimed(path := folder / f"{name}{number}.parquet"))
    try:
        with replacing(path) as temporary:
            table.to_parquet(temporary)
    except BaseException:
        path.unlink(missing_ok=True)
        raise
    return path


def _claimed(path: Path) -> bool:
    """Create an empty file, unless the file or the win rate beside it is there."""
    try:
        open(path, "xb").close()
    except FileExistsError:
        return False
    if win_rate_beside(path).exists() and path.name.startswith(JUDGED):
        path.unlink()
        return False
    return True


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
        """Take over what `read_win_rate` returns.

        Raises:
            ValueError: Nothing was judged.
        """
        options = said["options"] or {}
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
            found.append(Judgement.of(read_win_rate(path, (*FIGURES, "options"))))
        except ValueError:
            continue
    return found
