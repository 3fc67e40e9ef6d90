"""Random configurations: what is drawn, what it needs beside it, and what every configuration starts from."""

from __future__ import annotations

import json
import random
from typing import Any

Configuration = dict[str, Any]
"""Options of `PPOConfig` by name, and objects of `PPOTrainer` by the names in `OBJECTS`; JSON holds all of it."""

BASE: Configuration = {
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 4,
    "num_ppo_epochs": 2,
    "num_mini_batches": 2,
    "response_length": 7,
    "total_episodes": 24,
    "learning_rate": 0.3,
    "optim": "sgd",
    "temperature": 1.0,
    "kl_coef": 0.2,
    "stop_token": "eos",
    "logging_steps": 1,
    "seed": 1,
}
"""Three updates of eight episodes, each with four optimizer steps that move the policy far."""

OBJECTS: Configuration = {
    "reward": "length",
    "reference": "other",
    "value_model": "own",
    "responses": "sampled",
    "engine": "transformers",
    "loss": "in turn",
    "adapter": None,
}
"""What stands for the objects that `PPOTrainer` takes, see `tests/fuzz/recording.py`."""

OPTIONS: dict[str, list[Any]] = {
    # Rollout
    "temperature": [0.7, 1.6],
    "top_k": [1, 5],
    "top_p": [0.6, 0.9],
    "min_p": [0.05, 0.3],
    "stop_token": [None],
    "stop_token_id": [5],
    "stop_strings": [["w3", "w4"]],
    "response_length": [1, 3, 12],
    "num_generations": [2, 4],
    "local_rollout_forward_batch_size": [1, 3],
    "generation_engine": ["continuous"],
    "responses": ["turns"],
    "engine": ["says log-probabilities"],
    "importance_sampling_correction": [False],
    "importance_sampling_clip_max": [0.5, 1.2],
    # Rewards
    "reward": ["several", "tokens", "some None", "some None of one", "None in the second update", "model"],
    "reward_weights": [[0.5, -2.0, 3.0], {"length": 3.0, "reward_model": 0.5, "share": 0.0}],
    "score_clip": [0.3],
    "score_scaling": [True],
    "missing_eos_penalty": [1.5],
    "missing_eos_score": [-1.5, 0.0],
    "bootstrap_truncated": [True],
    "whiten_rewards": [True],
    # The reference
    "kl_coef": [0.0, 0.01, 1.0],
    "kl_estimator": ["k3"],
    "kl_target": [0.5, 6.0],
    "kl_horizon": [20, 100],
    "kl_stop": [0.02, 0.3],
    "reference": ["the policy"],
    "offload_frozen": [True],
    # Advantages
    "gamma": [0.0, 0.5, 0.95],
    "lam": [0.0, 0.5, 1.0],
    "lam_policy": [0.0, 0.7],
    "lam_critic": [0.3, 1.0],
    "gae_level": ["turn"],
    # Losses
    "policy_loss": ["tests.fuzz.recording.squared"],
    "cliprange": [0.05, 0.5],
    "cliprange_high": [0.02, 0.6],
    "cliprange_value": [None, 0.02, 0.7],
    "vf_coef": [0.0, 1.0],
    "entropy_coef": [0.05],
    "ptx_coef": [0.5],
    "loss_aggregation": ["sequence"],
    "loss": ["at once"],
    # Optimization
    "num_ppo_epochs": [1, 3],
    "num_mini_batches": [1, 4, 8],
    "max_tokens_per_micro_batch": [12, 40],
    "value_model": ["made"],
    "critic_learning_rate": [0.01, 0.05],
    "critic_warmup_steps": [1, 2],
    "learning_rate": [0.03, 0.8],
    "lr_scheduler_type": ["constant", "cosine", "constant_with_warmup"],
    "warmup_steps": [2],
    "max_grad_norm": [0.0, 0.05],
    "weight_decay": [0.1],
    "optim": ["adamw_torch"],
    "adapter": ["lora"],
    "share_base_model": [True],
    # What changes no number
    "gradient_checkpointing": [True],
    "lm_head_float32": [True],
    "share_prefixes": [False],
    "logging_steps": [2, 3],
}
"""What is drawn, and the values that differ from `BASE` and `OBJECTS`."""

_SAYS = {"engine": "says log-probabilities"}
NEEDS: dict[str, Configuration] = {
    # With a larger epsilon than usual: float32's noise in a gradient of 0 moves nothing.
    "optim": {"learning_rate": 0.02, "adam_epsilon": 1e-3},
    "importance_sampling_clip_max": _SAYS,
    "importance_sampling_correction": _SAYS,
    "stop_token_id": {"stop_token": None},
    "reward_weights": {"reward": "several"},
    "kl_horizon": {"kl_target": 0.5},
    "kl_target": {"kl_horizon": 30},
    "gae_level": {"responses": "turns"},
    "adapter": {"reference": "the policy"},
    "share_base_model": {"adapter": "lora", "reference": "the policy", "value_model": "made"},
    "generation_engine": {"temperature": 0.9},
}
"""What an option does nothing, or is refused, without; what is drawn beside it wins."""


def draw(seed: int, number: int, attempt: int = 0) -> Configuration:
    """Draw two to four options and a seed.

    One value after the other has its turn, in an order of the seed's, so that as many configurations as there are
    values hold each.

    Args:
        seed: Of all configurations.
        number: Of this one.
        attempt: How many were refused before.
    """
    values = [(name, value) for name in sorted(OPTIONS) for value in OPTIONS[name]]
    random.Random(f"turns {seed}").shuffle(values)
    random_ = random.Random(f"{seed} {number} {attempt}")
    first = {"score_clip": 0.3, "score_scaling": True} if number == 0 else dict([values[number % len(values)]])
    others = random_.sample(
        [name for name in sorted(OPTIONS) if name not in first], random_.randint(1, 4 - len(first))
    )
    drawn = first | {name: random_.choice(OPTIONS[name]) for name in others}
    needed: Configuration = {}
    for name in drawn:
        needed |= NEEDS.get(name, {})
    return {**needed, **drawn, "seed": random_.randint(1, 10_000)}


def described(configuration: Configuration) -> str:
    """Return the command that runs a configuration again."""
    return f"make test-fuzz CONFIGURATION='{json.dumps(configuration)}'"
