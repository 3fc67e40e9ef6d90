"""The values that inherited arguments may have: types, numbers, names, and what needs something else beside it.

`TrainingArguments` checks few of them. What it takes would be an error in the middle of a run, or change nothing.
"""

from __future__ import annotations

import enum
import inspect
import json
import math
import os
import types
from collections.abc import Iterator
from dataclasses import fields
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import torch.utils.checkpoint
from huggingface_hub.utils import HFValidationError, validate_repo_id
from transformers import TrainingArguments
from transformers.debug_utils import DebugOption
from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK
from transformers.trainer_pt_utils import AcceleratorConfig

from rlhf_ppo.config.trackers import missing_package
from rlhf_ppo.config.validation import Interval, check_json_file, check_range

_POSITIVE = Interval(0, math.inf, open_low=True)
_NOT_NEGATIVE = Interval(0, math.inf)
_AT_LEAST_ONE = Interval(1, math.inf)
_SEED = Interval(0, 2**32 - 1)  # NumPy takes no other

INHERITED_RANGES: dict[str, Interval] = {
    **dict.fromkeys(("num_train_epochs", "ddp_timeout"), _POSITIVE),
    **dict.fromkeys(
        ("learning_rate", "max_grad_norm", "logging_steps", "weight_decay", "adam_epsilon"), _NOT_NEGATIVE
    ),
    **dict.fromkeys(
        ("warmup_steps", "eval_steps", "save_steps", "eval_delay", "dataloader_num_workers"), _NOT_NEGATIVE
    ),
    **dict.fromkeys(("adam_beta1", "adam_beta2"), Interval(0, 1, open_high=True)),
    **dict.fromkeys(("per_device_train_batch_size", "per_device_eval_batch_size"), _AT_LEAST_ONE),
    **dict.fromkeys(("gradient_accumulation_steps", "save_total_limit", "torch_empty_cache_steps"), _AT_LEAST_ONE),
    **dict.fromkeys(("dataloader_prefetch_factor", "ddp_bucket_cap_mb"), _AT_LEAST_ONE),
    **dict.fromkeys(("seed", "data_seed"), _SEED),
    **dict.fromkeys(("max_steps", "local_rank"), Interval(-1, math.inf)),
}
"""The values that a number may have."""

_ALSO: dict[str, Any] = {
    **dict.fromkeys(("output_dir", "fsdp_config", "deepspeed"), os.PathLike),
    "accelerator_config": os.PathLike | AcceleratorConfig,
    "resume_from_checkpoint": os.PathLike | bool,
    "fsdp": bool | list[str],
    "debug": types.NoneType,
}
"""What `TrainingArguments` takes beside the types that it says."""

_INSTEAD: dict[str, Any] = {
    "include_num_input_tokens_seen": Literal["all", "non_padding", "no"] | bool,
    "torch_compile_mode": Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"] | None,
}
"""The texts that are read, where it says that any are."""

_FILES = ("accelerator_config", "fsdp_config")


def inherited_types() -> dict[str, Any]:
    """Return the type of each field of `TrainingArguments`; of one that is read as an enum, its values."""
    hints = get_type_hints(TrainingArguments)
    choices = {item.name: item.metadata["choices"] for item in fields(TrainingArguments) if "choices" in item.metadata}
    return {item.name: _type_of(item.name, hints[item.name], choices) for item in fields(TrainingArguments)}


def _type_of(name: str, hint: Any, choices: dict[str, Any]) -> Any:
    options = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
    enums = [option for option in options if isinstance(option, type) and issubclass(option, enum.Enum)]
    values = [member.value for kind in enums for member in kind] + list(choices.get(name, ()))
    if values:
        return Literal[*values, *([None] if types.NoneType in options else [])]
    return _INSTEAD.get(name, hint | _ALSO[name] if name in _ALSO else hint)


def check_numbers(args: TrainingArguments) -> None:
    """Check that the numbers of any training arguments are in their ranges.

    Raises:
        ValueError: One is not.
    """
    helps = {item.name: str(item.metadata.get("help", "")) for item in fields(args)}
    for name, interval in INHERITED_RANGES.items():
        check_range(name, getattr(args, name), interval, helps[name])


def check_dicts(args: TrainingArguments) -> None:
    """Check the dicts that were written as JSON, or as the path of a file with it.

    Raises:
        ValueError: One cannot be read.
    """
    for name in TrainingArguments._VALID_DICT_FIELDS:
        value = getattr(args, name)
        if name in _FILES and isinstance(value, str | os.PathLike) and not str(value).startswith("{"):
            check_json_file(os.fspath(value), name)
        elif isinstance(value, str) and not (name == "deepspeed" and not value.startswith("{")):  # it takes base64 too
            try:
                json.loads(value)
            except json.JSONDecodeError as error:
                raise ValueError(f"{name}={value!r} is no JSON: {error}") from error


def check_inherited(args: TrainingArguments) -> None:
    """Check inherited arguments whose types are right and whose numbers are in their ranges.

    Raises:
        ValueError: One names nothing, or needs another beside it.
    """
    for name, advice in _problems(args):
        raise ValueError(f"{name}={getattr(args, name)!r} {advice}")


def _problems(args: TrainingArguments) -> Iterator[tuple[str, str]]:
    if args.max_steps == 0:
        yield "max_steps", "must be at least 1; -1 leaves the length of the run to total_episodes or num_train_epochs"
    if args.save_strategy == "steps" and args.save_steps <= 0:
        yield "save_steps", "must be greater than 0; save_strategy='no' saves nothing"
    for which in ("logging", "eval"):
        if getattr(args, f"{which}_strategy") == "steps" and getattr(args, f"{which}_steps") == 0:
            yield f"{which}_steps", f"must be greater than 0; {which}_strategy='no' leaves it out"
    if args.output_dir is not None and not os.fspath(args.output_dir).strip():
        yield "output_dir", "names no directory"
    if args.output_dir is not None and os.path.expanduser(args.output_dir).startswith("~"):
        yield "output_dir", "names nobody who has a home directory here"
    yield from _trackers(args)
    yield from _names_of_nothing(args)
    yield from _needing_evaluation(args)
    yield from _needing_workers(args)


def _trackers(args: TrainingArguments) -> Iterator[tuple[str, str]]:
    trackers = [args.report_to] if isinstance(args.report_to, str) else args.report_to or []
    if not {*trackers} <= {*INTEGRATION_TO_CALLBACK, "all", "none"}:
        yield "report_to", f"must be 'none', 'all' or some of {[*INTEGRATION_TO_CALLBACK]}"
    for name, missing in ((name, missing_package(name)) for name in trackers):
        if missing is not None:
            yield "report_to", f"has {name!r}, which is not here: {missing}"


def _names_of_nothing(args: TrainingArguments) -> Iterator[tuple[str, str]]:
    if args.ddp_backend in ("nccl", "gloo") and not {"RANK", "LOCAL_RANK"} & os.environ.keys():
        yield "ddp_backend", "needs a run of several processes: start it with `accelerate launch`, or leave it None"
    if args.push_to_hub and args.hub_model_id is not None and not _is_repository(args.hub_model_id):
        yield "hub_model_id", "must be 'name' or 'organization/name', of letters, digits, '-', '_' and '.'"
    if args.metric_for_best_model == "":
        yield "metric_for_best_model", "names no metric; leave it None for 'score'"
    if args.torch_compile_backend is not None and args.torch_compile_backend not in _compile_backends():
        yield "torch_compile_backend", f"must be one of {_compile_backends()}"
    debug = args.debug.split() if isinstance(args.debug, str) else args.debug or []
    if not {*debug} <= {option.value for option in DebugOption}:
        yield "debug", f"must hold some of {[option.value for option in DebugOption]}"
    known = inspect.signature(torch.utils.checkpoint.checkpoint).parameters
    for name in ("gradient_checkpointing_kwargs", "activation_checkpointing_kwargs"):
        unknown = [key for key in _as_dict(getattr(args, name, None)) if key not in known]
        if unknown:
            yield name, f"has {unknown}, which torch.utils.checkpoint.checkpoint does not take"
    config = args.accelerator_config
    known = {item.name for item in fields(AcceleratorConfig)}
    if unknown := [key for key in _as_dict(config) if key not in known]:
        yield "accelerator_config", f"has {unknown}, but may have {sorted(known)} only"


def _is_repository(name: str) -> bool:
    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return True


def _compile_backends() -> list[str]:
    from torch._dynamo import list_backends  # it takes a second to import

    return [*list_backends(exclude_tags=()), "hpu_backend", "neuron"]


def _as_dict(value: Any) -> dict[str, Any]:
    if isinstance(value, str) and value.startswith("{"):
        return json.loads(value)
    return value if isinstance(value, dict) else {}


def _needing_evaluation(args: TrainingArguments) -> Iterator[tuple[str, str]]:
    compared = {
        "load_best_model_at_end": bool(args.load_best_model_at_end),
        "save_strategy": args.save_strategy == "best",
        "lr_scheduler_type": args.lr_scheduler_type in ("reduce_lr_on_plateau", "greedy"),
    }
    for name in (name for name, compares in compared.items() if compares and args.eval_strategy == "no"):
        yield name, "compares evaluations, but eval_strategy='no'; set eval_strategy to 'steps' or 'epoch'"


def _needing_workers(args: TrainingArguments) -> Iterator[tuple[str, str]]:
    given = {
        "dataloader_prefetch_factor": args.dataloader_prefetch_factor is not None,
        "dataloader_persistent_workers": bool(args.dataloader_persistent_workers),
        # transformers 5.16 has brought it
        "dataloader_multiprocessing_context": getattr(args, "dataloader_multiprocessing_context", None) is not None,
    }
    for name in (name for name, is_given in given.items() if is_given and args.dataloader_num_workers == 0):
        yield name, "needs worker processes; set dataloader_num_workers to 1 or more"
