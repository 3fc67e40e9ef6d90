"""A full disk: an error that names the directory, what is whole and how to go on; and the files that a kill leaves."""

from __future__ import annotations

import errno
import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

_NO_SPACE = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
_SAID = re.compile(
    r"No space left|[Qq]uota exceeded|File too large|iostream error"  # by safetensors, by C++
    r"|unexpected pos \d|PytorchStreamWriter failed"  # by torch.save, whose archive is shorter than it should be
)
UNFINISHED = "unfinished-checkpoint"
"""Where a checkpoint is written that is then put in place under another name than Trainer gives it."""

_TEMPORARY = re.compile(r"\.tmp\w{6}|.+\.[0-9a-f]{8}\.tmp|.*\.(json|parquet)\.tmp")
"""Temporary files of safetensors, of `replacing`, and of earlier versions."""
_SAVED = ("*.json", "*.safetensors", "*.bin", "*.jinja", "*.model", "vocab.txt", "merges.txt", "README.md")


class DiskFullError(OSError):
    """There was no room for what had to be written."""


@contextmanager
def naming_full_disk(directory: str, last_whole: Callable[[], str | None], what: str | None = None) -> Iterator[None]:
    """Tell of a full disk, or a quota, in a sentence; each library says something else.

    Args:
        directory: What is written into.
        last_whole: Returns the newest whole checkpoint, or None.
        what: What is written, if not the directory, which is else said to be not whole.

    Raises:
        DiskFullError: The disk is full.
    """
    try:
        yield
    except (OSError, RuntimeError, SafetensorError) as error:
        if isinstance(error, DiskFullError) or not _is_full(error):
            raise
        whole = last_whole()
        kept = "there is no checkpoint to go on from" if whole is None else f"{whole} is whole"
        going_on = "start again" if whole is None else "go on with resume_from_checkpoint=True"
        place = f"{directory}, which is not whole" if what is None else what
        raise DiskFullError(
            f"no space is left for {place} ({_free(directory)}; the error was: {error}). "
            f"{kept[0].upper()}{kept[1:]}: make room, and {going_on}"
        ) from error


def remove_leftovers(directory: str | Path) -> None:
    """Delete what a kill has left in a directory, temporary files also in the value model's beside it.

    Args:
        directory: Nobody else writes there now.
    """
    for pattern in ("*.tmp*", "*/*.tmp*"):
        for path in Path(directory).glob(pattern):
            if _TEMPORARY.fullmatch(path.name) and path.is_file():
                path.unlink(missing_ok=True)
    if (unfinished := Path(directory, UNFINISHED)).exists():
        shutil.rmtree(unfinished, ignore_errors=True)


def remove_links(directory: str | Path) -> None:
    """Delete symbolic links with names that a model, its tokenizer and its card are saved under.

    The libraries that save them would write through a link, into a file of somebody else's.

    Args:
        directory: Where a model is saved next.
    """
    for pattern in _SAVED:
        for path in Path(directory).glob(pattern):
            if path.is_symlink() and not path.is_dir():
                path.unlink(missing_ok=True)


def _is_full(error: BaseException) -> bool:
    return (isinstance(error, OSError) and error.errno in _NO_SPACE) or _SAID.search(str(error)) is not None


def _free(directory: str) -> str:
    while not os.path.isdir(directory):
        directory = os.path.dirname(os.path.abspath(directory))
    return f"{shutil.disk_usage(directory).free / 1e6:.0f} MB free"
