"""Processes of a run: log messages, errors of one rank, isolated random numbers and streams of a user's code."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset
from transformers import TrainerCallback

from rlhf_ppo import PPOTrainer
from rlhf_ppo.run import distributed
from rlhf_ppo.run.distributed import (
    RngStream,
    isolated_rng,
    raise_on_all_ranks,
    upcoming_seed,
)
from tests.conftest import count_w4, prompt_rows
from tests.runs import QUICK, assert_identical, end_of_run

MakeTrainer = Callable[..., PPOTrainer]
Numbers = tuple[float, float, float]


def draw() -> Numbers:
    return random.random(), float(np.random.rand()), float(torch.rand(()))


def test_without_an_error_no_objects_are_exchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under NCCL they travel through the device, for which the host waits several times."""
    exchanged: list[Any] = []
    monkeypatch.setattr(distributed, "gather_object", lambda objects: exchanged.extend(objects) or objects)
    two: Any = SimpleNamespace(num_processes=2, process_index=1)
    with raise_on_all_ranks(two):
        pass
    assert exchanged == []
    with pytest.raises(ValueError, match="mine"), raise_on_all_ranks(two):
        raise ValueError("mine")
    assert [str(error) for error in exchanged] == ["rank 1 failed: mine"]


# ---- Random numbers ----


def seed_all(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def test_a_block_draws_by_its_seed_and_leaves_every_generator_as_it_was() -> None:
    seed_all(0)
    undisturbed = draw(), draw()
    seed_all(0)
    first = draw()
    with isolated_rng(7, device_specific=False):
        inside = draw()
    assert (first, draw()) == undisturbed
    seed_all(7)
    assert inside == draw()


def test_an_upcoming_seed_takes_nothing_and_follows_the_generators_and_the_label() -> None:
    torch.manual_seed(0)
    undisturbed = torch.rand(())
    torch.manual_seed(0)
    seeds = upcoming_seed("a"), upcoming_seed("a"), upcoming_seed("b")
    assert torch.equal(torch.rand(()), undisturbed)
    assert seeds[0] == seeds[1] != seeds[2]
    assert upcoming_seed("a") != seeds[0]
    assert all(0 <= seed < 2**32 for seed in seeds)


# ---- Streams of reward functions and callbacks ----


class Draws(TrainerCallback):
    """Draws at every event of an update."""

    def __init__(self) -> None:
        self.drawn: list[Numbers] = []

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        self.drawn.append(draw())

    on_substep_end = on_pre_optimizer_step = on_optimizer_step = on_step_end = on_log = on_evaluate = on_step_begin


def count(prompts: Any, completions: Any, completion_ids: Any, **columns: Any) -> list[float]:
    """The plain reward, by the name of the one that draws."""
    return count_w4(prompts, completions, completion_ids)


def drawing(drawn: list[Numbers], is_async: bool = False) -> Callable[..., Any]:
    """The plain reward, after drawing."""

    def count(prompts: Any, completions: Any, completion_ids: Any, **columns: Any) -> list[float]:
        drawn.append(draw())
        return count_w4(prompts, completions, completion_ids)

    async def count_later(prompts: Any, completions: Any, completion_ids: Any, **columns: Any) -> list[float]:
        await asyncio.sleep(0.01)
        return count(prompts, completions, completion_ids)

    count_later.__name__ = "count"
    return count_later if is_async else count


@pytest.mark.parametrize("is_async", [False, True])
def test_code_that_draws_changes_nothing_of_a_run(is_async: bool, make_trainer: MakeTrainer) -> None:
    run = {**QUICK, "eval_dataset": Dataset.from_list(prompt_rows(4)), "eval_strategy": "steps", "eval_steps": 1}
    ends, by_reward, callback = [], [], Draws()
    for is_drawing in (False, True):
        reward = drawing(by_reward, is_async) if is_drawing else count
        trainer = make_trainer(**run, reward_funcs=reward, callbacks=[callback] if is_drawing else [])
        trainer.train()
        ends.append(end_of_run(trainer))
    assert_identical(*ends)
    assert len(by_reward) == 6 and by_reward[1] == by_reward[3] == by_reward[5], "those of the evaluations"
    for drawn in (by_reward[::2], callback.drawn):
        assert all(len(set(numbers)) == len(numbers) > 2 for numbers in zip(*drawn, strict=True))


def test_a_stream_goes_on_where_it_was_and_leaves_the_others_alone() -> None:
    torch.manual_seed(0)
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()  # pyright: ignore
    stream, same, other = RngStream("rewards"), RngStream("rewards"), RngStream("callbacks")
    for each in (stream, same, other):
        each.seed(3, 0)
    with stream.in_use():
        first = draw()
        with stream.in_use():
            second = draw()
    saved = stream.state()
    with stream.in_use():
        third = draw()
    with stream.reseeded(5), stream.in_use():
        apart = draw()
    with stream.in_use():
        fourth = draw()
    with same.in_use():
        assert [draw() for _ in range(4)] == [first, second, third, fourth]
    same.restore(saved)
    with same.in_use(), other.in_use():
        of_other = draw()
    with same.in_use():
        assert draw() == third
    assert len({first, second, third, fourth, apart, of_other}) == 6
    after = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()  # pyright: ignore
    assert torch.equal(before[0], after[0]) and before[1:] == after[1:]
