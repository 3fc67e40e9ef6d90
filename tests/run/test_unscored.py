"""Responses that no reward scored; that they count nowhere is among the numbers of tests/test_first_update.py."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rlhf_ppo.rewards.scorer import WrongRewardError
from tests.runs import QUICK, MakeTrainer, parameters


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
