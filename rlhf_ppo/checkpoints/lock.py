"""One run at a time in a directory: a lock that the system takes back when its process ends, however it ends."""

from __future__ import annotations

import errno
import gc
import json
import os
import socket
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rlhf_ppo.checkpoints.jsonfile import opened_without_links, parsed_json
from rlhf_ppo.processes.logs import get_logger

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

logger = get_logger(__name__)

LOCK_NAME = "_ppo_run.lock"  # the hub's uploads leave out names that begin with "_"
_held: set[tuple[int, str]] = set()


class InUseError(RuntimeError, ValueError):
    """Another run has the directory, or its lock is not a file of ours; the message says which."""


@contextmanager
def locked(output_dir: str) -> Iterator[None]:
    """Hold the lock of a directory while the context lasts.

    It is a POSIX record lock, which ends with its process, also by SIGKILL, and which children that outlive it do not
    inherit. It works over NFS where the server has locks; where there are none, a warning says so.

    Args:
        output_dir: The run's directory.

    Raises:
        InUseError: Another process holds it, or another trainer of this one.
    """
    path = Path(output_dir, LOCK_NAME)
    key = os.getpid(), os.path.realpath(path)
    if key in _held:
        gc.collect()  # a notebook may have replaced the trainer that holds it
    if key in _held:  # a process never waits for itself, and closing the file once would free it
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
        if file is not None and key[0] == os.getpid():  # a forked process has inherited the file, not the lock
            path.unlink(missing_ok=True)
            os.close(file)


def _open_locked(path: Path, output_dir: str) -> int | None:
    while True:
        file = _open(path, output_dir)
        try:
            if not _lock(file):
                os.close(file)
                return None
            if _is_at(file, path):  # else the one who held it has ended and deleted it in between
                os.write(file, json.dumps({"pid": os.getpid(), "host": socket.gethostname()}).encode())
                os.truncate(file, os.lseek(file, 0, os.SEEK_CUR))
                return file
        except BlockingIOError:
            holder = _holder(file)
            os.close(file)
            raise InUseError(_refusal(output_dir, holder)) from None
        os.close(file)


def _open(path: Path, output_dir: str) -> int:
    """Open the lock's file, which must be a regular file: its content is overwritten, and a FIFO could block.

    Raises:
        InUseError: It is a link or no regular file, or belongs to another user.
    """
    try:
        file = opened_without_links(str(path), os.O_RDWR | os.O_CREAT | getattr(os, "O_NONBLOCK", 0))
    except OSError as error:
        if not path.exists() and not path.is_symlink():
            raise  # the directory cannot be written
        reason = "is a symbolic link" if path.is_symlink() else f"cannot be opened ({error.strerror})"
    else:
        status = os.fstat(file)
        if stat.S_ISREG(status.st_mode) and status.st_nlink <= 1:
            return file
        os.close(file)
        reason = "has other names (hard links)" if stat.S_ISREG(status.st_mode) else "is not a regular file"
    raise InUseError(
        f"output_dir={output_dir!r} cannot be locked: {path} {reason}; if nobody trains there, remove it, or choose "
        "another output_dir"
    )


def _lock(file: int) -> bool:
    """Take the lock; False where the system has none.

    Raises:
        BlockingIOError: Another process has it.
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
        found = parsed_json(os.pread(file, 1000, 0).decode())
        return f"process {found['pid']} on {found['host']}"
    except (ValueError, KeyError, TypeError):
        return "another process"


def _refusal(output_dir: str, holder: str) -> str:
    return (
        f"output_dir={output_dir!r} is in use: {holder} trains in it; wait until that has ended, or choose another "
        "output_dir"
    )
