"""Checkpoints of a run: the directory and its lock, and the saved state of the loop beyond Trainer's own."""

from __future__ import annotations

import dataclasses
import gc
import json
import math
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from transformers import TrainerState, TrainingArguments
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import sort_checkpoints

from rlhf_ppo.data.files import read_object, write_json
from rlhf_ppo.terminal import is_secret

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

LOCK_NAME = "_ppo_run.lock"  # uploads to the hub skip names that begin with "_"
UNFINISHED = "_unfinished"
"""Directory in which a checkpoint is written before it gets its name."""

_held: set[str] = set()


def list_checkpoints(output_dir: str | Path) -> list[str]:
    """Return the complete `checkpoint-<step>` directories, oldest first; Trainer writes its state last."""
    found = [path for path in sort_checkpoints(str(output_dir)) if re.fullmatch(r"checkpoint-\d+", Path(path).name)]
    return [path for path in found if os.path.isfile(Path(path, TRAINER_STATE_NAME))]


def last_complete_checkpoint(output_dir: str | Path) -> str | None:
    """Return the newest complete checkpoint of PPO or of one of TRL's trainers, or None."""
    return next(reversed(list_checkpoints(output_dir)), None)


def parse_resume(resume_from_checkpoint: str | bool | None) -> str | bool:
    """Return a checkpoint's directory, True for the newest checkpoint, or False for a new run."""
    text = str(resume_from_checkpoint or False)
    return {"true": True, "false": False}.get(text.lower(), text)


def find_start(
    output_dir: str | Path, resume_from_checkpoint: str | bool | None, overwrite: bool | None
) -> str | None:
    """Return the checkpoint from which a run starts; None for a new run.

    Args:
        output_dir: The run's directory.
        resume_from_checkpoint: As `PPOTrainer.train` takes it.
        overwrite: Whether a new run may replace checkpoints in the directory; None if the command has no such option.

    Raises:
        ValueError: The directory holds the checkpoints of another run, or later ones than the run resumes from; or
            there is no such checkpoint.
    """
    wanted, found = parse_resume(resume_from_checkpoint), list_checkpoints(output_dir)
    if wanted is True and not found:
        raise ValueError(
            f"resume_from_checkpoint=True, but output_dir={str(output_dir)!r} holds no complete checkpoint; leave it "
            "out to start a new run"
        )
    start = found[-1] if wanted is True else wanted or None
    if start is not None:
        _check_complete(start)
    kept = [] if start is None else found[: _position(start, found)]
    if len(kept) < len(found) and not (overwrite and start is None):
        deleting = "" if overwrite is None else " (a new run with overwrite_output_dir=True deletes them)"
        raise ValueError(
            f"output_dir={str(output_dir)!r} holds checkpoints that this run does not continue, such as {found[-1]}: "
            f"resume from the newest one with resume_from_checkpoint=True, move them away{deleting}, or choose "
            "another output_dir"
        )
    return start


def _check_complete(checkpoint: str) -> None:
    if not os.path.isfile(path := Path(checkpoint, TRAINER_STATE_NAME)):
        raise ValueError(f"resume_from_checkpoint={checkpoint!r} is not a complete checkpoint")
    name, step = os.path.basename(os.path.realpath(checkpoint)), read_object(path, {"global_step": int})["global_step"]
    if re.fullmatch(r"checkpoint-\d+", name) and name != f"checkpoint-{step}":
        raise ValueError(f"{checkpoint} holds the state after update {step}: rename it to checkpoint-{step}")


def _position(checkpoint: str, found: list[str]) -> int:
    """Return the number of checkpoints up to one of them; 0 if it is in another directory."""
    paths = [os.path.realpath(path) for path in found]
    path = os.path.realpath(checkpoint)
    return paths.index(path) + 1 if path in paths else 0


def delete_checkpoints(output_dir: str) -> None:
    """Delete all checkpoints in a directory."""
    for checkpoint in list_checkpoints(output_dir):
        shutil.rmtree(checkpoint)


class InUseError(RuntimeError, ValueError):
    """Another run uses the directory."""


@contextmanager
def locked(output_dir: str | Path) -> Iterator[None]:
    """Hold the lock of a directory in the block.

    It is a POSIX record lock, which ends with its process, also after SIGKILL.

    Raises:
        InUseError: Another process, or another trainer of this one, holds the lock.
    """
    path = Path(output_dir, LOCK_NAME)
    key = f"{os.getpid()} {os.path.realpath(path)}"
    if key in _held:
        gc.collect()  # a notebook may have replaced the trainer that holds it
    if in_use(output_dir):
        raise InUseError(
            f"output_dir={str(output_dir)!r} is in use: another trainer trains in it; call its close(), wait until it "
            "has ended, or choose another output_dir"
        )
    with open(path, "a", encoding="utf-8") as file:
        with suppress(OSError):  # a file system without locks
            if fcntl is not None:
                fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        _held.add(key)
        try:
            yield
        finally:
            _held.discard(key)


def in_use(output_dir: str | os.PathLike[str]) -> bool:
    """Return whether a process, this one included, trains in a directory."""
    path = Path(output_dir, LOCK_NAME)
    if f"{os.getpid()} {os.path.realpath(path)}" in _held:  # closing the file below would release the lock
        return True
    if fcntl is None or not path.is_file():
        return False
    with open(path, "r+", encoding="utf-8") as file:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        except OSError:  # no locks here
            return False
    return False


# ---- State of the loop ----

PROGRESS_NAME = "ppo_state.json"

_NOT_COMPARED = {
    *("output_dir", "overwrite_output_dir", "resume_from_checkpoint", "run_name", "logging_dir", "local_rank"),
    *("local_batch_size", "micro_batch_size", "batch_size", "local_mini_batch_size", "mini_batch_size"),
    *("num_total_batches", "total_episodes", "disable_tqdm", "log_level", "log_level_replica", "log_console"),
    *("health_checks", "learning_rate", "lr_scheduler_type", "lr_scheduler_kwargs", "warmup_steps", "warmup_ratio"),
    *("weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon"),
}
"""Paths, derived sizes, display options, and arguments that are compared with `Progress.optimization` instead."""


class PPOTrainerState(TrainerState):
    """Trainer's state with the number of episodes.

    Attributes:
        episode: Episodes generated so far, on all ranks.
    """

    episode: int = 0

    @classmethod
    def of(cls, state: TrainerState, episode: int = 0) -> Self:
        """Return a state with the fields of another one."""
        own = cls(**{item.name: getattr(state, item.name) for item in dataclasses.fields(state)})
        own.episode = episode
        return own


@dataclass
class Progress:
    """State of the training loop beyond `TrainerState`.

    Attributes:
        episode: Episodes generated so far, on all ranks.
        epoch: Index of the current pass over the data.
        batches_in_epoch: Batches taken from that pass.
        num_prompts: Rows of the data; 0 if unknown.
        losses: Each rank's sum of the losses since the last log.
        last_logged_step: Update of the last log.
        pending_metrics: Metrics of the updates since the last log.
        batch_size: Episodes of an update, on all ranks.
        num_processes: Number of processes of the run.
        num_generations: Responses to each prompt of an update.
        optimization: Settings of optimizer and scheduler, by name.
        arguments: The other arguments, as JSON values and without secrets.
        kinds: What trains of `model` and `value_model`: all weights, a kind of adapter, or a head.
    """

    episode: int = 0
    epoch: int = 0
    batches_in_epoch: int = 0
    num_prompts: int = 0
    losses: list[float] = field(default_factory=list)
    last_logged_step: int = 0
    pending_metrics: list[dict[str, float]] = field(default_factory=list)
    batch_size: int = 0
    num_processes: int = 0
    num_generations: int = 1
    optimization: dict[str, Any] = field(default_factory=dict)
    arguments: dict[str, Any] = field(default_factory=dict)
    kinds: dict[str, str] = field(default_factory=dict)

    def loss_of(self, rank: int, num_processes: int) -> float:
        """Return a rank's sum of losses; after a change of the number of processes, the mean over the ranks."""
        if len(self.losses) == num_processes:
            return self.losses[rank]
        return math.fsum(self.losses) / max(1, len(self.losses))

    def save(self, directory: str) -> None:
        """Write `ppo_state.json`."""
        write_json(Path(directory, PROGRESS_NAME), dataclasses.asdict(self))

    @classmethod
    def load(cls, directory: str) -> Self:
        """Read `ppo_state.json`."""
        return cls(**read_object(Path(directory, PROGRESS_NAME)))


def comparable_arguments(args: TrainingArguments) -> dict[str, Any]:
    """Return the arguments that a resumed run is compared in, as JSON values and without secrets."""
    values = {
        name: value for name, value in args.to_dict().items() if name not in _NOT_COMPARED and not is_secret(name)
    }
    return json.loads(json.dumps(values, default=str))


def describe_changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """Return the arguments that have changed, with both values; empty if none has."""
    changed = [name for name in sorted(before.keys() & now.keys()) if before[name] != now[name]]
    return ", ".join(f"{name}={now[name]!r} (was {before[name]!r})" for name in changed)
