"""Benchmarks of agents: the optimum by dynamic programming, the documented rows, and the counters of episodes."""

from __future__ import annotations

import dataclasses
import json
import random
import runpy
import shlex
from pathlib import Path

import pytest

from rlhf_ppo import PPOConfig
from rlhf_ppo.data.conversation import check_versions

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("arguments", "best", "at_random"),
    [("", 1.0, 0.0124), ("--slippery --rate 0.8", 0.7846, 0.0124), ("--slippery --moves 50", 0.5459, 0.0139)],
)
def test_the_optimum_is_that_of_dynamic_programming(arguments: str, best: float, at_random: float) -> None:
    import lake

    assert lake.optimum(*lake.game_of(arguments)) == pytest.approx((best, at_random), abs=5e-5)


def test_the_example_takes_the_arguments_of_every_setting() -> None:
    import lake

    example = runpy.run_path(str(lake.EXAMPLE))
    names = {field.name for field in dataclasses.fields(PPOConfig)}
    for arguments in lake.SETTINGS.values():
        assert set(json.loads(example["command_line"](shlex.split(arguments)).options)) <= names


def test_no_simulated_player_beats_the_optimum() -> None:
    """The way along the left and the bottom edge, in the wind, wins as often as simulated games say."""
    import gymnasium
    import lake

    game, won = gymnasium.make("FrozenLake-v1", success_rate=0.8, max_episode_steps=20), 0
    policy = [1, 2, 1, 0, 1, 0, 1, 0, 2, 1, 1, 0, 0, 2, 2, 0]
    draws = random.Random(0)
    for _ in range(2000):
        place, _ = game.reset(seed=draws.randrange(10**9))
        over = cut = False
        while not (over or cut):
            place, reward, over, cut, _ = game.step(policy[place])
            won += float(reward)
    best, at_random = lake.optimum(4, 20, True, 0.8)
    assert at_random < won / 2000 < best + 0.03


def test_the_page_shows_the_tables_of_the_stored_runs() -> None:
    import agents
    from lake import read_results

    page = (ROOT / "docs" / "agents.md").read_text()
    assert agents.filled(page, read_results()) == page


def test_an_episode_is_read_once_and_tools_do_not_wait_for_each_other() -> None:
    try:
        check_versions()
    except ValueError as error:
        pytest.skip(str(error))
    from benchmarks.agents import ROWS, ours, play

    found = play(ours, 3)
    assert found["tokens read per episode token"] <= 1.05 and found["tools at once"] == ROWS
