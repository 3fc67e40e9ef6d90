"""Values that the guard watches are made not finite: the error names each, and the last checkpoint stays."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from rlhf_ppo import PPOTrainer
from rlhf_ppo.run.rollouts import DivergenceError
from tests.conftest import tiny_policy
from tests.runs import QUICK, At, MakeTrainer

RUN: dict[str, Any] = {**QUICK, "num_ppo_epochs": 2, "save_strategy": "steps", "save_steps": 1}
AT = 2
"""The update in which a value is not finite; 3 are made."""


class RolloutWith(PPOTrainer):
    """A number of response 1 of one rollout is not finite."""

    field, value = "logprobs", math.nan

    def collect_rollout(self, *args: Any) -> Any:
        rollout = super().collect_rollout(*args)
        if self.state.global_step == AT - 1:
            is_of_engine = self.field == "sampling_logprobs"
            changed = torch.zeros_like(rollout.logprobs) if is_of_engine else getattr(rollout, self.field).clone()
            changed.view(len(rollout), -1)[1, 0] = self.value
            if is_of_engine:
                responses = dataclasses.replace(rollout.responses, sampling_logprobs=changed)
                return dataclasses.replace(rollout, responses=responses)
            return dataclasses.replace(rollout, **{self.field: changed})
        return rollout


class ExperienceWith(PPOTrainer):
    """A number of response 1 is not finite."""

    field = "returns"

    def estimate_advantages(self, *args: Any) -> Any:
        experience = super().estimate_advantages(*args)
        if self.state.global_step == AT - 1:
            getattr(experience, self.field)[1, 0] = math.inf
        return experience


class LossWith(PPOTrainer):
    """A loss of one update is not finite."""

    def value_loss(self, *args: Any) -> Any:
        value = super().value_loss(*args)
        return value._replace(loss=value.loss * (math.inf if self.state.global_step == AT - 1 else 1))


class PolicyLossWith(PPOTrainer):
    """A loss of one update is not finite."""

    def policy_loss(self, *args: Any) -> Any:
        policy = super().policy_loss(*args)
        return policy._replace(loss=policy.loss * (math.inf if self.state.global_step == AT - 1 else 1))


def nan_gradient(model: Any) -> None:
    next(model.parameters()).register_hook(lambda gradient: gradient * math.nan)


def nan_weight(model: Any) -> None:
    with torch.no_grad():
        getattr(model, "value_model", model).model.norm.weight[0] = math.nan


def breaking(event: str, how: Callable[[Any], None]) -> dict[str, Any]:
    return {"callbacks": [At(event, AT - 1, lambda now: how(now.model))]}


def variant(base: type, **changes: Any) -> dict[str, Any]:
    return {"trainer_class": type(base.__name__, (base,), changes)}


@pytest.mark.parametrize(
    ("given", "named"),
    [
        (variant(RolloutWith), "the policy's log-probabilities of response 1"),
        (variant(RolloutWith, field="ref_logprobs"), "the reference's log-probabilities of response 1"),
        (variant(RolloutWith, field="sampling_logprobs"), "the sampling log-probabilities of response 1.* The engine"),
        (variant(RolloutWith, field="values", value=math.inf), "the values of response 1"),
        (variant(RolloutWith, field="scores", value=math.inf), "the score of response 1"),
        (variant(RolloutWith, field="final_values"), "the value after the last token of response 1"),
        (variant(ExperienceWith), "the returns of response 1"),
        (variant(ExperienceWith, field="advantages"), "the advantages of response 1"),
        (variant(LossWith), "the value loss became not finite"),
        (variant(PolicyLossWith), "the policy loss became not finite"),
        (breaking("on_step_begin", nan_gradient), "the norm of the gradient became not finite"),
        (breaking("on_optimizer_step", nan_weight), "the policy's log-probabilities became not finite"),
    ],
)
def test_the_run_stops_and_names_update_value_and_checkpoint(
    given: dict[str, Any], named: str, make_trainer: MakeTrainer, tmp_path: Path
) -> None:
    trainer = make_trainer(**{**RUN, **given}, output_dir=str(tmp_path))
    with pytest.raises(DivergenceError, match=named) as error:
        trainer.train()
    assert f"update {AT}" in str(error.value) and f"checkpoint is {tmp_path}/checkpoint-1" in str(error.value)
    assert [path.name for path in tmp_path.glob("checkpoint-*")] == ["checkpoint-1"]


def test_weights_in_float16_are_told_to_be_loaded_in_another_type(make_trainer: MakeTrainer) -> None:
    trainer = make_trainer(RolloutWith, **RUN, model=tiny_policy().half())
    with pytest.raises(DivergenceError, match=r"weights in float16, .* dtype=torch\.float32") as error:
        trainer.train()
    assert "rewards" not in str(error.value)


def test_nan_is_no_score(make_trainer: MakeTrainer) -> None:
    assert make_trainer(**variant(RolloutWith, field="scores"), **QUICK).train().global_step == 3


def test_weights_that_are_not_finite_are_not_saved(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    trainer = make_trainer(**QUICK)
    nan_weight(trainer.model)
    with pytest.raises(DivergenceError, match=r"value_model\.model\.norm\.weight"):
        trainer.save_model(str(tmp_path / "saved"))
    assert not (tmp_path / "saved").exists()
