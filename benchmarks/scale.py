"""Simulate one rank of 8 or 64 under FSDP2, without weights and without the other ranks, beside what is estimated.

Tensors are fake (they have shapes and no storage) and the process group is torch's fake one, whose collectives do
nothing. All else is real: accelerate shards policy and value model, this package the reference, FSDP2 gathers and
reduces, and each storage that an operation makes is counted until it is freed. Activations are recomputed, products
are in bf16. Nothing is measured: streams, fragments of the allocator and NCCL's own buffers are not there.

The table is in GB for each rank, and in brackets what the package estimates. *Construction*: the most while policy,
value model and reference are sharded: the whole models, which are a node's, and a copy of the largest parameter.
*Generation*: the most while 64 rows of 512 + 512 tokens generate; *learning*: while 4 rows are learned from. *A
micro-batch*, *an update*: bytes that each rank sends; an update has 16 micro-batches.
"""

from __future__ import annotations

import argparse
import weakref
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification

from rlhf_ppo.data.rollout import PackedIndices
from rlhf_ppo.estimate.update import Estimate, NoStorage, Sharding, Workload, estimate_update
from rlhf_ppo.models.frozen import FrozenPolicy
from rlhf_ppo.models.policy_and_value import PolicyAndValue
from rlhf_ppo.models.unwrapping import as_in_learning, in_eval_mode
from rlhf_ppo.training.construction import place_frozen, set_up_engine
from rlhf_ppo.training.rollouts import on_whole_policy


class Shape(NamedTuple):
    """A Llama: width, layers, heads, heads of keys, width of the MLP, vocabulary, and whether its head is tied."""

    width: int
    layers: int
    heads: int
    keys: int
    inner: int
    vocabulary: int
    tied: bool = False


SHAPES = {  # of Llama 3.2 1B, Llama 3.1 8B, Qwen2.5 32B
    "1B": Shape(2048, 16, 32, 8, 8192, 128256, tied=True),
    "8B": Shape(4096, 32, 32, 8, 14336, 128256),
    "32B": Shape(5120, 64, 40, 8, 27648, 152064),
}
WORLDS = (8, 64)
WORKLOAD = Workload(
    rows=64, rows_per_call=64, rows_per_micro_batch=4, prompt_length=512, response_length=512, num_ppo_epochs=1,
    recomputes=True, dtype=torch.bfloat16,
)  # fmt: skip


class Held(TorchDispatchMode):
    """Counts the bytes of all storages that operations have made and that are not freed, and collectives.

    Attributes:
        now: Bytes that are held now.
        peak: The most since `restart`.
        calls: Number of each collective since then.
        moved: Bytes of each: the whole tensor's, of which a rank sends and receives all but its own part.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._sizes: dict[int, int] = {}
        self.restart()

    def restart(self) -> None:
        """Count peak and collectives anew."""
        self.peak, self.calls, self.moved = self.now, Counter[str](), Counter[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Do one operation, and count what it made."""
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # its parts come here again
        result = func(*args, **(kwargs or {}))
        if func.namespace == "c10d":
            name = func._opname.strip("_").removesuffix("_base")
            self.calls[name] += 1
            self.moved[name] += max(leaf.nbytes for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._note(leaf.untyped_storage())
        return result

    def _note(self, storage: Any) -> None:
        if storage._cdata not in self._sizes:
            self._sizes[storage._cdata] = 0
            weakref.finalize(storage, self._forget, storage._cdata)
            self._resized(storage._cdata, storage.nbytes())

    def _forget(self, key: int) -> None:
        self.now -= self._sizes.pop(key)

    def _resized(self, key: int, size: int) -> None:
        if key in self._sizes:
            self.now += size - self._sizes[key]
            self._sizes[key] = size
            self.peak = max(self.peak, self.now)

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Count while the context lasts."""
        resize = torch.UntypedStorage.resize_

        def resized(storage: Any, size: int) -> Any:
            result = resize(storage, size)
            self._resized(storage._cdata, size)
            return result

        with mock.patch.object(torch.UntypedStorage, "resize_", resized), self:
            yield


@dataclass
class Simulated:
    """What one rank holds and exchanges.

    Attributes:
        construction: The most while policy, value model and reference were sharded, with the whole models.
        largest: Bytes of the largest parameter, of which sharding makes a copy.
        resident: Weights, gradients and the optimizer's state.
        generation: The most in a decoding step with a full cache.
        learning: The most in a micro-batch.
        rollout: Collectives of a rollout: `(kind, number, bytes)`.
        micro_batch: Those of a forward and backward pass.
    """

    construction: int = 0
    largest: int = 0
    resident: int = 0
    generation: int = 0
    learning: int = 0
    rollout: list[tuple[str, int, int]] = field(default_factory=list)
    micro_batch: list[tuple[str, int, int]] = field(default_factory=list)


def models_of(shape: Shape) -> tuple[nn.Module, nn.Module, nn.Module]:
    """Make policy, value model and reference in float32."""
    config = LlamaConfig(
        hidden_size=shape.width, num_hidden_layers=shape.layers, num_attention_heads=shape.heads,
        num_key_value_heads=shape.keys, intermediate_size=shape.inner, vocab_size=shape.vocabulary,
        tie_word_embeddings=shape.tied, max_position_embeddings=4096, pad_token_id=0,
    )  # fmt: skip
    config.num_labels = 1
    return LlamaForCausalLM(config), LlamaForSequenceClassification(config), LlamaForCausalLM(config)


def accelerator_of(world: int) -> Any:
    """Make what stands for accelerate's Accelerator: a rank under accelerate_configs/fsdp2.yaml."""
    from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin

    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        reshard_after_forward=True,
        cpu_ram_efficient_loading=False,
        state_dict_type="FULL_STATE_DICT",
        mixed_precision_policy=MixedPrecisionPolicy(torch.bfloat16, torch.bfloat16, torch.bfloat16),
    )
    return SimpleNamespace(
        state=SimpleNamespace(fsdp_plugin=plugin, deepspeed_plugin=None),
        distributed_type=DistributedType.FSDP,
        mixed_precision="bf16",
        is_main_process=True,
        device=torch.device("cpu"),
        torch_device_mesh=init_device_mesh("cpu", (world,), mesh_dim_names=("dp_shard",)),
        parallelism_config=SimpleNamespace(fsdp_dim_names=["dp_shard"]),
        unwrap_model=lambda model, **_: model,
    )


@contextmanager
def ranks(world: int) -> Iterator[None]:
    """Be the first of so many ranks."""
    dist.init_process_group("fake", rank=0, world_size=world, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def simulate(shape: Shape, world: int, workload: Workload = WORKLOAD) -> Simulated:
    """Simulate a rank of so many."""
    from accelerate.utils.fsdp_utils import fsdp2_prepare_model

    held, found = Held(), Simulated()
    with ranks(world), ExitStack() as stack:
        accelerator = accelerator_of(world)
        stack.enter_context(NoStorage(allow_non_fake_inputs=True))
        stack.enter_context(held.counting())
        stack.enter_context(mock.patch("rlhf_ppo.models.frozen.pack_rows"))  # whose proof reads numbers
        policy, value_model, reference = models_of(shape)
        found.largest = max(value.nbytes for value in policy.parameters())
        models: Any = PolicyAndValue(policy, value_model, temperature=1.0)
        set_up_engine(accelerator, models)
        stack.enter_context(as_in_learning(True, None, policy, value_model))
        frozen = place_frozen(FrozenPolicy(reference, 1.0), accelerator)
        models = fsdp2_prepare_model(accelerator, models)
        found.construction = held.peak
        optimizer = torch.optim.AdamW(models.parameters(), fused=True)
        _learn(models, workload)
        _step(models, optimizer)
        found.generation, found.rollout = _rollout(models, frozen, accelerator, workload, held)
        _learn(models, workload)
        held.restart()
        _learn(models, workload)
        found.learning, found.micro_batch, found.resident = held.peak, _collectives(held), held.now
    return found


def _learn(models: nn.Module, workload: Workload) -> None:
    output = _passed(models, workload)
    (output.logprobs.sum() + output.values.sum()).backward()


def _step(models: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    nn.utils.clip_grad_norm_(models.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()


def _collectives(held: Held) -> list[tuple[str, int, int]]:
    return [(name, number, held.moved[name]) for name, number in sorted(held.calls.items())]


def _passed(model: nn.Module, workload: Workload, **given: Any) -> Any:
    shape = workload.rows_per_micro_batch, workload.length
    mask, response = torch.ones(shape).bool(), torch.ones(shape[0], workload.response_length).bool()
    with unset_fake_temporarily():
        places = PackedIndices.of(torch.ones(shape).bool(), torch.ones(shape[0], workload.response_length).bool())
    with torch.autocast("cpu", torch.bfloat16):
        return model(torch.zeros(shape).long(), mask, response, places=places, **given)


@torch.no_grad()
def _rollout(models: Any, frozen: nn.Module, accelerator: Any, workload: Workload, held: Held) -> Any:
    """Compute one token of each row beside a full cache, and evaluate some rows with each model."""

    def decode(policy: Any) -> None:
        config, rows = policy.config, workload.rows_per_call
        full = 2 * config.num_hidden_layers, rows, config.num_key_value_heads, workload.length, config.head_dim
        cache = torch.empty(full, dtype=torch.bfloat16)
        with in_eval_mode(policy), torch.autocast("cpu", torch.bfloat16):
            policy(torch.zeros(rows, 1).long(), use_cache=False)
        del cache

    held.restart()
    on_whole_policy(models, accelerator, True, decode)
    peak = held.peak
    _passed(models, workload, with_entropy=False)
    _passed(frozen, workload)
    return peak, _collectives(held)


def estimated(shape: Shape, world: int, workload: Workload = WORKLOAD) -> Estimate:
    """Return what the package estimates of the same run."""
    with NoStorage():
        policy, value_model, reference = models_of(shape)
    sharding = Sharding.of(None, True, world, torch.bfloat16)
    autocast = partial(torch.autocast, "cpu", torch.bfloat16)
    with as_in_learning(True, None, policy, value_model):
        return estimate_update(policy, value_model, [reference], workload, 8.0, sharding, autocast)


def compared(found: Simulated, estimate: Estimate, world: int) -> dict[str, tuple[float, float]]:
    """Pair what was simulated with what is estimated, in GB."""

    def sent(collectives: list[tuple[str, int, int]]) -> float:
        return sum(num_bytes for *_, num_bytes in collectives) * (world - 1) / world

    exchanged = estimate.communication
    pairs = {
        "construction": (found.construction, estimate.host + found.largest),
        "resident": (found.resident, estimate.resident),
        "generation": (found.generation, estimate.resident + estimate.generation - estimate.freed),
        "learning": (found.learning, estimate.resident + estimate.learning),
        "a micro-batch": (sent(found.micro_batch), exchanged.per_micro_batch),
        "an update": (sent(found.rollout) + sent(found.micro_batch) * exchanged.micro_batches, exchanged.total),
    }
    return {name: (here / 1e9, there / 1e9) for name, (here, there) in pairs.items()}


def main() -> None:
    """Simulate, and print a table."""
    parser = argparse.ArgumentParser(allow_abbrev=False, description=__doc__)
    parser.add_argument("sizes", nargs="*", default=SHAPES, help=f"of {', '.join(SHAPES)}")
    parser.add_argument("--ranks", nargs="+", type=int, default=WORLDS)
    options = parser.parse_args()
    columns = ["construction", "resident", "generation", "learning", "a micro-batch", "an update"]
    print(f"| model | ranks | {' | '.join(columns)} | collectives of a micro-batch |")
    print(f"|{' --- |' * (3 + len(columns))}")
    for size in options.sizes:
        for world in options.ranks:
            found = simulate(SHAPES[size], world)
            pairs = compared(found, estimated(SHAPES[size], world), world)
            cells = [f"{here:.1f} ({there:.1f})" for here, there in pairs.values()]
            kinds = ", ".join(f"{number} {name}" for name, number, _ in found.micro_batch)
            print(f"| {size} | {world} | {' | '.join(cells)} | {kinds} |", flush=True)


if __name__ == "__main__":
    main()
