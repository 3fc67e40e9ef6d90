"""What is compared: TRL, rlhf_ppo as it is, and rlhf_ppo with one option of the recipes switched on."""

from __future__ import annotations

from typing import Any

import yaml

TRL, PLAIN = "trl", "plain"

OPTIONS: dict[str, dict[str, Any]] = {
    "kl_target": {"kl_target": 6.0, "kl_horizon": 2000},
    "kl_stop": {"kl_stop": 0.02},
    "critic_learning_rate": {"critic_learning_rate": 1e-3},
    "lam_critic": {"lam_critic": 1.0},
    "lam_policy": {"lam_policy": 0.95, "lam_critic": 1.0},
    "length_adaptive_alpha": {"length_adaptive_alpha": 0.5},
    "cliprange_high": {"cliprange_high": 0.28},
    "dual_clip": {"dual_clip": 3.0},
    "cliprange_value": {"cliprange_value": None},
    "entropy_coef": {"entropy_coef": 0.01},
    "loss_aggregation_sequence": {"loss_aggregation": "sequence"},
    "loss_aggregation_constant": {"loss_aggregation": "constant"},
    "gspo": {"policy_loss": "gspo"},
    "cispo": {"policy_loss": "cispo"},
    "score_normalization": {"score_normalization": True, "score_clip": 5.0},
    "value_head_init": {"value_head_init": "normal"},
}
"""Arguments of `PPOConfig` beside the task's, by the option's name."""


def overrides(variant: str) -> dict[str, Any]:
    """Return a variant's arguments beside the task's.

    Args:
        variant: `trl`, `plain`, a name in `OPTIONS`, or arguments such as `lam_critic=1,kl_stop=0.02`.

    Raises:
        ValueError: It is none of these.
    """
    if variant in (TRL, PLAIN):
        return {}
    if variant in OPTIONS:
        return OPTIONS[variant]
    pairs = [part.partition("=") for part in variant.split(",")]
    if not all(name and equals for name, equals, _ in pairs):
        names = ", ".join((TRL, PLAIN, *OPTIONS))
        raise ValueError(f"there is no option {variant!r}; there are {names}, or write arguments as NAME=VALUE,...")
    return {name: yaml.safe_load(value) for name, _, value in pairs}
