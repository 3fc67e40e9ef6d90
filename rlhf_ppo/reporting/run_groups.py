"""Runs as a report and a plot show them: each with its name, those that differ in their seed together."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from rlhf_ppo.reporting.completion_files import find_completions
from rlhf_ppo.reporting.plots import training_log
from rlhf_ppo.reporting.results import SAMPLES_DIR
from rlhf_ppo.reporting.run_log import Log
from rlhf_ppo.reporting.run_settings import RunSettings

T = TypeVar("T")
_SAMPLES = re.compile(r"update-(\d+)\.csv")


@dataclass(frozen=True)
class RecordedRun:
    """What a run has left, or has written so far.

    Attributes:
        name: Its directory's name, with as much of the path as tells it from the others.
        log: Its log; evaluations have their episode.
        settings: What it was started with.
        completions: The file of each update whose responses are kept.
        samples: The file of each sample table.
    """

    name: str
    log: Log
    settings: RunSettings
    completions: Mapping[int, Path]
    samples: Mapping[int, Path]


def read_runs(directories: Sequence[str | os.PathLike[str]]) -> list[RecordedRun]:
    """Read runs.

    Args:
        directories: Their output directories, or checkpoints of them, which give the log up to there.

    Raises:
        ValueError: One is given twice, has logged nothing yet, is of another trainer, or a file of it is damaged.
        FileNotFoundError: There is no run.
    """
    paths = [Path(directory) for directory in directories]
    return [_read_run(path, name) for path, name in zip(paths, _names(_different(paths)), strict=True)]


def grouped(runs: Sequence[RecordedRun]) -> dict[str, list[RecordedRun]]:
    """Put runs together whose arguments differ in seed and place only.

    Args:
        runs: The runs.

    Returns:
        The runs of each label, in the order in which they were given. A run whose arguments are not known, because it
        is of an earlier version, stands alone.
    """
    return _by_label(runs, [run.name for run in runs], [run.settings for run in runs])


def grouped_directories(directories: Sequence[str], separately: bool = False) -> dict[str, list[str]]:
    """Put directories of runs together in the same way; their logs are not read.

    Args:
        directories: Output directories, or checkpoints of them.
        separately: Whether each stands alone.

    Returns:
        The directories of each label.

    Raises:
        ValueError: One is given twice, or its settings are damaged.
    """
    whole = _different(directories)
    roots = [_root(Path(directory)) for directory in directories]
    settings = [RunSettings() if separately else RunSettings.load(root) for root in roots]
    return _by_label(directories, _names(whole), settings)


def _by_label(runs: Sequence[T], names: Sequence[str], settings: Sequence[RunSettings]) -> dict[str, list[T]]:
    groups: dict[str, list[int]] = {}
    for number, setting in enumerate(settings):
        groups.setdefault(setting.without_seed() or str(number), []).append(number)
    labels = [_label([names[number] for number in group]) for group in groups.values()]
    named = zip(labels, groups.values(), strict=True)
    return {
        label if labels.count(label) == 1 else names[group[0]]: [runs[number] for number in group]
        for label, group in named
    }


def _different(directories: Sequence[str | os.PathLike[str]]) -> list[str]:
    """Return the whole paths, no two of which are the same."""
    whole = [os.path.realpath(directory) for directory in directories]
    if twice := [str(path) for path, real in zip(directories, whole, strict=True) if whole.count(real) > 1]:
        raise ValueError(f"{twice[0]} is given twice; name each run once")
    return whole


def _root(path: Path) -> Path:
    """Return the directory of a run, of which a checkpoint may be given."""
    return path.parent if re.fullmatch(r"checkpoint-\d+(-\d+)?", path.name) else path


def _read_run(path: Path, name: str) -> RecordedRun:
    log = training_log(path)
    keys = list(dict.fromkeys(key for entry in log for key in entry))
    if not keys:
        raise ValueError(f"{path} has logged nothing yet")
    if not any(key.startswith("objective/") for key in keys):
        raise ValueError(
            f"{path} is no run of PPO: its log has {', '.join(keys[:4])} and nothing of objective/; `rlhf-ppo plot "
            f"--x step {path}` draws it"
        )
    root = _root(path)
    last = max(entry.get("step", 0) for entry in log)
    completions = {step: file for step, file in find_completions(root).items() if step <= last}
    return RecordedRun(name, log, RunSettings.load(root), completions, _samples(root, int(last)))


def _samples(root: Path, last: int) -> dict[int, Path]:
    found = {path: _SAMPLES.fullmatch(path.name) for path in Path(root, SAMPLES_DIR).glob("update-*.csv")}
    steps = {int(match[1]): path for path, match in found.items() if match is not None}
    return {step: steps[step] for step in sorted(steps) if step <= last}


def _names(paths: Sequence[str]) -> list[str]:
    """Return the last parts of paths, as many of them as make all different."""
    parts = [Path(path).parts for path in paths]
    longest = max(map(len, parts), default=1)
    for length in range(1, longest):
        names = ["/".join(part[-length:]) for part in parts]
        if len(set(names)) == len(names):
            return names
    return list(paths)


def _label(names: Sequence[str]) -> str:
    if len(names) == 1:
        return names[0]
    start = os.path.commonprefix(list(names))  # noqa: RUF071 (characters in common, as in "a-seed1" and "a-seed2")
    common = re.sub(r"[-_./ ]*(seed|run)?[-_./ =]*$", "", start)
    return common or f"{names[0]} and {len(names) - 1} more"
