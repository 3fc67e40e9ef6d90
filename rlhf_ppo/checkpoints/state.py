"""Saved state of a run: its progress, a fingerprint of its ingredients."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import inspect
import json
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self, get_type_hints

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import TrainerState, TrainingArguments
from transformers.trainer import TRAINER_STATE_NAME

from rlhf_ppo.checkpoints.files import check_values, read_object, replacing, write_json
from rlhf_ppo.config.validation import Interval, check_range, check_type
from rlhf_ppo.data.prompts import num_rows
from rlhf_ppo.processes.distributed import isolated_rng
from rlhf_ppo.terminal import is_secret

PROGRESS_NAME = "ppo_state.json"
_COUNT = Interval(0, 2.0**63)


class PPOTrainerState(TrainerState):
    """Trainer's state with the number of episodes, written atomically.

    Attributes:
        episode: Episodes generated so far, on all ranks.
    """

    episode: int = 0

    @classmethod
    def of(cls, state: TrainerState, episode: int = 0) -> Self:
        """Return a state with the fields of another one."""
        own = cls(**{item.name: getattr(state, item.name) for item in dataclasses.fields(state)})
        own.episode = episode
        return own

    def save_to_json(self, json_path: str) -> None:
        """Write the state atomically."""
        with replacing(json_path) as temporary:
            super().save_to_json(str(temporary))


@dataclass
class Progress:
    """State of the training loop beyond `TrainerState`.

    Attributes:
        episode: Episodes generated so far, on all ranks.
        epoch: Index of the current pass over the data.
        batches_in_epoch: Batches taken from that pass.
        num_prompts: Rows of the data; 0 if unknown.
        loss: Sum of the losses since the last log, averaged over the ranks.
        losses: That sum for each rank.
        last_logged_step: Update of the last log.
        num_logged: Number of all log entries; `trainer_state.json` has the last ones.
        pending_metrics: Metrics of the updates since the last log.
        batch_size: Episodes of an update, on all ranks.
        num_processes: Number of processes of the run.
        num_generations: Responses to each prompt of an update.
        optimization: Settings of optimizer and scheduler, by name.
    """

    episode: int = 0
    epoch: int = 0
    batches_in_epoch: int = 0
    num_prompts: int = 0
    loss: float = 0.0
    losses: list[float] = field(default_factory=list)
    last_logged_step: int = 0
    num_logged: int = 0
    pending_metrics: list[dict[str, float]] = field(default_factory=list)
    batch_size: int = 0
    num_processes: int = 0
    num_generations: int = 1
    optimization: dict[str, Any] = field(default_factory=dict)

    def keep_losses(self, losses: list[float]) -> None:
        """Keep each rank's sum of losses since the last log."""
        self.losses, self.loss = losses, math.fsum(losses) / len(losses)

    def loss_of(self, rank: int, num_processes: int) -> float:
        """Return a rank's sum of losses; after a change of the number of processes, the mean over the ranks."""
        return self.losses[rank] if len(self.losses) == num_processes else self.loss

    def save(self, directory: str) -> None:
        """Write `ppo_state.json`."""
        write_json(Path(directory, PROGRESS_NAME), dataclasses.asdict(self))

    @classmethod
    def load(cls, directory: str) -> Self:
        """Read `ppo_state.json`.

        Raises:
            ValueError: A value has the wrong type or is impossible; the message names the file.
        """
        values = read_object(Path(directory, PROGRESS_NAME))
        known = get_type_hints(cls)
        if unknown := values.keys() - known.keys():
            raise ValueError(f"its {PROGRESS_NAME} has {sorted(unknown)[0]}, which this version does not know")
        _check(PROGRESS_NAME, values, known)
        optimization = values.get("optimization", {})
        if "learning_rate" in optimization:
            check_values(f"{PROGRESS_NAME}: optimization", optimization, {"learning_rate": list[float]})
        return cls(**values)


def check_state(directory: str, progress: Progress) -> None:
    """Check that `trainer_state.json` has possible values that agree with `ppo_state.json`.

    Raises:
        ValueError: It does not; the message names the file.
    """
    values = read_object(Path(directory, TRAINER_STATE_NAME))
    _check(TRAINER_STATE_NAME, values, _state_types())
    if unknown := sorted(values.keys() - {field.name for field in dataclasses.fields(TrainerState)}):
        raise ValueError(
            f"its {TRAINER_STATE_NAME} has {unknown[0]}, which this version of transformers does not know"
        )
    step = values["global_step"]
    if progress.episode != step * progress.batch_size:
        raise ValueError(
            f"its {PROGRESS_NAME} has episode={progress.episode}, but {TRAINER_STATE_NAME} has global_step={step} of "
            f"{progress.batch_size} episodes each"
        )
    if progress.epoch > step or progress.batches_in_epoch > step:
        raise ValueError(
            f"its {PROGRESS_NAME} has epoch={progress.epoch} and batches_in_epoch={progress.batches_in_epoch}, more "
            f"than the global_step={step} of {TRAINER_STATE_NAME} allows"
        )


def _check(name: str, values: Mapping[str, Any], types: Mapping[str, Any]) -> None:
    """Check types, and that integers are valid counts."""
    for key in values.keys() & types.keys():
        try:
            check_type(key, values[key], types[key], "")
            if types[key] is int:
                check_range(key, values[key], _COUNT, "")
        except (TypeError, ValueError):
            raise ValueError(f"its {name} has {key}={values[key]!r}") from None
    if missing := {"global_step", "episode"} & types.keys() - values.keys():
        raise ValueError(f"its {name} lacks {missing.pop()}")


@functools.cache
def _state_types() -> dict[str, Any]:
    hints = get_type_hints(TrainerState)
    names = (
        *("epoch", "global_step", "num_input_tokens_seen", "best_metric", "best_global_step"),
        "best_model_checkpoint",
    )
    of_callbacks = dict[str, dict | list] | None
    return {name: hints[name] for name in names} | {"log_history": list[dict], "stateful_callbacks": of_callbacks}


FINGERPRINT_NAME = "ppo_arguments.json"

_NOT_COMPARED = {
    *("output_dir", "overwrite_output_dir", "resume_from_checkpoint", "run_name", "logging_dir", "local_rank"),
    *("local_batch_size", "micro_batch_size", "batch_size", "local_mini_batch_size", "mini_batch_size"),
    *("num_total_batches", "total_episodes", "disable_tqdm", "log_level", "log_level_replica", "log_console"),
    "health_checks",
    *("learning_rate", "lr_scheduler_type", "lr_scheduler_kwargs", "warmup_steps", "warmup_ratio"),
    *("weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon"),
}
"""Paths, derived sizes, display options, and arguments that are compared with `Progress.optimization` instead."""

_NOTES = {
    "seed": "it now orders the prompts and shuffles mini-batches; responses are sampled with the checkpoint's random "
    "numbers",
    "data_seed": "the order of the prompts changes, so some prompts of this pass are repeated and some are skipped",
    "max_steps": "the run ends after that many updates, those before the checkpoint included",
    "world_size": "each process draws new random numbers",
    "ignore_data_skip": "it decides where in the pass the run continues",
}
_CHANGED_PARTS = {
    "processing_class": "the tokenizer has another vocabulary or other special tokens",
    "reward_funcs": "the reward functions are others, or their code is",
    "reward_model": "the reward models have other weights, or another precision",
    "ref_model": "the reference has other weights, or another precision",
    "base_model": "the frozen weights under the adapters are others, or have another precision",
    "train_dataset": "the prompts are others",
}
_NUM_ROWS, _NUM_VALUES = 64, 16


def comparable_arguments(args: TrainingArguments) -> dict[str, Any]:
    """Return the arguments that a resumed run is compared in, as JSON values and without secrets."""
    values = {
        name: value for name, value in args.to_dict().items() if name not in _NOT_COMPARED and not is_secret(name)
    }
    return json.loads(json.dumps(values, default=str))


def hash_of_text(text: str) -> str:
    """Return a short hash of a text."""
    return hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()[:16]


def hash_of_function(function: Callable[..., Any]) -> str | None:
    """Return a hash of a function's source code, or of an object's class and dataclass fields; None without source."""
    function = function.func if isinstance(function, functools.partial) else function
    values = dataclasses.asdict(function) if dataclasses.is_dataclass(function) else {}  # pyright: ignore
    try:
        source = inspect.getsource(function if inspect.isroutine(function) else type(function))
    except (OSError, TypeError):
        return None
    return hash_of_text(source + repr(values))


def hash_of_weights(tensors: Iterable[Tensor]) -> str | None:
    """Return a hash of a few values of each tensor; None without tensors, or if they are sharded."""
    samples: list[Tensor] = []
    for tensor in tensors:
        if isinstance(tensor, DTensor) or hasattr(tensor, "ds_id") or tensor.is_meta:
            return None
        values = tensor.detach().reshape(-1)
        samples.append(values[:: max(1, len(values) // _NUM_VALUES)][:_NUM_VALUES].float().cpu())
    return hashlib.sha256(torch.cat(samples).numpy().tobytes()).hexdigest()[:16] if samples else None


def describe_dataset(dataset: Any) -> dict[str, Any] | None:
    """Return the number of rows of a dataset and a hash of some of them; None for a stream."""
    length = num_rows(dataset)
    if length is None:
        return None
    with isolated_rng(0):  # a row may be random
        rows = [dataset[index] for index in range(0, length, max(1, length // _NUM_ROWS))]
    return {"rows": length, "content": hash_of_text("\n".join(map(_row_text, rows)))}


def _row_text(row: Any) -> str:
    columns = row.items() if isinstance(row, Mapping) else enumerate([row])
    simple = {name: value for name, value in columns if isinstance(value, str | int | float | list)}
    return json.dumps(simple, sort_keys=True, default=lambda value: type(value).__name__)


def save_fingerprint(directory: str, fingerprint: Mapping[str, Any]) -> None:
    """Write `ppo_arguments.json`."""
    write_json(Path(directory, FINGERPRINT_NAME), fingerprint)


def load_fingerprint(directory: str) -> dict[str, Any]:
    """Read `ppo_arguments.json`.

    Raises:
        ValueError: It is missing or invalid; the message names the file.
    """
    fingerprint = read_object(Path(directory, FINGERPRINT_NAME))
    types = {"arguments": dict[str, Any], "optimizer": str}
    given = {name: kind for name, kind in types.items() if fingerprint.get(name) is not None}
    check_values(FINGERPRINT_NAME, fingerprint, given)
    return fingerprint


def describe_changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return a line for each argument, and each ingredient of the run, that has changed.

    Args:
        before: Fingerprint in the checkpoint.
        now: Fingerprint of this run.
    """
    lines = []
    old, new = before.get("arguments") or {}, now["arguments"]
    for name in sorted(old.keys() & new.keys()):
        if old[name] != new[name]:
            note = f": {_NOTES[name]}" if name in _NOTES else ""
            lines.append(f"{name}={new[name]!r} takes effect instead of {old[name]!r}{note}")
    for name, change in _CHANGED_PARTS.items():
        one, other = before.get(name), now.get(name)
        if one is not None and other is not None and one != other:
            lines.append(f"{name}: {change}; the new value takes effect{_difference(one, other)}")
    return lines


def _difference(one: Any, other: Any) -> str:
    if isinstance(one, dict) and isinstance(other, dict):
        names = sorted(name for name in one.keys() | other.keys() if one.get(name) != other.get(name))
        values = [f"{name} {one.get(name)!r} before, {other.get(name)!r} now" for name in names if name == "rows"]
        return f" ({', '.join(values or names)})"
    return ""
