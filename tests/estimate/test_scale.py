"""The simulation of one rank under FSDP2 beside the estimate, and what several processes load and exchange."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from benchmarks.scale import Shape, accelerator_of, compared, estimated, models_of, ranks, simulate
from rlhf_ppo.estimate.run import describe_processes, largest_micro_batch
from rlhf_ppo.estimate.update import Communication, Estimate, Sharding, Workload, estimate_update, stored_bytes
from rlhf_ppo.models.frozen import FrozenPolicy
from rlhf_ppo.training.construction import place_frozen

WORKLOAD = Workload(
    rows=64, rows_per_call=64, rows_per_micro_batch=4, prompt_length=64, response_length=64, num_ppo_epochs=1,
    recomputes=True, dtype=torch.bfloat16,
)  # fmt: skip
SMALL = Shape(256, 2, 4, 4, 1024, 4096)


@pytest.mark.filterwarnings("error:FSDP2-wrapped module")
@pytest.mark.parametrize(
    ("shape", "rows"), [(SMALL, 4), (Shape(256, 1, 4, 2, 512, 32768), 1)], ids=["blocks", "embeddings"]
)
def test_one_simulated_rank_of_8_holds_and_sends_what_is_estimated(shape: Shape, rows: int) -> None:
    """Where embeddings are most of a model, their gradients are, too: with one row, more than activations."""
    workload = replace(WORKLOAD, rows_per_micro_batch=rows)
    found = simulate(shape, 8, workload)
    pairs = compared(found, estimated(shape, 8, workload), 8)
    assert {name: here == pytest.approx(there, rel=0.1) for name, (here, there) in pairs.items()} == dict.fromkeys(
        pairs, True
    ), pairs
    blocks = 2 * shape.layers  # gathered for each pass; what is outside of them is gathered once, after a rollout too
    assert [(name, number) for name, number, _ in found.micro_batch] == [
        ("allgather", 2 * blocks + 1),
        ("reduce_scatter", blocks + 1),
    ]
    assert pairs["a micro-batch"][0] == pytest.approx(pairs["a micro-batch"][1], rel=1e-3)


def of_engine(
    stage: int | None, is_fsdp: bool, processes: int, reduces_once: bool = False, **changes: Any
) -> Estimate:
    policy, value_model, reference = models_of(Shape(16, 2, 2, 1, 24, 50))
    sharding = Sharding.of(stage, is_fsdp, processes, torch.bfloat16, reduces_once)
    workload = replace(WORKLOAD, recomputes=False, num_ppo_epochs=3, num_mini_batches=2, **changes)
    return estimate_update(policy, value_model, [reference], workload, 8.0, sharding)


def test_what_engines_exchange_by_hand() -> None:
    """Of 4 processes, each sends three quarters of what it gathers or reduces, and twice that in an all-reduce."""
    layers, embeddings = 2 * (2 * 16 * 16 + 2 * 8 * 16 + 3 * 16 * 24 + 2 * 16), 50 * 16
    policy, value_model = layers + 2 * embeddings + 16, layers + embeddings + 2 * 16
    trained = policy + value_model
    micro_batches, steps = 3 * 16, 3 * 2  # 64 rows, 4 at once; two mini-batches

    def sent(rollout: int, per_micro_batch: int, per_step: int) -> Communication:
        shares = (3 * each // 4 for each in (rollout, per_micro_batch, per_step))
        rollout, per_micro_batch, per_step = shares
        return Communication(rollout, per_micro_batch, micro_batches, per_step, steps)

    assert of_engine(None, False, 4).communication == sent(0, 0, 2 * 4 * trained)
    assert of_engine(1, False, 4).communication == sent(0, 0, (2 * 4 + 2) * trained)
    assert of_engine(2, False, 4).communication == sent(0, 2 * 4 * trained, 2 * trained)
    in_rollout = policy + 2 * (trained + policy)  # to generate; two calls of 32 rows, with the reference
    assert of_engine(3, False, 4, rows_per_call=32).communication == sent(2 * in_rollout, (2 * 2 + 4) * trained, 0)
    outside = trained - 2 * layers
    in_rollout = (policy - layers + value_model - layers + layers) + outside + 2 * (2 * layers + policy)
    in_passes = 2 * (outside + 2 * 2 * layers) + 4 * trained
    assert of_engine(None, True, 4, rows_per_call=32).communication == sent(2 * in_rollout, in_passes, 0)
    assert of_engine(None, False, 1).communication.total == of_engine(None, True, 1).communication.total == 0
    once = of_engine(None, True, 4, reduces_once=True)
    assert once.communication == sent(
        of_engine(None, True, 4).communication.rollout * 4 // 3, in_passes - 4 * trained, 4 * trained
    )
    assert once.gradients == 4 * trained // 4 + 4 * trained
    for stage, is_fsdp, gathered in (
        (2, False, (0, 0)),
        (3, False, (2 * trained, 0)),
        (None, True, (4 * trained, 8 * trained)),
    ):
        engine = of_engine(stage, is_fsdp, 4)
        assert engine.host == 4 * (trained + policy)
        assert (engine.gathered_weights, engine.gathered_optimizer) == gathered


def test_fsdp_has_one_whole_frozen_model_on_the_host() -> None:
    """The larger of two: each is sharded before the next is loaded."""
    policy, value_model, reference = models_of(Shape(16, 2, 2, 1, 24, 50))
    reward = models_of(Shape(16, 2, 2, 1, 24, 50))[1]
    given = (policy, value_model, [reference, reward], WORKLOAD, 8.0)
    size_of = {model: stored_bytes(model.parameters()) for model in (policy, value_model, reference, reward)}
    assert size_of[reward] < size_of[reference]
    assert estimate_update(*given, Sharding.of(None, False, 4)).host == sum(size_of.values())
    assert estimate_update(*given, Sharding.of(None, True, 4)).host == sum(size_of.values()) - size_of[reward]


def test_what_is_said_of_several_processes() -> None:
    """Half a gigabyte for each of 4 micro-batches of 2 rows; with 4 rows there are 2 of them."""
    made = of_engine(None, True, 4)
    estimate = replace(
        made, weights=10, frozen=0, gradients=0, optimizer=0, learning=20, learning_row=10, rows_per_micro_batch=2,
        rows_per_step=8, host=2**30, gathered_weights=2**31, gathered_optimizer=2**32,
        communication=Communication(2**30, 2**29, 4, 0, 1),
    )  # fmt: skip
    assert describe_processes(replace(estimate, communication=Communication()), 1.0, None) == ""
    said = describe_processes(estimate, 1.0, None)
    assert said == (
        "Host memory of each node while models are loaded: 1 GiB. "
        "Each process sends 3 GiB per update, which takes 0.011 s at 300 GB/s and 0.064 s at 50 GB/s. "
        "A checkpoint gathers 2 GiB in the first process's host memory, and 4 GiB with FULL_STATE_DICT."
    )
    without = replace(estimate, gathered_weights=0, gathered_optimizer=0)
    assert describe_processes(without, 1.0, None) == said.partition(" A checkpoint")[0]
    advised = describe_processes(estimate, 0.06, None)
    assert advised.startswith(said) and "Each of 4 micro-batches sends 512 MiB of it" in advised
    assert describe_processes(estimate, 0.06, 56 / 0.9).endswith("4 rows would fit, and 2 GiB would be sent.")
    assert describe_processes(estimate, 0.06, 30 / 0.9).endswith("; none larger would fit.")
    assert [largest_micro_batch(estimate, memory / 0.9) for memory in (1, 31, 41, 1000)] == [1, 2, 3, 8]


def test_a_frozen_model_is_not_whole_on_a_device() -> None:
    """`fully_shard` moves one block at a time to its mesh's device; the meta device would show a model moved whole."""
    with ranks(8):
        accelerator = accelerator_of(8)
        accelerator.device = torch.device("meta")
        *_, reference = models_of(Shape(16, 2, 2, 1, 24, 50))
        frozen: Any = place_frozen(FrozenPolicy(reference, 1.0), accelerator)
        assert {value.device.type for value in frozen.parameters()} == {"cpu"}
        here = sum(value.to_local().numel() for value in frozen.parameters())
        assert here < 0.2 * sum(value.numel() for value in frozen.parameters())
