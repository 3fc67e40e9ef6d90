"""Seeds are functions of what they are made from, and a block that draws leaves every generator as it was."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from rlhf_ppo.processes.random_numbers import isolated_rng, rng_kept, seed_of, upcoming_seed

Numbers = tuple[float, float, float]


def draw() -> Numbers:
    return random.random(), float(np.random.rand()), float(torch.rand(()))


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


def test_what_fails_inside_leaves_every_generator_as_it_was_too() -> None:
    seed_all(0)
    undisturbed = draw()
    seed_all(0)
    with pytest.raises(KeyError), rng_kept():
        draw()
        raise KeyError
    assert draw() == undisturbed


@pytest.mark.parametrize(("device_specific", "seed"), [(True, 7 + 3), (False, 7)])
def test_ranks_draw_the_same_only_when_asked(
    device_specific: bool, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("accelerate.utils.random.AcceleratorState", lambda: type("State", (), {"process_index": 3}))
    with isolated_rng(7, device_specific=device_specific):
        inside = draw()
    with isolated_rng(seed, device_specific=False):
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


def test_a_seed_is_a_function_of_the_label_and_of_each_number() -> None:
    seeds = [seed_of("a", 1, 2), seed_of("b", 1, 2), seed_of("a", 2, 1), seed_of("a", 1), seed_of("a", 12)]
    assert len(set(seeds)) == 5 and seeds[0] == seed_of("a", 1, 2)
    assert all(0 <= seed < 2**32 for seed in seeds)
