"""What a run will need on each device, told before it starts: memory by what it is for, and seconds per update."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from rlhf_ppo.estimate.counting import (
    PassCost,
    cast_bytes,
    count_cache_bytes,
    count_pass,
    gathered_bytes,
    num_elements,
    stored_bytes,
)
from rlhf_ppo.models.float32_head import is_in_float32
from rlhf_ppo.models.fused import weight_gradient_dtype
from rlhf_ppo.models.logprobs import max_chunk_elements
from rlhf_ppo.models.modes import in_eval_mode
from rlhf_ppo.models.unwrapping import output_layer, transformers_model, weight_of


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
        dtype: What products are computed in, where it is not the type of the weights.
        copies_policy: Whether what generates has the policy's weights in that type, as continuous batching has.
        has_reference: Whether there are passes of a reference.
        moves_reference: Whether the reference moves, for which it is kept in float32 too where it is in 16 bits.
    """

    rows: int
    rows_per_call: int
    rows_per_micro_batch: int
    prompt_length: int
    response_length: int
    num_ppo_epochs: int
    recomputes: bool
    in_turn: bool = False
    dtype: torch.dtype | None = None
    copies_policy: bool = False
    has_reference: bool = True
    moves_reference: bool = False

    @property
    def length(self) -> int:
        """Tokens of prompt and response."""
        return self.prompt_length + self.response_length


@dataclass(frozen=True)
class Sharding:
    """Over how many processes each kind of memory is spread, 1 where every process holds all of it, and in what type.

    Attributes:
        weights: Parameters, trained or not.
        gradients: Gradients.
        optimizer: The optimizer's state.
        stored: The 16-bit type that DeepSpeed gives all models; gradients are then float32, and beside the optimizer's
            state there are the trained weights in float32.
        gathered: The 16-bit type in which FSDP and ZeRO-3 put parameters together.
        buckets: Whether gradients have a copy through which they are exchanged, as under DDP.
    """

    weights: int = 1
    gradients: int = 1
    optimizer: int = 1
    stored: torch.dtype | None = None
    gathered: torch.dtype | None = None
    buckets: bool = False

    @classmethod
    def of(
        cls, zero_stage: int | None, is_fsdp: bool, num_processes: int, dtype: torch.dtype | None = None
    ) -> Sharding:
        """Return what DeepSpeed ZeRO (Rajbhandari et al., arXiv 1910.02054), FSDP or DDP do over the processes.

        Args:
            zero_stage: DeepSpeed's, or None.
            is_fsdp: Whether FSDP shards.
            num_processes: How many there are.
            dtype: The 16-bit type that is computed in, or None.
        """
        stage = 3 if is_fsdp else zero_stage or 0
        return cls(
            *(num_processes if stage >= least else 1 for least in (3, 2, 1)),
            stored=dtype if stage and not is_fsdp else None,
            gathered=dtype if stage == 3 else None,
            buckets=stage == 0 and num_processes > 1,
        )


@dataclass(frozen=True)
class Estimate:
    """Bytes per device, and the arithmetic of one update.

    Attributes:
        weights: Parameters of policy and value model.
        frozen: Parameters of reference and reward models.
        gradients: Gradients of the trained parameters, and under DDP the buckets in which they are exchanged.
        optimizer: State of the optimizer, and the float32 weights that DeepSpeed keeps beside 16-bit ones.
        generating_weights: The policy's weights in the type of products, or gathered where weights are sharded.
        generated_row: Key-value cache and last logits of one row.
        rows: Episodes of the process.
        rows_per_call: Most rows that are generated from at once.
        learning: Activations of one micro-batch, of both models or of the larger one, with what autocast makes of
            weights; the logits of one chunk, and the head's gradient; parameters that are gathered in a pass.
        flops: Floating-point operations of one update.
        decoded_per_call: Bytes that decoding reads in one call: the policy's weights once for each token.
    """

    weights: int
    frozen: int
    gradients: int
    optimizer: int
    generating_weights: int
    generated_row: int
    rows: int
    rows_per_call: int
    learning: int
    flops: int
    decoded_per_call: int

    @property
    def resident(self) -> int:
        """Bytes that are there all the time."""
        return self.weights + self.frozen + self.gradients + self.optimizer

    @property
    def generation(self) -> int:
        """Bytes of one call that generates, beside what is resident."""
        return self.generating_weights + self.generated_row * min(self.rows_per_call, self.rows)

    @property
    def decoded(self) -> int:
        """Bytes that decoding reads in one update."""
        return self.decoded_per_call * -(-self.rows // self.rows_per_call)

    @property
    def peak(self) -> int:
        """Bytes when most are needed: while generating, or while learning."""
        return self.resident + max(self.generation, self.learning)

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
    num_trained, stored = sum(map(num_elements, set(learning))), sharding.stored
    in_passes = stored or sharding.gathered
    micro = [
        count_pass(model, workload.rows_per_micro_batch, workload.length, autocast, in_passes)
        for model in (policy, value_model)
    ]
    own = [stored_bytes(set(model.parameters()) - set(trained), stored) for model in frozen]
    if workload.moves_reference and frozen:
        of_reference = list(set(frozen[0].parameters()))
        own[0] += sum(4 * num_elements(value) for value in of_reference if (stored or value.dtype).itemsize == 2)
    gradients = stored_bytes(learning, torch.float32 if stored else None) * (2 if sharding.buckets else 1)
    return Estimate(
        weights=stored_bytes(trained, stored) // sharding.weights,
        frozen=(max(own, default=0) if offloads else sum(own)) // sharding.weights,
        gradients=gradients // sharding.gradients,
        optimizer=int((optimizer_bytes + (4 if stored else 0)) * num_trained) // sharding.optimizer,
        generating_weights=_generating_weights(policy, workload, sharding),
        generated_row=count_cache_bytes(policy, 1, workload.length, autocast, in_passes) + 4 * _vocabulary(policy),
        rows=workload.rows,
        rows_per_call=workload.rows_per_call,
        learning=_learning(policy, value_model, micro, workload, sharding, autocast),
        flops=_flops(policy, micro, frozen, workload, autocast),
        decoded_per_call=stored_bytes(policy.parameters()) * workload.response_length,
    )


def _generating_weights(policy: nn.Module, workload: Workload, sharding: Sharding) -> int:
    in_passes = sharding.stored or sharding.gathered
    head, in_float32 = weight_of(output_layer(policy)), is_in_float32(output_layer(policy))
    is_widened = in_float32 and (in_passes or head.dtype) != torch.float32
    of_head = torch.float32.itemsize * num_elements(head) if is_widened else 0
    if sharding.weights > 1:
        return stored_bytes(policy.parameters(), in_passes) + of_head
    if workload.dtype is None or in_passes is not None:
        return of_head
    if workload.copies_policy:
        return stored_bytes(policy.parameters(), workload.dtype) + of_head
    if not in_float32 and not head.requires_grad and head.dtype == torch.float32:  # cast for a call
        of_head = workload.dtype.itemsize * num_elements(head)
    return cast_bytes(policy, workload.dtype) + of_head


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
    rollout = per_row[0] + sum(of_frozen) + (1 + workload.has_reference) * head  # generation; the reference's head
    return int(workload.rows * (rollout + trained_passes * (sum(per_row) + head)))


def _learning(
    policy: nn.Module,
    value_model: nn.Module,
    micro: Sequence[PassCost],
    workload: Workload,
    sharding: Sharding,
    autocast: Callable[[], AbstractContextManager[Any]],
) -> int:
    """Count the most that a forward and backward pass hold beside weights, gradients and the optimizer's state.

    Most is held at the end of the forward pass, with what autocast has made of weights; at the start of the backward
    pass, in the head; or, where activations are recomputed, in a block's backward pass.
    """
    in_passes = sharding.stored or sharding.gathered
    dtype = None if in_passes else workload.dtype

    def of(model: nn.Module, cost: PassCost, head: int) -> int:
        if not workload.recomputes:
            return cost.saved_bytes + head
        casts = 0 if dtype is None else cast_bytes(model, dtype)
        return cost.saved_bytes + max(head, casts, _recomputed_bytes(model, workload, autocast, in_passes))

    parts = [of(policy, micro[0], _head_bytes(policy, workload, in_passes)), of(value_model, micro[1], 0)]
    gathered = [gathered_bytes(model, in_passes) if sharding.weights > 1 else 0 for model in (policy, value_model)]
    return (max(parts) if workload.in_turn else sum(parts)) + sum(gathered)


def _head_bytes(policy: nn.Module, workload: Workload, in_passes: torch.dtype | None) -> int:
    """Count the policy's head in learning: the logits of a chunk, its gradient, its weight in the type of products."""
    weight: torch.Tensor = weight_of(output_layer(policy))
    stored = in_passes or weight.dtype
    dtype = torch.float32 if is_in_float32(output_layer(policy)) else in_passes or workload.dtype or weight.dtype
    num_tokens, vocabulary = workload.rows_per_micro_batch * workload.response_length, _vocabulary(policy)
    most = max_chunk_elements(weight)
    logits = min(most, num_tokens * vocabulary) * (6 if dtype.itemsize == 2 else 4)
    on_cpu = weight.device.type == "cpu"
    added_in = weight_gradient_dtype(stored, dtype, num_tokens, vocabulary, most, on_cpu)
    gradient = added_in.itemsize * num_elements(weight) if weight.requires_grad else 0
    return logits + gradient + (dtype.itemsize * num_elements(weight) if stored != dtype else 0)


def _recomputed_bytes(
    model: nn.Module,
    workload: Workload,
    autocast: Callable[[], AbstractContextManager[Any]],
    in_passes: torch.dtype | None,
) -> int:
    """Count what one block keeps for its backward pass: its share of a pass that recomputes nothing."""
    with in_eval_mode(model):  # in which nothing is recomputed
        whole = count_pass(model, workload.rows_per_micro_batch, workload.length, autocast, in_passes)
    return whole.saved_bytes // transformers_model(model).config.get_text_config().num_hidden_layers


def _vocabulary(policy: nn.Module) -> int:
    return transformers_model(policy).config.get_text_config().vocab_size


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
