"""PPO on comparisons: the policy's stories learn to beat the reference's, by a judge that only compares pairs."""

from collections.abc import Callable
from typing import Any

import pytest

from rlhf_ppo import PPOTrainer
from rlhf_ppo.compat.environments import make_environment
from tests.learning.test_stories import NUM_SEEDS


class HappierStory:
    """The judge: the story of the higher VADER valence is better."""

    def __init__(self, vader: Callable[..., list[float]]) -> None:
        self.vader = vader

    def __call__(self, prompts: list[str], pairs: list[list[str]]) -> list[float]:
        return [0.5 if first == second else float(second > first) for first, second in map(self.vader, pairs)]


@pytest.fixture
def make_trainer(story_trainer: Callable[..., PPOTrainer], vader: Any) -> Callable[[int], PPOTrainer]:
    environment = make_environment("preference_comparison", {"judge": HappierStory(vader), "opponent": "reference"})
    options = {"learning_rate": 7e-4, "lr_scheduler_type": "constant"}
    return lambda seed: story_trainer(seed, 8, 48, 256, environment.reward_funcs, **options)


@pytest.mark.learning
@pytest.mark.timeout(1800)
def test_the_policy_beats_the_reference_with_every_seed(make_trainer: Any) -> None:
    """Of equal players the rate on 256 prompts has a spread of 0.03: 0.6 is three of them above a half.

    Measured: with seed 0 from 0.52 to 0.88, at a KL of 12 nats.
    """
    for seed in range(NUM_SEEDS):
        trainer = make_trainer(seed)
        before = trainer.evaluate()
        trainer.train()
        after = trainer.evaluate()
        assert abs(before["eval_preference/win_rate"] - 0.5) < 0.1
        assert after["eval_preference/win_rate"] > 0.6
