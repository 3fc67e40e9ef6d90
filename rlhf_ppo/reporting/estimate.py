"""What a run will need on each device, told before it starts: memory by what it is for, and seconds per update."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from rlhf_ppo.models.counting import PassCost, count_cache_bytes, count_pass, num_elements
from rlhf_ppo.models.inputs import transformers_model
from rlhf_ppo.models.logprobs import MAX_CHUNK_ELEMENTS


@dataclass(frozen=True)
class Workload:
    """The shape of one update on one process.

    Attributes:
        rows: Episodes of the process.
        rows_per_call: Rows of one generation call or of one pass without gradient.
        rows_per_micro_batch: Rows of one pass with gradient.
        prompt_length: Tokens of a prompt.
        response_length: Tokens of a response.
        num_ppo_epochs: Passes over the episodes with gradient.
        recomputes: Whether activations are recomputed in the backward pass.
        in_turn: Whether policy and value model run forward and backward one after the other.
    """

    rows: int
    rows_per_call: int
    rows_per_micro_batch: int
    prompt_length: int
    response_length: int
    num_ppo_epochs: int
    recomputes: bool
    in_turn: bool = False

    @property
    def length(self) -> int:
        """Tokens of prompt and response."""
        return self.prompt_length + self.response_length


@dataclass(frozen=True)
class Sharding:
    """Over how many processes each kind of memory is spread; 1 where every process holds all of it.

    Attributes:
        weights: Parameters, trained or not.
        gradients: Gradients.
        optimizer: The optimizer's state.
    """

    weights: int = 1
    gradients: int = 1
    optimizer: int = 1

    @classmethod
    def of(cls, zero_stage: int | None, is_fsdp: bool, num_processes: int) -> Sharding:
        """Return what DeepSpeed ZeRO (Rajbhandari et al., arXiv 1910.02054) or FSDP spread over the processes."""
        stage = 3 if is_fsdp else zero_stage or 0
        return cls(*(num_processes if stage >= least else 1 for least in (3, 2, 1)))


@dataclass(frozen=True)
class Estimate:
    """Bytes per device, and the arithmetic of one update.

    Attributes:
        weights: Parameters of policy and value model.
        frozen: Parameters of reference and reward models.
        gradients: Gradients of the trained parameters.
        optimizer: State of the optimizer.
        generation: Key-value cache of one call, and the gathered policy where weights are sharded.
        learning: Activations of one micro-batch, of both models or of the larger one, and the logits of one chunk.
        flops: Floating-point operations of one update.
        decoded: Bytes that decoding reads in one update: the policy's weights once for each token of a call.
    """

    weights: int
    frozen: int
    gradients: int
    optimizer: int
    generation: int
    learning: int
    flops: int
    decoded: int

    @property
    def peak(self) -> int:
        """Bytes when most are needed: while generating, or while learning."""
        return self.weights + self.frozen + self.gradients + self.optimizer + max(self.generation, self.learning)

    def seconds(self, flops_per_second: float, bytes_per_second: float) -> float:
        """Return the seconds of one update on a device that reaches these rates."""
        return self.flops / flops_per_second + self.decoded / bytes_per_second


def estimate_update(
    policy: nn.Module,
    value_model: nn.Module,
    frozen: Sequence[nn.Module],
    workload: Workload,
    optimizer_bytes: float,
    sharding: Sharding = Sharding(),
    autocast: Callable[[], AbstractContextManager[Any]] = nullcontext,
    offloads: bool = False,
) -> Estimate:
    """Estimate an update with responses of full length.

    Passes are counted, not computed. The arithmetic is that of all forward passes of the rollout (policy and value
    model; each frozen model; generation as one pass of the policy), and of learning: a backward pass costs two
    forward passes, and one more where activations are recomputed. Heads cost `2 H V` for each response token.

    Args:
        policy: The trained language model.
        value_model: The trained value model.
        frozen: Reference and reward models that have weights of their own, the reference first.
        workload: The shape of the update.
        optimizer_bytes: Bytes of optimizer state for each trained parameter, see `optimizer_bytes_per_parameter`.
        sharding: What is spread over processes.
        autocast: Makes the context of the passes.
        offloads: Whether frozen models come to the device one after the other.
    """
    trained = [parameter for model in (policy, value_model) for parameter in model.parameters()]
    learning = [parameter for parameter in trained if parameter.requires_grad]
    micro = [
        count_pass(model, workload.rows_per_micro_batch, workload.length, autocast) for model in (policy, value_model)
    ]
    cache = count_cache_bytes(policy, min(workload.rows_per_call, workload.rows), workload.length, autocast)
    policy_bytes = _bytes(policy.parameters())
    own = [_bytes(set(model.parameters()) - set(trained)) for model in frozen]
    return Estimate(
        weights=_bytes(trained) // sharding.weights,
        frozen=(max(own, default=0) if offloads else sum(own)) // sharding.weights,
        gradients=_bytes(learning) // sharding.gradients,
        optimizer=int(optimizer_bytes * sum(map(num_elements, learning))) // sharding.optimizer,
        generation=cache + (policy_bytes if sharding.weights > 1 else 0),
        learning=_activations(policy, micro, workload),
        flops=_flops(policy, micro, frozen, workload, autocast),
        decoded=policy_bytes * workload.response_length * -(-workload.rows // workload.rows_per_call),
    )


def _flops(
    policy: nn.Module,
    micro: Sequence[PassCost],
    frozen: Sequence[nn.Module],
    workload: Workload,
    autocast: Callable[[], AbstractContextManager[Any]],
) -> int:
    per_row = [cost.flops / workload.rows_per_micro_batch for cost in micro]
    of_frozen = [count_pass(model, 1, workload.length, autocast).flops for model in frozen]
    config = transformers_model(policy).config.get_text_config()
    head = 2 * config.hidden_size * config.vocab_size * workload.response_length
    trained_passes = 1 + workload.num_ppo_epochs * (4 if workload.recomputes else 3)
    rollout = per_row[0] + sum(of_frozen) + 2 * head  # generation; the reference's head
    return int(workload.rows * (rollout + trained_passes * (sum(per_row) + head)))


def _activations(policy: nn.Module, micro: Sequence[PassCost], workload: Workload) -> int:
    vocabulary = transformers_model(policy).config.get_text_config().vocab_size
    chunk = 4 * min(MAX_CHUNK_ELEMENTS, workload.rows_per_micro_batch * workload.response_length * vocabulary)
    of_policy, of_value_model = (cost.saved_bytes for cost in micro)
    return max(of_policy + chunk, of_value_model) if workload.in_turn else of_policy + chunk + of_value_model


def optimizer_bytes_per_parameter(
    optimizer_class: type[torch.optim.Optimizer], kwargs: dict[str, Any], device: torch.device | str = "cpu"
) -> float:
    """Measure an optimizer's state on one small matrix after one step: 8 for AdamW in float32.

    Args:
        optimizer_class: Its class.
        kwargs: Its arguments.
        device: Where it steps.
    """
    parameter = nn.Parameter(torch.zeros(256, 256, device=device))
    optimizer = optimizer_class([parameter], **kwargs)
    parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    state = [
        value for values in optimizer.state.values() for value in values.values() if isinstance(value, torch.Tensor)
    ]
    return sum(value.nbytes for value in state) / parameter.numel()


def measure_rates(device: torch.device, dtype: torch.dtype) -> tuple[float, float]:
    """Measure a device for a moment.

    Args:
        device: The device.
        dtype: What matrices are multiplied in.

    Returns:
        FLOP/s of matrix multiplication, and bytes/s of reading memory; the best of three.
    """
    size = 8192 if device.type == "cuda" else 768
    matrix = torch.ones(size, size, device=device, dtype=dtype)
    numbers = torch.ones(2**26 if device.type == "cuda" else 2**24, device=device)
    return (
        2 * size**3 / _best_seconds(lambda: matrix @ matrix, device),
        numbers.nbytes / _best_seconds(numbers.sum, device),
    )


def _best_seconds(function: Callable[[], Any], device: torch.device) -> float:
    seconds = []
    for _ in range(4):  # the first one warms up
        start = time.perf_counter()
        function()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - start)
    return min(seconds[1:])


def _bytes(parameters: Any) -> int:
    return sum(num_elements(parameter) * parameter.element_size() for parameter in set(parameters))
