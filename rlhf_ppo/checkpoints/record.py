"""What a run is made of, beside its weights, in a form that the next start can be compared with."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import inspect
import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import TrainingArguments
from transformers.trainer_utils import has_length

from rlhf_ppo.checkpoints.jsonfile import check_values, read_object, write_json
from rlhf_ppo.config.redaction import is_secret
from rlhf_ppo.processes.random_numbers import isolated_rng

RECORD_NAME = "ppo_arguments.json"

_NOT_COMPARED = {
    *("output_dir", "overwrite_output_dir", "resume_from_checkpoint", "run_name", "logging_dir", "local_rank"),
    *("local_batch_size", "micro_batch_size", "batch_size", "local_mini_batch_size", "mini_batch_size"),
    *("num_total_batches", "total_episodes", "disable_tqdm", "log_level", "log_level_replica", "log_console"),
    *("health_checks", "health_thresholds", "health_judge"),
    *("learning_rate", "lr_scheduler_type", "lr_scheduler_kwargs", "warmup_steps", "warmup_ratio"),
    *("weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon"),
}
"""Where the run stands on disk, what follows from others, what only shows, and what `schedules.py` compares."""

_IN_FORCE = {
    "seed": "it orders the prompts and shuffles mini-batches from here on; responses are sampled with the random "
    "numbers of the checkpoint",
    "data_seed": "it orders the prompts from here on, so that some of this pass come again and others not at all",
    "max_steps": "the run ends after that many updates, those before the checkpoint included",
    "world_size": "each process draws new random numbers",
    "ignore_data_skip": "it says where in the pass the run goes on",
}
_NUM_ROWS, _NUM_VALUES = 64, 16


def recorded_arguments(args: TrainingArguments) -> dict[str, Any]:
    """Return the arguments that a resumed run may be compared in, as JSON values and without secrets."""
    values = {
        name: value for name, value in args.to_dict().items() if name not in _NOT_COMPARED and not is_secret(name)
    }
    return json.loads(json.dumps(values, default=str))


def hash_of_text(text: str) -> str:
    """Return a short hash of a text."""
    return hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()[:16]


def hash_of_function(function: Callable[..., Any]) -> str | None:
    """Return a hash of a function's source text; of an object it is that of its class, with a dataclass's values.

    None where there is no source.
    """
    function = function.func if isinstance(function, functools.partial) else function
    values = dataclasses.asdict(function) if dataclasses.is_dataclass(function) else {}  # pyright: ignore
    try:
        source = inspect.getsource(function if inspect.isroutine(function) else type(function))
    except (OSError, TypeError):
        return None
    return hash_of_text(source + repr(values))


def hash_of_weights(tensors: Iterable[Tensor]) -> str | None:
    """Return a hash of a few values of each tensor; None where there are none, or each process has but a part."""
    samples: list[Tensor] = []
    for tensor in tensors:
        if isinstance(tensor, DTensor) or hasattr(tensor, "ds_id") or tensor.is_meta:
            return None
        values = tensor.detach().reshape(-1)
        samples.append(values[:: max(1, len(values) // _NUM_VALUES)][:_NUM_VALUES].float().cpu())
    return hashlib.sha256(torch.cat(samples).numpy().tobytes()).hexdigest()[:16] if samples else None


def described_rows(dataset: Any) -> dict[str, Any] | None:
    """Return the number of rows of a data set and a hash of some of them, or None for a stream."""
    number = _num_rows(dataset)
    if number is None:
        return None
    with isolated_rng(0):  # a row may be made at random
        rows = [dataset[index] for index in range(0, number, max(1, number // _NUM_ROWS))]
    return {"rows": number, "content": hash_of_text("\n".join(map(_row_text, rows)))}


def _num_rows(dataset: Any) -> int | None:
    return len(dataset) if has_length(dataset) else None


def _row_text(row: Any) -> str:
    columns = row.items() if isinstance(row, Mapping) else enumerate([row])
    simple = {name: value for name, value in columns if isinstance(value, str | int | float | list)}
    return json.dumps(simple, sort_keys=True, default=lambda value: type(value).__name__)


def save_record(directory: str, record: Mapping[str, Any]) -> None:
    """Write `ppo_arguments.json`."""
    write_json(Path(directory, RECORD_NAME), record)


def load_record(directory: str) -> dict[str, Any] | None:
    """Read `ppo_arguments.json`; None for checkpoints that were written before there was one.

    Raises:
        ValueError: It cannot be read, or holds something else; the message names the file.
    """
    path = Path(directory, RECORD_NAME)
    if not path.exists():
        return None
    record = read_object(path)
    types = {"arguments": dict[str, Any], "optimizer": str}
    check_values(path.name, record, {name: kind for name, kind in types.items() if record.get(name) is not None})
    return record


def what_changed(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Say what a checkpoint's run was made of that this one is not, and what is in force; a line each.

    Args:
        before: The checkpoint's record: `arguments` and others.
        now: This run's.
    """
    lines = []
    old, new = before.get("arguments") or {}, now["arguments"]
    for name in sorted(old.keys() & new.keys()):
        if old[name] != new[name]:
            note = f": {_IN_FORCE[name]}" if name in _IN_FORCE else ""
            lines.append(f"{name}={new[name]!r} is in force, which was {old[name]!r}{note}")
    for name, what in _OTHERS.items():
        one, other = before.get(name), now.get(name)
        if one is not None and other is not None and one != other:
            lines.append(f"{name}: {what}; what is passed now is in force{_difference(one, other)}")
    return lines


_OTHERS = {
    "processing_class": "the tokenizer has another vocabulary or other special tokens",
    "reward_funcs": "the reward functions are others, or their code is",
    "reward_model": "the reward models have other weights, or another precision",
    "ref_model": "the reference has other weights, or another precision",
    "base_model": "the frozen weights under the adapters are others, or have another precision",
    "train_dataset": "the prompts are others",
}


def _difference(one: Any, other: Any) -> str:
    if isinstance(one, dict) and isinstance(other, dict):
        names = sorted(name for name in one.keys() | other.keys() if one.get(name) != other.get(name))
        values = [f"{name} {one.get(name)!r} before, {other.get(name)!r} now" for name in names if name == "rows"]
        return f" ({', '.join(values or names)})"
    return ""
