"""Rewards in the trainer: what each token is paid, what is left out, what runs at the same time, what fails how."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from datasets import Dataset
from numpy.testing import assert_allclose

from rlhf_ppo import PPOTrainer
from tests.conftest import tiny_policy, tiny_scorer
from tests.recorded_update import RecordingTrainer, number_of_tokens, share_of_w4, stopping_policy
from tests.rewards.test_reward_model_tokens import alone
from tests.runs import QUICK

MakeTrainer = Callable[..., PPOTrainer]
EOS = 1


def marks_even_tokens(completion_ids: list[list[int]], **_: Any) -> list[list[float]]:
    """A reward for each token: 0.5 for an even id, a hundredth of it for an odd one."""
    return [[0.5 if token % 2 == 0 else token / 100 for token in ids] for ids in completion_ids]


# ---- Sums ----


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"missing_eos_penalty": 1.5},
        {"score_clip": 0.7, "missing_eos_score": -1.0},
        {"score_scaling": True, "score_clip": 1.0, "missing_eos_penalty": 0.25},
    ],
    ids=["plain", "penalty", "clip and replacement", "scaling, clip and penalty"],
)
def test_every_token_is_paid_what_numpy_says(settings: dict[str, Any], make_trainer: MakeTrainer) -> None:
    """Two functions, a model and rewards per token. With gamma = lam = 1 a return is the sum of rewards to come."""
    reward_model = tiny_scorer(seed=7).eval()
    weights = {"number_of_tokens": -2.0, "marks_even_tokens": 3.0, "reward_model": 0.5, "share_of_w4": 1.5}
    trainer: Any = make_trainer(
        RecordingTrainer,
        model=stopping_policy(),
        ref_model=tiny_policy(seed=5),
        reward_model=reward_model,
        reward_funcs=[share_of_w4, marks_even_tokens, number_of_tokens],
        reward_weights=weights,
        gamma=1.0,
        lam=1.0,
        kl_coef=0.3,
        per_device_train_batch_size=12,
        gradient_accumulation_steps=1,
        total_episodes=12,
        **settings,
    )
    trainer.train()
    rollout, experience = trainer.rollout, trainer.experience
    rows, scores, per_token = [], [], []
    for row, real in enumerate(rollout.response_mask):
        ids = rollout.responses[row][real].tolist()
        whole = rollout.query_responses[row][rollout.attention_mask[row]].tolist()
        rows.append(ids)
        model_score = alone(reward_model, whole)
        scores.append(0.5 * model_score + 1.5 * ids.count(7) / len(ids) - 2.0 * 0.1 * len(ids))
        per_token.append(3.0 * np.array([0.5 if token % 2 == 0 else token / 100 for token in ids]))
    wholes = [score + tokens.sum() for score, tokens in zip(scores, per_token, strict=True)]
    std = np.std(wholes, ddof=1) if settings.get("score_scaling") else 1.0
    assert {ids[-1] == EOS for ids in rows} == {True, False} and len({len(ids) for ids in rows}) > 2
    expected_worth = []
    for row, ids in enumerate(rows):
        score = scores[row] / std
        if "score_clip" in settings:
            score = min(max(score, -settings["score_clip"]), settings["score_clip"])
        if ids[-1] != EOS:
            score = settings.get("missing_eos_score", score - settings.get("missing_eos_penalty", 0.0))
        kl = (rollout.logprobs - rollout.ref_logprobs)[row, : len(ids)].double().numpy()
        expected = -0.3 * kl + per_token[row] / std
        expected[-1] += score
        expected_worth.append(score + per_token[row].sum() / std)
        returns = experience.returns[row].double().numpy()
        paid = (returns - np.append(returns[1:], 0.0))[: len(ids)]
        assert_allclose(paid, expected, rtol=1e-5, atol=1e-5, err_msg=f"row {row}")
    logged = trainer.state.log_history[0]
    assert logged["objective/scores"] == pytest.approx(np.mean(expected_worth), abs=1e-5)
    assert logged["rewards/marks_even_tokens/mean"] == pytest.approx(np.mean([t.sum() / 3 for t in per_token]), 1e-5)
    assert logged["rewards/number_of_tokens/mean"] == pytest.approx(np.mean([len(ids) / 10 for ids in rows]), 1e-5)


def test_evaluation_clips_in_deviations_of_training_and_leaves_the_moments_alone(make_trainer: MakeTrainer) -> None:
    def numbers(number: list[int], **_: Any) -> list[float]:
        return [10.0 * value for value in number]

    rows = [{"input_ids": [5, 6], "number": number} for number in range(4)]
    trainer: Any = make_trainer(
        **QUICK, model=tiny_policy(), eval_dataset=rows, train_dataset=Dataset.from_list(rows * 2),
        reward_funcs=numbers, score_scaling=True, score_clip=0.5,
    )  # fmt: skip
    trainer.train()
    moments = dict(trainer.score_moments.state_dict())
    assert moments["count"] == 6
    limit = 0.5 * trainer.score_moments.std
    clipped = [min(10.0 * number, limit) for number in range(4)]
    metrics = trainer.evaluate()
    assert metrics["eval_score"] == pytest.approx(sum(clipped) / 4) and metrics["eval_score"] < 10
    assert metrics["eval_rewards/numbers/mean"] == pytest.approx(15.0)
    assert trainer.score_moments.state_dict() == moments
    assert all(abs(entry["objective/scores"]) <= 0.5 for entry in trainer.state.log_history if "loss" in entry)


# ---- At the same time ----


# ---- Failures ----
