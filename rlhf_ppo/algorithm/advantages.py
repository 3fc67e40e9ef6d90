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
    lam: float | Tensor,
    bootstrap_values: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute advantages and returns, from the last token to the first.

        delta_t = r_t + gamma V_{t+1} - V_t
        A_t = delta_t + gamma lam A_{t+1}
        return_t = A_t + V_t

    The sum ends at the last real token: there `A_{t+1} = 0` and `V_{t+1}` is 0, or the row's bootstrap value if the
    response was truncated by its length. GAE, 1506.02438, section 3; PPO, 1707.06347, section 5.

    Args:
        rewards: `(B, T)`, in the reward's unit.
        values: Value estimates before each token, `(B, T)`, in the reward's unit.
        response_mask: True on real tokens, bool `(B, T)`. Other tokens are skipped, at any position.
        gamma: Discount per token, 0 to 1.
        lam: 0 for one-step TD errors, 1 for Monte-Carlo returns minus the value; a number, or `(B,)`.
        bootstrap_values: Value estimate after the last real token, `(B,)`; 0 for rows that ended. None if all did.

    Returns:
        `(advantages, returns)`, not whitened, float32 `(B, T)`, 0 outside the mask.
    """
    places = response_mask.logical_not().to(torch.uint8).argsort(dim=1, stable=True)  # real tokens first, in order
    real = response_mask.gather(1, places)
    rewards = zero_outside(rewards, response_mask).gather(1, places)
    values = zero_outside(values, response_mask).gather(1, places)
    deltas = rewards + gamma * _next_values(values, real, bootstrap_values) - values
    advantages = _discounted_sums(deltas, gamma * lam)
    tokens = places.argsort(dim=1)
    return advantages.gather(1, tokens), (advantages + values).gather(1, tokens)


def turn_starts(response_mask: Tensor) -> Tensor:
    """Return which tokens are the first of a turn, a contiguous span of tokens that the policy wrote.

    Args:
        response_mask: True on the policy's tokens, bool `(B, T)`; False on those of tools and environments.

    Returns:
        bool `(B, T)`.
    """
    starts = response_mask.clone()
    starts[:, 1:] &= ~response_mask[:, :-1]
    return starts


def turn_gae(
    rewards: Tensor,
    values: Tensor,
    response_mask: Tensor,
    gamma: float,
    lam: float | Tensor,
    bootstrap_values: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute advantages and returns of turns: an action is a turn, its state all preceding tokens.

        r_k = sum of the rewards of turn k's tokens,        V_k = value before its first token
        delta_k = r_k + gamma V_{k+1} - V_k
        A_k = delta_k + gamma lam A_{k+1},                  return_k = A_k + V_k

    Every token of turn k has the advantage `A_k`; only its first token has a return, and a value that is used.
    Turn-PPO, 2512.17008. With turns of one token it equals `gae`; with a single turn it is a bandit.

    Args:
        rewards: Token rewards, `(B, T)`, in the reward's unit.
        values: Value estimates before each token, `(B, T)`, in the reward's unit.
        response_mask: True on real tokens, bool `(B, T)`.
        gamma: Discount per turn, 0 to 1.
        lam: As in `gae`, per turn.
        bootstrap_values: As in `gae`.

    Returns:
        `(advantages, returns)`, not whitened, float32 `(B, T)`, 0 outside the mask; returns only on first tokens.
    """
    starts = turn_starts(response_mask)
    turns = (starts.cumsum(dim=1) - 1).clamp(min=0)
    own = zero_outside(rewards, response_mask)
    # On the CPU, where the order of summation is deterministic.
    sums = torch.zeros(own.shape).scatter_add(1, turns.cpu(), own.cpu()).to(own.device)
    advantages, returns = gae(sums.gather(1, turns), values, starts, gamma, lam, bootstrap_values)
    places = torch.arange(starts.shape[1], device=starts.device)
    first = torch.where(starts, places, 0).cummax(dim=1).values
    return zero_outside(advantages.gather(1, first), response_mask), returns


def length_adaptive_lam(response_mask: Tensor, alpha: float) -> Tensor:
    """Compute each response's lambda from its length: `lam_i = max(0, 1 - 1 / (alpha l_i))`.

    The weights of a response's TD errors then sum to about `alpha l`. VAPO, 2504.05118,
    section 4.2.

    Args:
        response_mask: True on real tokens, bool `(B, T)`.
        alpha: Positive; 0.05 in the paper.

    Returns:
        float32 `(B,)`.
    """
    return (1 - 1 / (alpha * response_mask.sum(dim=1).clamp(min=1))).clamp(min=0)


def _next_values(values: Tensor, real: Tensor, bootstrap_values: Tensor | None) -> Tensor:
    """Shift values by one token; real tokens come first in their rows, other values are 0."""
    next_values = values.roll(-1, dims=1)
    next_values[:, -1] = 0.0
    if bootstrap_values is None:
        return next_values
    is_last = real.clone()
    is_last[:, :-1] &= ~real[:, 1:]
    return torch.where(is_last, bootstrap_values.float()[:, None], next_values)


def _discounted_sums(terms: Tensor, discount: float | Tensor) -> Tensor:
    """Return `y_t = x_t + discount y_{t+1}`, computed on the CPU: on a GPU, each step would be a kernel launch."""
    sums = terms.T.cpu().clone(memory_format=torch.contiguous_format)
    steps = sums.unbind()
    discount = discount.cpu() if isinstance(discount, Tensor) else discount
    for step, following in zip(steps[-2::-1], steps[:0:-1], strict=True):
        step += discount * following
    return sums.to(terms.device).T
