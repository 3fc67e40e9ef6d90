"""Atomic writes, and checked JSON."""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rlhf_ppo.terminal import visible_logger

logger = visible_logger(__name__)


@contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Yield a path to write; the file replaces `path` at the end of the block, or is deleted after an error."""
    path = Path(path)
    temporary = path.with_name(f"{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        yield temporary
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def optional(what: str) -> Iterator[None]:
    """Turn an OSError of the block into a warning: the run continues without the file.

    Args:
        what: The file, for the warning.
    """
    try:
        yield
    except OSError as error:
        logger.warning(f"{what} could not be written, and the run continues: {error}")


@contextmanager
def reading(path: str | os.PathLike[str]) -> Iterator[None]:
    """Name a damaged file in the error that reading it raises.

    Raises:
        ValueError: The block has not found in the file what it needs.
    """
    try:
        yield
    except (ValueError, TypeError, LookupError, AttributeError, OSError, RecursionError) as error:
        fault = f"{type(error).__name__}: {error!s:.200}"
        raise ValueError(f"{path} cannot be read ({fault}): restore the file, or move it away") from error


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """Write a UTF-8 text file atomically; characters that UTF-8 cannot encode become question marks."""
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8", errors="replace")


def write_json(path: Path, content: object) -> None:
    """Write a JSON file atomically."""
    write_text(path, json.dumps(content, indent=1))


def read_object(path: Path) -> dict[str, Any]:
    """Read a JSON file that holds an object; raise a `ValueError` if it is missing, or holds something else."""
    with reading(path):
        content = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(content, dict):
            raise TypeError(f"it holds no JSON object, but {content!r:.80}")
    return content
