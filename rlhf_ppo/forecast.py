"""The line that a run starts with: how much memory and time it will take."""

from __future__ import annotations

import statistics
from datetime import timedelta
from typing import Any, cast

import torch
from torch.utils.data import IterableDataset
from transformers.trainer_utils import has_length
from transformers.utils import logging

from rlhf_ppo.distributed import is_fsdp, zero_stage
from rlhf_ppo.models.inputs import is_sharded
from rlhf_ppo.reporting.estimate import (
    Estimate,
    Sharding,
    Workload,
    estimate_update,
    measure_rates,
    optimizer_bytes_per_parameter,
)

logger = logging.get_logger(__name__)


def announce(trainer: Any) -> None:
    """Print the estimate, in the main process and where progress is shown.

    Args:
        trainer: A `PPOTrainer` whose models are not yet placed by an engine.
    """
    args = trainer.args
    if args.disable_tqdm or not trainer.is_world_process_zero():
        return
    try:
        estimate = forecast(trainer)
    except Exception as error:  # an architecture or optimizer that cannot be counted can still be trained
        logger.warning(f"No estimate of memory and time: {type(error).__name__}: {error}")
        return
    if estimate is not None:
        dtype = torch.bfloat16 if args.bf16 else torch.float32
        print(describe(estimate, args.device, dtype, cast(int, args.num_total_batches)))


def forecast(trainer: Any) -> Estimate | None:
    """Estimate the updates of a trainer whose models are not yet placed by an engine.

    Prompts count with the mean length of the training set, responses with `response_length`.

    Args:
        trainer: The `PPOTrainer`.

    Returns:
        The estimate, or None where it cannot be made: for a stream, whose lengths are not known, and for models whose
        parameters ZeRO-3 has already taken apart.
    """
    dataset = trainer.train_dataset
    if isinstance(dataset, IterableDataset) or not has_length(dataset) or is_sharded(trainer.policy_model):
        return None
    args = trainer.args
    optimizer_class, kwargs = trainer.get_optimizer_cls_and_kwargs(args)
    frozen = [*([] if trainer.reference.model is None else [trainer.reference.model.model]), *trainer.reward_models]
    accelerator = trainer.accelerator
    device = next(trainer.policy_model.parameters()).device.type
    return estimate_update(
        trainer.policy_model,
        trainer.value_model,
        frozen,
        Workload(
            rows=cast(int, args.local_batch_size),
            rows_per_call=args.local_rollout_forward_batch_size,
            rows_per_micro_batch=args.per_device_train_batch_size,
            prompt_length=round(statistics.mean(len(row["input_ids"]) for row in cast(Any, dataset))),
            response_length=args.response_length,
            num_ppo_epochs=args.num_ppo_epochs,
            recomputes=args.gradient_checkpointing,
        ),
        optimizer_bytes_per_parameter(optimizer_class, kwargs, args.device),
        Sharding.of(zero_stage(accelerator), is_fsdp(accelerator), accelerator.num_processes),
        lambda: torch.autocast(device, torch.bfloat16, enabled=accelerator.mixed_precision == "bf16"),
        args.offload_frozen,
    )


def describe(estimate: Estimate, device: torch.device, dtype: torch.dtype, num_updates: int) -> str:
    """Write an estimate as one line, with times at the rates that the device reaches in a short measurement.

    Args:
        estimate: The estimate.
        device: Where the run is.
        dtype: What matrices are multiplied in.
        num_updates: Updates of the run.
    """
    flops, bandwidth = measure_rates(device, dtype)
    seconds = estimate.seconds(flops, bandwidth)
    parts = ("weights", "frozen", "gradients", "optimizer", "generation", "learning")
    memory = ", ".join(f"{name} {_size(getattr(estimate, name))}" for name in parts)
    return (
        f"Estimated per device: {_size(estimate.peak)} of memory ({memory}), and {seconds:.2g} s per update, "
        f"{timedelta(seconds=round(seconds * num_updates))} for {num_updates}, if responses are of full length and "
        f"the device does its measured {_rate(flops)}FLOP/s and {_rate(bandwidth)}B/s."
    )


def _size(num_bytes: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if num_bytes < 1024:
            return f"{num_bytes:.3g} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.3g} GiB"


def _rate(per_second: float) -> str:
    for unit in ("", "k", "M", "G"):
        if per_second < 1000:
            return f"{per_second:.3g} {unit}"
        per_second /= 1000
    return f"{per_second:.3g} T"
