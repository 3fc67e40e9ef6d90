"""The manifest of a checkpoint: size and hash of each of its files, written last, as the mark of a whole one.

Hashes are XXH3-128: as sure as SHA-256 to notice damage, and many times faster (gigabytes per second and thread), so
that a checkpoint is hashed about as fast as it is read. They are no seal against forgery: who can write a file can
write the manifest.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import xxhash

from rlhf_ppo.checkpoints.jsonfile import check_values, read_object, write_json

MANIFEST_NAME = "manifest.json"
_BLOCK = 1 << 22
_FORMAT = 1


def write_manifest(directory: str) -> None:
    """Bring every file of a checkpoint to the disk, then write `manifest.json`, in one piece.

    Args:
        directory: The checkpoint's, all of whose files are written.
    """
    names = sorted(str(path.relative_to(directory)) for path in _files(Path(directory)))
    with ThreadPoolExecutor(min(8, len(names))) as pool:
        hashes = pool.map(lambda name: _stored_hash(Path(directory, name)), names)
        files = {
            name: {"size": os.path.getsize(Path(directory, name)), "xxh3_128": value}
            for name, value in zip(names, hashes, strict=True)
        }
    content = {"format": _FORMAT, "files": files}
    write_json(Path(directory, MANIFEST_NAME), {**content, "xxh3_128": _hash_of(content)})


def what_is_damaged(directory: str) -> str | None:
    """Tell which file of a checkpoint is not what the manifest says, or None if all are.

    Args:
        directory: The checkpoint's; it has a manifest.
    """
    try:
        content = read_object(Path(directory, MANIFEST_NAME))
    except ValueError as error:
        return str(error)
    expected = content.pop("xxh3_128", None)
    if content.get("format") != _FORMAT or expected != _hash_of(content):
        return f"its {MANIFEST_NAME} was changed after it was written, or by another version"
    try:
        check_values(MANIFEST_NAME, content, {"files": dict[str, dict]})
        files: dict[str, dict[str, Any]] = content["files"]
        for entry in files.values():
            check_values(MANIFEST_NAME, entry, {"size": int, "xxh3_128": str})
    except ValueError as error:
        return str(error)
    for name, entry in files.items():  # sizes first: they cost nothing
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


def _files(directory: Path) -> Iterator[Path]:
    return (path for path in directory.rglob("*") if path.is_file() and path.name != MANIFEST_NAME)


def hash_of_file(path: Path) -> str:
    """Return the XXH3-128 of a file."""
    digest = xxhash.xxh3_128()
    with open(path, "rb", buffering=0) as file:
        while block := file.read(_BLOCK):
            digest.update(block)
    return digest.hexdigest()


def _stored_hash(path: Path) -> str:
    """Hash a file, and wait until the disk has it: a manifest must not outlive a power cut that its files do not."""
    value = hash_of_file(path)
    with open(path, "rb") as file:
        os.fsync(file.fileno())
    return value


def _hash_of(content: dict[str, Any]) -> str:
    return xxhash.xxh3_128(json.dumps(content, sort_keys=True).encode()).hexdigest()
