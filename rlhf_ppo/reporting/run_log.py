"""Files of a run: its log, its settings, and runs grouped over seeds for reports and plots.

The log is read from `trainer_state.json` and from `log_history.jsonl`, to which a running run appends.
"""

from __future__ import annotations

import functools
import json
import os
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Self, TypeVar

import numpy as np
from transformers import TrainerState, TrainingArguments

from rlhf_ppo.checkpoints.files import check_values, parse_json, read_object, write_json
from rlhf_ppo.checkpoints.run import HISTORY_NAME, full_history, list_checkpoints
from rlhf_ppo.checkpoints.state import PROGRESS_NAME, Progress
from rlhf_ppo.config.validation import Interval
from rlhf_ppo.reporting.completion_files import find_completions
from rlhf_ppo.reporting.judgements import JUDGED_RATE, found_judgements

_LARGEST = 2.0**63
_COUNT = Interval(0, _LARGEST)

Log = Sequence[Mapping[str, Any]]
"""A log history: a mapping of metric to value for each log of Trainer."""

Run = str | os.PathLike[str] | TrainerState | Log
"""A run: its output directory, its `trainer_state.json`, a `TrainerState` or a log history."""


def read_log(run: Run) -> Log:
    """Return the log history of a run.

    Args:
        run: An output directory (the longest of its `log_history.jsonl`, its state and its newest checkpoint's state),
            a `trainer_state.json`, a `TrainerState` or a log history.

    Returns:
        The log history.

    Raises:
        TypeError: `run` is none of these.
        ValueError: The file is damaged.
        FileNotFoundError: The file does not exist.
    """
    if isinstance(run, TrainerState):
        return run.log_history
    if isinstance(run, (str, os.PathLike)):
        return _read_path(Path(run))
    if isinstance(run, Mapping) or not all(isinstance(entry, Mapping) for entry in run):
        raise TypeError(
            f"a run is a path, a TrainerState or a list of log entries, got {type(run).__name__}; "
            "runs must be a list of runs, or a mapping of label to a list of runs"
        )
    return run


def training_log(run: Run) -> Log:
    """Read a run's log without its summary, and add the episode to evaluations, which log only their step."""
    log = [_numbers(entry) for entry in read_log(run) if "train_runtime" not in entry]
    known = [(entry["step"], entry["episode"]) for entry in log if "step" in entry and "episode" in entry]
    if not known:
        return log
    placed = [entry for entry in log if "step" in entry]
    episodes = np.interp([entry["step"] for entry in placed], *np.array([(0, 0), *known], float).T)
    with_episode = iter(episodes.tolist())
    return [{"episode": next(with_episode), **entry} if "step" in entry else entry for entry in log]


def _numbers(entry: Mapping[str, Any]) -> dict[str, float]:
    return {key: value for key, value in entry.items() if isinstance(value, int | float)}


def find_state(directory: str | os.PathLike[str]) -> Path | None:
    """Return the path of a run's `trainer_state.json`, or that of its newest checkpoint, or None."""
    own = Path(directory, "trainer_state.json")
    if own.is_file():
        return own
    states = (checkpoint / "trainer_state.json" for checkpoint in list_checkpoints(Path(directory)))
    return next(filter(Path.is_file, states), None)


def has_log(directory: str | os.PathLike[str]) -> bool:
    """Return whether a run in a directory has logged anything."""
    return Path(directory, HISTORY_NAME).is_file() or find_state(directory) is not None


def _read_path(path: Path) -> Log:
    if path.is_file():
        return _read_state(path)
    state, lines = find_state(path), path / HISTORY_NAME
    if state is None and not lines.is_file():
        missing = "no trainer_state.json or log_history.jsonl" if path.is_dir() else "no such directory"
        raise FileNotFoundError(
            f"{path} holds no run: there is {missing}; pass the output_dir of a run that has logged something"
        )
    written = _read_lines(lines)
    if state is None:
        return written
    log = _read_state(state)
    # An older state, or one of another run, does not begin with the run's log.
    return log if _comparable(log[: len(written)]) == _comparable(written) else written


def _read_state(path: Path) -> Log:
    try:
        log = _with_earlier(path.parent, read_object(path, {"log_history": list[dict]})["log_history"])
        for entry in log:
            _check_entry(path.name, entry)
    except ValueError as error:
        raise ValueError(f"{path} is not a trainer_state.json that Trainer wrote: {error}") from error
    return log


def _read_lines(path: Path) -> list[dict[str, Any]]:
    """Read `log_history.jsonl`, without an incomplete last line."""
    if not path.is_file():
        return []
    entries = []
    for number, line in enumerate(path.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True), 1):
        try:
            entries.append(_entry(line))
        except ValueError as error:
            if line.endswith("\n"):
                raise ValueError(f"{path} is damaged: line {number} is not an entry of a log: {error}") from error
    return entries


def _entry(line: str) -> dict[str, Any]:
    entry = parse_json(line)
    if not isinstance(entry, dict):
        raise ValueError("it is no object")
    _check_entry(HISTORY_NAME, entry)
    return entry


def _check_entry(file: str, entry: Mapping[str, Any]) -> None:
    """Raise a `ValueError` if an entry's counters are invalid, or if a number cannot be drawn."""
    check_values(file, entry, {name: _COUNT for name in ("step", "episode") if name in entry})
    for name, value in entry.items():
        if isinstance(value, int) and abs(value) > _LARGEST:
            raise ValueError(f"its {file} has {name}={value!s:.20}...")


def _comparable(log: Log) -> str:
    return json.dumps(list(log), sort_keys=True)  # here NaN equals NaN


def _with_earlier(directory: Path, last: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the complete log of a checkpoint, whose state holds only the last entries."""
    progress = directory / PROGRESS_NAME
    num_logged = Progress.load(str(directory)).num_logged if progress.is_file() else 0
    return full_history(directory, last, num_logged)


# Settings

SETTINGS_NAME = "ppo_settings.json"
_PACKAGES = ("rlhf_ppo", "transformers", "trl", "accelerate", "datasets", "peft", "deepspeed", "torch")

_PLACES = frozenset({"output_dir", "logging_dir", "run_name", "exp_name", "overwrite_output_dir", "local_rank"})
_SEEDS = frozenset({"seed", "data_seed"})
_SHOWN_ONLY = frozenset({"resume_from_checkpoint", "disable_tqdm", "report_to", "hub_model_id", "log_level"})


@dataclass(frozen=True)
class RunSettings:
    """The settings at a run's start; empty if the run has no `ppo_settings.json`.

    Attributes:
        arguments: The arguments of `PPOConfig`, without secrets.
        versions: Package to version.
        made_of: Origins or names of `policy`, another `reference`, `rewards` and `dataset`, and `reward_funcs`, the
            texts that named reward functions, None for other functions.
        health: The run's properties for the health checks; empty without them.
    """

    arguments: Mapping[str, Any] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    made_of: Mapping[str, Any] = field(default_factory=dict)
    health: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def load(cls, output_dir: str | Path) -> Self:
        """Read `ppo_settings.json`.

        Raises:
            ValueError: The file is damaged.
        """
        path = Path(output_dir, SETTINGS_NAME)
        if not path.exists():
            return cls()
        try:
            values = read_object(path, dict.fromkeys(("arguments", "versions", "made_of"), dict[str, Any]))
            check_values(SETTINGS_NAME, values["versions"], dict.fromkeys(values["versions"], str))
            types: dict[str, Any] = {
                "policy": str | None,
                "reference": str | None,
                "rewards": list[str],
                "dataset": str | None,
                "reward_funcs": list,
            }
            made_of = values["made_of"]
            check_values(SETTINGS_NAME, made_of, {name: kind for name, kind in types.items() if name in made_of})
            health = values.setdefault("health", {})
        except ValueError as error:
            raise ValueError(f"{output_dir} cannot be read: {error}") from error
        return cls(values["arguments"], values["versions"], made_of, health)

    def without_seed(self) -> str | None:
        """Return a text that is equal for runs that differ only in seed and directory; None without settings."""
        if not self.arguments:
            return None
        left_out = _PLACES | _SEEDS | _SHOWN_ONLY
        told = {name: value for name, value in self.arguments.items() if name not in left_out}
        text = json.dumps([told, self.made_of], sort_keys=True)
        return json.dumps(json.loads(text, parse_int=float))  # gamma=1 is gamma=1.0


@functools.cache
def installed_versions() -> dict[str, str]:
    """Return the versions of the installed packages that affect a run's numbers."""
    found = {}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def save_settings(
    output_dir: str | Path, args: TrainingArguments, made_of: Mapping[str, Any], health: Mapping[str, Any]
) -> None:
    """Write `ppo_settings.json`.

    Args:
        output_dir: The run's directory.
        args: The run's arguments.
        made_of: The names of policy and rewards.
        health: The settings of its health checks.
    """
    settings = {
        "arguments": args.to_dict(), "versions": installed_versions(), "made_of": dict(made_of), "health": dict(health)
    }  # fmt: skip
    write_json(Path(output_dir, SETTINGS_NAME), json.loads(json.dumps(settings, default=str)))


# Results

AUDIT_NAME = "critic_audit.json"
SAMPLES_DIR = "_samples"
"""The directory of the sample tables in `output_dir`; `push_to_hub` does not upload it."""


def where_results_are(policy: str | os.PathLike[str], output_dir: str | os.PathLike[str]) -> str:
    """Return one line that names the policy's directory, and the existing curves, report and samples.

    Args:
        policy: The policy's directory.
        output_dir: The run's directory, with its log and its samples.
    """
    parts = [f"The policy is in {policy}"]
    if has_log(output_dir):
        run = shlex.quote(os.fspath(output_dir))
        parts += [f"its curves: `rlhf-ppo plot {run}`", f"its report: `rlhf-ppo report {run}`"]
    if Path(output_dir, SAMPLES_DIR).is_dir():
        parts.append(f"its samples: {Path(output_dir, SAMPLES_DIR)}")
    return "; ".join(parts) + "."


# Runs for reports and plots

T = TypeVar("T")
_SAMPLES = re.compile(r"update-(\d+)\.csv")


@dataclass(frozen=True)
class RecordedRun:
    """The files of a finished or running run.

    Attributes:
        name: The last parts of its path, as many as make it unique among the runs.
        directory: The run's directory.
        log: Its log; evaluations have their episode. Each judgement of the policy is an entry after the last update.
        settings: Its settings.
        completions: The file of responses of each update.
        samples: The file of each sample table.
    """

    name: str
    directory: Path
    log: Log
    settings: RunSettings
    completions: Mapping[int, Path]
    samples: Mapping[int, Path]


def read_runs(directories: Sequence[str | os.PathLike[str]]) -> list[RecordedRun]:
    """Read runs.

    Args:
        directories: Their output directories, or checkpoints, whose logs end there.

    Raises:
        ValueError: A run is given twice, has logged nothing yet, is from another trainer, or has a damaged file.
        FileNotFoundError: A directory has no run.
    """
    paths = [Path(directory) for directory in directories]
    return [_read_run(path, name) for path, name in zip(paths, _names(_different(paths)), strict=True)]


def read_audit(directory: str | Path) -> dict[str, Any] | None:
    """Read the `critic_audit.json` of a run; None without one.

    Raises:
        ValueError: It is damaged.
    """
    path = Path(directory, AUDIT_NAME)
    if not path.exists():
        return None
    kinds = {name: int for name in ("num_prompts", "num_prefixes", "num_continuations")}
    kinds |= {"figures": dict[str, dict[str, float]], "findings": list[str], "calibration": list[dict[str, float]]}
    try:
        return read_object(path, kinds | {"by_position": list[dict[str, float | None]]})
    except ValueError as error:
        raise ValueError(f"{path} is damaged: {error}") from None


def grouped(runs: Sequence[RecordedRun]) -> dict[str, list[RecordedRun]]:
    """Group runs whose arguments differ only in seed and directory.

    Returns:
        The runs of each label, in their order. A run without settings is its own group.
    """
    return _by_label(runs, [run.name for run in runs], [run.settings for run in runs])


def grouped_directories(directories: Sequence[str], separately: bool = False) -> dict[str, list[str]]:
    """Group directories of runs in the same way, without reading their logs.

    Args:
        directories: Output directories, or checkpoints.
        separately: Whether each is its own group.

    Returns:
        The directories of each label.

    Raises:
        ValueError: A directory is given twice, or its settings are damaged.
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
    """Return the real paths; raise a `ValueError` if two are the same."""
    whole = [os.path.realpath(directory) for directory in directories]
    if twice := [str(path) for path, real in zip(directories, whole, strict=True) if whole.count(real) > 1]:
        raise ValueError(f"{twice[0]} is given twice; name each run once")
    return whole


def _root(path: Path) -> Path:
    """Return the run's directory of a path that may be a checkpoint."""
    return path.parent if re.fullmatch(r"checkpoint-\d+(-\d+)?", path.name) else path


def _read_run(path: Path, name: str) -> RecordedRun:
    log = training_log(path)
    keys = list(dict.fromkeys(key for entry in log for key in entry))
    if not keys:
        raise ValueError(f"{path} has logged nothing yet")
    root = _root(path)
    has_only_evaluated = "loss" not in keys and Path(root, SETTINGS_NAME).exists()  # with eval_on_start
    if not (has_only_evaluated or any(key.startswith("objective/") for key in keys)):
        raise ValueError(
            f"{path} is not a run of PPO: its log has {', '.join(keys[:4])} and nothing of objective/; `rlhf-ppo plot "
            f"--x step {shlex.quote(str(path))}` draws it"
        )
    last = max(entry.get("step", 0) for entry in log)
    completions = {step: file for step, file in find_completions(root).items() if step <= last}
    settings = RunSettings.load(root)
    log = [*log, *_judged(root, log)]
    return RecordedRun(name, root, log, settings, completions, _samples(root, int(last)))


def _judged(root: Path, log: Log) -> Iterator[dict[str, float]]:
    """Yield the judgements of a run's policy as entries of its log."""
    where = {name: max(entry.get(name, 0) for entry in log) for name in ("step", "episode")}
    for judgement in found_judgements(root):
        low, high = judgement.interval
        rates = {JUDGED_RATE: judgement.win_rate, f"{JUDGED_RATE}_low": low, f"{JUDGED_RATE}_high": high}
        yield where | rates


def _samples(root: Path, last: int) -> dict[int, Path]:
    found = {path: _SAMPLES.fullmatch(path.name) for path in Path(root, SAMPLES_DIR).glob("update-*.csv")}
    steps = {int(match[1]): path for path, match in found.items() if match is not None}
    return {step: steps[step] for step in sorted(steps) if step <= last}


def _names(paths: Sequence[str]) -> list[str]:
    """Return the last parts of paths, as many as make all names unique."""
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
    if any(name[len(start) :][:1].isdigit() for name in names):
        start = start.rstrip("0123456789")  # of 42 and 43, 4 is no name
    common = re.sub(r"[-_./ ]*(seed|run)?[-_./ =]*$", "", start)
    return common or f"{names[0]} and {len(names) - 1} more"
