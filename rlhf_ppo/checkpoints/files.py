"""Files of a checkpoint: atomic writes, checked JSON, the manifest of sizes and hashes, and errors of a full disk.

Hashes are XXH3-128: they detect damage as reliably as SHA-256 and run at gigabytes per second, about as fast as a file
is read. They do not protect against forgery: whoever can write a file can also write the manifest.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import xxhash
from safetensors import SafetensorError

from rlhf_ppo.config.validation import Interval, check_range, check_type

MANIFEST_NAME = "manifest.json"
UNFINISHED = "unfinished-checkpoint"
"""Directory in which a checkpoint is written whose final name is not Trainer's."""

_TEMPORARY = re.compile(r"\.tmp\w{6}|.+\.[0-9a-f]{8}\.tmp")
"""Temporary files of safetensors and of `replacing`."""
_FULL_DISK_MESSAGES = re.compile(
    r"No space left|[Qq]uota exceeded|File too large|iostream error"  # safetensors, C++
    r"|unexpected pos \d|PytorchStreamWriter failed"  # torch.save, whose archive is too short
)


@contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Yield an empty file to write; it replaces `path` at the end of the block.

    The file has a new, unpredictable name in the same directory, is synced to the disk, and then moved to `path`.
    Readers see the old content or the new one. If `path` is a symbolic link, the link is replaced; its target keeps
    its content. After an error `path` is unchanged and the new file is deleted.

    Args:
        path: The file to write. Its directory exists.

    Raises:
        FileExistsError: `path` is a directory, a FIFO or a device.
        OSError: The file cannot be written; the error names it.
    """
    path = Path(path)
    if path.exists() and not path.is_file():
        raise FileExistsError(f"{path} is not a regular file: rename it, or choose another place")
    temporary = path.with_name(f"{path.name}.{secrets.token_hex(4)}.tmp")
    open(temporary, "xb").close()  # "x" follows no link, and keeps the permissions that the user's umask asks for
    try:
        yield temporary
        with open(temporary, "rb") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException as error:
        temporary.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.errno is not None and error.filename is None:  # of a full disk
            error.filename = str(path)
        raise


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """Write a UTF-8 text file atomically; characters that UTF-8 cannot encode become question marks."""
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8", errors="replace")


def write_json(path: Path, content: Any) -> None:
    """Write a JSON file atomically."""
    write_text(path, json.dumps(content, indent=1))


def open_no_follow(path: str, flags: int) -> int:
    """Open a file like `os.open`, but raise `OSError` if it is a symbolic link; an `opener` of `open`."""
    return os.open(path, flags | getattr(os, "O_NOFOLLOW", 0), 0o666)


def read_object(path: Path, types: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Read a JSON file that holds an object.

    Args:
        path: The file.
        types: Required keys and their types, as in `check_values`; other keys are not checked.

    Raises:
        ValueError: The file is missing, unreadable or not a JSON object, or a key is missing or has another type. The
            message is a clause about a checkpoint: "its run.json is cut off".
    """
    try:
        if path.exists() and not path.is_file():  # reading a FIFO could block
            raise ValueError(f"its {path.name} is not a regular file")
        content = parse_json(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"it has no {path.name}") from None
    except OSError as error:
        raise ValueError(f"its {path.name} cannot be read: {error.strerror}") from None
    except (json.JSONDecodeError, UnicodeDecodeError):
        raise ValueError(f"its {path.name} is cut off or no JSON") from None
    if not isinstance(content, dict):
        raise ValueError(f"its {path.name} holds no JSON object")
    check_values(path.name, content, types or {})
    return content


def parse_json(text: str) -> Any:
    """Parse a JSON text.

    Raises:
        json.JSONDecodeError: It is not JSON, is nested too deeply, or has a number of thousands of digits.
    """
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise json.JSONDecodeError(f"not JSON ({type(error).__name__})", "", 0) from None


def check_values(file: str, values: Mapping[str, Any], types: Mapping[str, Any]) -> None:
    """Check the values of a JSON file.

    Args:
        file: Name of the file.
        values: Its content.
        types: Required keys, each with an annotation for `check_type`, or with the `Interval` of a number.

    Raises:
        ValueError: A key is missing, or its value has another type or lies outside of the interval.
    """
    for name, kind in types.items():
        if name not in values:
            raise ValueError(f"its {file} lacks {name}")
        try:
            if isinstance(kind, Interval):
                check_type(name, values[name], float, "")
                check_range(name, values[name], kind, "")
            else:
                check_type(name, values[name], kind, "")
        except (TypeError, ValueError):
            raise ValueError(f"its {file} has {name}={values[name]!r:.80}") from None


_MANIFEST_FORMAT = 1


def hash_share(directory: str, index: int, count: int) -> dict[str, str]:
    """Sync this process's share of a checkpoint's files to the disk, and hash them.

    Args:
        directory: The checkpoint; all of its files but the manifest are written.
        index: Number of this process among those that share.
        count: How many share.

    Returns:
        XXH3-128 of each file, by its name.
    """
    return _synced_hashes(directory, _names_of_files(directory)[index::count])


def write_manifest(directory: str, known: Mapping[str, str] | None = None) -> None:
    """Sync every file of a checkpoint to the disk, then write `manifest.json` atomically.

    The manifest is the last file: a checkpoint that has one was written to its end.

    Args:
        directory: The checkpoint; all of its other files are written.
        known: What `hash_share` returned in each process; the files that are not in it are hashed here.
    """
    names = _names_of_files(directory)
    known = known or {}
    hashes = {**known, **_synced_hashes(directory, [name for name in names if name not in known])}
    entries = {name: {"size": os.path.getsize(Path(directory, name)), "xxh3_128": hashes[name]} for name in names}
    content = {"format": _MANIFEST_FORMAT, "files": entries}
    write_json(Path(directory, MANIFEST_NAME), {**content, "xxh3_128": _hash_of_json(content)})


def _names_of_files(directory: str) -> list[str]:
    files = (path for path in Path(directory).rglob("*") if path.is_file() and path.name != MANIFEST_NAME)
    return sorted(str(path.relative_to(directory)) for path in files)


def _synced_hashes(directory: str, names: Sequence[str]) -> dict[str, str]:
    with ThreadPoolExecutor(8) as pool:
        return dict(zip(names, pool.map(lambda name: _synced_hash(Path(directory, name)), names), strict=True))


def find_damage(directory: str) -> str | None:
    """Return how a checkpoint's files differ from its manifest, as a clause that names the file, or None.

    Args:
        directory: The checkpoint.
    """
    try:
        content = read_object(Path(directory, MANIFEST_NAME))
    except ValueError as error:
        return str(error)
    expected = content.pop("xxh3_128", None)
    if content.get("format") != _MANIFEST_FORMAT or expected != _hash_of_json(content):
        return f"its {MANIFEST_NAME} was changed after it was written, or by another version"
    try:
        check_values(MANIFEST_NAME, content, {"files": dict[str, dict]})
        files: dict[str, dict[str, Any]] = content["files"]
        for entry in files.values():
            check_values(MANIFEST_NAME, entry, {"size": int, "xxh3_128": str})
    except ValueError as error:
        return str(error)
    for name, entry in files.items():  # sizes first: they are cheap
        path = Path(directory, name)
        if not path.is_file():
            return f"it has no {name}"
        if path.stat().st_size != entry["size"]:
            return f"its {name} has {path.stat().st_size} bytes instead of {entry['size']}"
    with ThreadPoolExecutor(8) as pool:
        hashes = pool.map(lambda name: hash_of_file(Path(directory, name)), files)
        for (name, entry), found in zip(files.items(), hashes, strict=True):
            if found != entry["xxh3_128"]:
                return f"its {name} was changed after it was written: its hash is not the manifest's"
    return None


def hash_of_file(path: Path) -> str:
    """Return the XXH3-128 of a file."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, xxhash.xxh3_128).hexdigest()


def _synced_hash(path: Path) -> str:
    """Hash a file and sync it to the disk: after a power cut, a manifest implies its files."""
    value = hash_of_file(path)
    with open(path, "rb") as file:
        os.fsync(file.fileno())
    return value


def _hash_of_json(content: dict[str, Any]) -> str:
    return xxhash.xxh3_128(json.dumps(content, sort_keys=True).encode()).hexdigest()


class DiskFullError(OSError):
    """The disk or a quota is full."""


@contextmanager
def explaining_full_disk(
    directory: str, last_complete: Callable[[], str | None], what: str | None = None
) -> Iterator[None]:
    """Raise `DiskFullError` for the various errors that libraries raise on a full disk or quota.

    Args:
        directory: The directory that is written to.
        last_complete: Returns the newest complete checkpoint, or None.
        what: Name of what is written; None: the directory, which is then incomplete.

    Raises:
        DiskFullError: The disk is full.
    """
    try:
        yield
    except (OSError, RuntimeError, SafetensorError) as error:
        if isinstance(error, DiskFullError) or not _is_full(error):
            raise
        complete = last_complete()
        kept = "there is no checkpoint to resume from" if complete is None else f"{complete} is complete"
        advice = "start again" if complete is None else "continue with resume_from_checkpoint=True"
        place = f"{directory}, which is incomplete" if what is None else what
        raise DiskFullError(
            f"no space is left for {place} ({_free(directory)}; the error was: {error}). "
            f"{kept[0].upper()}{kept[1:]}: make room, and {advice}"
        ) from error


def _is_full(error: BaseException) -> bool:
    by_number = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
    return by_number or _FULL_DISK_MESSAGES.search(str(error)) is not None


def _free(directory: str) -> str:
    while not os.path.isdir(directory):
        directory = os.path.dirname(os.path.abspath(directory))
    return f"{shutil.disk_usage(directory).free / 1e6:.0f} MB free"


def remove_leftovers(directory: str | Path) -> None:
    """Delete temporary files that a killed process left in a directory and in its `value_model/`.

    Args:
        directory: A directory that no other process writes to.
    """
    for pattern in ("*.tmp*", "*/*.tmp*"):
        for path in Path(directory).glob(pattern):
            if _TEMPORARY.fullmatch(path.name) and path.is_file():
                path.unlink(missing_ok=True)
    if (unfinished := Path(directory, UNFINISHED)).exists():
        shutil.rmtree(unfinished, ignore_errors=True)


def remove_links(directory: str | Path) -> None:
    """Delete symbolic links with the file names of a model, a tokenizer or a model card.

    The libraries that save these would write through a link, into another file.

    Args:
        directory: The directory that a model is saved to next.
    """
    for pattern in ("*.json", "*.safetensors", "*.bin", "*.jinja", "*.model", "vocab.txt", "merges.txt", "README.md"):
        for path in Path(directory).glob(pattern):
            if path.is_symlink() and not path.is_dir():
                path.unlink(missing_ok=True)
