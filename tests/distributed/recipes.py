"""Options of published recipes, as many as go together, for runs in several processes."""

from typing import Any

FOLLOWING: dict[str, Any] = {
    "kl_target": 0.05,
    "kl_horizon": 20,
    "kl_stop": 0.002,
    "score_scaling": True,
    "critic_learning_rate": 2e-3,
}
"""Those that go on from update to update, or end one: they decide by figures of all ranks."""

PPO: dict[str, Any] = FOLLOWING | {
    "loss_aggregation": "sequence",
    "entropy_coef": 0.01,
    "cliprange_high": 0.3,
    "cliprange_value": None,
    "lam_critic": 1.0,
}
BESIDE: dict[str, Any] = {"ptx_coef": 0.2}
"""Losses beside PPO's."""

GSPO: dict[str, Any] = {
    "policy_loss": "examples/policy_losses.py:gspo",
    "cliprange": 3e-4,
    "cliprange_high": 4e-4,
    "lam_policy": 0.5,
    "critic_learning_rate": 0.2,
}
CISPO: dict[str, Any] = BESIDE | {
    "policy_loss": "examples/policy_losses.py:cispo",
    "cliprange_high": 1.0,
    "loss_aggregation": "sequence",
    "critic_learning_rate": 0.02,
    "num_generations": 2,
}
