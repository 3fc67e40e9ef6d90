"""PPO on a real language model: stories that get happier, and stay stories.

The policy is the 260K-parameter TinyStories model; the reward is VADER's `compound` of the response: the sum `s` of
its words' valences, squashed to `s / sqrt(s^2 + 15)`, between -1 and 1. The squashing bounds the KL that training can
buy. The objective is `reward - kl_coef * KL`; the untrained policy has KL 0 and reward `b`, so a policy that is better
than it by its own objective has `KL < (1 - b) / kl_coef`. (With the raw sum as the reward and a high learning rate the
same run ends at a KL of hundreds, telling "friend friend friend": each friend pays again.)
"""

import os
import statistics
from collections.abc import Callable
from typing import Any

import pytest

from rlhf_ppo import PPOTrainer

KL_COEF = 0.05
NUM_SEEDS = int(os.environ.get("NUM_SEEDS", "1"))
"""`make test-learning` trains with three."""


@pytest.fixture
def make_trainer(story_trainer: Callable[..., PPOTrainer], vader: Any) -> Callable[[int], PPOTrainer]:
    # At a learning rate of 1e-3 KL overshoots to 12 nats, which costs more than the reward gains.
    return lambda seed: story_trainer(seed, 20, 64, 128, vader, learning_rate=5e-4)


@pytest.fixture
def baseline(make_trainer):
    """Mean rewards of the untrained policy on the held-out prompts, sampled with five seeds."""
    trainer = make_trainer(0)
    rewards = []
    for seed in range(5):
        trainer.args.seed = seed
        rewards.append(trainer.evaluate()["eval_score"])
    return rewards


@pytest.mark.learning
@pytest.mark.timeout(1800)
def test_stories_get_happier_at_a_bounded_kl_with_every_seed(make_trainer, baseline):
    """A run that learned nothing would end within the baseline's spread; each must end six of them above.

    Measured with three seeds: baseline 0.37 with a spread of 0.027, after training 0.67 to 0.70 at a KL of 4.3 to 4.7
    (bound: 12.6).
    """
    mean, spread = statistics.mean(baseline), statistics.stdev(baseline)
    for seed in range(NUM_SEEDS):
        trainer = make_trainer(seed)
        trainer.train()
        after = trainer.evaluate()
        assert after["eval_score"] > mean + 6 * spread
        assert 0 < after["eval_kl"] < (1 - mean) / KL_COEF
        assert after["eval_score"] - KL_COEF * after["eval_kl"] > mean
