"""Options of `PPOConfig` that change a small run on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.conftest import tiny_policy
from tests.runs import QUICK, assert_identical, history, parameters

MakeTrainer = Callable[..., Any]

RUN: dict[str, Any] = QUICK | {
    **{"gradient_accumulation_steps": 2, "total_episodes": 8, "num_ppo_epochs": 2, "num_mini_batches": 2},
    **{"learning_rate": 0.01, "response_length": 6, "kl_coef": 0.3, "missing_eos_penalty": None, "logging_steps": 1},
}

CHANGES: dict[str, Any] = {
    "learning_rate": 0.02,
    "warmup_ratio": 0.5,
    "num_generations": 2,
    "kl_target": 1.0,
    "kl_coef": 0.1,
    "kl_estimator": "k3",
    "kl_stop": 1e-6,
    "score_scaling": True,
    "critic_learning_rate": 0.1,
    "critic_warmup_steps": 1,
    "lam_policy": 0.5,
    "lam_critic": 0.5,
    "gae_level": "turn",
    "policy_loss": "examples/policy_losses.py:cispo",
    "cliprange": 0.01,
    "cliprange_value": 0.001,
    "cliprange_high": 0.01,
    "entropy_coef": 0.5,
    "loss_aggregation": "sequence",
    "total_episodes": 12,
    "response_length": 3,
    "temperature": 1.5,
    "top_k": 2,
    "top_p": 0.3,
    "min_p": 0.5,
    "stop_token_id": 5,
    "stop_strings": ["w5"],
    "reward_weights": [2.0],
    "score_clip": 0.1,
    "missing_eos_penalty": 2.0,
    "missing_eos_score": -2.0,
    "bootstrap_truncated": True,
    "whiten_rewards": True,
    "num_ppo_epochs": 1,
    "num_mini_batches": 1,
    "gamma": 0.5,
    "lam": 0.3,
    "vf_coef": 1.0,
    "max_prompt_length": 2,
    "health_checks": False,
}
"""Values that change the weights or what is logged."""


def made(make_trainer: MakeTrainer, **options: Any) -> Any:
    given = {"ref_model": tiny_policy(seed=5), "value_model": None}
    if "stop_token_id" in options:
        options["stop_token"] = None
    return make_trainer(**{**given, **RUN, **options})


def outcome(trainer: Any) -> dict[str, Any]:
    trainer.train()
    return {"weights": parameters(trainer), "log": history(trainer)}


@pytest.mark.slow
@pytest.mark.usefixtures("plain_runs")
def test_each_option_changes_the_run(make_trainer: MakeTrainer, tmp_path: Any) -> None:
    plain = outcome(made(make_trainer, output_dir=str(tmp_path / "plain")))
    silent: list[str] = []
    for name, value in CHANGES.items():
        changed = outcome(made(make_trainer, output_dir=str(tmp_path / name), **{name: value}))
        try:
            assert_identical(changed, plain)
            silent.append(name)
        except AssertionError:
            pass
    assert silent == []
