"""The mathematics of PPO from human feedback: pure tensor functions, one idea each.

Read in the order the numbers flow: `penalties` turns scores into rewards per token, `advantages` rewards into
advantages and returns, `masked` whitens them over every rank's real tokens, `losses` compares them with the model in
training. The room imports nothing but torch and itself.

All functions compute in float32, whatever they are given. A mask is True on real tokens; what stands elsewhere, NaN
and inf included, reaches no result.
"""

from rlhf_ppo.algorithm.advantages import gae
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
from rlhf_ppo.algorithm.masked import masked_mean, masked_var, masked_whiten, zero_outside
from rlhf_ppo.algorithm.penalties import (
    clip_scores,
    kl_estimate,
    penalize_missing_eos,
    replace_missing_eos,
    token_rewards,
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
