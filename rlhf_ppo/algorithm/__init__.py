"""The mathematics of PPO from human feedback, as pure tensor functions.

In the order of the computation: `advantages` turns scores into token rewards, and these into advantages and returns,
and whitens them over the real tokens of all ranks; `losses` computes the losses. This package imports only torch and
itself.

All functions compute in float32. Masks are True on real tokens; other values, including NaN and inf, do not affect any
result.
"""

from rlhf_ppo.algorithm.advantages import (
    clip_scores,
    gae,
    kl_estimate,
    masked_mean,
    masked_var,
    masked_whiten,
    penalize_missing_eos,
    replace_missing_eos,
    token_rewards,
    zero_outside,
)
from rlhf_ppo.algorithm.losses import (
    PolicyLoss,
    ValueLoss,
    approx_kl,
    clipped_policy_loss,
    clipped_value_loss,
    explained_variance,
    importance_weights,
    token_mean,
)

__all__ = [
    "PolicyLoss",
    "ValueLoss",
    "approx_kl",
    "clip_scores",
    "clipped_policy_loss",
    "clipped_value_loss",
    "explained_variance",
    "gae",
    "importance_weights",
    "kl_estimate",
    "masked_mean",
    "masked_var",
    "masked_whiten",
    "penalize_missing_eos",
    "replace_missing_eos",
    "token_mean",
    "token_rewards",
    "zero_outside",
]
