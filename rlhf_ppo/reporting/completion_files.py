"""Responses of the logged updates in `completions/`: a parquet file for each update, written once."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from rlhf_ppo.checkpoints.jsonfile import replacing
from rlhf_ppo.checkpoints.run import Run

COMPLETIONS_DIR = "completions"
"""Where in `output_dir` the responses are, under the name that TRL has for it."""

TOKEN_VALUES = ("token_value", "token_advantage", "token_kl", "token_reward")
"""Figures of each token that the policy wrote; null for the others."""

_TYPES: dict[str, pa.DataType] = {
    "step": pa.int32(),
    "prompt": pa.string(),
    "completion": pa.string(),
    "score": pa.float32(),
    "kl": pa.float32(),
    "length": pa.int32(),
    "ended": pa.bool_(),
    "token_id": pa.list_(pa.int32()),
    "token_text": pa.list_(pa.string()),
    "token_written": pa.list_(pa.bool_()),
    **dict.fromkeys(TOKEN_VALUES, pa.list_(pa.float32())),
}
_NAME = re.compile(r"completions_(\d{5,})(?:-(\d+))?\.parquet")
_RUN = b"rlhf_ppo_run"


def write_completions(output_dir: str | Path, rows: Sequence[Mapping[str, Any]], run: Run) -> Path:
    """Write the responses of an update to `completions/completions_<step>.parquet`; no file is ever replaced.

    A resumed run that repeats an update finds its own responses there, and writes nothing. Where they are others (of
    another run, or because arguments were changed), they go to `completions_<step>-2.parquet` and so on.

    Args:
        output_dir: The run's directory.
        rows: The responses, at least one, all of one update; columns as in `KeptCompletions.rows`.
        run: The run, whose name is in the file.

    Returns:
        The file that holds them.

    Raises:
        OSError: They cannot be written; no file has appeared then.
    """
    folder, step = Path(output_dir, COMPLETIONS_DIR), rows[0]["step"]
    folder.mkdir(parents=True, exist_ok=True)
    table = _table(rows).replace_schema_metadata({_RUN: run.id.encode()})
    path = next(path for path in _names(folder, step) if not path.exists() or _holds(path, table, run, step))
    if path.exists():
        return path
    with replacing(path) as temporary:
        pq.write_table(table, temporary, compression="zstd")
    return path


def find_completions(output_dir: str | Path) -> dict[int, Path]:
    """Return the file of each update of the run that has a directory now, without those of runs before it.

    Args:
        output_dir: The run's directory.

    Raises:
        ValueError: A file is damaged.
    """
    run = Run.load(output_dir)
    found: dict[int, tuple[int, Path]] = {}
    for path in Path(output_dir, COMPLETIONS_DIR).glob("*.parquet"):
        if (match := _NAME.fullmatch(path.name)) is None or not _is_of(path, run, int(match[1])):
            continue
        place = int(match[2] or 1), path
        found[int(match[1])] = max(place, found.get(int(match[1]), place))
    return {step: found[step][1] for step in sorted(found)}


def read_completions(path: str | Path, num_rows: int | None = None) -> list[dict[str, Any]]:
    """Read the responses of an update.

    Args:
        path: The file.
        num_rows: How many, from the first; None: all.

    Raises:
        ValueError: The file is damaged, or lacks a column.
    """
    try:
        table = pq.read_table(path)
    except (pa.ArrowException, OSError) as error:
        raise ValueError(f"{path} is damaged: {error}") from error
    if missing := [name for name in _TYPES if name not in table.column_names]:
        raise ValueError(f"{path} has no column {missing[0]!r}: it was not written by rlhf_ppo")
    return table.slice(0, num_rows).to_pylist()


def _names(folder: Path, step: int) -> Iterator[Path]:
    yield folder / f"completions_{step:05d}.parquet"
    yield from (folder / f"completions_{step:05d}-{number}.parquet" for number in count(2))


def _holds(path: Path, table: pa.Table, run: Run, step: int) -> bool:
    try:
        return _is_of(path, run, step) and pq.read_table(path).equals(table)
    except (ValueError, pa.ArrowException, OSError):
        return False


def _is_of(path: Path, run: Run, step: int) -> bool:
    """Tell whether a file is of a run, or of one that it goes on from."""
    try:
        metadata = pq.read_schema(path).metadata or {}
    except (pa.ArrowException, OSError) as error:
        raise ValueError(f"{path} is damaged: {error}") from error
    writer = metadata.get(_RUN)
    return writer is not None and (not run.id or run.owns(Run(writer.decode()), step))


def _table(rows: Sequence[Mapping[str, Any]]) -> pa.Table:
    names = list(dict.fromkeys(name for row in rows for name in row))
    columns = {name: [_stored(row.get(name)) for row in rows] for name in names}
    return pa.table({name: _array(values, _TYPES.get(name)) for name, values in columns.items()})


def _stored(value: Any) -> Any:
    """Return a value with null in place of NaN, which equals nothing."""
    if isinstance(value, list):
        return [_stored(item) for item in value]
    return None if isinstance(value, float) and math.isnan(value) else value


def _array(values: list[Any], kind: pa.DataType | None) -> pa.Array:
    if kind is None and all(value is None or isinstance(value, int | float) for value in values):
        kind = pa.float64()
    if kind is None:  # what reward functions log may be anything
        values, kind = [None if value is None else str(value) for value in values], pa.string()
    return pa.array(values, kind)
