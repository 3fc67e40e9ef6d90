"""Critic warm-up: the value model learns alone, and the policy stays as if these updates had not been."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import TrainerCallback

from rlhf_ppo import PPOTrainer
from rlhf_ppo.algorithm.losses import PolicyLoss
from rlhf_ppo.data.rollout import Experience
from rlhf_ppo.training import learning
from rlhf_ppo.training.optimization import Optimization
from tests.conftest import tiny_policy, tiny_scorer
from tests.models.test_peft import lora
from tests.runs import (
    QUICK,
    DieAt,
    InOnePass,
    RunDied,
    assert_identical,
    end_of_run,
    history,
    parameters,
)

MakeTrainer = Callable[..., Any]

WARM: dict[str, Any] = QUICK | {
    **{"gradient_accumulation_steps": 2, "num_ppo_epochs": 2, "total_episodes": 12},
    **{"critic_warmup_steps": 2, "learning_rate": 1e-2, "lr_scheduler_type": "constant", "weight_decay": 0.1},
}
"""Three updates of two optimizer steps, of two micro-batches each; the first two are of warm-up."""


class Snapshots(TrainerCallback):
    """Copies all parameters after each update, and counts the policy's that the optimizer has a state of."""

    def __init__(self) -> None:
        self.weights: list[dict[str, Tensor]] = []
        self.num_begun: list[int] = []
        self.trainer: Any = None

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._take()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._take()

    def _take(self) -> None:
        self.weights.append(parameters(self.trainer))
        self.num_begun.append(sum(each in self.trainer.optimizer.state for each in own_of_policy(self.trainer)))

    def moved(self, update: int) -> set[str]:
        before, after = self.weights[update : update + 2]
        return {name for name, value in after.items() if not torch.equal(value, before[name])}


def own_of_policy(trainer: Any) -> list[nn.Parameter]:
    return [each for each in trainer.policy_model.parameters() if each.requires_grad]


def over_one_trunk() -> dict[str, Any]:
    """Policy and value model that share all trained weights but their heads."""
    policy, scorer = tiny_policy(), tiny_scorer()
    scorer.model = policy.model
    return {"model": policy, "value_model": scorer}


MODELS: dict[str, Callable[[], dict[str, Any]]] = {
    "two models": dict,
    "adapters over one base": lambda: {"share_base_model": True, "value_model": None, "peft_config": lora()},
    "one trunk": over_one_trunk,
}


class OfAnEngine(PPOTrainer):
    """Has old log-probabilities that are not the policy's own, as with `old_logprobs="sampling"`."""

    def learn(self, model: nn.Module, experience: Experience) -> float | Tensor:
        others = experience.logprobs - 0.5 * experience.response_mask
        return super().learn(model, dataclasses.replace(experience, logprobs=others))


class OfAnEngineInOnePass(InOnePass, OfAnEngine):
    """Both."""


@pytest.mark.parametrize(
    ("models", "trainer_class"),
    [
        *((models, PPOTrainer) for models in MODELS),
        *(("two models", each) for each in (OfAnEngine, OfAnEngineInOnePass)),
    ],
)
def test_the_policy_stays_and_nothing_of_it_is_begun(
    make_trainer: MakeTrainer, models: str, trainer_class: type[PPOTrainer]
) -> None:
    seen = Snapshots()
    trainer = seen.trainer = make_trainer(trainer_class, **WARM | MODELS[models](), callbacks=[seen])
    trainer.train()
    of_policy = {id(each) for each in own_of_policy(trainer)}
    named = trainer.model.named_parameters(remove_duplicate=False)
    held = {name for name, value in named if id(value) in of_policy}
    for update in (0, 1):
        assert seen.moved(update) and not seen.moved(update) & held
    assert seen.num_begun == [0, 0, 0, len(of_policy)] and seen.moved(2) & held

    *warm, last = (log for log in history(trainer) if "val/ratio" in log)
    for log in warm:
        assert log["val/critic_warmup"] == 1 and log["policy/grad_norm"] == 0 and log["val/grad_norm"] > 0
        assert (log["val/ratio"], log["policy/approxkl_avg"], log["policy/clipfrac_avg"]) == (1, 0, 0)
        assert not {"policy/entropy_avg", "loss/policy_avg", "val/first_logratio"} & log.keys()
        assert log["loss"] == pytest.approx(0.1 * log["loss/value_avg"], rel=0.2)
    assert last["val/critic_warmup"] == 0 and last["policy/grad_norm"] > 0 and "policy/entropy_avg" in last


def test_the_loss_that_is_logged_has_the_same_terms_where_compute_loss_is_overridden(
    make_trainer: MakeTrainer,
) -> None:
    run = WARM | {"entropy_coef": 0.5, "positive_nll_coef": 0.5, "positive_nll_threshold": -1.0}
    logged = []
    for trainer_class in (PPOTrainer, InOnePass):
        trainer = make_trainer(trainer_class, **run)
        trainer.train()
        logged.append([log["loss"] for log in history(trainer) if "loss" in log])
    assert len(logged[0]) == 3 and logged[0] == logged[1]


class WithoutPolicy(PPOTrainer):
    def policy_loss(self, logprobs: Tensor, experience: Experience) -> PolicyLoss:
        loss = super().policy_loss(logprobs, experience)
        return loss._replace(loss=0.0 * loss.loss)


def test_the_value_model_learns_returns_of_lambda_1_as_if_the_policy_had_no_loss(make_trainer: MakeTrainer) -> None:
    """With an optimizer without weight decay and clipping, under which each model's steps are its own."""
    run = WARM | {"weight_decay": 0.0, "max_grad_norm": 0.0, "critic_warmup_steps": 3}
    warm = make_trainer(**run, critic_warmup_explained_variance=0.999)
    plain = make_trainer(WithoutPolicy, **run | {"critic_warmup_steps": 0, "lam_critic": 1.0})
    warm.train()
    plain.train()
    assert_identical(parameters(warm), parameters(plain))


# ---- The gate ----


@pytest.fixture
def foreseen(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """What the gate is told of the explained variance, update by update."""
    variances = [0.1, 0.6, 0.7, 0.1]
    monkeypatch.setattr(learning, "explained_variance", lambda *_: variances.pop(0))
    return variances


def warmups(trainer: Any) -> list[float]:
    return [log["val/critic_warmup"] for log in history(trainer) if "val/critic_warmup" in log]


def test_warmup_ends_before_the_first_update_whose_values_are_good_and_stays_over(
    make_trainer: MakeTrainer, foreseen: list[float]
) -> None:
    """The one that passes the gate is learned with its own lambda, by both models."""
    run = WARM | {"critic_warmup_steps": 9, "critic_warmup_explained_variance": 0.5, "ref_model": tiny_policy(seed=5)}
    trainer = make_trainer(**run, kl_target=1e-3, kl_horizon=8)
    returns: list[Tensor] = []
    estimate = trainer.compute_advantages
    trainer.compute_advantages = lambda *given: returns.append(estimate(*given)[1]) or estimate(*given)
    trainer.train()
    assert warmups(trainer) == [1, 0, 0] and foreseen == [0.7, 0.1]
    assert len(returns) == 4 and not torch.equal(returns[1], returns[2])  # the second update's, of both lambdas
    coefs = [log["objective/kl_coef"] for log in history(trainer) if "objective/kl_coef" in log]
    assert coefs[0] == coefs[1] != coefs[2]


@pytest.mark.thorough
def test_a_resumed_run_knows_that_it_is_over(make_trainer: MakeTrainer, foreseen: list[float], tmp_path: Path) -> None:
    run = WARM | {"critic_warmup_steps": 9, "critic_warmup_explained_variance": 0.5}

    def make(name: str, **given: Any) -> PPOTrainer:
        saving = {"save_strategy": "steps", "save_steps": 1, "output_dir": str(tmp_path / name)}
        return make_trainer(**run | saving, **given)

    whole = make("whole")
    whole.train()
    foreseen[:] = [0.1, 0.6]
    with pytest.raises(RunDied):
        make("died", callbacks=[DieAt("on_step_begin", 2)]).train()
    resumed = make("died")
    resumed.train(resume_from_checkpoint=True)
    assert_identical(end_of_run(resumed), end_of_run(whole))
    assert resumed._critic_only.warmup_is_over and foreseen == []


# ---- What it is said of ----


def test_deepspeed_holds_the_policys_groups_by_the_numbers_that_it_gives_them(make_trainer: MakeTrainer) -> None:
    """It drops groups without parameters, such as that of adapters for what has no weight decay."""
    trainer = make_trainer(**WARM, peft_config=lora(), value_peft_config=lora())
    optimization = Optimization((None, None))
    optimization._is_deepspeed = True
    groups = optimization.rated(trainer.create_optimizer(), trainer.model, trainer.args).param_groups
    kept = [group["params"] for group in groups if group["params"]]
    held = {id(each) for index in optimization.policy_groups for each in kept[index]}
    assert held == {id(each) for each in trainer.policy_model.parameters() if each.requires_grad}
    assert len(kept) < len(groups)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"critic_warmup_steps": 0, "critic_warmup_explained_variance": 0.5},
            r"critic_warmup_explained_variance=0\.5 ends a warm-up that critic_warmup_steps=0 does not begin",
        ),
        ({"vf_coef": 0.0}, r"critic_warmup_steps=2 .* with vf_coef=0 it learns nothing"),
        ({"critic_learning_rate": 0.0}, r"critic_warmup_steps=2 .* with critic_learning_rate=0 it learns nothing"),
        ({"critic_warmup_steps": 3, "max_steps": 3}, r"critic_warmup_steps=3 is the whole run of 3 updates"),
    ],
)
def test_a_warmup_that_cannot_be_is_an_error(make_trainer: MakeTrainer, given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_trainer(**WARM | given)


# ---- Epochs of the value model alone, and frozen parameters ----


@pytest.mark.parametrize("models", MODELS)
def test_the_policy_does_not_depend_on_num_critic_epochs_within_an_update(
    make_trainer: MakeTrainer, models: str
) -> None:
    ends = []
    for epochs in (None, 2, 5):
        run = WARM | {"critic_warmup_steps": 0, "total_episodes": 4, "num_critic_epochs": epochs}
        trainer = make_trainer(**run | MODELS[models]())
        trainer.train()
        own = {id(each) for each in own_of_policy(trainer)}
        named = [*trainer.model.named_parameters(remove_duplicate=False)]
        critic = {name: each.detach().clone() for name, each in named if each.requires_grad and id(each) not in own}
        ends.append(([each.detach().clone() for each in own_of_policy(trainer)], critic, history(trainer)))
    (policy, critic, log), same, more = ends
    assert_identical(same[0], policy)
    assert_identical(same[1], critic)
    assert_identical(same[2], log)
    assert_identical(more[0], policy)
    assert any(not torch.equal(value, more[1][name]) for name, value in critic.items())


def test_frozen_parameters_of_the_value_model_stay_without_gradient_and_optimizer_state(
    make_trainer: MakeTrainer,
) -> None:
    trainer = make_trainer(**WARM | {"critic_freeze": "attention", "critic_warmup_steps": 0})
    before = parameters(trainer)
    trainer.train()
    after = parameters(trainer)
    frozen = {name for name, each in trainer.model.named_parameters() if not each.requires_grad}
    assert frozen and frozen == {name for name in before if name.startswith("value_model") and ".self_attn." in name}
    assert {name for name in before if torch.equal(before[name], after[name])} >= frozen
    stated = {id(each) for each in trainer.optimizer.state}
    for name, each in trainer.model.named_parameters():
        assert (id(each) in stated) is (name not in frozen), name


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"critic_freeze": "nothing"}, "critic_freeze='nothing' matches none of the trainable parameters"),
        ({"critic_freeze": "."}, "critic_freeze='.' matches all trainable parameters"),
        ({"critic_freeze": "("}, "critic_freeze='\\(' is not a regular expression"),
        ({"critic_freeze": "attention", **over_one_trunk()}, "self_attn.*which the policy trains too"),
        ({"num_critic_epochs": 1}, "num_critic_epochs=1 is below num_ppo_epochs=2"),
        ({"num_critic_epochs": 3, "vf_coef": 0.0}, "num_critic_epochs=3 .* with vf_coef=0 it learns nothing"),
    ],
)
def test_critic_options_that_cannot_be_are_errors(
    make_trainer: MakeTrainer, given: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        make_trainer(**WARM | {"critic_warmup_steps": 0} | given)


# ---- The gradient's norm of each model ----


@pytest.mark.parametrize("models", MODELS)
def test_gradient_norms_are_those_of_each_models_own_parameters_before_clipping(
    make_trainer: MakeTrainer, models: str
) -> None:
    """Of two micro-batches in one step; together they are Trainer's norm of all."""
    run = WARM | {"critic_warmup_steps": 0, "num_ppo_epochs": 1, "num_mini_batches": 1, "max_grad_norm": 1e-3}
    gradients: list[list[Tensor]] = []
    trainer = make_trainer(**run | MODELS[models]())

    def clip(model: Any) -> Any:
        policy = own_of_policy(trainer)
        own = [each for each in model.value_model.parameters() if not any(each is other for other in policy)]
        gradients.append(
            [torch.cat([each.grad.flatten() for each in part if each.grad is not None]) for part in (policy, own)]
        )
        return PPOTrainer._clip_grad_norm(trainer, model)

    trainer._clip_grad_norm = clip
    trainer.train()
    logs = [log for log in history(trainer) if "val/grad_norm" in log]
    assert len(logs) == len(gradients) == 3
    for log, (of_policy, of_value_model) in zip(logs, gradients, strict=True):
        assert log["policy/grad_norm"] == pytest.approx(float(of_policy.norm()), rel=1e-5) and of_policy.any()
        assert log["val/grad_norm"] == pytest.approx(float(of_value_model.norm()), rel=1e-5) and of_value_model.any()
        both = (log["policy/grad_norm"] ** 2 + log["val/grad_norm"] ** 2) ** 0.5
        assert log["grad_norm"] == pytest.approx(both, rel=1e-5)
