"""The line that a run starts with: how much memory and time it will take."""

from __future__ import annotations

import functools
import statistics
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any, Protocol

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import IterableDataset
from transformers import Trainer
from transformers.trainer_utils import has_length

from rlhf_ppo.config import PPOConfig
from rlhf_ppo.config.settled import settings_of
from rlhf_ppo.config.sizes import Sizes
from rlhf_ppo.estimate.update import (
    Estimate,
    Sharding,
    Workload,
    estimate_update,
    measure_rates,
    optimizer_bytes_per_parameter,
)
from rlhf_ppo.models.modes import as_in_learning
from rlhf_ppo.models.reference import asks_for_reference
from rlhf_ppo.models.sharded import is_sharded
from rlhf_ppo.processes.engines import is_fsdp, product_dtype, zero_stage
from rlhf_ppo.terminal.foreign import print_text, visible_logger

logger = visible_logger(__name__)

_SHARE_OF_MEMORY = 0.9
"""Of a device's memory, what the estimate may fill."""

NOT_COUNTED = (
    "not counted is what each call costs however little it computes, most of the time of small models, nor reward "
    "functions, evaluation and saving"
)
"""What the estimated time leaves out."""

MEMORY_NOT_COUNTED = (
    "not counted are the libraries' own memory, what the allocator holds in fragments, buffers of DeepSpeed, vLLM, "
    "activations of passes without gradients, and what single operations need for a moment"
)
"""What the estimated memory leaves out."""


class EstimatedTrainer(Protocol):
    """What an estimate reads of a `PPOTrainer`."""

    args: PPOConfig
    sizes: Sizes
    accelerator: Accelerator
    train_dataset: Any
    policy_model: nn.Module
    value_model: nn.Module

    def is_world_process_zero(self) -> bool:
        """Tell whether this is the main process."""
        ...

    @property
    def _learns_in_turn(self) -> bool: ...


class RunEstimate:
    """The estimate of a trainer's run, made when the run begins, or its rows are asked for.

    The trained models must not be placed by an engine by then; the frozen ones are, where they were made.

    Args:
        trainer: The `PPOTrainer`.
        frozen: Its reference and reward models that have weights of their own, the reference first, as they were
            before an engine took them apart; None if that is not known.
    """

    def __init__(self, trainer: EstimatedTrainer, frozen: Sequence[nn.Module] | None) -> None:
        self.trainer, self.frozen = trainer, frozen
        self._is_announced = False

    def announce(self) -> None:
        """Print the estimate once, in the main process and where progress is shown."""
        trainer, args, rows = self.trainer, self.trainer.args, self.generation_rows
        if self._is_announced or args.disable_tqdm or not trainer.is_world_process_zero():
            return
        self._is_announced = True
        try:
            estimate = self.forecast(rows)
            if estimate is not None:
                dtype = multiplied_dtype(trainer.accelerator, trainer.policy_model)
                print_text(describe(estimate, args.device, dtype, trainer.sizes.num_total_batches))
        except Exception as error:  # what cannot be counted, or measured in the memory left, can still be trained
            logger.warning(f"No estimate of memory and time: {type(error).__name__}: {error}")

    @functools.cached_property
    def generation_rows(self) -> int:
        """How many rows are generated from at once, on this process.

        What `args.generation_batch_size` says; else on a GPU the whole local batch, halved until its cache fits beside
        what the estimate has for the models, but no fewer than `args.local_rollout_forward_batch_size`. That many on
        other devices: which random number a row gets depends on the rows beside it.
        """
        args = self.trainer.args
        least, most = args.local_rollout_forward_batch_size, self.trainer.sizes.local_batch_size
        if args.generation_batch_size is not None or args.device.type != "cuda" or most <= least:
            return args.generation_batch_size or least
        try:
            estimate = self.forecast()
        except Exception as error:
            logger.warning(
                f"generation_batch_size is {least}: no estimate of memory ({type(error).__name__}: {error})"
            )
            estimate = None
        if estimate is None:
            return least
        memory = _SHARE_OF_MEMORY * torch.cuda.get_device_properties(args.device).total_memory
        rows = most
        while rows > least and estimate.resident + replace(estimate, rows_per_call=rows).generation > memory:
            rows = -(-rows // 2)
        return max(rows, least)

    def forecast(self, num_generated: int | None = None) -> Estimate | None:
        """Estimate the updates of the run; they are counted once, with any number of rows.

        Prompts count with the mean length of the training set, responses with `response_length`.

        Args:
            num_generated: Rows that are generated from at once; None for what the arguments say.

        Returns:
            The estimate, or None where it cannot be made: for a stream, whose lengths are not known, and for models
            whose parameters ZeRO-3 has already taken apart.
        """
        counted = self._counted
        return counted if counted is None or num_generated is None else replace(counted, rows_per_call=num_generated)

    @functools.cached_property
    def _counted(self) -> Estimate | None:
        trainer, accelerator, dataset = self.trainer, self.trainer.accelerator, self.trainer.train_dataset
        is_stream = isinstance(dataset, IterableDataset) or not has_length(dataset)
        if is_stream or self.frozen is None or is_sharded(trainer.policy_model):
            return None
        dtype = product_dtype(accelerator)
        with torch.enable_grad():  # an evaluation may ask
            return estimate_run(
                trainer.args,
                trainer.sizes,
                trainer.policy_model,
                trainer.value_model,
                self.frozen,
                mean_prompt_length(dataset),
                Sharding.of(zero_stage(accelerator), is_fsdp(accelerator), accelerator.num_processes, dtype),
                dtype,
                trainer._learns_in_turn,
            )


def multiplied_dtype(source: Accelerator | PPOConfig, policy: nn.Module) -> torch.dtype:
    """Tell in which precision the policy's matrices are multiplied: autocast's, else their own."""
    return product_dtype(source) or next(weight.dtype for weight in policy.parameters() if weight.is_floating_point())


def estimate_run(
    args: PPOConfig,
    sizes: Sizes,
    policy: nn.Module,
    value_model: nn.Module,
    frozen: Sequence[nn.Module],
    prompt_length: int,
    sharding: Sharding,
    dtype: torch.dtype | None,
    in_turn: bool,
) -> Estimate:
    """Estimate the updates of a run.

    Args:
        args: The arguments.
        sizes: What follows from them.
        policy: The trained language model, in training mode; it may have no storage.
        value_model: The trained value model, likewise.
        frozen: Reference and reward models that have weights of their own, the reference first.
        prompt_length: Tokens of a prompt.
        sharding: What is spread over processes, in what type.
        dtype: The 16-bit type that products are computed in, or None for the weights' own.
        in_turn: Whether policy and value model learn one after the other.
    """
    device = next(policy.parameters()).device.type
    in_autocast = dtype is not None and sharding.stored is None
    optimizer_class, kwargs = Trainer.get_optimizer_cls_and_kwargs(args)
    with as_in_learning(
        args.gradient_checkpointing, settings_of(args.gradient_checkpointing_kwargs), policy, value_model
    ):
        return estimate_update(
            policy,
            value_model,
            frozen,
            Workload(
                rows=sizes.local_batch_size,
                rows_per_call=args.generation_batch_size or args.local_rollout_forward_batch_size,
                rows_per_micro_batch=_rows_per_micro_batch(args, prompt_length + args.response_length),
                prompt_length=prompt_length,
                response_length=args.response_length,
                num_ppo_epochs=args.num_ppo_epochs,
                recomputes=args.gradient_checkpointing,
                in_turn=in_turn,
                dtype=dtype,
                copies_policy=args.generation_engine == "continuous",
                has_reference=asks_for_reference(args),
                moves_reference=args.reference_ema is not None,
            ),
            optimizer_bytes_per_parameter(optimizer_class, kwargs, args.device),
            sharding,
            lambda: torch.autocast(device, dtype, enabled=in_autocast),
            args.offload_frozen,
        )


def _rows_per_micro_batch(args: PPOConfig, length: int) -> int:
    max_tokens = args.max_tokens_per_micro_batch
    return args.per_device_train_batch_size if max_tokens is None else max(1, max_tokens // length)


def mean_prompt_length(dataset: Any) -> int:
    """Return the mean number of tokens of a prepared data set's prompts, rounded."""
    return round(statistics.mean(len(row["input_ids"]) for row in dataset))


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
    memory = ", ".join(f"{name} {size(getattr(estimate, name))}" for name in parts)
    return (
        f"Estimated per device: {size(estimate.peak)} of memory ({memory}), and at least {seconds:.2g} s per update, "
        f"{timedelta(seconds=round(seconds * num_updates))} for {num_updates}, if responses are of full length and "
        f"the device does its measured {rate(flops)}FLOP/s and {rate(bandwidth)}B/s; {NOT_COUNTED}. "
        "Libraries need memory of their own."
    )


def size(num_bytes: float) -> str:
    """Write a number of bytes."""
    for unit in ("B", "KiB", "MiB"):
        if num_bytes < 1024:
            return f"{num_bytes:.3g} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.3g} GiB"


def rate(per_second: float) -> str:
    """Write a large number, with the prefix of its unit."""
    for unit in ("", "k", "M", "G"):
        if per_second < 1000:
            return f"{per_second:.3g} {unit}"
        per_second /= 1000
    return f"{per_second:.3g} T"
