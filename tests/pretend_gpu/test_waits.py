"""Where the host waits for the device in an update of one process, by phase."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import pretend  # pyright: ignore[reportMissingImports]
import pytest

from tests.gpu.conftest import MakeTrainer, device, make_device_trainer  # noqa: F401

EXPECTED = {
    "generate": {
        "generation/sampling.py:join_responses": 1,
        "generation/sampling.py:sample_with": 1,
        "generation/transformers_engine.py:_repeats": 1,
        "generation/transformers_engine.py:check_beside": 3,
    },
    "score": {"rewards/scorer.py:_rows": 1, "rewards/scorer.py:weighted_sum": 1},
    "learn": {"trainer.py:optimizer_step": 2, "run/rollouts.py:check_step": 2},
}
"""Waits of an update of two mini-batches, of two micro-batches each, without those in transformers.

In generation the host must know whether adjacent prompts are equal, which rows go on after each of three calls of
`generate`, whether the engine sampled all tokens, and how long the responses are: the next shapes follow from it.
"""


@pytest.fixture
def waits(make_device_trainer: MakeTrainer) -> Iterator[dict[str, Counter[str]]]:  # noqa: F811
    """Waits of the second of two updates by phase, each by the place in the package that caused it."""
    trainer = make_device_trainer(
        per_device_train_batch_size=4, gradient_accumulation_steps=2, num_ppo_epochs=1, num_mini_batches=2,
        max_steps=2, response_length=8,
    )  # fmt: skip
    counted: dict[str, Counter[str]] = {}

    def count(operation: str) -> None:
        if trainer.state.global_step == 1:
            counted.setdefault(trainer._run.timer.running, Counter())[pretend.caller()] += 1

    with pretend.watching(count):
        trainer.train()
    yield counted


@pytest.mark.parametrize("phase", EXPECTED)
def test_the_host_waits_where_it_must_and_nowhere_else(phase: str, waits: dict[str, Counter[str]]) -> None:
    own = {place: count for place, count in waits[phase].items() if " via " not in place}
    assert own == EXPECTED[phase]


def test_a_micro_batch_waits_at_most_twice(waits: dict[str, Counter[str]]) -> None:
    """Of learning's waits only these are of its steps; the others are once an update."""
    of_steps = waits["learn"]["trainer.py:optimizer_step"] + waits["learn"]["run/rollouts.py:check_step"]
    assert 0 < of_steps <= 2 * 4
