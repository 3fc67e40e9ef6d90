"""Arguments that TrainingArguments settles when it is made, with the types that they have from then on."""

from __future__ import annotations

import os
from typing import Any

from transformers import TrainingArguments


def output_directory(args: TrainingArguments) -> str:
    """Return `output_dir`, which has a default; a `ValueError` where it was taken away."""
    if args.output_dir is None:
        raise ValueError("output_dir=None: there is no directory to write to; set output_dir")
    return os.fspath(args.output_dir)


def settings_of(value: dict[str, Any] | str | None) -> dict[str, Any] | None:
    """Return an argument that is a dict, or was the JSON text of one until it was read; a `TypeError` for a text."""
    if isinstance(value, str):
        raise TypeError(f"{value!r} is a text; pass a dict")
    return value
