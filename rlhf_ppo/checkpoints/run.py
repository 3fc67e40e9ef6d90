"""Runs and their directories: the identity of a run, its checkpoints, the lock, and the log in `log_history.jsonl`."""

from __future__ import annotations

import dataclasses
import datetime
import errno
import gc
import json
import os
import re
import shutil
import socket
import stat
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self, get_type_hints

from transformers import TrainerState
from transformers.trainer import TRAINER_STATE_NAME

from rlhf_ppo.checkpoints.files import MANIFEST_NAME, open_no_follow, parse_json, read_object, write_json, write_text
from rlhf_ppo.config.validation import check_type
from rlhf_ppo.processes.distributed import get_logger

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

logger = get_logger(__name__)

RUN_NAME = "ppo_run.json"
LOCK_NAME = "_ppo_run.lock"  # uploads to the hub skip names that begin with "_"
HISTORY_NAME = "log_history.jsonl"
NUM_KEPT = 100
"""Largest number of log entries in a checkpoint's `trainer_state.json`."""

Entry = dict[str, Any]

_DELETED = "deleted-"
_CHECKPOINT = r"checkpoint-\d+(-\d+)?"
_held: set[tuple[int, str]] = set()


@dataclass(frozen=True)
class Run:
    """Identity of a run, which may be stopped and resumed any number of times.

    Attributes:
        id: Unique name; empty for a directory without `ppo_run.json`.
        started: Start time, in UTC.
        earlier: Runs that this one continues, by id, each with the last update that both have in common.
    """

    id: str = ""
    started: str = ""
    earlier: dict[str, int] = field(default_factory=dict)

    @classmethod
    def new(cls, earlier: dict[str, int] | None = None) -> Self:
        """Return a run with a unique name."""
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        return cls(uuid.uuid4().hex, now, earlier or {})

    def branched(self, step: int) -> Self:
        """Return a new run that continues from update `step` of this one and shares none of its later updates."""
        return self.new({name: min(last, step) for name, last in self.earlier.items()} | {self.id: step})

    def owns(self, other: Run, step: int) -> bool:
        """Return whether a checkpoint of `other`, with nothing after update `step`, belongs to this run."""
        return other.id == self.id or step <= self.earlier.get(other.id, -1)

    def save(self, directory: str | Path) -> None:
        """Write `ppo_run.json`."""
        write_json(Path(directory, RUN_NAME), dataclasses.asdict(self))

    @classmethod
    def load(cls, directory: str | Path) -> Self:
        """Read `ppo_run.json`; without the file, return a run without a name.

        Raises:
            ValueError: It cannot be read.
        """
        path = Path(directory, RUN_NAME)
        if not path.exists():
            return cls()
        values = read_object(path)
        types = get_type_hints(cls)
        try:
            for name in values.keys() | types.keys():
                check_type(name, values[name], types[name], "")
        except (KeyError, TypeError) as error:
            raise ValueError(f"its {RUN_NAME} holds something else than a run: {str(error)[:80]}") from None
        return cls(**values)


def list_checkpoints(output_dir: str | Path) -> list[Path]:
    """Return the directories `checkpoint-<updates>` and `checkpoint-<updates>-<mini-batches>`, newest first."""
    found = [path for path in Path(output_dir).glob("checkpoint-*") if re.fullmatch(_CHECKPOINT, path.name)]
    return sorted((path for path in found if path.is_dir()), key=_position, reverse=True)


def _position(checkpoint: Path) -> tuple[int, ...]:
    """Return the numbers in a checkpoint's name: complete updates, and mini-batches of a partial update."""
    return tuple(map(int, checkpoint.name.split("-")[1:]))


def _is_partial(checkpoint: Path) -> bool:
    return len(_position(checkpoint)) > 1


def _last_update(position: tuple[int, ...]) -> int:
    """Return the last update of which a checkpoint contains any part."""
    return position[0] + len(position) - 1


def _was_finished(checkpoint: Path) -> bool:
    """Return whether a checkpoint was once written to its end; it may be damaged since."""
    is_of_trl = not Path(checkpoint, RUN_NAME).exists()  # of the SFT and reward steps
    return Path(checkpoint, MANIFEST_NAME).exists() or (is_of_trl and Path(checkpoint, TRAINER_STATE_NAME).exists())


def run_of(output_dir: str | Path) -> Run | None:
    """Return the run that a directory belongs to, or None if it holds no checkpoints.

    Without a readable `ppo_run.json` it is the run of the newest checkpoint.
    """
    for directory in (Path(output_dir), *filter(_was_finished, list_checkpoints(output_dir))):
        try:
            run = Run.load(directory)
        except ValueError:
            continue
        if run.id:
            return run
    return None


def _is_owned(checkpoint: Path, run: Run) -> bool | None:
    """Return whether a checkpoint belongs to a run; None if its `ppo_run.json` cannot be read."""
    try:
        return run.owns(Run.load(checkpoint), _last_update(_position(checkpoint)))
    except ValueError:
        return None


def belongs_to_another(checkpoint: Path, run: Run) -> bool:
    """Return whether a finished checkpoint names another run."""
    return _was_finished(checkpoint) and _is_owned(checkpoint, run) is False


def finished_checkpoints(output_dir: str | Path) -> str:
    """Return the names of the finished checkpoints: "checkpoint-1 to checkpoint-9", or "" if there are none."""
    found = [path.name for path in list_checkpoints(output_dir) if _was_finished(path)]
    return f"{found[-1]} to {found[0]}" if len(found) > 1 else "".join(found)


def _check_unused(output_dir: str | Path) -> None:
    """Raise if a directory holds finished checkpoints, which a new run would mix with its own.

    Raises:
        ValueError: It does; the message lists the options.
    """
    if found := finished_checkpoints(output_dir):
        raise ValueError(
            f"output_dir={str(output_dir)!r} holds the checkpoints of another run ({found}): continue that run "
            "with resume_from_checkpoint=True, delete its checkpoints with overwrite_output_dir=True, or choose "
            "another output_dir"
        )


def parse_resume(resume_from_checkpoint: str | bool | None) -> str | bool:
    """Return a checkpoint's directory, True for the newest checkpoint, or False for a new run.

    Raises:
        TypeError: It is something else.
    """
    if not isinstance(resume_from_checkpoint, str | os.PathLike | bool | None):
        raise TypeError(
            f"resume_from_checkpoint={resume_from_checkpoint!r:.60} must be a checkpoint's directory, True or False"
        )
    if isinstance(resume_from_checkpoint, os.PathLike):
        return os.fspath(resume_from_checkpoint)
    if isinstance(resume_from_checkpoint, str) and resume_from_checkpoint.lower() in ("true", "false"):
        return resume_from_checkpoint.lower() == "true"
    return False if resume_from_checkpoint is None else resume_from_checkpoint


def no_checkpoint(output_dir: str) -> ValueError:
    """Return the error for `resume_from_checkpoint=True` without a complete checkpoint."""
    return ValueError(
        f"resume_from_checkpoint=True, but output_dir={output_dir!r} holds no complete checkpoint; leave it out to "
        "start a new run"
    )


def check_start(output_dir: str, resume_from_checkpoint: str | bool | None, overwrite: bool) -> None:
    """Check, before anything is loaded, how a run is to start.

    Args:
        output_dir: The run's directory.
        resume_from_checkpoint: As `PPOTrainer.train` takes it.
        overwrite: Whether to delete checkpoints in the directory.

    Raises:
        ValueError: The directory is used and neither option is given, there is nothing to resume from, or both
            options are given.
    """
    wanted = parse_resume(resume_from_checkpoint)
    if wanted is False:
        if not overwrite:
            _check_unused(output_dir)
    elif overwrite:
        raise ValueError(
            f"overwrite_output_dir=True deletes the checkpoints, but resume_from_checkpoint={wanted!r} needs "
            "one; leave one of the two out"
        )
    elif wanted is True and not finished_checkpoints(output_dir):
        raise no_checkpoint(output_dir)
    elif isinstance(wanted, str) and not os.path.isdir(wanted):
        raise ValueError(f"resume_from_checkpoint={wanted!r} is not a complete checkpoint: there is no such directory")


def start_run(output_dir: str, overwrite: bool) -> Run:
    """Return a new run, after `check_start`.

    Args:
        output_dir: The run's directory.
        overwrite: Whether to delete its checkpoints.
    """
    if overwrite:
        for checkpoint in list_checkpoints(output_dir):
            delete(checkpoint)
    return Run.new()


def continue_run(output_dir: str, checkpoint: str, position: tuple[int, ...]) -> tuple[Run, list[str]]:
    """Return the run that continues from a checkpoint.

    It is the checkpoint's own run, unless that run has later checkpoints: then it is a new run that branches off, and
    the later checkpoints do not belong to it.

    Args:
        output_dir: The run's directory.
        checkpoint: A complete checkpoint.
        position: Number of updates in the checkpoint, and of mini-batches of a partial update.

    Returns:
        The run, and the names of the abandoned later checkpoints.

    Raises:
        ValueError: `output_dir` holds the checkpoints of another run.
    """
    origin, current = Run.load(checkpoint), run_of(output_dir)
    run = current if current is not None and current.owns(origin, _last_update(position)) else origin
    if run is not current and not os.path.samefile(os.path.dirname(os.path.abspath(checkpoint)), output_dir):
        _check_unused(output_dir)
    later = [path for path in list_checkpoints(output_dir) if _position(path) > position and _was_finished(path)]
    abandoned = [path.name for path in later if _is_owned(path, run)]
    return (run.branched(position[0]) if abandoned else run), abandoned


def delete(checkpoint: Path) -> None:
    """Delete a checkpoint; rename it first, so that a kill leaves no half of it under its name."""
    if checkpoint.is_symlink():
        checkpoint.unlink()
        return
    renamed = checkpoint.with_name(f"{_DELETED}{checkpoint.name}")
    if renamed.exists():
        shutil.rmtree(renamed, ignore_errors=True)
    os.rename(checkpoint, renamed)
    shutil.rmtree(renamed, ignore_errors=True)


def rotate(output_dir: str, run: Run, limit: int | None, best: str | None, newest: str | None) -> None:
    """Delete the oldest checkpoints of a run, and of no other run.

    Checkpoints of a partial update do not count; they are deleted as soon as the run is past them.

    Args:
        output_dir: The run's directory.
        run: The run.
        limit: Number of checkpoints to keep; None keeps all.
        best: The best checkpoint, which is kept.
        newest: The newest checkpoint, which is kept; None keeps the best one only.
    """
    own = [path for path in list_checkpoints(output_dir) if _was_finished(path) and _is_owned(path, run)]
    for checkpoint in filter(_is_partial, own):
        if newest is not None and _position(checkpoint) < _position(Path(newest)):
            delete(checkpoint)
    if limit is None or limit <= 0 or (newest is not None and _is_partial(Path(newest))):
        return
    for leftover in Path(output_dir).glob(f"{_DELETED}checkpoint-*"):
        shutil.rmtree(leftover, ignore_errors=True)
    kept = {os.path.realpath(path) for path in (best, newest) if path is not None}
    own = [path for path in own if not _is_partial(path)]
    others = [path for path in own if os.path.realpath(path) not in kept]
    for checkpoint in others[max(0, limit - (len(own) - len(others))) :]:
        delete(checkpoint)


class InUseError(RuntimeError, ValueError):
    """Another run uses the directory, or its lock file cannot be used; the message says which."""


@contextmanager
def locked(output_dir: str) -> Iterator[None]:
    """Hold the lock of a directory in the block.

    It is a POSIX record lock: it ends with its process, also after SIGKILL, and child processes do not inherit it. It
    works over NFS if the server supports locks; without support, a warning is logged.

    Raises:
        InUseError: Another process, or another trainer of this one, holds the lock.
    """
    path = Path(output_dir, LOCK_NAME)
    key = os.getpid(), os.path.realpath(path)
    if key in _held:
        gc.collect()  # a notebook may have replaced the trainer that holds it
    if key in _held:  # record locks do not exclude their own process
        raise InUseError(
            f"output_dir={output_dir!r} is in use: a trainer of this process trains in it; call that trainer's "
            "close(), or choose another output_dir"
        )
    file = _open_locked(path, output_dir)
    _held.add(key)
    try:
        yield
    finally:
        _held.discard(key)
        if file is not None and key[0] == os.getpid():  # a forked process inherits the file, not the lock
            path.unlink(missing_ok=True)
            os.close(file)


def in_use(output_dir: str | os.PathLike[str]) -> bool:
    """Return whether a process, this one included, trains in a directory."""
    path = Path(output_dir, LOCK_NAME)
    if (os.getpid(), os.path.realpath(path)) in _held:  # closing the file below would release the lock
        return True
    try:
        file = open_no_follow(str(path), os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
    except OSError:
        return False
    try:
        if fcntl is not None:
            fcntl.lockf(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return fcntl is None
    except OSError:
        return True
    finally:
        os.close(file)


def _open_locked(path: Path, output_dir: str) -> int | None:
    while True:
        file = _open(path, output_dir)
        try:
            if not _lock(file):
                os.close(file)
                return None
            if _is_at(file, path):  # else the previous holder has deleted it in between
                os.write(file, json.dumps({"pid": os.getpid(), "host": socket.gethostname()}).encode())
                os.truncate(file, os.lseek(file, 0, os.SEEK_CUR))
                return file
        except BlockingIOError:
            holder = _holder(file)
            os.close(file)
            raise InUseError(
                f"output_dir={output_dir!r} is in use: {holder} trains in it; wait until that has ended, or choose "
                "another output_dir"
            ) from None
        os.close(file)


def _open(path: Path, output_dir: str) -> int:
    """Open the lock file, which must be a regular file: its content is overwritten, and a FIFO could block.

    Raises:
        InUseError: It is a link, not a regular file, or belongs to another user.
    """
    try:
        file = open_no_follow(str(path), os.O_RDWR | os.O_CREAT | getattr(os, "O_NONBLOCK", 0))
    except OSError as error:
        if not path.exists() and not path.is_symlink():
            raise  # the directory is not writable
        reason = "is a symbolic link" if path.is_symlink() else f"cannot be opened ({error.strerror})"
    else:
        status = os.fstat(file)
        if stat.S_ISREG(status.st_mode) and status.st_nlink <= 1:
            return file
        os.close(file)
        reason = "has other names (hard links)" if stat.S_ISREG(status.st_mode) else "is not a regular file"
    raise InUseError(
        f"output_dir={output_dir!r} cannot be locked: {path} {reason}; if no process trains there, remove it, or "
        "choose another output_dir"
    )


def _lock(file: int) -> bool:
    """Take the lock; return False if the system does not support locks.

    Raises:
        BlockingIOError: Another process holds it.
    """
    if fcntl is None:
        return False
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EAGAIN):
            raise BlockingIOError from None
        logger.warning(f"output_dir cannot be locked ({error}): take care that no other run uses it.")
        return False
    return True


def _is_at(file: int, path: Path) -> bool:
    try:
        return os.fstat(file).st_ino == path.stat().st_ino
    except FileNotFoundError:
        return False


def _holder(file: int) -> str:
    try:
        found = parse_json(os.pread(file, 1000, 0).decode())
        return f"process {found['pid']} on {found['host']}"
    except (ValueError, KeyError, TypeError):
        return "another process"


class History:
    """The log of a run in `log_history.jsonl`, one line for each log, beside the checkpoints.

    Each entry is written once, and `trainer_state.json` has the last entries only: saves do not grow with the run.

    Args:
        directory: The run's directory.
        logged: Entries logged so far, in this process or in the run that it resumes. They replace the file's content.
    """

    def __init__(self, directory: str | Path, logged: Sequence[Entry]) -> None:
        self.path, self.num_written = Path(directory, HISTORY_NAME), 0
        if logged:
            write_text(self.path, "".join(f"{json.dumps(entry)}\n" for entry in logged))
            self.num_written = len(logged)
        else:
            self.path.unlink(missing_ok=True)

    def write(self, logged: Sequence[Entry]) -> None:
        """Append the new entries.

        Args:
            logged: All entries of the run.
        """
        entries = logged[self.num_written :]
        with open(self.path, "a", encoding="utf-8", opener=open_no_follow) as file:
            file.write("".join(f"{json.dumps(entry)}\n" for entry in entries))
            file.flush()
            os.fsync(file.fileno())
        self.num_written += len(entries)


@contextmanager
def last_entries(state: TrainerState) -> Iterator[None]:
    """Keep only the last log entries in the state while a checkpoint is written."""
    history = state.log_history
    state.log_history = history[-NUM_KEPT:]
    try:
        yield
    finally:
        state.log_history = history


def full_history(checkpoint: str | Path, last: list[Entry], num_logged: int) -> list[Entry]:
    """Return all log entries of a run up to a checkpoint.

    Args:
        checkpoint: The checkpoint, beside `log_history.jsonl`.
        last: The entries in its `trainer_state.json`.
        num_logged: Number of all entries.

    Returns:
        All entries; `last`, with a warning, if the file is missing, cut off or of another run.
    """
    if num_logged <= len(last):
        return last
    path = Path(checkpoint).absolute().parent / HISTORY_NAME
    try:
        with open(path, encoding="utf-8") as file:
            entries = [parse_json(line) for line, _ in zip(file, range(num_logged), strict=False)]
    except (OSError, ValueError):
        entries = []
    are_entries = all(isinstance(entry, dict) for entry in entries)
    if are_entries and len(entries) == num_logged and _text(entries[-len(last) :]) == _text(last):
        return entries
    logger.warning(f"{path} does not hold the {num_logged} entries that were logged; the last {len(last)} are kept.")
    return last


def _text(entries: list[Entry]) -> str:
    return json.dumps(entries, sort_keys=True)  # as text, NaN equals NaN
