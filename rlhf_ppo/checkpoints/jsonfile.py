"""Small JSON files that appear in one piece, and errors that name them."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any


def write_json(path: Path, content: Any) -> None:
    """Write a JSON file under a temporary name, bring it to the disk, and move it into place."""
    temporary = path.with_name(f"{path.name}.tmp")
    with open(temporary, "w", encoding="utf-8") as file:
        json.dump(content, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def read_object(path: Path) -> dict[str, Any]:
    """Read a JSON file that holds an object.

    Raises:
        ValueError: There is no such file, it is no JSON, or something else than an object. The message goes on after
            "because": "its run.json is cut off".
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"it has no {path.name}") from None
    except (ValueError, RecursionError):
        raise ValueError(f"its {path.name} is cut off or no JSON") from None
    if not isinstance(content, dict):
        raise ValueError(f"its {path.name} holds no JSON object")
    return content
