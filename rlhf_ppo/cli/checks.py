"""Checks before anything is loaded, whose errors say what to change."""

from __future__ import annotations

from typing import Any

NUMBERS = {
    "bool",
    "double",
    "float",
    *(f"{kind}{bits}" for kind in ("int", "uint", "float") for bits in (8, 16, 32, 64)),
}
"""The types of columns of numbers, by their names in `datasets`."""


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
