"""Files of a run: its log, its settings, and runs grouped over seeds for reports and plots."""

from __future__ import annotations

import functools
import json
import os
import re
import shlex
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeVar

import numpy as np
from transformers import TrainerState
from transformers.trainer import TRAINER_STATE_NAME

from rlhf_ppo.config import PPOConfig
from rlhf_ppo.config.ppo_config import NOT_OF_TRAINING
from rlhf_ppo.data.files import optional, read_object, reading, write_json
from rlhf_ppo.reporting.completion_files import find_completions
from rlhf_ppo.reporting.judgements import JUDGED_RATE, Judgement, is_checkpoint, read_judgements

if TYPE_CHECKING:
    from transformers import Trainer

History = Sequence[Mapping[str, Any]]
"""A log history: a mapping of metric to value for each log of Trainer."""

Run = str | os.PathLike[str] | TrainerState | History
"""A run: its output directory, a `trainer_state.json`, a `TrainerState` or a log history."""


def read_log(run: Run) -> History:
    """Return the log history of a run.

    Args:
        run: An output directory (its `trainer_state.json` or that of a checkpoint, whichever is newest), a
            `trainer_state.json`, a `TrainerState` or a log history.

    Raises:
        FileNotFoundError: The directory holds no log.
        ValueError: The file is damaged.
    """
    if isinstance(run, TrainerState):
        return run.log_history
    if not isinstance(run, str | os.PathLike):
        return run
    path = find_state(run)
    if path is None:
        raise FileNotFoundError(f"{run} holds no run: neither it nor a checkpoint in it has a {TRAINER_STATE_NAME}")
    with reading(path):
        return [dict(entry) for entry in read_object(path)["log_history"]]


def training_log(run: Run) -> History:
    """Read a run's log without its summary, and add the episode to evaluations, which log only their step."""
    log = [_numbers(entry) for entry in read_log(run) if "train_loss" not in entry]
    known = [(entry["step"], entry["episode"]) for entry in log if "step" in entry and "episode" in entry]
    if not known:
        return log
    placed = [entry for entry in log if "step" in entry]
    episodes = np.interp([entry["step"] for entry in placed], *np.array([(0, 0), *known], float).T)
    with_episode = iter(episodes.tolist())
    return [{"episode": next(with_episode), **entry} if "step" in entry else entry for entry in log]


def _numbers(entry: Mapping[str, object]) -> dict[str, float]:
    return {key: value for key, value in entry.items() if isinstance(value, int | float)}


def find_state(run: str | os.PathLike[str]) -> Path | None:
    """Return the `trainer_state.json` with the most updates of a directory and its checkpoints, or None."""
    path = Path(run)
    if path.is_file():
        return path
    states = [*path.glob(TRAINER_STATE_NAME), *path.glob(f"checkpoint-*/{TRAINER_STATE_NAME}")]
    return max(states, key=lambda state: (_updates_of(state), state.stat().st_mtime_ns), default=None)


def _updates_of(state: Path) -> int:
    return read_object(state).get("global_step", 0)


def step_of_policy(trainer: Trainer) -> int:
    """Return the update whose policy a trainer has: that of the best model, if Trainer has loaded it."""
    state = trainer.state
    best = state.best_model_checkpoint if trainer.args.load_best_model_at_end and not trainer.is_in_train else None
    return int(best.rpartition("-")[2]) if best else state.global_step


# Settings

SETTINGS_NAME = "ppo_settings.json"
_PACKAGES = ("rlhf_ppo", "transformers", "trl", "accelerate", "datasets", "peft", "deepspeed", "torch")


@dataclass(frozen=True)
class RunSettings:
    """The settings at a run's start; empty if the run has no `ppo_settings.json`.

    Attributes:
        arguments: The arguments of `PPOConfig`, without secrets.
        versions: Package to version.
        made_of: Origins or names of `policy`, `value_model`, another `reference`, `rewards` and `dataset`;
            `reward_identities`; `reward_weights` by name, unless all are 1; `reward_funcs`, the texts that named
            reward functions, None for other functions; `trained`, the kind of each trained model, with the settings of
            `adapters`; `dtypes` of the policy's weights; `own_parts`, the names of a trainer subclass, of tools,
            and of objects or functions that replace a part of PPO; and `num_prompts`.
        health: The run's properties for the health checks; empty without them.
    """

    arguments: Mapping[str, Any] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    made_of: Mapping[str, Any] = field(default_factory=dict)
    health: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def load(cls, output_dir: str | Path) -> Self:
        """Read the `ppo_settings.json` of a run, or of a checkpoint's run."""
        path = _root(Path(output_dir)) / SETTINGS_NAME
        with reading(path):
            return cls(**read_object(path)) if path.exists() else cls()

    def without_seed(self) -> str | None:
        """Return a text that is equal for runs that differ in seed, paths, names and display alone; None: none."""
        if not self.arguments:
            return None
        left_out = NOT_OF_TRAINING | {"seed", "data_seed"}
        told = {name: value for name, value in self.arguments.items() if name not in left_out}
        functions = [text and os.path.basename(text) for text in self.made_of.get("reward_funcs", ())]
        text = json.dumps([told, {**self.made_of, "reward_funcs": functions}], sort_keys=True)
        return json.dumps(json.loads(text, parse_int=float))  # gamma=1 is gamma=1.0


@functools.cache
def installed_versions() -> dict[str, str]:
    """Return the versions of the installed packages that affect a run's numbers."""
    versions = {}
    for package in _PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    return versions


@optional("The run's settings")
def save_settings(args: PPOConfig, made_of: Mapping[str, object], health: Mapping[str, object]) -> None:
    """Write `ppo_settings.json`.

    Args:
        args: The run's arguments.
        made_of: As in `RunSettings`.
        health: The settings of its health checks.
    """
    settings = RunSettings(args.to_dict(), installed_versions(), dict(made_of), dict(health))
    write_json(Path(str(args.output_dir), SETTINGS_NAME), json.loads(json.dumps(asdict(settings), default=str)))


# Results

AUDIT_NAME, CURVES = "critic_audit.json", "curves.png"
SAMPLES_DIR = "_samples"
"""The directory of the sample tables in `output_dir`; `push_to_hub` does not upload it."""


def where_results_are(policy: str | os.PathLike[str], output_dir: str | os.PathLike[str]) -> str:
    """Return one line that names the policy's directory, and the existing curves, report and samples.

    Args:
        policy: The policy's directory.
        output_dir: The run's directory, with its log and its samples.
    """
    parts = [f"The policy is in {policy}"]
    if find_state(output_dir) is not None:
        run = shlex.quote(os.fspath(output_dir))
        parts += [f"its curves: `rlhf-ppo plot {run}`", f"its report: `rlhf-ppo report {run}`"]
    if Path(output_dir, SAMPLES_DIR).is_dir():
        parts.append(f"its samples: {Path(output_dir, SAMPLES_DIR)}")
    return "; ".join(parts) + "."


# Runs for reports and plots

T = TypeVar("T")


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
        judgements: The win rates of the policy at its end; none if the log ends at a checkpoint.
    """

    name: str
    directory: Path
    log: History
    settings: RunSettings
    completions: Mapping[int, Path]
    samples: Mapping[int, Path]
    judgements: Sequence[Judgement] = ()


def read_runs(directories: Sequence[str | os.PathLike[str]]) -> list[RecordedRun]:
    """Read runs.

    Args:
        directories: Their output directories, or checkpoints, whose logs end there.

    Raises:
        ValueError: A run has no log of PPO, or a damaged file.
        FileNotFoundError: A directory has no run.
    """
    paths = [Path(directory) for directory in directories]
    return [_read_run(path, name) for path, name in zip(paths, names_of(paths), strict=True)]


def read_audit(directory: str | Path) -> dict[str, Any] | None:
    """Read the `critic_audit.json` of a run; None without one."""
    path = Path(directory, AUDIT_NAME)
    return read_object(path) if path.exists() else None


def grouped(runs: Sequence[RecordedRun]) -> dict[str, list[RecordedRun]]:
    """Group runs that differ in seed, paths, names and display alone; runs of one seed are in different groups.

    Returns:
        The runs of each label, in their order. A run without settings is its own group.
    """
    return _by_label(runs, [run.name for run in runs], [run.settings for run in runs])


def grouped_directories(directories: Sequence[str], separately: bool = False) -> dict[str, list[str]]:
    """Group directories as `grouped` groups runs, without reading their logs.

    Args:
        directories: Output directories, or checkpoints.
        separately: Whether each is its own group.

    Returns:
        The directories of each label.
    """
    settings = [RunSettings() if separately else RunSettings.load(directory) for directory in directories]
    return _by_label(directories, names_of(directories), settings)


def _by_label(runs: Sequence[T], names: Sequence[str], settings: Sequence[RunSettings]) -> dict[str, list[T]]:
    groups: dict[tuple[str, int], list[int]] = {}
    seen: Counter[tuple[str, Any]] = Counter()  # runs of the same seed are not one experiment
    for number, setting in enumerate(settings):
        same, seed = setting.without_seed() or str(number), setting.arguments.get("seed")
        groups.setdefault((same, seen[same, seed]), []).append(number)
        seen[same, seed] += 1
    labels = [_label([names[number] for number in group]) for group in groups.values()]
    named = zip(labels, groups.values(), strict=True)
    return {
        label if labels.count(label) == 1 else names[group[0]]: [runs[number] for number in group]
        for label, group in named
    }


def _root(path: Path) -> Path:
    """Return the run's directory of a path that may be a checkpoint."""
    return path.parent if is_checkpoint(path) else path


def _read_run(path: Path, name: str) -> RecordedRun:
    log = training_log(path)
    root = _root(path)
    keys = dict.fromkeys(key for entry in log for key in entry)
    if not any(key.startswith(("objective/", "eval_score")) for key in keys):
        raise ValueError(
            f"{path} has no log of PPO, but {', '.join([*keys][:4]) or 'an empty one'}; `rlhf-ppo plot --x step "
            f"{shlex.quote(str(path))}` draws the logs of other trainers"
        )
    last = max(entry.get("step", 0) for entry in log)
    completions = {step: file for step, file in find_completions(root).items() if step <= last}
    judgements = [] if is_checkpoint(path) else read_judgements(root)
    log = [*log, *_judged(judgements, log)]
    return RecordedRun(name, root, log, RunSettings.load(root), completions, _samples(root, int(last)), judgements)


def _judged(judgements: Sequence[Judgement], log: History) -> Iterator[dict[str, float]]:
    """Yield the judgements of a run's policy as entries of its log."""
    where = {name: max(entry.get(name, 0) for entry in log) for name in ("step", "episode")}
    for judgement in judgements:
        low, high = judgement.interval
        rates = {JUDGED_RATE: judgement.win_rate, f"{JUDGED_RATE}_low": low, f"{JUDGED_RATE}_high": high}
        yield where | rates


def _samples(root: Path, last: int) -> dict[int, Path]:
    paths = {int(path.stem.removeprefix("update-")): path for path in Path(root, SAMPLES_DIR).glob("update-*.csv")}
    return {step: paths[step] for step in sorted(paths) if step <= last}


def names_of(paths: Sequence[str | os.PathLike[str]]) -> list[str]:
    """Return the last parts of real paths, as many as make all names unique."""
    whole = [os.path.realpath(path) for path in paths]
    parts = [Path(path).parts for path in whole]
    longest = max(map(len, parts), default=1)
    for length in range(1, longest):
        names = ["/".join(part[-length:]) for part in parts]
        if len(set(names)) == len(names):
            return names
    return whole


def _label(names: Sequence[str]) -> str:
    if len(names) == 1:
        return names[0]
    start = os.path.commonprefix(list(names))  # noqa: RUF071 (characters in common, as in "a-seed1" and "a-seed2")
    if any(name[len(start) :][:1].isdigit() for name in names):
        start = start.rstrip("0123456789")  # 4 is not the name of 42 and 43
    common = re.sub(r"[-_./ ]*(seed|run)?[-_./ =]*$", "", start)
    return common or f"{names[0]} and {len(names) - 1} more"
