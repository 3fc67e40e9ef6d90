"""Responses that no reward scored: the update is that of the batch without them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from datasets import Dataset
from numpy.testing import assert_allclose

from rlhf_ppo.data.rollout import Rollout
from tests.conftest import prompt_rows, tiny_policy, tiny_scorer
from tests.recorded_update import RecordingTrainer, Snapshots, share_of_w4, stopping_policy
from tests.runs import QUICK, parameters

MakeTrainer = Callable[..., Any]
NAN = float("nan")
UNSCORED = (2, 3, 7)
NUM_ROWS = 8
KEPT = [row for row in range(NUM_ROWS) if row not in UNSCORED]


def with_scores(rollout: Rollout, scores: torch.Tensor) -> Rollout:
    return dataclasses.replace(rollout, scores=scores, scores_by_source={"share_of_w4": scores})


class Unscored(RecordingTrainer):
    """Takes the scores of some rows away."""

    def collect_rollout(self, prompts: Any, *given: Any) -> Rollout:
        rollout = super().collect_rollout(prompts, *given)
        lost = torch.tensor([row in UNSCORED for row in range(len(rollout))])
        self.rollout = with_scores(rollout, rollout.scores.masked_fill(lost, NAN))
        return self.rollout


class Absent(RecordingTrainer):
    """Takes the rows themselves away."""

    def collect_rollout(self, prompts: Any, *given: Any) -> Rollout:
        rollout = super().collect_rollout(prompts, *given)
        self.rollout = with_scores(rollout[torch.tensor(KEPT)], rollout.scores[KEPT])
        return self.rollout


def first_step(make_trainer: MakeTrainer, kind: type[RecordingTrainer], **overrides: Any) -> tuple[Any, Snapshots]:
    """One optimizer step on one rollout, in micro-batches of one row: some hold no score at all."""
    policy, value_model = stopping_policy(), tiny_scorer(seed=2)
    snapshots = Snapshots(policy, value_model)
    values: dict[str, Any] = {
        "model": policy,
        "value_model": value_model,
        "ref_model": tiny_policy(seed=5),
        "reward_funcs": share_of_w4,
        "train_dataset": Dataset.from_list(prompt_rows(NUM_ROWS)),
        "callbacks": [snapshots],
        "optimizers": (torch.optim.SGD([*policy.parameters(), *value_model.parameters()], 0.03), None),
        "per_device_train_batch_size": 1,
        "gradient_accumulation_steps": NUM_ROWS,
        "num_ppo_epochs": 1,
        "num_mini_batches": 1,
        "total_episodes": NUM_ROWS,
        "max_grad_norm": 0.0,
    }
    trainer = make_trainer(kind, **{**values, **overrides})
    trainer.train()
    return trainer, snapshots


@pytest.mark.parametrize(
    "overrides",
    [{}, {"whiten_rewards": True, "missing_eos_penalty": 1.0}, {"score_scaling": True, "score_clip": 1.0}],
    ids=["plain", "whiten", "scaling"],
)
def test_the_gradient_is_that_of_the_batch_without_the_row(make_trainer: MakeTrainer, overrides: Any) -> None:
    (ours, ours_at), (other, other_at) = (first_step(make_trainer, kind, **overrides) for kind in (Unscored, Absent))
    for model, gradients in other_at.gradients[0].items():
        assert any(abs(gradient).max() > 1e-3 for gradient in gradients.values())
        for name, gradient in gradients.items():
            assert_allclose(ours_at.gradients[0][model][name], gradient, rtol=1e-4, atol=1e-6, err_msg=name)
    logged, expected = ours.state.log_history[0], other.state.log_history[0]
    assert logged.keys() == expected.keys()
    exact = [k for k in expected if k.startswith(("loss", "policy/", "val/", "rewards/")) and "num_eos" not in k]
    for key in [*exact, "objective/scores"]:
        assert logged[key] == pytest.approx(expected[key], rel=1e-4, abs=1e-6), key
    assert len(exact) > 9


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
