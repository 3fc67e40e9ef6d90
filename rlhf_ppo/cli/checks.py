"""Checks before anything is loaded, whose errors say what to change."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

NUMBERS = {
    "bool",
    "double",
    "float",
    *(f"{kind}{bits}" for kind in ("int", "uint", "float") for bits in (8, 16, 32, 64)),
}
"""The types of columns of numbers, by their names in `datasets`."""


def check_output_dir(path: str | None) -> None:
    """Check that a directory can be made, or written into; nothing is made.

    Raises:
        ValueError: It cannot.
    """
    place = Path(path or ".").absolute()
    while not place.exists():
        place = place.parent
    if not place.is_dir() or not os.access(place, os.W_OK):
        reason = "may not be written" if place.is_dir() else "is a file"
        raise ValueError(f"output_dir={path!r} cannot be written, for {str(place)!r} {reason}; name another")


def check_columns(dataset: Any, alternatives: list[set[str]]) -> None:
    """Check that a data set has the columns that TRL's trainer reads.

    Args:
        dataset: The rows; those of a stream may have columns that nobody knows yet.
        alternatives: Sets of columns, one of which must be there.

    Raises:
        ValueError: None of them is.
    """
    columns = dataset.column_names
    if columns is not None and not any(needed <= {*columns} for needed in alternatives):
        wanted = " or ".join(" and ".join(f"`{name}`" for name in sorted(needed)) for needed in alternatives)
        raise ValueError(f"the data set has the columns {columns}, but training needs {wanted}; rename them")
    for name, kind in (dataset.features or {}).items():
        if name in set().union(*alternatives) and getattr(kind, "dtype", "string") in NUMBERS:
            raise ValueError(f"the column `{name}` holds {kind.dtype}, but training needs texts or messages in it")


def check_json_file(path: str, argument: str) -> None:
    """Check that a file holds JSON.

    Raises:
        ValueError: It cannot be read, or holds something else.
    """
    try:
        with open(path, encoding="utf-8") as file:
            json.load(file)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ValueError(f"{argument}={path!r} cannot be read as JSON: {reason}") from error
