"""Each step of PPO is a method that a subclass can replace or extend (huggingface/trl#3270, #3250, #2576)."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch

from rlhf_ppo import PPOTrainer
from rlhf_ppo.data.rollout import Experience, Prompts, Responses, Rollout
from rlhf_ppo.rewards.scorer import Scores
from tests.conftest import prompt_rows
from tests.run.test_optimization import moved
from tests.runs import QUICK, logged, parameters


class AlwaysSays(PPOTrainer):
    """Answers each prompt with `w4 w4 w5 <eos>`."""

    def generate_responses(self, prompts: Prompts, *given: Any) -> Responses:
        answer = torch.tensor([7, 7, 8, 1]).expand(len(prompts), -1)
        mask = torch.ones_like(answer, dtype=torch.bool)
        return Responses(
            query_responses=torch.cat([prompts.input_ids, answer], dim=1),
            attention_mask=torch.cat([prompts.attention_mask, mask], dim=1),
            response_mask=mask,
        )


def test_generate_responses(make_trained):
    trainer = make_trained(AlwaysSays, eval_dataset=prompt_rows(3), **QUICK)

    assert logged(trainer, "objective/scores") == [0.5] * 3
    assert logged(trainer, "response/length_mean") == [4.0] * 3
    assert logged(trainer, "response/ended_frac") == [1.0] * 3
    assert trainer.evaluate()["eval_score"] == 0.5
    assert list(trainer.generate_completions()["model response"]) == ["w4 w4 w5 <eos>"] * 3


def test_score_responses(make_trained):
    class Brief(AlwaysSays):
        """Takes a point for every token."""

        def score_responses(self, responses: Responses, *given: Any) -> Scores:
            scores = super().score_responses(responses, *given)
            brevity = -responses.response_mask.sum(dim=1).float()
            by_source = {**scores.by_source, "brevity": brevity}
            return dataclasses.replace(scores, scores=scores.scores + brevity, by_source=by_source)

    trainer = make_trained(Brief, eval_dataset=prompt_rows(3), **QUICK)

    assert logged(trainer, "objective/scores") == [-3.5] * 3
    assert logged(trainer, "rewards/brevity/mean") == [-4.0] * 3
    assert logged(trainer, "rewards/count_w4/mean") == [0.5] * 3
    metrics = trainer.evaluate()
    assert (metrics["eval_score"], metrics["eval_rewards/brevity/mean"]) == (-3.5, -4.0)
    assert list(trainer.generate_completions()["score"]) == [-3.5] * 3


def test_what_compute_advantages_leaves_outside_of_the_mask_does_not_count(make_trainer):
    class ToCome(PPOTrainer):
        """Returns the rewards to come, NaN for a response without a score, as `rewards` are."""

        def compute_advantages(self, rollout: Rollout, rewards: Any) -> Any:
            to_come = rewards.flip(1).cumsum(dim=1).flip(1)
            return to_come, to_come.where(rollout.loss_mask, math.nan)

    def every_second(completion_ids: list[list[int]], **_: Any) -> list[float | None]:
        return [None if row % 2 else float(len(ids)) for row, ids in enumerate(completion_ids)]

    trainer = make_trainer(ToCome, **QUICK, reward_funcs=every_second)
    trainer.train()
    assert all(math.isfinite(value) for value in logged(trainer, "loss/value_avg"))


def test_estimate_advantages(make_trainer):
    class Indifferent(PPOTrainer):
        """Finds no action better than another."""

        def estimate_advantages(self, rollout: Rollout) -> Experience:
            experience = super().estimate_advantages(rollout)
            return dataclasses.replace(experience, advantages=torch.zeros_like(experience.advantages))

    trainer = make_trainer(Indifferent, **QUICK)
    before = parameters(trainer)
    trainer.train()

    assert moved(trainer, before) == {"value_model"}
    assert logged(trainer, "loss/policy_avg") == [0.0] * 3
