"""Processes of a run: log messages, errors of one rank, isolated random numbers and streams of a user's code."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset
from transformers import TrainerCallback

from rlhf_ppo.ranks.random_streams import isolated_rng, upcoming_seed
from tests.conftest import count_w4, prompt_rows
from tests.runs import QUICK, MakeTrainer, assert_identical, end_of_run

Numbers = tuple[float, float, float]


def draw() -> Numbers:
    return random.random(), float(np.random.rand()), float(torch.rand(()))


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
    with isolated_rng(7):
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
        await asyncio.sleep(0.001)
        return count(prompts, completions, completion_ids)

    count_later.__name__ = "count"
    return count_later if is_async else count


@pytest.mark.usefixtures("slow_exchanges")
@pytest.mark.parametrize("is_async", [False, True])
def test_code_that_draws_changes_nothing_of_a_run(is_async: bool, make_trained: MakeTrainer) -> None:
    run = {**QUICK, "eval_dataset": Dataset.from_list(prompt_rows(4)), "eval_strategy": "steps", "eval_steps": 1}
    ends, by_reward, callback = [], [], Draws()
    for is_drawing in (False, True):
        reward = drawing(by_reward, is_async) if is_drawing else count
        trainer = make_trained(**run, reward_funcs=reward, callbacks=[callback] if is_drawing else [])
        ends.append(end_of_run(trainer))
    assert_identical(*ends)
    assert len(by_reward) == 6 and by_reward[1] == by_reward[3] == by_reward[5], "those of the evaluations"
    for drawn in (by_reward[::2], callback.drawn):
        assert all(len(set(numbers)) == len(numbers) > 2 for numbers in zip(*drawn, strict=True))
