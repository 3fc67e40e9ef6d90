"""Generalized advantage estimation."""

from __future__ import annotations

import torch
from torch import Tensor

from rlhf_ppo.algorithm.masked import zero_outside


def gae(
    rewards: Tensor,
    values: Tensor,
    response_mask: Tensor,
    gamma: float,
    lam: float,
    bootstrap_values: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Estimate advantages and returns, from the last token to the first.

        delta_t = r_t + gamma V_{t+1} - V_t
        A_t = delta_t + gamma lam A_{t+1}
        return_t = A_t + V_t

    The sum ends at the last real token: there `A_{t+1} = 0` and `V_{t+1}` is 0, or the row's bootstrap value if the
    response was cut by its length rather than ended. GAE, 1506.02438, section 3; PPO, 1707.06347, section 5.

    Args:
        rewards: `(B, T)`, in the reward's unit.
        values: Value estimates before each token, `(B, T)`, in the reward's unit.
        response_mask: True on real tokens, bool `(B, T)`. Other tokens are passed over, wherever they stand.
        gamma: Discount per token, 0 to 1.
        lam: 0 for one-step TD errors, 1 for Monte-Carlo returns minus the value.
        bootstrap_values: Value estimate after the last real token, `(B,)`: give 0 for the rows that ended. None when
            every row did.

    Returns:
        `(advantages, returns)`, not whitened, float32 `(B, T)`, 0 outside the mask.
    """
    rewards, values = zero_outside(rewards, response_mask), zero_outside(values, response_mask)
    next_value = torch.zeros_like(values[:, 0]) if bootstrap_values is None else bootstrap_values.float()
    next_advantage = torch.zeros_like(next_value)
    advantages = torch.zeros_like(values)
    for t in reversed(range(values.shape[1])):
        real = response_mask[:, t]
        delta = rewards[:, t] + gamma * next_value - values[:, t]
        advantages[:, t] = torch.where(real, delta + gamma * lam * next_advantage, 0.0)
        next_advantage = torch.where(real, advantages[:, t], next_advantage)
        next_value = torch.where(real, values[:, t], next_value)
    return advantages, advantages + values
