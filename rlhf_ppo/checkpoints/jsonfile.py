"""Files that appear in one piece and follow no links; JSON whose errors name the file and the key."""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rlhf_ppo.config.validation import Interval, check_range, check_type


@contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Yield an empty file to write; it takes the place of `path` at the end of the context.

    The file has a new, unpredictable name in the same directory, is synced to the disk, and then moved to `path`. A
    reader sees the old content or the new one. If `path` is a symbolic link, the link is replaced; its target keeps
    its content. After an error `path` is unchanged and the new file is deleted.

    Args:
        path: The file to write. Its directory exists.

    Raises:
        FileExistsError: `path` is a directory, a FIFO or a device.
        OSError: The file cannot be written.
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
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """Write a UTF-8 text file by `replacing`; characters that UTF-8 cannot hold become question marks."""
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8", errors="replace")


def write_json(path: Path, content: Any) -> None:
    """Write a JSON file by `replacing`."""
    write_text(path, json.dumps(content, indent=1))


def opened_without_links(path: str, flags: int) -> int:
    """Open a file like `os.open`, but raise `OSError` if it is a symbolic link; an `opener` of `open`."""
    return os.open(path, flags | getattr(os, "O_NOFOLLOW", 0), 0o666)


def read_object(path: Path, types: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Read a JSON file that holds an object.

    Args:
        path: The file.
        types: Required keys, each with what `check_value` takes; other keys are not checked.

    Raises:
        ValueError: There is no such file, it cannot be read, is no JSON, holds something else than an object, or a key
            is missing or of another type. The message goes on after "because": "its run.json is cut off".
    """
    try:
        if path.exists() and not path.is_file():  # reading a FIFO would wait for ever
            raise ValueError(f"its {path.name} is not a regular file")
        content = parsed_json(path.read_text(encoding="utf-8"))
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


def parsed_json(text: str) -> Any:
    """Return what a JSON text holds.

    Raises:
        json.JSONDecodeError: It is no JSON, is nested too deeply, or holds a number of thousands of digits.
    """
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise json.JSONDecodeError(f"not JSON ({type(error).__name__})", "", 0) from None


def check_values(file: str, values: Mapping[str, Any], types: Mapping[str, Any]) -> None:
    """Check the values of a JSON file.

    Args:
        file: Its name.
        values: What it holds.
        types: Required keys, each with an annotation for `check_type`, or the `Interval` of a number.

    Raises:
        ValueError: One is missing, of another type or out of its interval; the message names file, key and value.
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
