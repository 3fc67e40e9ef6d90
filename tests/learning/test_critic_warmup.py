"""Critic warm-up on a task where an untrained value model knows nothing: the policy's first update finds it good."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset

from rlhf_ppo import PPOConfig, PPOTrainer
from tests.conftest import QUIET, make_tokenizer, prompt_rows, tiny_policy, tiny_scorer
from tests.runs import history

pytestmark = pytest.mark.learning


def by_last_word(completion_ids: list[list[int]], last_word: list[int], **_: Any) -> list[float]:
    """What a response is worth depends on its prompt, and somewhat on how much of it is the token 7."""
    return [word / 8 + 4 * ids.count(7) / len(ids) for word, ids in zip(last_word, completion_ids, strict=True)]


def test_the_policys_first_update_finds_values_that_explain_the_returns(tmp_path: Path) -> None:
    args = PPOConfig(
        **QUIET, output_dir=str(tmp_path), per_device_train_batch_size=64, num_ppo_epochs=4, num_mini_batches=2,
        max_steps=26, response_length=6, learning_rate=1e-3, critic_learning_rate=3e-3, lr_scheduler_type="constant",
        cliprange_value=None, vf_coef=1.0, kl_coef=0.01, logging_steps=1, seed=1, critic_warmup_steps=14,
    )  # fmt: skip
    rows = [row | {"last_word": row["input_ids"][-1]} for row in prompt_rows(256, longest=3)]
    trainer = PPOTrainer(
        args, make_tokenizer(), tiny_policy(), reward_funcs=by_last_word, value_model=tiny_scorer(seed=2),
        train_dataset=Dataset.from_list(rows),
    )  # fmt: skip
    trainer.train()
    logs = [log for log in history(trainer) if "val/explained_variance" in log]
    warm, learned = ([log for log in logs if log["val/critic_warmup"] == part] for part in (1, 0))
    assert warm[0]["val/explained_variance"] < 0 and learned[0]["val/explained_variance"] > 0.3
    standing, scores = ([log["objective/scores"] for log in part] for part in (warm, learned))
    before, noise = statistics.fmean(standing), statistics.stdev(standing)
    assert min(statistics.fmean(scores[start : start + 4]) for start in range(len(scores) - 3)) > before - noise
    assert statistics.fmean(scores[-4:]) > before + noise / 2
