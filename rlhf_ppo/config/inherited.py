"""Arguments that `PPOConfig` inherits from `transformers.TrainingArguments`: rejected ones, valid values, trackers.

No argument is silently ignored: each is used, or in `REJECTED` with an alternative.
"""

from __future__ import annotations

import enum
import inspect
import json
import math
import os
import sys
import types
from collections.abc import Callable, Iterator
from dataclasses import fields
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import huggingface_hub
import torch.utils.checkpoint
import transformers.training_args
from huggingface_hub.utils import HFValidationError, validate_repo_id
from transformers import TrainingArguments
from transformers.integrations import integration_utils
from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK
from transformers.trainer_pt_utils import AcceleratorConfig
from transformers.utils.import_utils import is_torch_bf16_gpu_available, is_torch_xla_available

from rlhf_ppo.config.validation import HINTS, Interval, check_json_file
from rlhf_ppo.terminal import visible_logger

REJECTED: dict[str, tuple[object, str]] = {
    name: (accepted, advice) for advice, names in HINTS["rejected"].items() for name, accepted in names.items()
}
"""Rejected argument: its only accepted value, and the reason or an alternative."""

REJECTED_VALUES: dict[str, dict[str, str]] = {
    name: {value: advice for advice, values in table.items() for value in values}
    for name, table in HINTS["rejected_values"].items()
}
"""Accepted argument: values that PPO cannot support, and the reason."""


def reject_unsupported(args: TrainingArguments) -> None:
    """Raise for inherited arguments that PPO does not support.

    Args:
        args: The arguments, before or after `TrainingArguments.__post_init__`.

    Raises:
        ValueError: `REJECTED` or `REJECTED_VALUES` excludes a value.
    """
    problems = [f"{name}={getattr(args, name)!r}: {advice}" for name, advice in _unsupported(args)]
    if problems:
        raise ValueError(f"PPO cannot use {'; '.join(problems)}")


def _unsupported(args: TrainingArguments) -> Iterator[tuple[str, str]]:
    for name, (accepted, advice) in REJECTED.items():
        value = getattr(args, name, accepted)
        if value != accepted or isinstance(value, bool) != isinstance(accepted, bool):
            yield name, advice
    for name, advice_by_value in REJECTED_VALUES.items():
        if getattr(args, name) in advice_by_value:  # transformers' enums are strings too
            yield name, advice_by_value[getattr(args, name)]
    config = args.accelerator_config
    if isinstance(config, AcceleratorConfig) and config.split_batches:
        yield "accelerator_config", "drop its split_batches: each process reads per_device_train_batch_size rows"
    if isinstance(config, AcceleratorConfig) and config.dispatch_batches:
        yield "accelerator_config", "drop its dispatch_batches: each process reads its own prompts"
    if isinstance(config, AcceleratorConfig) and config.gradient_accumulation_kwargs and not reduces_once(args):
        yield "accelerator_config", "drop its gradient_accumulation_kwargs: use gradient_accumulation_steps"
    if isinstance(config, AcceleratorConfig) and not config.use_seedable_sampler:
        yield "accelerator_config", "drop its use_seedable_sampler=False: prompts could not be resumed in their order"
    if args.metric_for_best_model in ("loss", "eval_loss"):
        yield "metric_for_best_model", "evaluation has no loss; use 'score'"


def reduces_once(args: TrainingArguments) -> bool:
    """Return whether FSDP2 keeps whole gradients until the last micro-batch of a step, to exchange them once."""
    given = getattr(args.accelerator_config, "gradient_accumulation_kwargs", None) or {}
    return given | {"num_steps": 1} == {"sync_each_batch": False, "num_steps": 1}  # Trainer adds num_steps


_POSITIVE = Interval(0, math.inf, open_low=True)
_NOT_NEGATIVE = Interval(0, math.inf)
_AT_LEAST_ONE = Interval(1, math.inf)
_SEED = Interval(0, 2**32 - 1)  # as NumPy requires

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
"""Range of each numeric argument."""

_ALSO: dict[str, Any] = {
    **dict.fromkeys(("output_dir", "fsdp_config", "deepspeed"), os.PathLike),
    "accelerator_config": os.PathLike | AcceleratorConfig,
    "resume_from_checkpoint": os.PathLike | bool,
    "fsdp": bool | list[str],
    "debug": types.NoneType,
}
"""Types that `TrainingArguments` accepts in addition to its annotations."""

_INSTEAD: dict[str, Any] = {
    "include_num_input_tokens_seen": Literal["all", "non_padding", "no"] | bool,
    "torch_compile_mode": Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"] | None,
}
"""Values that it accepts where its annotation allows any string."""

_FILES = ("accelerator_config", "fsdp_config")


def inherited_types() -> dict[str, Any]:
    """Return the type of each field of `TrainingArguments`; for an enum, its values."""
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


def check_dicts(args: TrainingArguments) -> None:
    """Check dicts that are given as JSON text or as the path of a JSON file.

    Raises:
        ValueError: One cannot be parsed.
    """
    for name in TrainingArguments._VALID_DICT_FIELDS:
        value = getattr(args, name)
        if name in _FILES and isinstance(value, str | os.PathLike) and not str(value).startswith("{"):
            check_json_file(os.fspath(value), name)
        elif isinstance(value, str) and not (name == "deepspeed" and not value.startswith("{")):  # it takes base64 too
            try:
                json.loads(value)
            except json.JSONDecodeError as error:
                raise ValueError(f"{name}={value!r} is not JSON: {error}") from error


def check_inherited(args: TrainingArguments) -> None:
    """Check names and combinations of inherited arguments, after types and ranges.

    Raises:
        ValueError: A name is unknown, or an argument needs another one.
    """
    for name, advice in _problems(args):
        raise ValueError(f"{name}={getattr(args, name)!r} {advice}")


def _problems(args: TrainingArguments) -> Iterator[tuple[str, str]]:
    if args.max_steps == 0:
        yield "max_steps", "must be at least 1; with -1, total_episodes or num_train_epochs sets the length of the run"
    if args.save_strategy == "steps" and args.save_steps <= 0:
        yield "save_steps", "must be greater than 0; save_strategy='no' saves nothing"
    for which in ("logging", "eval"):
        if getattr(args, f"{which}_strategy") == "steps" and getattr(args, f"{which}_steps") == 0:
            yield f"{which}_steps", f"must be greater than 0; {which}_strategy='no' disables it"
    if args.output_dir is not None and not os.fspath(args.output_dir).strip():
        yield "output_dir", "names no directory"
    if args.output_dir is not None and os.path.expanduser(args.output_dir).startswith("~"):
        yield "output_dir", "names a user without a home directory on this machine"
    yield from _trackers(args)
    yield from _unknown_names(args)
    yield from _missing_requirements(args)


def _trackers(args: TrainingArguments) -> Iterator[tuple[str, str]]:
    trackers = [args.report_to] if isinstance(args.report_to, str) else args.report_to or []
    if not {*trackers} <= {*INTEGRATION_TO_CALLBACK, "all", "none"}:
        yield "report_to", f"must be 'none', 'all' or some of {[*INTEGRATION_TO_CALLBACK]}"
    for name, missing in ((name, missing_package(name)) for name in trackers):
        if missing is not None:
            yield "report_to", f"has {name!r}, which is not installed: {missing}"


def _unknown_names(args: TrainingArguments) -> Iterator[tuple[str, str]]:
    if args.ddp_backend in ("nccl", "gloo") and not {"RANK", "LOCAL_RANK"} & os.environ.keys():
        yield "ddp_backend", "needs a run of several processes: start it with `accelerate launch`, or leave it None"
    if args.push_to_hub and args.hub_model_id is not None and not _is_repository(args.hub_model_id):
        yield "hub_model_id", "must be 'name' or 'organization/name', of letters, digits, '-', '_' and '.'"
    if args.metric_for_best_model == "":
        yield "metric_for_best_model", "names no metric; None means 'score'"
    if args.torch_compile_backend is not None and args.torch_compile_backend not in _compile_backends():
        yield "torch_compile_backend", f"must be one of {_compile_backends()}"
    if args.debug:
        yield "debug", "must be empty: transformers' hooks do not reach this trainer's loop"
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
    from torch._dynamo import list_backends  # its import takes a second

    return [*list_backends(exclude_tags=()), "hpu_backend", "neuron"]


def _as_dict(value: Any) -> dict[str, Any]:
    if isinstance(value, str) and value.startswith("{"):
        return json.loads(value)
    return value if isinstance(value, dict) else {}


def _missing_requirements(args: TrainingArguments) -> Iterator[tuple[str, str]]:
    evaluation = "compares evaluations, but eval_strategy='no'; set eval_strategy to 'steps' or 'epoch'"
    workers = "needs worker processes; set dataloader_num_workers to 1 or more"
    if args.eval_strategy == "no":
        if args.load_best_model_at_end:
            yield "load_best_model_at_end", evaluation
        if args.save_strategy == "best":
            yield "save_strategy", evaluation
        if args.lr_scheduler_type in ("reduce_lr_on_plateau", "greedy"):
            yield "lr_scheduler_type", evaluation
    if args.dataloader_num_workers == 0:
        for name in ("prefetch_factor", "persistent_workers", "multiprocessing_context"):  # the last since 5.16
            if getattr(args, f"dataloader_{name}", None) not in (None, False):
                yield f"dataloader_{name}", workers


logger = visible_logger(__name__)


def default_bf16(args: TrainingArguments) -> bool:
    """Return whether a run without a given `bf16` uses bf16; rank 0 warns once if its GPU does not support it.

    Args:
        args: Gives `fp16` and `use_cpu`; devices need not be set up yet.
    """
    if args.fp16 or os.environ.get("ACCELERATE_MIXED_PRECISION") == "fp16":
        return False
    on_cpu = args.use_cpu or os.environ.get("ACCELERATE_USE_CPU", "").lower() in ("1", "true")
    if not on_cpu and (is_torch_bf16_gpu_available() or is_torch_xla_available()):
        return True
    if torch.cuda.is_available() and not on_cpu and os.environ.get("RANK", "0") == "0":  # no processes yet
        logger.warning_once("bf16 is off, because this GPU does not support it; fp16=True saves as much memory")
    return False


def resolved_bf16(args: TrainingArguments) -> bool:
    """Return `bf16`, or its default if it is None.

    Raises:
        ValueError: It is on, and the device does not support it.
    """
    of_transformers: Any = transformers.training_args  # whose own check follows
    has_bf16 = of_transformers.is_torch_bf16_gpu_available() or is_torch_xla_available()
    if args.bf16 is True and not (args.use_cpu or has_bf16):
        raise ValueError(
            "bf16=True needs a GPU that computes in bf16, and there is none; leave it out, or add use_cpu=True to "
            "compute in bf16 on the CPU"
        )
    return default_bf16(args) if args.bf16 is None else args.bf16


def _pip(*packages: str) -> str:
    return f"`pip install {' '.join(packages)}`, or report to 'none'"


_PACKAGES: dict[str, str] = {
    "azure_ml": _pip("azureml-sdk"),
    "comet_ml": _pip("-U", "comet-ml"),
    "dagshub": _pip("dagshub", "mlflow"),
    "flyte": _pip("flytekit"),
    "kubeflow": "Kubeflow's trainer sets KUBEFLOW_TRAINER_SERVER_URL; elsewhere report to 'none'",
}
"""How to install a tracker whose package has another name."""


def missing_package(tracker: str) -> str | None:
    """Return how to install a missing tracker, or None; only W&B and Comet are imported for the check."""
    return None if _is_there(tracker) else _PACKAGES.get(tracker, _pip(tracker))


def _is_there(tracker: str) -> bool:
    if tracker == "comet_ml":  # Trainer's own check also requires a key
        return integration_utils._is_comet_installed and integration_utils._is_comet_recent_enough
    package = {"azure_ml": "azureml", "flyte": "flytekit"}.get(tracker, tracker)
    return getattr(integration_utils, f"is_{package}_available", lambda: True)()


def check_keys(args: TrainingArguments) -> None:
    """Check that the main process can log in to W&B, Comet, and Trackio's spaces.

    Args:
        args: Training arguments.

    Raises:
        ValueError: There is no key, and no terminal to ask for one.
    """
    for tracker in args.report_to or () if args.process_index == 0 else ():
        if tracker in _KEYS and (missing := _KEYS[tracker](args)) is not None:
            raise ValueError(f"report_to={args.report_to!r} has {tracker!r}, but {missing}, or report to 'none'")


def is_logged_in_to_wandb() -> bool:
    """Return whether W&B has a key or needs none, without asking the user or the network."""
    if os.environ.get("WANDB_MODE") in _WITHOUT_LOGIN:
        return True
    import wandb

    if wandb.run is not None or wandb.setup().settings.mode in _WITHOUT_LOGIN:
        return True
    if "prompt" in inspect.signature(wandb.login).parameters:
        return wandb.login(prompt=False, verify=False)
    return wandb.api.api_key is not None  # before W&B 0.28


def _wandb(_: TrainingArguments) -> str | None:
    if is_logged_in_to_wandb():
        return None
    from wandb.errors import term

    if getattr(term, "can_use_terminput", sys.stdin.isatty)():  # the oldest versions lack it
        return None  # it asks
    return (
        "nobody is logged in to W&B here: log in with `wandb login` or set WANDB_API_KEY, set WANDB_MODE=offline to "
        "record into ./wandb"
    )


def _comet(_: TrainingArguments) -> str | None:
    import comet_ml  # pyright: ignore[reportMissingImports]

    has_key, is_online = comet_ml.get_config("comet.api_key"), comet_ml.get_config("comet.start.online")
    if has_key or is_online is False or comet_ml.get_running_experiment() is not None:
        return None
    return (
        "Comet has no key here: set COMET_API_KEY or call comet_ml.login(), set COMET_START_ONLINE=0 to record into a "
        "local file"
    )


def _trackio(args: TrainingArguments) -> str | None:
    space = args.trackio_space_id or os.environ.get("TRACKIO_SPACE_ID")
    if not space or huggingface_hub.get_token() is not None:
        return None
    return (
        f"nobody is logged in to the hub, where its space {space!r} is (trackio_space_id): run `hf auth login` "
        "or set HF_TOKEN, leave trackio_space_id None to record here"
    )


_WITHOUT_LOGIN = ("offline", "dryrun", "disabled")
_KEYS: dict[str, Callable[[Any], str | None]] = {"wandb": _wandb, "comet_ml": _comet, "trackio": _trackio}
