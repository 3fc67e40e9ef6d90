"""PPO on comparisons: the policy's stories come to beat the reference's, by a judge that only ever compares two."""

from collections.abc import Callable
from typing import Any

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from rlhf_ppo import PPOConfig, PPOTrainer
from rlhf_ppo.compat.environments import make_environment
from tests.conftest import QUIET
from tests.learning.test_stories import NUM_SEEDS, rows

NUM_UPDATES, NUM_EPISODES, NUM_HELD_OUT = 8, 48, 256


class HappierStory:
    """The judge: the story of the higher VADER valence is better."""

    def __init__(self, vader: Callable[..., list[float]]) -> None:
        self.vader = vader

    def __call__(self, prompts: list[str], pairs: list[list[str]]) -> list[float]:
        return [0.5 if first == second else float(second > first) for first, second in map(self.vader, pairs)]


@pytest.fixture
def make_trainer(stories, vader, shared_data, tmp_path):
    environment = make_environment("preference_comparison", {"judge": HappierStory(vader), "opponent": "reference"})

    def make(seed: int) -> PPOTrainer:
        args = PPOConfig(
            output_dir=str(tmp_path / str(seed)),
            seed=seed,
            total_episodes=NUM_UPDATES * NUM_EPISODES,
            per_device_train_batch_size=NUM_EPISODES,
            per_device_eval_batch_size=NUM_HELD_OUT // 2,
            response_length=40,
            temperature=1.0,
            stop_token="eos",
            lr_scheduler_type="constant",
            kl_coef=0.05,
            learning_rate=7e-4,
            num_ppo_epochs=2,
            **QUIET,
            reward_weights=environment.reward_weights,
            **environment.settings,
        )
        return PPOTrainer(
            args,
            AutoTokenizer.from_pretrained(shared_data / "stories260K"),
            model=AutoModelForCausalLM.from_pretrained(shared_data / "stories260K"),
            reward_funcs=environment.reward_funcs,
            train_dataset=rows(stories.openings(stories.HEROES), NUM_EPISODES * NUM_UPDATES),
            eval_dataset=rows(stories.openings(stories.HELD_OUT_HEROES), NUM_HELD_OUT),
        )

    return make


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
