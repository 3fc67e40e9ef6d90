"""Rewards in the trainer: scaled and clipped scores in training and evaluation."""

from __future__ import annotations

from typing import Any

import pytest
from datasets import Dataset

from tests.conftest import tiny_policy
from tests.runs import QUICK, MakeTrainer


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
