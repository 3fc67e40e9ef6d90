"""One backward pass after the other: the numbers of one for both, with the activations of one model."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from peft import LoraConfig

from rlhf_ppo import PPOTrainer
from rlhf_ppo.models.unwrapping import backbone
from tests.runs import QUICK, InOnePass, history, parameters

RUN = QUICK | {"gradient_accumulation_steps": 2, "num_ppo_epochs": 2, "vf_coef": 0.7, "learning_rate": 0.01}
SETUPS: dict[str, Callable[[], dict[str, Any]]] = {
    "plain": dict,
    "recomputed activations": lambda: {"gradient_checkpointing": True},
    "one base": lambda: {
        "peft_config": LoraConfig(init_lora_weights=False), "value_model": None, "share_base_model": True
    },
}  # fmt: skip


@pytest.mark.parametrize("setup", SETUPS)
def test_it_trains_like_one_backward_pass_for_both(make_trainer: Callable[..., Any], setup: str) -> None:
    ends = []
    for trainer_class in (PPOTrainer, InOnePass):
        torch.manual_seed(0)  # of the adapters
        trainer = make_trainer(trainer_class, **{**RUN, **SETUPS[setup]()})
        before = parameters(trainer)
        trainer.train()
        ends.append((parameters(trainer), history(trainer)))
        moved = [name for name, value in before.items() if not torch.equal(value, ends[-1][0][name])]
        assert {name.split(".")[0] for name in moved} == {"policy", "value_model"}
    (ours, our_log), (theirs, their_log) = ends
    assert all(torch.equal(value, theirs[name]) for name, value in ours.items())
    assert our_log == their_log


def test_the_policys_activations_are_gone_when_the_value_model_runs(make_trainer: Callable[..., Any]) -> None:
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
        {"importance_sampling_correction": True, "loss_aggregation": "sequence"},
    ],
    ids=str,
)
def test_equal_scores_teach_the_policy_nothing(make_trainer: Callable[..., Any], options: dict[str, Any]) -> None:
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
