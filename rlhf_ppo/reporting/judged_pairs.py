"""Tables of judged pairs of `rlhf-ppo judge`, as a report shows them."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from rlhf_ppo.config.redaction import redacted
from rlhf_ppo.reporting.judgements import FIGURES, JUDGED, SeedWinRates, judge_of, read_win_rate, win_rate_beside
from rlhf_ppo.rewards.builtin import prompt_text

MAX_PAIRS = 40
"""Largest number of pairs of each outcome in a report."""
MAX_CHARACTERS = 4000

_OF_RATES = ("win_rate", "interval", "length_controlled")
_OF_A_SEED = ("model", "seed", "output_dir")
_COLUMNS = ("prompt", "model", "opponent", "verdict")
_NAME = re.compile(rf"{JUDGED}(-\d+)?\.parquet")


@dataclass(frozen=True)
class Judged:
    """A table of judged pairs.

    Attributes:
        name: Short name of its directory.
        figures: The win rate, its statistics, and the options of the judgement.
        table: `prompt`, `model`, `opponent`, `verdict`, and optionally `verdict_first` and `verdict_second`.
    """

    name: str
    figures: Mapping[str, Any]
    table: pd.DataFrame


def read_judged(runs: Sequence[str | os.PathLike[str]], named: Sequence[str | os.PathLike[str]]) -> list[Judged]:
    """Read the tables of judged pairs.

    Args:
        runs: Directories of runs, with tables in `judged/`, if any.
        named: Tables, or directories with tables.

    Raises:
        FileNotFoundError: A named directory has no such table.
        ValueError: A file is damaged.
    """
    paths = [path for run in runs for path in _tables(Path(run) / JUDGED)]
    for place in map(Path, named):
        found = [place] if place.is_file() else _tables(place)
        if not found:
            raise FileNotFoundError(
                f"{place} has no {JUDGED}.parquet, which `rlhf-ppo judge --output_dir` writes there"
            )
        paths += found
    different = {os.path.realpath(path): path for path in paths}
    return [_read(path) for path in different.values()]


def judged_data(judged: Judged) -> dict[str, Any]:
    """Return a table of judged pairs as JSON values.

    Args:
        judged: The table.
    """
    options = judged.figures.get("options") or {}
    rows = [_row(row) for row in judged.table.to_dict("records")]
    return {
        "name": judged.name,
        **{name: judged.figures.get(name) for name in (*FIGURES, "length_controlled", "agreement")},
        **{name: redacted(options.get(name) or options.get(f"{name}_column")) for name in ("model", "opponent")},
        "judge": redacted(judge_of(options)),
        "rows": list(_first_of_each_outcome(rows)),
    }


def over_seeds(judged: Sequence[Judged]) -> list[dict[str, Any]]:
    """Return the mean win rate of runs that differ only in their seed, as JSON values.

    Args:
        judged: The tables.

    Returns:
        `names`, `mean` and `standard_error` of each group of two or more.
    """
    groups: dict[str, list[Judged]] = {}
    for each in judged:
        options = dict(each.figures.get("options") or {})
        alike = {name: value for name, value in options.items() if name not in _OF_A_SEED}
        if "seed" in options and each.figures["win_rate"] is not None:
            groups.setdefault(json.dumps(alike, sort_keys=True, default=str), []).append(each)
    found = []
    for group in groups.values():
        seeds = [each.figures["options"]["seed"] for each in group]
        if len(set(seeds)) == len(group) > 1:
            figures: Any = [[each.figures.get(name) for each in group] for name in _OF_RATES]
            rates = SeedWinRates(seeds, *figures)
            names = [each.name for each in group]
            found.append({"names": names, "mean": rates.mean, "standard_error": rates.standard_error})
    return found


def _tables(folder: Path) -> list[Path]:
    """Find the tables of a directory, in the order of their numbers."""
    found = [path for path in folder.glob(f"{JUDGED}*.parquet") if _NAME.fullmatch(path.name)]
    return sorted(found, key=lambda path: (len(path.name), path.name))


def _read(path: Path) -> Judged:
    try:
        table = pd.read_parquet(path)
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read: {' '.join(str(error).split())[:200]}") from None
    try:
        figures = read_win_rate(win_rate_beside(path))
    except ValueError as error:
        raise ValueError(f"{path} has no win rate: {error}") from None
    if lacking := [name for name in _COLUMNS if name not in table]:
        raise ValueError(f"{path} was not written by `rlhf-ppo judge`: it has no {', '.join(lacking)}")
    number = path.stem.removeprefix(JUDGED)
    folder = path.resolve().parent
    inside = f"{folder.parent.name}/" if folder.name == JUDGED else ""
    return Judged(f"{inside}{folder.name}{number}", figures, table)


def _row(row: Mapping[str, Any]) -> dict[str, Any]:
    verdict, first, second = (_number(row.get(name)) for name in ("verdict", "verdict_first", "verdict_second"))
    outcome = "none" if verdict is None else "model" if verdict > 0 else "opponent" if verdict < 0 else "tie"
    texts = {name: _text(row[name]) for name in ("prompt", "model", "opponent")}
    return {**texts, "verdict": verdict, "first": first, "second": second, "outcome": outcome}


def _first_of_each_outcome(rows: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield the first pairs of each outcome, and of pairs whose two orders contradict each other."""
    seen: dict[tuple[str, bool], int] = {}
    for row in rows:
        kind = row["outcome"], None not in (row["first"], row["second"]) and row["first"] * row["second"] < 0
        seen[kind] = seen.get(kind, 0) + 1
        if seen[kind] <= MAX_PAIRS:
            yield row


def _number(value: Any) -> float | None:
    return None if value is None or pd.isna(value) else float(value)


def _text(value: Any) -> str | None:
    if value is None or isinstance(value, float):
        return None
    text = prompt_text(value)
    return text if len(text) <= MAX_CHARACTERS else f"{text[:MAX_CHARACTERS]} …"
