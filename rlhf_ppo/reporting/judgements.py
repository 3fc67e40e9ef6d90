"""Files of `rlhf-ppo judge` and `rlhf-ppo reward`: win rates, judged pairs, and the accuracy of reward models."""

from __future__ import annotations

import itertools
import json
import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from rlhf_ppo.checkpoints.files import check_values, read_object, replacing, write_json
from rlhf_ppo.config.validation import Interval
from rlhf_ppo.rewards.builtin import prompt_text
from rlhf_ppo.terminal import redacted

JUDGED = "judged"
"""Prefix of the names of tables of verdicts, and the name of their directory in a run's directory."""


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


_SHARE, _COUNT = Interval(0, 1), Interval(0, math.inf)
FIGURES = ("win_rate", "interval", "wins", "losses", "ties", "failed")
"""The keys of every `win_rate.json`; `win_rate` and `interval` are null if all verdicts failed."""
_NAMES = ("model", "model_column", "opponent", "opponent_column", "judge_model", "judge")


def read_win_rate(path: Path, required: Sequence[str] = FIGURES) -> dict[str, Any]:
    """Read and check a `win_rate.json`.

    Args:
        path: The file.
        required: Keys that it must have.

    Raises:
        ValueError: The file does not exist, or a value is missing or invalid; see `read_object`.
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
    """Write a table under a free name, safe against other processes that write there.

    Args:
        table: The table.
        folder: The directory.
        name: The file's name without suffix; `-2`, `-3` ... are appended if it exists.

    Returns:
        The file's path.
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
    """Create an empty file; return whether neither it nor its win rate existed."""
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
    """A win rate of a policy.

    Attributes:
        win_rate: Share of the judged prompts that the policy won, with a tie as half.
        interval: Its 95% bootstrap interval.
        num_prompts: Number of judged prompts.
        opponent: The opponent: a model, or a column of the data set.
        judge: The judge's name.
        length_controlled: The win rate at equal length.
    """

    win_rate: float
    interval: tuple[float, float]
    num_prompts: int
    opponent: str
    judge: str
    length_controlled: float | None = None

    @classmethod
    def of(cls, said: dict[str, Any]) -> Judgement:
        """Make a judgement from the result of `read_win_rate`; raise a `ValueError` if nothing was judged."""
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
            length_controlled=said.get("length_controlled"),
        )


def found_judgements(output_dir: str | Path) -> list[Judgement]:
    """Read the win rates in a run's directory and in its `judged/`.

    Args:
        output_dir: The run's directory; the judge writes there with `--output_dir <output_dir>/judged`.

    Returns:
        The valid win rates, in the order in which they were judged.
    """
    found, folders = [], (Path(output_dir), Path(output_dir, JUDGED))
    paths = [path for folder in folders for path in folder.glob("win_rate*.json")]
    for path in sorted(paths, key=lambda path: (path.parent, len(path.name), path.name)):
        try:
            found.append(Judgement.of(read_win_rate(path, (*FIGURES, "options"))))
        except ValueError:
            continue
    return found


# Seeds


@dataclass(frozen=True)
class SeedWinRates:
    """Win rates of policies that differ only in PPO's seed.

    Attributes:
        seeds: The seeds.
        rates: Share of prompts won by each policy, in [0, 1].
        intervals: Low and high end of each rate's interval over prompts.
        length_controlled: Each length-controlled rate, or None.
    """

    seeds: Sequence[int]
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

    def lines(self) -> Iterator[str]:
        """Yield one line for each seed, and one for the mean."""
        yield "Win rates:"
        for seed, rate, (low, high), controlled in zip(
            self.seeds, self.rates, self.intervals, self.length_controlled, strict=True
        ):
            equal = "" if controlled is None else f", {100 * controlled:.2f}% at equal length"
            yield f"  seed {seed}: {100 * rate:.2f}% (95% interval {100 * low:.2f} to {100 * high:.2f}){equal}"
        if (error := self.standard_error) is not None:
            yield f"  mean of {len(self.rates)} seeds: {100 * self.mean:.2f}%, standard error {100 * error:.2f}"

    def as_json(self) -> dict[str, Any]:
        """Return the win rates as JSON values."""
        columns = zip(self.seeds, self.rates, self.intervals, self.length_controlled, strict=True)
        names = ("seed", "win_rate", "interval", "length_controlled")
        by_seed = [dict(zip(names, column, strict=True)) for column in columns]
        return {
            "win_rate": self.mean,
            "interval": list(self.interval),
            "standard_error": self.standard_error,
            "seeds": by_seed,
        }


_STUDENT = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)


def student_quantile(freedom: int) -> float:
    """Return the 97.5% quantile of Student's t distribution: a table, then its expansion in 1 / freedom."""
    return _STUDENT[freedom - 1] if freedom <= len(_STUDENT) else 1.96 + 2.372 / freedom + 2.82 / freedom**2


def wilson_interval(share: float, count: int, z: float = 1.959964) -> tuple[float, float]:
    """Compute the Wilson score interval of a share (Wilson 1927, JASA 22).

        (p + z^2 / 2n +- z sqrt(p (1 - p) / n + z^2 / 4n^2)) / (1 + z^2 / n)

    Args:
        share: `p`, from 0 to 1.
        count: `n`, at least 1.
        z: Quantile of the normal distribution; the default gives 95%.
    """
    center, scale = share + z**2 / (2 * count), 1 + z**2 / count
    margin = z * math.sqrt(share * (1 - share) / count + z**2 / (4 * count**2))
    return max(0.0, (center - margin) / scale), min(1.0, (center + margin) / scale)


# Reward models


ACCURACY = "accuracy.json"
"""The file beside a reward model with its accuracy on held-out pairs."""

AT_LEAST = 0.6
"""Accuracy below which a reward model is weak."""

ENOUGH_PAIRS = 100
"""Held-out pairs of which 60% right are above chance: the smallest number with such an interval is 97."""


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
    def is_at_chance(self) -> bool:
        """Whether the interval includes 50% or lies below it."""
        return self.interval[0] <= 0.5

    @property
    def state(self) -> str | None:
        """`at chance`, `perhaps at chance` if the pairs are too few to tell, `weak`, or None for a useful model."""
        if self.is_at_chance:
            is_open = self.num_pairs < ENOUGH_PAIRS and self.interval[1] > AT_LEAST
            return "perhaps at chance" if is_open else "at chance"
        return "weak" if self.accuracy < AT_LEAST else None

    @property
    def advice(self) -> str:
        """What to do about a reward model that is not useful."""
        if self.state == "perhaps at chance":
            return (
                f"Give more pairs, of which a tenth is held out: {self.num_pairs} are too few to tell 60% from "
                f"chance, {ENOUGH_PAIRS} are enough."
            )
        return (
            "Train the reward model longer (num_train_epochs), on more pairs or from a larger model, until it is "
            f"right on more than {AT_LEAST:.0%} of held-out pairs: PPO cannot be better than its reward."
        )

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
        said = read_object(Path(directory, ACCURACY), {"accuracy": float, "interval": list[float], "num_pairs": int})
        low, high = said["interval"]
        check_values(ACCURACY, {"accuracy": said["accuracy"], "low": low, "high": high}, dict.fromkeys(
            ("accuracy", "low", "high"), _SHARE
        ))  # fmt: skip
    except (ValueError, OSError):
        return None
    return RewardAccuracy(said["accuracy"], (low, high), said["num_pairs"])


def percent(share: float) -> str:
    """Return a share as a percentage with one digit, such as 51.0%."""
    return f"{100 * share:.1f}%"


# Tables of judged pairs, as a report shows them

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
    """Return the mean win rate of runs that differ only in their seed, as JSON values.

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
