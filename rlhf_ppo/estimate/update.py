"""Estimate of one update on each device: memory by purpose, arithmetic, and communication between processes.

Passes are counted on tensors without storage: nothing is computed or allocated.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Self, cast

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count

from rlhf_ppo.models.fused import weight_gradient_dtype
from rlhf_ppo.models.heads import Float32Linear, is_in_float32
from rlhf_ppo.models.policy_and_value import max_chunk_elements
from rlhf_ppo.models.unwrapping import (
    CACHE,
    autocast_dtype,
    backbone,
    in_eval_mode,
    no_split_modules,
    output_layer,
    text_config,
)


@dataclass(frozen=True)
class Workload:
    """The shape of one update on one process.

    Attributes:
        rows: Episodes.
        rows_per_call: Rows of one generation call or of one pass without gradient.
        rows_per_micro_batch: Rows of one pass with gradient.
        prompt_length: Tokens of a prompt.
        response_length: Tokens of a response.
        num_ppo_epochs: Passes over the episodes with gradient.
        recomputes: Whether activations are recomputed in the backward pass.
        sequential_backward: Whether policy and value model run forward and backward one after the other.
        dtype: The type of matrix products, if it differs from the weights' type.
        copies_policy: Whether generation uses a copy of the policy's weights in `dtype`, as continuous batching does.
        has_reference: Whether a reference model scores the responses.
        num_mini_batches: Optimizer steps of each pass over the episodes.
    """

    rows: int
    rows_per_call: int
    rows_per_micro_batch: int
    prompt_length: int
    response_length: int
    num_ppo_epochs: int
    recomputes: bool
    sequential_backward: bool = False
    dtype: torch.dtype | None = None
    copies_policy: bool = False
    has_reference: bool = True
    num_mini_batches: int = 1

    @property
    def length(self) -> int:
        """Tokens of prompt and response."""
        return self.prompt_length + self.response_length


@dataclass(frozen=True)
class Sharding:
    """Number of processes that share each kind of memory (1: every process holds all of it), and its types.

    Attributes:
        weights: Processes that share the parameters, trained or not.
        gradients: Processes that share the gradients.
        optimizer: Processes that share the optimizer's state.
        stored: The 16-bit type that DeepSpeed gives all models; gradients and a copy of the trained weights are then
            float32.
        gathered: The 16-bit type in which FSDP and ZeRO-3 gather parameters.
        buckets: Whether gradients are exchanged through a copy, as under DDP.
        is_fsdp: Whether FSDP2 shards.
        processes: Number of processes.
        reduces_once: Whether FSDP2 keeps whole gradients until the last micro-batch of a step.
    """

    weights: int = 1
    gradients: int = 1
    optimizer: int = 1
    stored: torch.dtype | None = None
    gathered: torch.dtype | None = None
    buckets: bool = False
    is_fsdp: bool = False
    processes: int = 1
    reduces_once: bool = False

    @classmethod
    def of(
        cls,
        zero_stage: int | None,
        is_fsdp: bool,
        num_processes: int,
        dtype: torch.dtype | None = None,
        reduces_once: bool = False,
    ) -> Self:
        """Return the sharding of DeepSpeed ZeRO (Rajbhandari et al., arXiv 1910.02054), FSDP or DDP.

        Args:
            zero_stage: DeepSpeed's stage, or None.
            is_fsdp: Whether FSDP shards.
            num_processes: Number of processes.
            dtype: The 16-bit type of matrix products, or None.
            reduces_once: Whether the arguments ask for one exchange of gradients per step.
        """
        stage = 3 if is_fsdp else zero_stage or 0
        return cls(
            *(num_processes if stage >= least else 1 for least in (3, 2, 1)),
            stored=dtype if stage and not is_fsdp else None,
            gathered=dtype if stage == 3 else None,
            buckets=stage == 0 and num_processes > 1,
            is_fsdp=is_fsdp,
            processes=num_processes,
            reduces_once=is_fsdp and reduces_once,
        )

    @property
    def in_passes(self) -> torch.dtype | None:
        """The type of the parameters in forward passes; None: their own."""
        return self.stored or self.gathered


@dataclass(frozen=True)
class Communication:
    """Bytes that each process sends in one update; it receives as many.

    Attributes:
        rollout: Parameters that are gathered to generate and to evaluate.
        per_micro_batch: Parameters that are gathered for a forward and a backward pass, and gradients.
        micro_batches: Micro-batches of an update.
        per_step: Gradients or parameters that are exchanged once for an optimizer step.
        steps: Optimizer steps of an update.
    """

    rollout: int = 0
    per_micro_batch: int = 0
    micro_batches: int = 0
    per_step: int = 0
    steps: int = 0

    @property
    def total(self) -> int:
        """Bytes of one update."""
        return self.rollout + self.per_micro_batch * self.micro_batches + self.per_step * self.steps


@dataclass(frozen=True)
class Estimate:
    """Bytes per device, and the arithmetic of one update.

    Attributes:
        weights: Parameters of policy and value model.
        frozen: Parameters of reference and reward models.
        gradients: Gradients of the trained parameters, and under DDP the buckets in which they are exchanged.
        optimizer: State of the optimizer, and DeepSpeed's float32 copy of 16-bit weights.
        generating_weights: The policy's weights in the type of products, or gathered if weights are sharded.
        generated_row: Key-value cache and last logits of one row.
        rows: Episodes of the process.
        rows_per_call: Most rows in one generation call.
        learning: Activations of one micro-batch, of both models or of the larger one, with autocast's copies of
            weights; the logits of one chunk, and the head's gradient; parameters that are gathered in a pass.
        flops: Floating-point operations of one update.
        decoded_per_call: Bytes that decoding reads in one call: the policy's weights once for each token.
        freed: Gradients that do not exist while the policy generates.
        rows_per_micro_batch: Rows of one pass with gradient.
        rows_per_step: Rows of an optimizer step.
        learning_row: The part of `learning` that each row of a micro-batch adds.
        host: Bytes of all models, which the processes of a node hold once on the host while they are loaded and
            converted; under FSDP2 those of the trained models and of one frozen model.
        gathered_weights: Bytes of the weights that a checkpoint gathers on the host of the first process.
        gathered_optimizer: Those of the optimizer's state, with FSDP2's `FULL_STATE_DICT`.
        communication: Bytes that each process exchanges.
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
    freed: int
    rows_per_micro_batch: int
    rows_per_step: int
    learning_row: int
    host: int
    gathered_weights: int
    gathered_optimizer: int
    communication: Communication

    @property
    def resident(self) -> int:
        """Bytes that are always held."""
        return self.weights + self.frozen + self.gradients + self.optimizer

    @property
    def generation(self) -> int:
        """Bytes of one generation call, beside the resident ones."""
        return self.generating_weights + self.generated_row * min(self.rows_per_call, self.rows)

    @property
    def decoded(self) -> int:
        """Bytes that decoding reads in one update."""
        return self.decoded_per_call * -(-self.rows // self.rows_per_call)

    @property
    def peak(self) -> int:
        """Most bytes held at one time: while generating, or while learning."""
        return self.resident + max(self.generation - self.freed, self.learning)

    def seconds(self, flops_per_second: float, bytes_per_second: float) -> float:
        """Return the seconds of one update on a device with these rates."""
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
    forward passes, and one more if activations are recomputed. Heads cost `2 H V` for each response token.

    Args:
        policy: The trained language model.
        value_model: The trained value model.
        frozen: Reference and reward models that have weights of their own, the reference first.
        workload: The shape of the update.
        optimizer_bytes: Bytes of optimizer state for each trained parameter, see `optimizer_bytes_per_parameter`.
        sharding: Memory that processes share.
        autocast: Makes the context of the passes.
        offloads: Whether frozen models are on the device one at a time.
    """
    count = _UpdateCounter(policy, value_model, frozen, workload, sharding, autocast)
    stored, learned = sharding.stored, count.learned
    gradients = stored_bytes(learned, torch.float32 if stored else None) * (2 if sharding.buckets else 1)
    is_sharded, num_learned = sharding.weights > 1, sum(map(num_elements, learned))
    frozen_bytes = count.frozen_bytes()
    gathered_outside, reduced_outside = count.outside_block_bytes()
    learning, learning_rows = count.learning_bytes()
    return Estimate(
        weights=stored_bytes(count.trained, stored) // sharding.weights,
        frozen=(max(frozen_bytes, default=0) if offloads else sum(frozen_bytes)) // sharding.weights,
        gradients=gradients // sharding.gradients + sharding.reduces_once * is_sharded * 4 * num_learned,
        optimizer=int((optimizer_bytes + (4 if stored else 0)) * num_learned) // sharding.optimizer,
        generating_weights=max(count.generating_weights(), gathered_outside),
        generated_row=count_cache_bytes(policy, 1, workload.length, autocast, sharding.in_passes)
        + 4 * text_config(policy).vocab_size,
        rows=workload.rows,
        rows_per_call=workload.rows_per_call,
        learning=max(learning, gathered_outside, reduced_outside),
        flops=count.flops(),
        decoded_per_call=stored_bytes(policy.parameters()) * workload.response_length,
        freed=0 if stored else gradients // (2 if sharding.buckets else 1) // sharding.gradients,
        rows_per_micro_batch=workload.rows_per_micro_batch,
        rows_per_step=workload.rows // workload.num_mini_batches,
        learning_row=learning_rows // workload.rows_per_micro_batch,
        host=count.host_bytes(),
        gathered_weights=is_sharded * stored_bytes(count.trained, stored),
        gathered_optimizer=int(is_sharded * sharding.is_fsdp * optimizer_bytes * num_learned),
        communication=count.communication(),
    )


@dataclass(frozen=True)
class _UpdateCounter:
    """Counts the parts of `estimate_update`, whose arguments its attributes are."""

    policy: nn.Module
    value_model: nn.Module
    frozen: Sequence[nn.Module]
    workload: Workload
    sharding: Sharding
    autocast: Callable[[], AbstractContextManager[Any]]

    @cached_property
    def trained(self) -> set[nn.Parameter]:
        """Parameters of policy and value model."""
        return {*self.policy.parameters(), *self.value_model.parameters()}

    def host_bytes(self) -> int:
        """Bytes of all models.

        FSDP2 shards each frozen model before the next one is loaded or made, so only the largest counts.
        """
        frozen = sorted(self.frozen, key=lambda model: stored_bytes(model.parameters()))
        kept = frozen[-1:] if self.sharding.is_fsdp else frozen
        modules = [module for model in (self.policy, self.value_model, *kept) for module in model.modules()]
        return stored_bytes(value for each in modules for value in each.parameters(False))

    @cached_property
    def learned(self) -> list[nn.Parameter]:
        """Those with a gradient."""
        return [value for value in self.trained if value.requires_grad]

    @cached_property
    def micro_batch(self) -> list[PassCost]:
        """Costs of a micro-batch's passes, of policy and value model."""
        return [self._count_pass(model) for model in (self.policy, self.value_model)]

    def _count_pass(self, model: nn.Module) -> PassCost:
        rows, length = self.workload.rows_per_micro_batch, self.workload.length
        return count_pass(model, rows, length, self.autocast, self.sharding.in_passes)

    def frozen_bytes(self) -> list[int]:
        """Count each frozen model's weights that no trained model shares."""
        stored = self.sharding.stored
        return [stored_bytes(set(model.parameters()) - self.trained, stored) for model in self.frozen]

    def outside_block_bytes(self) -> tuple[int, int]:
        """Count FSDP2's memory to gather all parameters outside blocks, and to reduce their gradients at the end.

        Each exists twice: as processes exchange it, gradients in float32, and as the models have it.
        """
        if not self.sharding.is_fsdp or self.sharding.processes == 1:
            return 0, 0
        outside, gathered = outside_blocks(self.policy, self.value_model), self.sharding.gathered
        learned = [value for value in outside if value.requires_grad]
        reduced = stored_bytes(learned, gathered) + stored_bytes(learned, torch.float32)
        return 2 * stored_bytes(outside, gathered), reduced

    def generating_weights(self) -> int:
        """Count the copies of the policy's weights that generation makes."""
        workload, sharding, in_passes = self.workload, self.sharding, self.sharding.in_passes
        head, in_float32 = cast(Any, output_layer(self.policy)).weight, is_in_float32(output_layer(self.policy))
        is_widened = in_float32 and (in_passes or head.dtype) != torch.float32
        head_bytes = torch.float32.itemsize * num_elements(head) if is_widened else 0
        if sharding.weights > 1:  # FSDP2 gathers all parameters outside both models' blocks at once
            besides = outside_blocks(self.value_model) if sharding.is_fsdp else set[nn.Parameter]()
            return stored_bytes({*self.policy.parameters(), *besides}, in_passes) + head_bytes
        if workload.dtype is None or in_passes is not None:
            return head_bytes
        if workload.copies_policy:
            return stored_bytes(self.policy.parameters(), workload.dtype) + head_bytes
        if not in_float32 and not head.requires_grad and head.dtype == torch.float32:  # cast for a call
            head_bytes = workload.dtype.itemsize * num_elements(head)
        return cast_bytes(self.policy, workload.dtype) + head_bytes

    def flops(self) -> int:
        """Count the floating-point operations."""
        workload = self.workload
        per_row = [cost.flops / workload.rows_per_micro_batch for cost in self.micro_batch]
        frozen = [count_pass(model, 1, workload.length, self.autocast).flops for model in self.frozen]
        config = text_config(self.policy)
        head = 2 * config.hidden_size * config.vocab_size * workload.response_length
        trained_passes = 1 + workload.num_ppo_epochs * (4 if workload.recomputes else 3)
        rollout = per_row[0] + sum(frozen) + (1 + workload.has_reference) * head  # generation; the reference's head
        return int(workload.rows * (rollout + trained_passes * (sum(per_row) + head)))

    def learning_bytes(self) -> tuple[int, int]:
        """Count the peak of a forward and backward pass beside weights, gradients and the optimizer's state.

        The peak is at the end of the forward pass, with autocast's copies of weights; at the start of the backward
        pass, in the head; or, if activations are recomputed, in a block's backward pass.

        Returns:
            The peak, and the part of it that grows with the rows.
        """
        heads = (self._head_bytes(), 0)
        models = list(zip((self.policy, self.value_model), self.micro_batch, heads, strict=True))
        parts = [self._activation_bytes(*given) for given in models]
        sharded = self.sharding.weights > 1
        gathered = [gathered_bytes(model, self.sharding.in_passes) if sharded else 0 for model, *_ in models]
        most: Callable[[Iterable[int]], int] = max if self.workload.sequential_backward else sum
        peak, rows = (most(each) for each in zip(*parts, strict=True))
        return peak + sum(gathered), rows

    def _activation_bytes(self, model: nn.Module, cost: PassCost, head: int) -> tuple[int, int]:
        if not self.workload.recomputes:
            return cost.saved_bytes + head, cost.saved_bytes
        dtype = None if self.sharding.in_passes else self.workload.dtype
        casts = 0 if dtype is None else cast_bytes(model, dtype)
        with in_eval_mode(model):  # nothing is recomputed
            whole = self._count_pass(model)
        block = whole.saved_bytes // text_config(model).num_hidden_layers
        return cost.saved_bytes + max(head, casts, block), cost.saved_bytes + block

    def _head_bytes(self) -> int:
        """Count the policy's head in learning: the logits of a chunk, its gradient, its weight in products' type."""
        workload, in_passes = self.workload, self.sharding.in_passes
        weight: Any = output_layer(self.policy).weight
        stored = in_passes or weight.dtype
        in_float32 = is_in_float32(output_layer(self.policy))
        dtype = torch.float32 if in_float32 else in_passes or workload.dtype or weight.dtype
        num_tokens = workload.rows_per_micro_batch * workload.response_length
        vocabulary = text_config(self.policy).vocab_size
        most = max_chunk_elements(weight)
        logits = min(most, num_tokens * vocabulary) * (6 if dtype.itemsize == 2 else 4)
        on_cpu = weight.device.type == "cpu"
        added_in = weight_gradient_dtype(stored, dtype, num_tokens, vocabulary, most, on_cpu)
        gradient = added_in.itemsize * num_elements(weight) if weight.requires_grad else 0
        return logits + gradient + (dtype.itemsize * num_elements(weight) if stored != dtype else 0)

    def communication(self) -> Communication:
        """Count the bytes that an update exchanges.

        DDP and ZeRO-1 reduce gradients once for an optimizer step, ZeRO-2, ZeRO-3 and FSDP2 for every micro-batch;
        ZeRO-3 and FSDP2 also gather parameters for every forward and backward pass, FSDP2 those outside blocks once
        for both. With `reduces_once` FSDP2 reduces gradients once for a step. Of `S` bytes and `n` processes, each
        sends `S (n - 1) / n` in an all-gather or a reduce-scatter, twice that in an all-reduce. Gradients have 4
        bytes. Norms, metrics and buffers are left out.
        """
        workload, sharding = self.workload, self.sharding
        stage = 3 if sharding.weights > 1 else 2 if sharding.gradients > 1 else 1 if sharding.optimizer > 1 else 0
        gradients = 4 * sum(map(num_elements, self.learned))
        rollout, per_pass = self._gathered_bytes() if stage == 3 else (0, 0)
        reduced = {2: 2 * gradients, 3: gradients}.get(stage, 0)
        per_micro_batch = per_pass + (0 if sharding.reduces_once else reduced)
        per_step = reduced if sharding.reduces_once else 2 * gradients if stage < 2 else 0
        per_step += stored_bytes(self.learned, sharding.stored) if stage in (1, 2) else 0
        share = (sharding.processes - 1) / sharding.processes
        return Communication(
            int(share * rollout),
            int(share * per_micro_batch),
            workload.num_ppo_epochs * -(-workload.rows // workload.rows_per_micro_batch),
            int(share * per_step),
            workload.num_ppo_epochs * workload.num_mini_batches,
        )

    def _gathered_bytes(self) -> tuple[int, int]:
        """Count the parameters that are gathered in a rollout, and in a forward and a backward pass."""
        workload, dtype = self.workload, self.sharding.in_passes
        policy, whole = set(self.policy.parameters()), stored_bytes(self.trained, dtype)
        frozen = sum(stored_bytes(model.parameters(), dtype) for model in self.frozen)
        passes = -(-workload.rows // workload.rows_per_call)
        if not self.sharding.is_fsdp:
            return stored_bytes(policy, dtype) + passes * (whole + frozen), 2 * whole
        outer = outside_blocks(self.policy, self.value_model)
        outside, generating = stored_bytes(outer, dtype), stored_bytes(policy | outer, dtype)
        return generating + outside + passes * (whole - outside + frozen), 2 * whole - outside


# ---- Counting without storage ----

_CPU_ATTENTION = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: (
        lambda query, key, value, *_, **__: sdpa_flop_count(query, key, value)
    )
}
"""The attention that torch's counter does not know."""


class NoStorage(FakeTensorMode):
    """A context in which new tensors have shapes and a device, and no storage; a copy of one stays in its context.

    torch would copy the context too, with weak references that are then released twice: later, the program crashes.
    """

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self


@dataclass(frozen=True)
class PassCost:
    """Costs of one forward pass of a model's backbone, without its head.

    Attributes:
        saved_bytes: Bytes that autograd keeps for the backward pass, without parameters.
        flops: Floating-point operations, two per multiply-add.
    """

    saved_bytes: int
    flops: int


def count_pass(
    model: nn.Module,
    rows: int,
    length: int,
    autocast: Callable[[], AbstractContextManager[Any]] = nullcontext,
    stored: torch.dtype | None = None,
) -> PassCost:
    """Count memory and arithmetic of a forward pass over `rows` full rows, in the model's current mode.

    Args:
        model: A transformers model, or a `PeftModel` around one; activation checkpointing counts as it is set.
        rows: Number of rows.
        length: Tokens of each.
        autocast: Makes the context of the pass.
        stored: The engine's type of floating-point parameters; None: their own.
    """
    body = backbone(model)
    saved: dict[int, int] = {}
    kept: list[Tensor] = []  # a storage that was freed could give its address to another
    with NoStorage(allow_non_fake_inputs=True), autocast():
        state = _state_without_storage(body, stored)
        own = {value.untyped_storage()._cdata for value in state.values()}

        def keep(value: Tensor) -> Tensor:
            if value.untyped_storage()._cdata not in own:
                kept.append(value)
                saved[value.untyped_storage()._cdata] = value.untyped_storage().nbytes()
            return value

        with (
            FlopCounterMode(display=False, custom_mapping=_CPU_ATTENTION) as counter,
            torch.autograd.graph.saved_tensors_hooks(keep, lambda value: value),
        ):
            _run(body, state, rows, length, use_cache=False)
    return PassCost(sum(saved.values()), counter.get_total_flops())


@torch.no_grad()
def count_cache_bytes(
    model: nn.Module,
    rows: int,
    length: int,
    autocast: Callable[[], AbstractContextManager[Any]] = nullcontext,
    stored: torch.dtype | None = None,
) -> int:
    """Count the key-value cache of `rows` full rows, under autocast in its type; arguments: those of `count_pass`."""
    body, device = backbone(model), next(model.parameters()).device.type
    # With recomputed activations, training mode makes no cache.
    with in_eval_mode(body), NoStorage(allow_non_fake_inputs=True), autocast():
        output = _run(body, _state_without_storage(body, stored), rows, length, use_cache=True)
        dtype = autocast_dtype(device)
    layers = getattr(getattr(output, CACHE, None), "layers", ())
    tensors = [value for layer in layers for value in vars(layer).values() if isinstance(value, Tensor)]
    storages: dict[int, int] = {}
    for value in tensors:
        if value.is_floating_point():
            storage = value.untyped_storage()
            storages[storage._cdata] = storage.nbytes() // value.itemsize * _type_in(value, dtype).itemsize
    return sum(storages.values())


def _run(body: nn.Module, state: dict[str, Tensor], rows: int, length: int, use_cache: bool) -> Any:
    ids = torch.zeros(rows, length, dtype=torch.long, device=next(body.parameters()).device)
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "use_cache": use_cache, "return_dict": True}
    return functional_call(body, state, kwargs=inputs)


def cast_bytes(model: nn.Module, dtype: torch.dtype) -> int:
    """Count autocast's 16-bit copies of the weights of a model's trained linear layers."""
    return sum(
        num_elements(module.weight) * dtype.itemsize
        for module in model.modules()
        if isinstance(module, nn.Linear)
        and not isinstance(module, Float32Linear)
        and module.weight.requires_grad
        and module.weight.dtype == torch.float32
    )


def outside_blocks(*models: nn.Module) -> set[nn.Parameter]:
    """Return the parameters outside the blocks that ZeRO-3 and FSDP2 gather one by one: embeddings, norms, heads."""
    return {value for model in models for value in model.parameters()} - {
        value for model in models for block in _blocks(model) for value in block.parameters()
    }


def _blocks(model: nn.Module) -> list[nn.Module]:
    names = no_split_modules(model)
    return [part for part in model.modules() if type(part).__name__ in names]


def gathered_bytes(model: nn.Module, dtype: torch.dtype | None) -> int:
    """Count the gathered parameters of a sharded model in a pass: all outside its blocks, a block and the next one.

    Args:
        model: The model.
        dtype: The type of gathered parameters; None: their own.
    """
    blocks = [stored_bytes(block.parameters(), dtype) for block in _blocks(model)]
    return stored_bytes(model.parameters(), dtype) - sum(blocks) + 2 * max(blocks, default=0)


def stored_bytes(parameters: Iterable[nn.Parameter], dtype: torch.dtype | None = None) -> int:
    """Return the bytes of parameters, each counted once.

    Args:
        parameters: The parameters, also sharded by ZeRO-3.
        dtype: The stored type of floating-point parameters; None: their own.
    """
    return sum(num_elements(value) * _type_in(value, dtype).itemsize for value in set(parameters))


def _type_in(value: Tensor, dtype: torch.dtype | None) -> torch.dtype:
    return value.dtype if dtype is None or not value.is_floating_point() else dtype


def _state_without_storage(body: nn.Module, stored: torch.dtype | None) -> dict[str, Tensor]:
    parameters = {name: _without_storage(value, stored) for name, value in body.named_parameters()}
    return parameters | {name: _without_storage(value, None) for name, value in body.named_buffers()}


def num_elements(parameter: Tensor) -> int:
    """Return the number of elements of a parameter, also if ZeRO-3 has sharded it."""
    return int(getattr(parameter, "ds_numel", parameter.numel()))


def copy_without_storage(model: nn.Module, kept: Iterable[Tensor]) -> nn.Module:
    """Copy a model for counting, before an engine shards it: its tensors have shapes, types and a device only.

    Args:
        model: The model.
        kept: Parameters that it may share with another model; the copy shares them too.
    """
    own = {id(value): value for value in kept}
    with NoStorage():
        for value in (*model.parameters(), *model.buffers()):
            if id(value) not in own:
                empty = _without_storage(value, None)
                own[id(value)] = nn.Parameter(empty, value.requires_grad) if isinstance(value, nn.Parameter) else empty
    return copy.deepcopy(model, own)


def _without_storage(value: Tensor, dtype: torch.dtype | None) -> Tensor:
    shape = getattr(value, "ds_shape", value.shape)
    return torch.empty(shape, dtype=_type_in(value, dtype), device=value.device, requires_grad=value.requires_grad)
