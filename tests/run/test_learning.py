"""One backward pass after the other: the numbers of one for both, with the activations of one model."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch

from rlhf_ppo.models.unwrapping import backbone
from tests.runs import QUICK, MakeTrainer, logged, parameters

RUN = QUICK | {"gradient_accumulation_steps": 2, "num_ppo_epochs": 2, "vf_coef": 0.7, "learning_rate": 0.01}


def test_the_policys_activations_are_gone_when_the_value_model_runs(make_trainer: MakeTrainer) -> None:
    states: list[Any] = []
    seen: list[tuple[bool, bool]] = []
    trainer = make_trainer(**RUN)
    policy, value_model = backbone(trainer.policy_model), backbone(trainer.value_model)

    def before_value_model(*_: Any) -> None:
        if torch.is_grad_enabled():
            has_gradient = all(parameter.grad is not None for parameter in trainer.policy_model.parameters())
            seen.append((has_gradient, states[-1]() is None))

    policy.register_forward_hook(lambda _, args, output: states.append(weakref.ref(output.last_hidden_state)))
    value_model.register_forward_pre_hook(before_value_model)
    trainer.train()
    assert seen == [(True, True)] * (2 * 2 * 2)  # updates, epochs, micro-batches


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"score_scaling": True},
        {"response_length": 1, "whiten_rewards": True},
        {"loss_aggregation": "sequence"},
    ],
    ids=str,
)
def test_equal_scores_teach_the_policy_nothing(make_trainer: MakeTrainer, options: dict[str, Any]) -> None:
    """Equal advantages whiten to exactly 0, so Adam, which divides by the gradient's size, has nothing to divide."""
    settings = {
        **RUN,
        "gradient_accumulation_steps": 7,
        "total_episodes": 14,
        "kl_coef": 0.0,
        "lam": 1.0,
        "gamma": 1.0,
        **options,
    }

    def always(completions: list[str], **_: Any) -> list[float]:
        return [30.37] * len(completions)  # whose float32 mean is another number

    trainer = make_trainer(**settings, reward_funcs=always, value_model=None)
    before = parameters(trainer)
    trainer.train()
    after = parameters(trainer)
    assert trainer.state.global_step == 1
    policy = [name for name in before if name.startswith("policy.")]
    assert policy and all(torch.equal(before[name], after[name]) for name in policy)
    assert any(not torch.equal(before[name], after[name]) for name in before if name not in policy)


def test_the_loss_is_the_mean_over_the_steps_that_were_taken(make_trainer: MakeTrainer) -> None:
    """`kl_stop` ends the update after the second epoch, before which the policy has not moved."""
    whole = make_trainer(**{**RUN, "num_ppo_epochs": 2, "total_episodes": 4})
    stopped = make_trainer(**{**RUN, "num_ppo_epochs": 4, "kl_stop": 1e-12, "total_episodes": 4})
    losses = [logged(trainer.train() and trainer, "loss")[0] for trainer in (whole, stopped)]
    assert losses[0] == losses[1] != 0
