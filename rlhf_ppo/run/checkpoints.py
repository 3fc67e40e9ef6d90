"""Directories of runs: their checkpoints, results of earlier policies, and the lock of the run that writes there."""

from __future__ import annotations

import gc
import itertools
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import sort_checkpoints

from rlhf_ppo.data.files import read_object
from rlhf_ppo.reporting.completion_files import COMPLETIONS_DIR
from rlhf_ppo.reporting.judgements import JUDGED
from rlhf_ppo.reporting.run_log import AUDIT_NAME, CURVES, SAMPLES_DIR
from rlhf_ppo.reporting.verdict import VERDICT

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

LOCK_NAME = "_ppo_run.lock"  # uploads to the hub skip names that begin with "_"
UNFINISHED = "_unfinished"
"""Directory in which a checkpoint is written before it gets its name."""

EARLIER = "_earlier"
"""Directory in a run's directory for the results of a policy that was trained there before."""
_RESULTS = (
    *(f"{JUDGED}/", f"{JUDGED}*.parquet", "win_rate*.json", VERDICT),
    *(f"{SAMPLES_DIR}/", f"{COMPLETIONS_DIR}/", AUDIT_NAME, TRAINER_STATE_NAME),
    CURVES,
)

_held: set[str] = set()


def is_unfinished(directory: str | Path) -> bool:
    """Return whether a directory is that of a checkpoint that is being written."""
    return Path(directory).parent.name == UNFINISHED


def list_checkpoints(output_dir: str | Path) -> list[str]:
    """Return the complete `checkpoint-<step>` directories, oldest first; Trainer writes its state last."""
    paths = [path for path in sort_checkpoints(str(output_dir)) if re.fullmatch(r"checkpoint-\d+", Path(path).name)]
    return [path for path in paths if os.path.isfile(Path(path, TRAINER_STATE_NAME))]


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
    wanted, complete = parse_resume(resume_from_checkpoint), list_checkpoints(output_dir)
    if wanted is True and not complete:
        raise ValueError(
            f"resume_from_checkpoint=True, but output_dir={str(output_dir)!r} holds no complete checkpoint; leave it "
            "out to start a new run"
        )
    start = complete[-1] if wanted is True else wanted or None
    if start is not None:
        _check_complete(start)
    kept = [] if start is None else complete[: _position(start, complete)]
    if len(kept) < len(complete) and not (overwrite and start is None):
        deleting = "" if overwrite is None else " (a new run with overwrite_output_dir=True deletes them)"
        raise ValueError(
            f"output_dir={str(output_dir)!r} holds checkpoints that this run does not continue, such as "
            f"{complete[-1]}: resume from the newest one with resume_from_checkpoint=True, move them away{deleting}, "
            "or choose another output_dir"
        )
    return start


def _check_complete(checkpoint: str) -> None:
    if not os.path.isfile(path := Path(checkpoint, TRAINER_STATE_NAME)):
        raise ValueError(f"resume_from_checkpoint={checkpoint!r} is not a complete checkpoint")
    name, step = os.path.basename(os.path.realpath(checkpoint)), read_object(path).get("global_step")
    if re.fullmatch(r"checkpoint-\d+", name) and name != f"checkpoint-{step}":
        raise ValueError(f"{checkpoint} holds the state after update {step}: rename it to checkpoint-{step}")


def _position(checkpoint: str, checkpoints: list[str]) -> int:
    """Return the number of checkpoints up to one of them; 0 if it is in another directory."""
    paths = [os.path.realpath(path) for path in checkpoints]
    path = os.path.realpath(checkpoint)
    return paths.index(path) + 1 if path in paths else 0


def set_results_aside(output_dir: str | Path) -> Path | None:
    """Move results of an earlier policy into `_earlier`, `_earlier-2`...; return that directory, or None."""
    folder = Path(output_dir)
    results = [path for pattern in _RESULTS for path in folder.glob(pattern)]
    if not results:
        return None
    place = free_path(folder / EARLIER)
    place.mkdir()
    for path in results:
        os.rename(path, place / path.name)
    return place


def free_path(path: Path) -> Path:
    """Return the first of `path`, `path-2`, `path-3`... that does not exist."""
    others = (path.with_name(f"{path.name}-{number}") for number in itertools.count(2))
    return next(candidate for candidate in itertools.chain([path], others) if not os.path.lexists(candidate))


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
    error = InUseError(
        f"output_dir={str(output_dir)!r} is in use: another trainer trains in it; call its close(), wait until it "
        "has ended, or choose another output_dir"
    )
    if key in _held:  # opening and closing the file would release the lock
        raise error
    with open(path, "a", encoding="utf-8") as file:
        try:
            if fcntl is not None:
                fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise error from None
        except OSError:  # a file system without locks
            pass
        _held.add(key)
        try:
            yield
        finally:
            _held.discard(key)
