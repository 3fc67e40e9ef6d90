"""Atomic writes, and checked JSON."""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rlhf_ppo.config.checks import Interval, check_range, check_type
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
    except (ValueError, TypeError, LookupError, AttributeError, OSError) as error:
        fault = f"{type(error).__name__}: {error!s:.200}"
        raise ValueError(f"{path} cannot be read ({fault}): restore the file, or move it away") from error


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """Write a UTF-8 text file atomically; characters that UTF-8 cannot encode become question marks."""
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8", errors="replace")


def write_json(path: Path, content: object) -> None:
    """Write a JSON file atomically."""
    write_text(path, json.dumps(content, indent=1))


def read_object(path: Path, types: Mapping[str, object] | None = None) -> dict[str, Any]:
    """Read a JSON file that holds an object.

    Args:
        path: The file.
        types: Required keys and their types, as in `check_values`; other keys are not checked.

    Raises:
        ValueError: The file is missing or not a JSON object, or a key is missing or has another type.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"its {path.name} cannot be read: {error}") from error
    check_values(path.name, {"content": content}, {"content": dict})
    check_values(path.name, content, types or {})
    return content


def check_values(file: str, values: Mapping[str, Any], types: Mapping[str, object]) -> None:
    """Check the values of a JSON file.

    Args:
        file: Name of the file.
        values: Its content.
        types: Required keys, each with an annotation for `check_type`, or with the `Interval` of a number.

    Raises:
        ValueError: A key is missing, or its value has another type or lies outside of the interval.
    """
    for name, kind in types.items():
        try:
            if isinstance(kind, Interval):
                check_type(name, values[name], float, "")
                check_range(name, values[name], kind, "")
            else:
                check_type(name, values[name], kind, "")
        except (TypeError, ValueError, KeyError):
            raise ValueError(f"its {file} has {name}={values.get(name)!r:.80}") from None
