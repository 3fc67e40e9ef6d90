"""Advantages and returns as the arguments say."""

from __future__ import annotations

from torch import Tensor

from rlhf_ppo.algorithm.advantages import gae, length_adaptive_lam, turn_gae, turn_starts
from rlhf_ppo.config import PPOConfig
from rlhf_ppo.data.rollout import Rollout


def advantages_and_returns(
    rollout: Rollout, rewards: Tensor, args: PPOConfig, warms_up: bool = False
) -> tuple[Tensor, Tensor]:
    """Estimate both with GAE, in one pass where they share their lambda, else in a pass for each.

    Decoupled GAE: VAPO, 2504.05118, section 4.1, after VC-PPO, 2503.01491, section 3.3.

    Args:
        rollout: `B` responses.
        rewards: What each token is paid, `(B, T)`.
        args: Gives `gamma`, `lam`, `lam_policy`, `lam_critic`, `length_adaptive_alpha`, `gae_level` and
            `bootstrap_truncated`.
        warms_up: Whether this is an update of critic warm-up, whose returns are of lambda 1.

    Returns:
        Advantages and returns, float32 `(B, T)` each, in the reward's unit, 0 outside `rollout.loss_mask`.
    """
    cut = rollout.final_values.masked_fill(rollout.stopped, 0.0) if args.bootstrap_truncated else None

    estimator = turn_gae if args.gae_level == "turn" else gae

    def estimate(lam: float | Tensor) -> tuple[Tensor, Tensor]:
        return estimator(rewards, rollout.values, rollout.loss_mask, args.gamma, lam, cut)

    of_critic = args.lam if args.lam_critic is None else args.lam_critic
    of_critic = 1.0 if warms_up else of_critic
    of_policy: float | Tensor = args.lam if args.lam_policy is None else args.lam_policy
    if args.length_adaptive_alpha is not None:
        of_policy = length_adaptive_lam(valued_tokens(rollout.loss_mask, args), args.length_adaptive_alpha)
    advantages, returns = estimate(of_policy)
    is_shared = not isinstance(of_policy, Tensor) and of_policy == of_critic
    return advantages, returns if is_shared else estimate(of_critic)[1]


def valued_tokens(loss_mask: Tensor, args: PPOConfig) -> Tensor:
    """Tell before which tokens a value counts: all that are learned from, or the first ones of turns (`gae_level`).

    Args:
        loss_mask: True on the tokens that are learned from, bool `(B, T)`.
        args: Gives `gae_level`.

    Returns:
        bool `(B, T)`.
    """
    return turn_starts(loss_mask) if args.gae_level == "turn" else loss_mask
