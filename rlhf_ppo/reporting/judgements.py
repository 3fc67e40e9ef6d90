"""Files of `rlhf-ppo judge` and `rlhf-ppo reward`: win rates, judged pairs, and the accuracy of reward models."""

from __future__ import annotations

import itertools
import json
import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from transformers.trainer import TRAINER_STATE_NAME

from rlhf_ppo.data.files import read_object, reading, write_json
from rlhf_ppo.rewards.builtin import prompt_text
from rlhf_ppo.terminal import redacted

JUDGED = "judged"
"""Prefix of the names of tables of verdicts, and the name of their directory in a run's directory."""


FEW = 30
"""Number of judged prompts below which a win rate shows little."""

JUDGED_RATE = "judged/win_rate"
"""Key of a win rate in a log."""


def win_rate_beside(judged: Path) -> Path:
    """Return the path of a table's win rate.

    Args:
        judged: The table, such as `judged-2.parquet`.
    """
    return judged.with_name(f"win_rate{judged.stem.removeprefix(JUDGED)}.json")


def judge_of(options: Mapping[str, Any]) -> str | None:
    """Return the judge's name from the options of `rlhf-ppo judge`."""
    return options.get("judge_model") or options.get("judge")


FIGURES = ("win_rate", "interval", "wins", "losses", "ties", "failed")
"""The keys of every `win_rate.json`; `win_rate` and `interval` are null if all verdicts failed."""


def keep(table: pd.DataFrame, folder: Path, name: str) -> Path:
    """Write a table under a free name: `-2`, `-3` ... are appended if it exists; return the file's path."""
    numbers = itertools.chain([""], (f"-{number}" for number in itertools.count(2)))
    paths = (folder / f"{name}{number}.parquet" for number in numbers)
    path = next(path for path in paths if not path.exists() and not win_rate_beside(path).exists())
    table.to_parquet(path)
    return path


@dataclass(frozen=True)
class Judgement:
    """A win rate of a policy.

    Attributes:
        win_rate: Share of the judged prompts that the policy won, with a tie as half.
        interval: Its 95% bootstrap interval.
        num_prompts: Number of judged prompts.
        opponent: The opponent: a model, or a column of the data set.
        judge: The judge's name.
        length_controlled: The win rate at equal length.
        identities: See `rlhf_ppo.rewards.identity.judge_identities`.
        model: The policy's directory or hub name; None if its responses came from a column.
        updates: The updates of the policy when it was judged; None if unknown.
    """

    win_rate: float
    interval: tuple[float, float]
    num_prompts: int
    opponent: str
    judge: str
    length_controlled: float | None = None
    identities: tuple[str, ...] = ()
    model: str | None = None
    updates: int | None = None

    @classmethod
    def read(cls, path: Path) -> Judgement:
        """Read a `win_rate.json`; raise a `ValueError` if it is damaged, or nothing was judged."""
        said = read_object(path)
        if said.get("win_rate") is None:
            raise ValueError(f"{path}: nothing was judged")
        options = said.get("options") or {}
        low, high = said["interval"]
        return cls(
            win_rate=said["win_rate"],
            interval=(low, high),
            num_prompts=said["wins"] + said["losses"] + said["ties"],
            opponent=options.get("opponent") or f"the column {options.get('opponent_column')}",
            judge=judge_of(options) or "a judge",
            length_controlled=said.get("length_controlled"),
            identities=tuple(said.get("judge_identities") or ()),
            model=options.get("model"),
            updates=(said.get("run") or {}).get("updates"),
        )


def is_checkpoint(path: str | Path) -> bool:
    """Return whether a path has the name of a checkpoint, which is not the policy at the end of its run."""
    return re.fullmatch(r"checkpoint-\d+(-\d+)?", Path(path).name) is not None


def read_judgements(output_dir: str | Path) -> list[Judgement]:
    """Read the win rates of a run's policy in its directory and in its `judged/`.

    Those of its checkpoints, and of the policy before the run was continued, are left out.

    Args:
        output_dir: The run's directory; the judge writes there with `--output_dir <output_dir>/judged`.

    Returns:
        The valid win rates: those beside the run, then those in `judged/`, each in the order of their numbers.
    """
    judgements, folders = [], (Path(output_dir), Path(output_dir, JUDGED))
    updates = updates_at_end(output_dir)
    paths = [path for folder in folders for path in folder.glob("win_rate*.json")]
    for path in sorted(paths, key=lambda path: (path.parent, len(path.name), path.name)):
        with suppress(ValueError, KeyError):
            judgement = Judgement.read(path)
            if not is_checkpoint(judgement.model or "") and judgement.updates in (None, updates):
                judgements.append(judgement)
    return judgements


def updates_at_end(output_dir: str | Path) -> int | None:
    """Return the updates of the policy that a directory holds, from its `trainer_state.json`; None without one."""
    path = Path(output_dir, TRAINER_STATE_NAME)
    with suppress(ValueError):
        return read_object(path).get("global_step")
    return None


# Seeds


@dataclass(frozen=True)
class SeedWinRates:
    """Win rates of policies that differ only in PPO's seed.

    Attributes:
        rates: Share of prompts won by each policy, in [0, 1].
        intervals: Low and high end of each rate's interval over prompts.
        length_controlled: Each length-controlled rate, or None.
    """

    rates: Sequence[float]
    intervals: Sequence[Sequence[float]]
    length_controlled: Sequence[float | None]

    @property
    def mean(self) -> float:
        """Mean over seeds."""
        return float(np.mean(self.rates))

    @property
    def standard_error(self) -> float | None:
        """Standard deviation over seeds (denominator `n - 1`), divided by `sqrt(n)`; None for one seed."""
        count = len(self.rates)
        return float(np.std(self.rates, ddof=1) / np.sqrt(count)) if count > 1 else None

    @property
    def interval(self) -> tuple[float, float]:
        """The 95% interval of the mean, within [0, 1]: over prompts and, with several seeds, also over seeds.

            mean +- sqrt((t s)^2 + h^2)

        with `s` the standard error over seeds, `t` Student's quantile, and `h` the mean half-width of the intervals
        over prompts, which does not shrink with the number of seeds: all seeds are judged on the same prompts.
        """
        if (error := self.standard_error) is None:
            low, high = self.intervals[0]
            return float(low), float(high)
        half = float(np.mean([(high - low) / 2 for low, high in self.intervals]))
        width = math.hypot(student_quantile(len(self.rates) - 1) * error, half)
        return max(0.0, self.mean - width), min(1.0, self.mean + width)


_STUDENT = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)


def student_quantile(freedom: int) -> float:
    """Return the 97.5% quantile of Student's t distribution: a table, then its expansion in 1 / freedom."""
    return _STUDENT[freedom - 1] if freedom <= len(_STUDENT) else 1.96 + 2.372 / freedom + 2.82 / freedom**2


def wilson_interval(share: float, count: int) -> tuple[float, float]:
    """Compute the 95% Wilson score interval of a share (Wilson 1927, JASA 22).

        (p + z^2 / 2n +- z sqrt(p (1 - p) / n + z^2 / 4n^2)) / (1 + z^2 / n),    z = 1.96

    Args:
        share: `p`, from 0 to 1.
        count: `n`, at least 1.
    """
    z = 1.959964
    center, scale = share + z**2 / (2 * count), 1 + z**2 / count
    margin = z * math.sqrt(share * (1 - share) / count + z**2 / (4 * count**2))
    return max(0.0, (center - margin) / scale), min(1.0, (center + margin) / scale)


# Reward models


ACCURACY = "accuracy.json"
"""The file beside a reward model with its accuracy on held-out pairs."""

AT_LEAST = 0.6
"""Accuracy below which a reward model is weak."""
GOOD = 0.7
"""Accuracy of a good reward model."""
AT_CHANCE, TOO_FEW_PAIRS = "at chance", "tested on too few pairs"
"""States of a reward model that guesses, and of one that may guess, for lack of pairs."""


@dataclass(frozen=True)
class RewardAccuracy:
    """How often a reward model scores the better response of a held-out pair higher.

    Attributes:
        accuracy: Share of the pairs, with a tie as half.
        interval: Its 95% interval.
        num_pairs: Number of pairs.
    """

    accuracy: float
    interval: tuple[float, float]
    num_pairs: int

    @classmethod
    def of(cls, accuracy: float, num_pairs: int) -> RewardAccuracy:
        """Return an accuracy with Wilson's 95% interval (E. B. Wilson, 1927)."""
        return cls(accuracy, wilson_interval(accuracy, num_pairs), num_pairs)

    @property
    def state(self) -> str | None:
        """`at chance` if the interval includes 50%, `weak` below 60%, or None for a useful model.

        If it includes 70% too, a good model's accuracy, or there are fewer than `FEW` pairs: `TOO_FEW_PAIRS`.
        """
        low, high = self.interval
        if low <= 0.5:
            return AT_CHANCE if high < GOOD and self.num_pairs >= FEW else TOO_FEW_PAIRS
        return "weak" if self.accuracy < AT_LEAST else None

    @property
    def advice(self) -> str:
        """The advice for the state."""
        too_few = self.state == TOO_FEW_PAIRS
        return "give more pairs, of which a tenth is held out" if too_few else "train it longer, or on more pairs"

    def __str__(self) -> str:
        """Return the figures in words."""
        low, high = self.interval
        return (
            f"right on {percent(self.accuracy)} of {self.num_pairs} held-out pairs (95% interval {100 * low:.1f} to "
            f"{percent(high)})"
        )

    def save(self, directory: str | Path) -> None:
        """Write `accuracy.json` beside a reward model."""
        write_json(Path(directory, ACCURACY), asdict(self))


def read_accuracy(directory: str | Path) -> RewardAccuracy | None:
    """Read the accuracy of a reward model; None if it was not measured, or the file is damaged."""
    try:
        said = read_object(Path(directory, ACCURACY))
        low, high = said["interval"]
        return RewardAccuracy(said["accuracy"], (low, high), said["num_pairs"])
    except (ValueError, KeyError):
        return None


def percent(share: float) -> str:
    """Return a share as a percentage with one digit, such as 51.0%."""
    return f"{100 * share:.1f}%"


# Tables of judged pairs, as a report shows them

MAX_PAIRS = 40
"""Largest number of pairs of each outcome in a report."""
MAX_CHARACTERS = 4000

_OF_RATES = ("win_rate", "interval", "length_controlled")
_OF_A_SEED = ("model", "seed", "output_dir")
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
        ValueError: A file is damaged, or a table has no win rate.
    """
    paths = [path for run in runs for path in _tables(Path(run) / JUDGED)]
    for place in map(Path, named):
        tables = [place] if place.is_file() else _tables(place)
        if not tables:
            raise FileNotFoundError(
                f"{place} has no {JUDGED}.parquet, which `rlhf-ppo judge --output_dir` writes there"
            )
        paths += tables
    different = {os.path.realpath(path): path for path in paths}
    return [_read(path) for path in different.values()]


def judged_data(judged: Judged) -> dict[str, Any]:
    """Return a table of judged pairs as JSON values."""
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
    """Return the mean win rate of runs that differ only in their seed and were judged alike, as JSON values.

    Returns:
        `names`, `mean` and `standard_error` of each group of two or more.
    """
    groups: dict[str, list[Judged]] = {}
    for table in judged:
        options, run = dict(table.figures.get("options") or {}), table.figures.get("run") or {}
        alike = [{name: value for name, value in options.items() if name not in _OF_A_SEED}, run.get("without_seed")]
        if run.get("seed") is not None and table.figures["win_rate"] is not None:
            groups.setdefault(json.dumps(alike, sort_keys=True, default=str), []).append(table)
    means = []
    for group in groups.values():
        seeds = [table.figures["run"]["seed"] for table in group]
        if len(set(seeds)) == len(group) > 1:
            figures: Any = [[table.figures.get(name) for table in group] for name in _OF_RATES]
            rates = SeedWinRates(*figures)
            names = [table.name for table in group]
            means.append({"names": names, "mean": rates.mean, "standard_error": rates.standard_error})
    return means


def _tables(folder: Path) -> list[Path]:
    """Find the tables of a directory, in the order of their numbers."""
    tables = [path for path in folder.glob(f"{JUDGED}*.parquet") if _NAME.fullmatch(path.name)]
    return sorted(tables, key=lambda path: (len(path.name), path.name))


def _read(path: Path) -> Judged:
    try:
        figures = read_object(win_rate_beside(path))
    except ValueError as error:
        raise ValueError(f"{path} has no win rate: {error}") from None
    folder = path.resolve().parent
    inside = f"{folder.parent.name}/" if folder.name == JUDGED else ""
    with reading(path):
        return Judged(f"{inside}{folder.name}{path.stem.removeprefix(JUDGED)}", figures, pd.read_parquet(path))


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


def _number(value: float | None) -> float | None:
    return None if value is None or pd.isna(value) else float(value)


def _text(value: Any) -> str | None:
    if value is None or isinstance(value, float):
        return None
    text = prompt_text(value)
    return text if len(text) <= MAX_CHARACTERS else f"{text[:MAX_CHARACTERS]} …"
