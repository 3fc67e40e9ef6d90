"""Estimate of a run's memory and time, the line that a run starts with, and the rates that it measures."""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils.data import IterableDataset
from transformers import Trainer
from transformers.trainer_utils import has_length

from rlhf_ppo.config import PPOConfig
from rlhf_ppo.config.inherited import reduces_once
from rlhf_ppo.config.ppo_config import Sizes, settings_of
from rlhf_ppo.estimate.update import Estimate, Sharding, Workload, estimate_update
from rlhf_ppo.models.reference import asks_for_reference
from rlhf_ppo.models.unwrapping import as_in_learning, is_sharded, multiplied_dtype
from rlhf_ppo.processes.distributed import is_fsdp, mixed_precision_dtype, zero_stage
from rlhf_ppo.reporting.console import format_duration
from rlhf_ppo.terminal import print_text, visible_logger

logger = visible_logger(__name__)

NOT_COUNTED = "the fixed cost of each call (most of the time of small models), reward functions, evaluation and saving"
"""Costs that the estimated time leaves out."""

MEMORY_NOT_COUNTED = (
    "the memory of libraries, fragments of the allocator, buffers of DeepSpeed, vLLM, activations of passes without "
    "gradients, and temporary memory of single operations"
)
"""Memory that the estimate leaves out."""

SHARE_OF_MEMORY = 0.9
"""Share of a device's memory that the estimate may fill."""

BANDWIDTHS = (300e9, 50e9)
"""Bytes/s that a process sends: about those of GPUs with NVLink in one node, and of one 400 Gbit/s link for each."""


class RunEstimate:
    """The estimate of a trainer's run, computed when the run begins.

    An engine must not have placed the trained models by then. The frozen models are copies without storage, made
    before an engine placed them.

    Args:
        args: The arguments.
        sizes: Sizes that follow from them.
        accelerator: Knows devices and engines.
        dataset: The prepared prompts.
        policy: The trained language model.
        value_model: The trained value model.
        sequential_backward: Whether each has a backward pass of its own.
        frozen: Reference and reward models that have weights of their own, the reference first; None: unknown.
    """

    def __init__(
        self,
        args: PPOConfig,
        sizes: Sizes,
        accelerator: Accelerator,
        dataset: Any,
        policy: nn.Module,
        value_model: nn.Module,
        sequential_backward: bool,
        frozen: Sequence[nn.Module] | None,
    ) -> None:
        self.args, self.sizes, self.accelerator, self.dataset = args, sizes, accelerator, dataset
        self.policy, self.value_model, self.frozen = policy, value_model, frozen
        self.sequential_backward, self._is_announced = sequential_backward, False

    def announce(self) -> None:
        """Print the estimate once, in the main process, if progress is shown."""
        args = self.args
        if self._is_announced or args.disable_tqdm or args.process_index != 0:
            return
        self._is_announced = True
        try:
            estimate = self.forecast()
            if estimate is not None:
                dtype = multiplied_dtype(self.accelerator, self.policy)
                print_text(describe(estimate, args.device, dtype, self.sizes.num_total_batches))
        except Exception as error:  # a model that cannot be counted, or measured in the memory left, can be trained
            logger.warning(f"No estimate of memory and time: {type(error).__name__}: {error}")

    def forecast(self, num_generated: int | None = None) -> Estimate | None:
        """Estimate the updates of the run; they are counted once, for any number of generated rows.

        Prompts count with the mean length of the training set, responses with `response_length`.

        Args:
            num_generated: Rows that are generated at once; None: by the arguments.

        Returns:
            The estimate; None for a stream, whose lengths are unknown, and for models whose parameters ZeRO-3 has
            already sharded.
        """
        counted = self._counted
        return counted if counted is None or num_generated is None else replace(counted, rows_per_call=num_generated)

    @functools.cached_property
    def _counted(self) -> Estimate | None:
        accelerator, dataset = self.accelerator, self.dataset
        is_stream = isinstance(dataset, IterableDataset) or not has_length(dataset)
        if is_stream or self.frozen is None or is_sharded(self.policy):
            return None
        dtype = mixed_precision_dtype(accelerator)
        engine = zero_stage(accelerator), is_fsdp(accelerator)
        sharding = Sharding.of(*engine, accelerator.num_processes, dtype, reduces_once(self.args))
        models = (self.policy, self.value_model, self.frozen)
        with torch.enable_grad():  # an evaluation may ask
            return estimate_run(
                self.args, self.sizes, *models, mean_prompt_length(dataset), sharding, dtype, self.sequential_backward
            )


def estimate_run(
    args: PPOConfig,
    sizes: Sizes,
    policy: nn.Module,
    value_model: nn.Module,
    frozen: Sequence[nn.Module],
    prompt_length: int,
    sharding: Sharding,
    dtype: torch.dtype | None,
    sequential_backward: bool,
) -> Estimate:
    """Estimate the updates of a run.

    Args:
        args: The arguments.
        sizes: Sizes that follow from them.
        policy: The trained language model, in training mode; it may have no storage.
        value_model: The trained value model, likewise.
        frozen: Reference and reward models that have weights of their own, the reference first.
        prompt_length: Tokens of a prompt.
        sharding: Memory that processes share.
        dtype: The 16-bit type of matrix products; None: that of the weights.
        sequential_backward: Whether policy and value model learn one after the other.
    """
    device, max_tokens = next(policy.parameters()).device.type, args.max_tokens_per_micro_batch
    workload = Workload(
        rows=sizes.local_batch_size,
        rows_per_call=args.local_rollout_forward_batch_size,
        rows_per_micro_batch=args.per_device_train_batch_size
        if max_tokens is None
        else max(1, max_tokens // (prompt_length + args.response_length)),
        prompt_length=prompt_length,
        response_length=args.response_length,
        num_ppo_epochs=args.num_ppo_epochs,
        recomputes=args.gradient_checkpointing,
        sequential_backward=sequential_backward,
        dtype=dtype,
        copies_policy=args.generation_engine == "continuous",
        has_reference=asks_for_reference(args),
        num_mini_batches=args.num_mini_batches,
    )
    optimizer_bytes = optimizer_bytes_per_parameter(*Trainer.get_optimizer_cls_and_kwargs(args), args.device)
    in_autocast = dtype is not None and sharding.stored is None
    autocast = functools.partial(torch.autocast, device, dtype, enabled=in_autocast)
    checkpointing = settings_of(args.gradient_checkpointing_kwargs)
    with as_in_learning(args.gradient_checkpointing, checkpointing, policy, value_model):
        return estimate_update(
            policy, value_model, frozen, workload, optimizer_bytes, sharding, autocast, args.offload_frozen
        )


def mean_prompt_length(dataset: Any) -> int:
    """Return the mean number of tokens of a prepared data set's prompts, rounded."""
    return round(statistics.mean(len(row["input_ids"]) for row in dataset))


def describe(estimate: Estimate, device: torch.device, dtype: torch.dtype, num_updates: int) -> str:
    """Describe an estimate in one line, with times at the device's measured rates.

    With several processes, a second line describes host memory and communication.

    Args:
        estimate: The estimate.
        device: The run's device.
        dtype: The type of matrix products.
        num_updates: Updates of the run.
    """
    seconds = estimate.seconds(*measure_rates(device, dtype))
    device_memory = torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else None
    besides = describe_processes(estimate, seconds, device_memory)
    return (
        f"Estimate per device: {size(estimate.peak)}; at least {seconds:.2g} s an update, "
        f"{duration(seconds * num_updates)} in all."
    ) + f"\n{besides}" * bool(besides)


def duration(seconds: float) -> str:
    """Format seconds as 1:02:03, or as 0.25 s."""
    return format_duration(seconds) if seconds >= 1 else f"{seconds:.2g} s"


# Several processes


def describe_processes(estimate: Estimate, seconds: float, memory: float | None) -> str:
    """Describe host memory and communication; empty for one process.

    Args:
        estimate: The estimate of each process.
        seconds: Least seconds of an update without communication.
        memory: Bytes of a device; None: unknown.
    """
    exchanged = estimate.communication
    if exchanged.total == 0:
        return ""
    times = " and ".join(f"{rounded_seconds(exchanged.total / rate)} at {rate / 1e9:.0f} GB/s" for rate in BANDWIDTHS)
    lines = [
        f"Host memory of each node while models are loaded: {size(estimate.host)}.",
        f"Each process sends {size(exchanged.total)} per update, which takes {times}.",
    ]
    if gathered := estimate.gathered_weights:
        state = f", and {size(optimizer)} with FULL_STATE_DICT" if (optimizer := estimate.gathered_optimizer) else ""
        lines.append(f"A checkpoint gathers {size(gathered)} in the first process's host memory{state}.")
    if exchanged.per_micro_batch and exchanged.total / BANDWIDTHS[-1] > seconds:
        lines.append(_advice(estimate, memory))
    return " ".join(lines)


def _advice(estimate: Estimate, memory: float | None) -> str:
    exchanged = estimate.communication
    advice = (
        f"Each of {exchanged.micro_batches} micro-batches sends {size(exchanged.per_micro_batch)} of it; at 50 GB/s "
        "this takes longer than the computation. Use the largest micro-batches that fit: raise "
        "per_device_train_batch_size and lower gradient_accumulation_steps"
    )
    if memory is None:
        return f"{advice}."
    rows = largest_micro_batch(estimate, memory)
    if rows <= estimate.rows_per_micro_batch:
        return f"{advice}; none larger would fit."
    per_step = -(-estimate.rows_per_step // rows)
    fewer = replace(exchanged, micro_batches=exchanged.steps * per_step)
    return f"{advice}; {rows} rows would fit, and {size(fewer.total)} would be sent."


def largest_micro_batch(estimate: Estimate, memory: float) -> int:
    """Return the most rows of a micro-batch that fit, at least 1 and at most those of an optimizer step.

    Args:
        estimate: The estimate.
        memory: Bytes of a device, of which a tenth is left free.
    """
    free = SHARE_OF_MEMORY * memory - estimate.resident - estimate.learning
    rows = estimate.rows_per_micro_batch + int(free // max(1, estimate.learning_row))
    return min(max(rows, 1), estimate.rows_per_step)


def describe_fit(estimate: Estimate, memory: float) -> str:
    """Say how many rows a micro-batch may have.

    Args:
        estimate: The estimate.
        memory: Bytes of a device, of which a tenth is left free.
    """
    rows = largest_micro_batch(estimate, memory)
    more = (rows - estimate.rows_per_micro_batch) * estimate.learning_row
    if estimate.resident + estimate.learning + more > SHARE_OF_MEMORY * memory:
        return f"No micro-batch fits into {size(memory)}, not even one of a single row."
    now = estimate.rows_per_micro_batch
    return f"The largest micro-batch that fits into {size(memory)} has {rows} rows; it has {now} now."


# Measurements


def optimizer_bytes_per_parameter(
    optimizer_class: type[torch.optim.Optimizer], kwargs: dict[str, Any], device: torch.device | str = "cpu"
) -> float:
    """Measure an optimizer's state on one small matrix after one step: 8 for AdamW in float32.

    Args:
        optimizer_class: The class.
        kwargs: Its arguments.
        device: The device of the matrix.
    """
    parameter = nn.Parameter(torch.zeros(256, 256, device=device))
    optimizer = optimizer_class([parameter], **kwargs)
    parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    state = [
        value for values in optimizer.state.values() for value in values.values() if isinstance(value, torch.Tensor)
    ]
    return sum(map(_stored_bytes, state)) / parameter.numel()


def _stored_bytes(value: torch.Tensor) -> int:
    """Count the bytes that a tensor keeps. One made of other tensors, as torchao's 8-bit states, keeps only these."""
    if is_traceable_wrapper_subclass(value):
        return sum(_stored_bytes(getattr(value, name)) for name in value.__tensor_flatten__()[0])
    return value.nbytes


def measure_rates(device: torch.device, dtype: torch.dtype) -> tuple[float, float]:
    """Measure a device's rates.

    Args:
        device: The device.
        dtype: The type of matrix products.

    Returns:
        FLOP/s of matrix multiplication, and bytes/s of reading memory; the best of three.
    """
    size, seconds = 384, 0.0
    while seconds < 5e-4:  # a product that takes so long is large enough to show the rate
        size *= 2
        matrix = torch.ones(size, size, device=device, dtype=dtype)
        seconds = best_seconds(functools.partial(torch.matmul, matrix, matrix), device)
    numbers = torch.ones(2**26 if device.type == "cuda" else 2**24, device=device)
    return 2 * size**3 / seconds, numbers.nbytes / best_seconds(numbers.sum, device)


def best_seconds(
    function: Callable[[], Any],
    device: torch.device,
    num_calls: int = 3,
    clock: Callable[[], float] | None = None,
) -> float:
    """Return the least seconds of some calls, after one that warms up; `time.perf_counter` is the default clock."""
    clock, seconds = clock or time.perf_counter, list[float]()
    for _ in range(num_calls + 1):
        start = clock()
        function()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(clock() - start)
    return min(seconds[1:])


# Units


def size(num_bytes: float) -> str:
    """Format a number of bytes."""
    return _with_unit(num_bytes, 1024, ("B", "KiB", "MiB", "GiB"))


def rate(per_second: float) -> str:
    """Format a large number, with the prefix of its unit."""
    return _with_unit(per_second, 1000, ("", "k", "M", "G", "T"))


def _with_unit(number: float, base: int, units: Sequence[str]) -> str:
    power = 0
    while number >= base and power < len(units) - 1:
        number, power = number / base, power + 1
    return f"{number:.3g} {units[power]}"


def rounded_seconds(seconds: float) -> str:
    """Format seconds with two digits, or as a whole number from 100 on."""
    return f"{seconds:.2g} s" if seconds < 100 else f"{seconds:.0f} s"
