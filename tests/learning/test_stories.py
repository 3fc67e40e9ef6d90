"""PPO on a real language model: stories that get happier, and stay stories.

The policy is the 260K-parameter TinyStories model; the reward is VADER's `compound` of the response: the sum `s` of
its words' valences, squashed to `s / sqrt(s^2 + 15)`, between -1 and 1. The squashing bounds the KL that training can
buy. The objective is `reward - kl_coef * KL`; the untrained policy has KL 0 and reward `b`, so a policy that is better
than it by its own objective has `KL < (1 - b) / kl_coef`. (With the raw sum as the reward and a high learning rate the
same run ends at a KL of hundreds, telling "friend friend friend": each friend pays again.)
"""

import itertools
import os
import statistics

import pytest
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer

from rlhf_ppo import PPOConfig, PPOTrainer
from tests.conftest import QUIET

NUM_UPDATES, NUM_EPISODES, NUM_HELD_OUT, KL_COEF = 20, 64, 128, 0.05
NUM_SEEDS = int(os.environ.get("NUM_SEEDS", "1"))
"""`make test-learning` trains with three."""


def rows(texts: list[str], num_rows: int) -> Dataset:
    """Prompts, again from the first one on until there are enough."""
    return Dataset.from_dict({"prompt": list(itertools.islice(itertools.cycle(texts), num_rows))})


@pytest.fixture
def make_trainer(stories, vader, shared_data, tmp_path):
    def make(seed: int) -> PPOTrainer:
        args = PPOConfig(
            output_dir=str(tmp_path / str(seed)),
            seed=seed,
            total_episodes=NUM_UPDATES * NUM_EPISODES,
            per_device_train_batch_size=NUM_EPISODES,
            per_device_eval_batch_size=NUM_HELD_OUT,
            response_length=40,
            temperature=1.0,
            stop_token="eos",
            kl_coef=KL_COEF,
            learning_rate=5e-4,  # at 1e-3 KL overshoots to 12 nats, which costs more than the reward gains
            num_ppo_epochs=2,
            **QUIET,
        )
        return PPOTrainer(
            args,
            AutoTokenizer.from_pretrained(shared_data / "stories260K"),
            model=AutoModelForCausalLM.from_pretrained(shared_data / "stories260K"),
            reward_funcs=vader,
            train_dataset=rows(stories.openings(stories.HEROES), NUM_EPISODES * NUM_UPDATES),
            eval_dataset=rows(stories.openings(stories.HELD_OUT_HEROES), NUM_HELD_OUT),
        )

    return make


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
