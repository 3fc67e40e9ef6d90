"""Arguments that `PPOConfig` inherits from `transformers.TrainingArguments`: rejected ones, ranges, bf16, W&B.

No argument is silently ignored: each is used, or in `REJECTED` with an alternative.
"""

from __future__ import annotations

import inspect
import math
import os
from collections.abc import Iterator
from typing import Any

import torch.utils.checkpoint
import transformers.training_args
from transformers import TrainingArguments
from transformers.trainer_pt_utils import AcceleratorConfig
from transformers.utils.import_utils import is_torch_bf16_gpu_available, is_torch_xla_available

from rlhf_ppo.config.validation import HINTS, Interval
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
    yield from _unsupported_parts(args)
    if args.debug:
        yield "debug", "transformers' hooks do not reach this trainer's loop"
    if args.save_strategy == "best" and args.eval_strategy == "no":
        yield "save_strategy", "it compares evaluations: set eval_strategy to 'steps' or 'epoch'"
    if args.metric_for_best_model in ("loss", "eval_loss"):
        yield "metric_for_best_model", "evaluation has no loss; use 'score'"


def _unsupported_parts(args: TrainingArguments) -> Iterator[tuple[str, str]]:
    config = args.accelerator_config
    if not isinstance(config, AcceleratorConfig):
        return
    if config.split_batches:
        yield "accelerator_config", "drop its split_batches: each process reads per_device_train_batch_size rows"
    if config.dispatch_batches:
        yield "accelerator_config", "drop its dispatch_batches: each process reads its own prompts"
    if config.gradient_accumulation_kwargs and not reduces_once(args):
        yield "accelerator_config", "drop its gradient_accumulation_kwargs: use gradient_accumulation_steps"
    if not config.use_seedable_sampler:
        yield "accelerator_config", "drop its use_seedable_sampler=False: prompts could not be resumed in their order"


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


_WITHOUT_LOGIN = ("offline", "dryrun", "disabled")


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
