"""Extension points: a KL controller, an engine, a reward source, losses, advantages, parts with a state."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rlhf_ppo import PPOTrainer
from rlhf_ppo.algorithm.losses import PolicyLoss, ValueLoss
from rlhf_ppo.data.rollout import Experience, Rollout
from rlhf_ppo.rewards.scorer import RewardSource, ScoringBatch
from tests.conftest import tiny_policy
from tests.runs import QUICK, InOnePass, MakeTrainer, die_and_resume, history, logged, parameters, train_and_record


class Doubling:
    """Doubles its coefficient after each update."""

    def __init__(self, coef: float = 0.5) -> None:
        self.coef = coef
        self.seen: list[tuple[float, int]] = []

    def update(self, mean_kl: float, num_episodes: int) -> None:
        self.seen.append((mean_kl, num_episodes))
        self.coef *= 2

    def state_dict(self) -> dict[str, Any]:
        return {"coef": self.coef}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.coef = state["coef"]


def test_a_kl_controller_sets_the_coefficient_of_the_next_update(make_trained: MakeTrainer) -> None:
    controller = Doubling()
    trainer = make_trained(**QUICK, ref_model=tiny_policy(seed=5), kl_controller=controller)

    kl, paid = logged(trainer, "objective/kl"), logged(trainer, "objective/non_score_reward")
    assert logged(trainer, "objective/kl_coef") == [0.5, 1.0, 2.0] and controller.coef == 4.0
    assert paid == pytest.approx([-coef * each for coef, each in zip((0.5, 1.0, 2.0), kl, strict=True)], rel=1e-5)
    assert controller.seen == [(each, trainer.args.batch_size) for each in kl]


class Adding:
    """A part with a state: a tensor that a callback of its own changes."""

    def __init__(self) -> None:
        self.total = torch.zeros(2)

    def state_dict(self) -> dict[str, Any]:
        return {"total": self.total}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.total = state["total"]


class Accumulating(PPOTrainer):
    """Weights rewards by the sum of all scores so far: what it learns depends on its part's state."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.part = Adding()
        self.register_stateful("adding", self.part)

    def shape_rewards(self, rollout: Rollout) -> Tensor:
        self.part.total = self.part.total + torch.tensor([1.0, float(rollout.scores.sum())])
        return super().shape_rewards(rollout) * self.part.total.sum()


def test_a_run_with_states_resumes_bit_for_bit(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    def given() -> dict[str, Any]:
        models = {"trainer_class": Accumulating, "ref_model": tiny_policy(seed=5)}
        return models | {"kl_controller": Doubling(), "score_scaling": True}

    resumed, whole = die_and_resume(make_trainer, tmp_path, given)
    assert torch.equal(resumed.part.total, whole.part.total) and resumed.part.total[0] == 3
    assert resumed.kl_controller.coef == 4.0
    assert resumed.score_moments == whole.score_moments


def test_a_name_of_a_part_is_taken_once(make_trainer: MakeTrainer) -> None:
    trainer, part = make_trainer(kl_target=3.0), Adding()
    trainer.register_stateful("adding", part)
    trainer.register_stateful("adding", part)
    for name in ("adding", "kl_controller"):
        with pytest.raises(ValueError, match=f"'{name}' is taken"):
            trainer.register_stateful(name, Adding())


class Lengths(RewardSource):
    """A tenth of a point for each token."""

    name = "lengths"

    def __call__(self, batch: ScoringBatch) -> Tensor:
        return batch.responses.response_mask.sum(dim=1) / 10


class Evens:
    """Each even token is worth a point: a source by its shape, without the base class."""

    name = "evens"

    def __call__(self, batch: ScoringBatch) -> Tensor:
        return (batch.responses.response_ids % 2 == 0).float() * batch.responses.response_mask


def test_reward_sources_stand_beside_functions(make_trainer: MakeTrainer) -> None:
    def seven(completions: list[str], **_: Any) -> list[float]:
        return [7.0] * len(completions)

    funcs = [Lengths(), seven, Evens()]
    trainer = make_trainer(**QUICK, reward_funcs=funcs, reward_weights=[1, 10, 100])
    rollouts = train_and_record(trainer)
    rollout = rollouts[-1]
    evens = (rollout.responses.response_ids % 2 == 0) & rollout.response_mask
    assert trainer.scorer.names == ["lengths", "seven", "evens"] and evens.any()
    assert torch.equal(rollout.scores, rollout.response_mask.sum(dim=1) / 10 + 70)
    assert torch.equal(rollout.token_scores, 100 * evens.float())
    assert logged(trainer, "rewards/evens/mean")[-1] == pytest.approx(float(evens.sum(dim=1).float().mean()))


class Trusting(PPOTrainer):
    """PPO with a squared log-ratio in place of the clip, and its own figure."""

    def policy_loss(self, logprobs: Tensor, experience: Experience) -> PolicyLoss:
        own = super().policy_loss(logprobs, experience)
        distance = (logprobs - experience.logprobs).square()
        loss = -experience.advantages * own.ratio + 0.5 * distance
        return PolicyLoss(loss, own.ratio, own.clipped, {"policy/distance": distance})

    def value_loss(self, values: Tensor, experience: Experience) -> ValueLoss:
        error = values - experience.returns
        return ValueLoss(error.abs(), torch.zeros_like(error, dtype=torch.bool), {"val/error": error})


class TrustingAtOnce(InOnePass, Trusting):
    """Both losses in one backward pass."""


def test_losses_of_a_subclass_learn_in_turn_and_log_their_figures(make_trainer: MakeTrainer) -> None:
    settings = {
        **QUICK,
        "num_ppo_epochs": 2,
        "gradient_accumulation_steps": 2,
        "total_episodes": 12,
        "learning_rate": 0.01,
    }
    plain, ours, at_once = (make_trainer(kind, **settings) for kind in (PPOTrainer, Trusting, TrustingAtOnce))
    for trainer in (plain, ours, at_once):
        trainer.train()

    assert all(torch.equal(value, parameters(at_once)[name]) for name, value in parameters(ours).items())
    assert history(ours) == history(at_once) != history(plain)
    approximate = [2 * each for each in logged(ours, "policy/approxkl_avg")]  # which is half of the square
    assert logged(ours, "policy/distance") == pytest.approx(approximate, rel=1e-5)
    assert len(logged(ours, "val/error")) == 3 and min(approximate) > 0
