"""What is compared: TRL, rlhf_ppo as it is, and rlhf_ppo with one option of the recipes switched on."""

from __future__ import annotations

from typing import Any

import yaml

TRL, PLAIN, PRESET = "trl", "plain", "preset:"
RECOMMENDED = f"{PRESET}recommended"

OPTIONS: dict[str, dict[str, Any]] = {
    "kl_target": {"kl_target": 6.0, "kl_horizon": 2000},
    "kl_stop": {"kl_stop": 0.02},
    "num_generations": {"num_generations": 4},
    "kl_coef": {"kl_coef": 0.0},
    "critic_learning_rate": {"critic_learning_rate": 1e-3},
    "critic_warmup_steps": {"critic_warmup_steps": 3},
    "lam_critic": {"lam_critic": 1.0},
    "lam_policy": {"lam_policy": 0.95, "lam_critic": 1.0},
    "cliprange_high": {"cliprange_high": 0.28},
    "cliprange_value": {"cliprange_value": None},
    "entropy_coef": {"entropy_coef": 0.01},
    "loss_aggregation_sequence": {"loss_aggregation": "sequence"},
    "ptx_coef": {"ptx_coef": 0.1},
    "gae_level": {"gae_level": "turn"},
    "bf16": {"bf16": True},
    "lm_head_float32": {"bf16": True, "lm_head_float32": True},
}
"""Arguments of `PPOConfig` beside the task's, by the option's name. `lm_head_float32` is compared with `bf16`."""


AS_FAR_AS_TRL = {
    "arithmetic": f"{RECOMMENDED},kl_coef=0.24",
    "preferences": f"{RECOMMENDED},kl_coef=0.14",
}
"""By task, the preset with the KL coefficient with which it goes no further from the reference than TRL with the
task's: matched by the KL of the runs that report, not by their gold reward. On *stories* the two are the same."""

NEEDS = {
    "kl_target": ("stories", "preferences"),
    "kl_coef": ("stories", "preferences"),
    "lam_critic": ("stories", "preferences"),
    "lam_policy": ("arithmetic",),
    "loss_aggregation_sequence": ("preferences", "arithmetic"),
    "ptx_coef": ("preferences",),
}
"""Options that mean something in some tasks only: where there is a KL penalty, where lambda is not what they set
already, where responses differ in length, where there are texts of the language model."""

HELD_EQUAL = {
    "learning_rate", "kl_coef", "temperature", "response_length", "stop_token", "missing_eos_score", "gamma", "lam",
    "per_device_train_batch_size", "gradient_accumulation_steps", "local_rollout_forward_batch_size",
    "num_train_epochs",
}  # fmt: skip
"""What a preset does not change here: episodes, learning rate, KL coefficient and task are the same for all."""


def preset(name: str, learning_rate: float) -> dict[str, Any]:
    """Return what a preset of rlhf_ppo changes but for what is held equal.

    Args:
        name: The preset's.
        learning_rate: The task's, of which the value model has the multiple that the preset gives it.
    """
    from rlhf_ppo import preset as preset_of

    said = preset_of(name)
    changes = {key: value for key, value in said.items() if key not in HELD_EQUAL}
    if "critic_learning_rate" in said:
        changes["critic_learning_rate"] = said["critic_learning_rate"] / said["learning_rate"] * learning_rate
    return changes


def single_options() -> list[str]:
    """Return what runs where nothing else is asked for: no option, each one alone, and the recommended preset."""
    return [PLAIN, *OPTIONS, RECOMMENDED]


def value_of(text: str) -> Any:
    """Read an argument's value as YAML does, and None and numbers such as 1e-3 too, which are words to YAML."""
    if text == "None":
        return None
    try:
        return float(text) if "e" in text.lower() else yaml.safe_load(text)
    except ValueError:
        return yaml.safe_load(text)


def overrides(variant: str, learning_rate: float = 1.0) -> dict[str, Any]:
    """Return a variant's arguments beside the task's.

    Args:
        variant: `trl`, `plain`, or parts between commas, of which the later win: a name in `OPTIONS`, `preset:` and a
            preset's name, or an argument such as `kl_stop=0.02` or `value_model=policy`.
        learning_rate: The task's.

    Raises:
        ValueError: It is none of these.
    """
    if variant in (TRL, PLAIN):
        return {}
    changes: dict[str, Any] = {}
    for part in variant.split(","):
        name, equals, text = part.partition("=")
        if part in OPTIONS:
            changes |= OPTIONS[part]
        elif part.startswith(PRESET):
            changes |= preset(part.removeprefix(PRESET), learning_rate)
        elif name and equals:
            changes[name] = value_of(text)
        else:
            names = ", ".join((TRL, PLAIN, *OPTIONS))
            raise ValueError(
                f"there is no option {part!r}; there are {names}; or write preset:NAME, or NAME=VALUE,..."
            )
    return changes
