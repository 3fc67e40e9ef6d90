"""Responses that no reward scored; that they count nowhere is among the numbers of tests/test_first_update.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from rlhf_ppo.rewards.scorer import WrongRewardError
from tests.conftest import prompt_rows
from tests.runs import QUICK, MakeTrainer, history, parameters


def nothing_at_first(completions: list[str], trainer_state: Any, **columns: Any) -> list[float | None]:
    return [None if trainer_state.global_step == 0 else float(len(text)) for text in completions]


def test_an_update_without_any_score_changes_nothing_and_the_next_one_learns(make_trainer: MakeTrainer) -> None:
    trainer = make_trainer(**{**QUICK, "total_episodes": 2}, reward_funcs=nothing_at_first)
    before = parameters(trainer)
    trainer.train()
    assert trainer.state.global_step == 1
    assert all(torch.equal(value, before[name]) for name, value in parameters(trainer).items())
    trainer = make_trainer(**QUICK, reward_funcs=nothing_at_first)
    trainer.train()
    first, second, *_ = trainer.state.log_history
    assert not [key for key in first if key.startswith(("objective/scores", "rewards/", "loss/"))]
    assert first["loss"] == 0 and second["objective/scores"] > 0 and "rewards/nothing_at_first/mean" in second
    assert not any(value != value for entry in trainer.state.log_history for value in entry.values())
    assert any(not torch.equal(value, before[name]) for name, value in parameters(trainer).items())


def test_a_reward_that_never_scores_ends_the_run_after_three_updates(make_trainer: MakeTrainer) -> None:
    run = {"total_episodes": 8, "reward_funcs": lambda completions, **columns: [None] * len(completions)}
    trainer = make_trainer(**{**QUICK, **run})
    with pytest.raises(WrongRewardError, match="no response of the last three updates has a score"):
        trainer.train()
    assert trainer.state.global_step == 2


def test_an_evaluation_without_a_score_is_not_the_best_and_the_run_goes_on(
    make_trainer: MakeTrainer, caplog: pytest.LogCaptureFixture
) -> None:
    def all_but_second(completions: list[str], trainer_state: Any, **columns: Any) -> list[float | None]:
        return [None if trainer_state.global_step == 2 else -float(trainer_state.global_step)] * len(completions)

    evaluated = {"eval_strategy": "steps", "eval_steps": 1, "save_steps": 1, "load_best_model_at_end": True}
    run = QUICK | evaluated | {"save_strategy": "steps", "eval_dataset": prompt_rows(2)}
    trainer = make_trainer(**run, reward_funcs=all_but_second)
    with caplog.at_level("WARNING", logger="rlhf_ppo"):
        trainer.train()
    assert trainer.state.global_step == 3 and trainer.state.best_global_step == 1
    assert {path.name[-1] for path in Path(str(trainer.args.output_dir)).glob("checkpoint-*")} == {"1", "2", "3"}
    assert "The evaluation after update 2 has no eval_score, so it is not the best" in caplog.text
    misnamed = make_trainer(**run, metric_for_best_model="skore", output_dir=f"{trainer.args.output_dir}-misnamed")
    with pytest.raises(KeyError, match="eval_skore"):
        misnamed.train()


def test_the_gradient_norm_is_that_of_the_last_step(make_trainer: MakeTrainer) -> None:
    """Not 0 if the last mini-batch has no score, which takes no step."""

    def first_alone(completions: list[str], **columns: Any) -> list[float | None]:
        return [1.0, *[None] * (len(completions) - 1)]

    run = QUICK | {"per_device_train_batch_size": 4, "num_mini_batches": 4, "num_ppo_epochs": 1, "total_episodes": 16}
    trainer = make_trainer(**run, reward_funcs=first_alone)
    trainer.train()
    norms = [
        (log["grad_norm"], log["policy/grad_norm"], log["val/grad_norm"]) for log in history(trainer) if "loss" in log
    ]
    assert len(norms) == 4
    for whole, of_policy, of_value in norms:
        assert whole == pytest.approx((of_policy**2 + of_value**2) ** 0.5, rel=1e-4) and whole > 0
