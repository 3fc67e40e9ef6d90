"""PPO's clipped losses per token, and their weighted mean over the tokens of a mini-batch.

The losses take no mask. Replace padding in log-probabilities and values by selection (`zero_outside` or
`masked_fill`), so that it gets no gradient, and average with `token_mean`, which ignores it.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor

from rlhf_ppo.algorithm.advantages import ReduceSum, masked_mean, masked_var, zero_outside

NO_FIGURES: Mapping[str, Tensor] = MappingProxyType({})


class PolicyLoss(NamedTuple):
    """Result of a policy loss for each token.

    Attributes:
        loss: The loss to minimise, float32 `(..., T)`, in the advantage's unit.
        ratio: Importance ratio, new probability over old, float32 `(..., T)`.
        clipped: Whether the clip removes the token's gradient, bool `(..., T)`.
        figures: Further metrics, `(..., T)` by name; their means over the real tokens of an update are logged.
    """

    loss: Tensor
    ratio: Tensor
    clipped: Tensor
    figures: Mapping[str, Tensor] = NO_FIGURES


class ValueLoss(NamedTuple):
    """Result of a value loss for each token.

    Attributes:
        loss: The loss to minimise, float32 `(..., T)`, in the reward's unit squared.
        clipped: Whether the clipped branch is the larger loss, so that the token has no gradient, bool `(..., T)`.
        figures: Further metrics, `(..., T)` by name; their means over the real tokens of an update are logged.
    """

    loss: Tensor
    clipped: Tensor
    figures: Mapping[str, Tensor] = NO_FIGURES


def clipped_policy_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    cliprange: float,
    weights: Tensor | None = None,
    cliprange_high: float | None = None,
) -> PolicyLoss:
    """Compute PPO's clipped policy loss.

        rho = exp(logprob - old_logprob)
        loss = w max(-A rho, -A clip(rho, 1 - cliprange, 1 + cliprange_high))

    The clip removes the gradient of a token with A > 0 once its ratio is above 1 + cliprange_high, and of a token with
    A < 0 once its ratio is below 1 - cliprange.

    PPO, 1707.06347, section 3 (eq. 7, negated); two clip ranges: DAPO, 2503.14476, section 3.1.

    Args:
        logprobs: Log-probabilities of the sampled tokens under the policy being trained, nats, `(..., T)`.
        old_logprobs: The same under the sampling policy, nats, `(..., T)`.
        advantages: `(..., T)`, in standard deviations once whitened.
        cliprange: Largest useful distance of the ratio below 1.
        weights: Result of `importance_weights`, `(..., T)`; None: all 1.
        cliprange_high: Largest useful distance of the ratio above 1; None: `cliprange`.

    Returns:
        Loss, ratio and clip flag of each token; meaningless outside the response mask.
    """
    advantages = advantages.float()
    ratio = (logprobs.float() - old_logprobs.float()).exp()
    unclipped_loss = -advantages * ratio
    high = cliprange if cliprange_high is None else cliprange_high
    clipped_loss = -advantages * ratio.clamp(1 - cliprange, 1 + high)
    clipped = clipped_loss > unclipped_loss
    loss = torch.maximum(unclipped_loss, clipped_loss)
    return PolicyLoss(loss if weights is None else loss * weights, ratio, clipped)


def clipped_value_loss(
    values: Tensor, old_values: Tensor, returns: Tensor, cliprange_value: float | None
) -> ValueLoss:
    """Compute PPO's clipped value loss.

        loss = 0.5 max((V - R)^2, (clip(V, V_old - cliprange_value, V_old + cliprange_value) - R)^2)

    Not in the PPO paper; from its authors' code, as in N+ implementation details, 2403.17031, section 7.

    Args:
        values: Values of the model being trained, `(..., T)`, in the reward's unit.
        old_values: Values at sampling time, `(..., T)`.
        returns: Regression targets, `(..., T)`, in the reward's unit.
        cliprange_value: In the reward's unit; None does not clip, which Andrychowicz et al., 2006.05990, section 3.2,
            find to be no worse.

    Returns:
        Loss and clip flag of each token; meaningless outside the response mask.
    """
    values, old_values, returns = values.float(), old_values.float(), returns.float()
    unclipped_loss = 0.5 * (values - returns).square()
    if cliprange_value is None:
        return ValueLoss(unclipped_loss, torch.zeros_like(values, dtype=torch.bool))
    nearby_values = values.clamp(old_values - cliprange_value, old_values + cliprange_value)
    clipped_loss = 0.5 * (nearby_values - returns).square()
    return ValueLoss(torch.maximum(unclipped_loss, clipped_loss), clipped_loss > unclipped_loss)


def importance_weights(logprobs: Tensor, sampling_logprobs: Tensor, clip_max: float) -> Tensor:
    """Compute importance weights of the policy over the generation engine.

        w_t = min(exp(logprob_t - sampling_logprob_t), clip_max)

    Truncated importance sampling (Ionides, *Truncated Importance Sampling*, 2008), for engines whose arithmetic
    differs from that of training (Yao et al., *Your Efficient RL Framework Secretly Brings You Off-Policy RL
    Training*, 2025).

    Args:
        logprobs: Log-probabilities of the sampled tokens under the sampling policy, by the training forward pass,
            nats, `(..., T)`.
        sampling_logprobs: The same as reported by the engine, nats, `(..., T)`.
        clip_max: Largest weight.

    Returns:
        Constant factors of the policy's per-token loss, float32 `(..., T)`; meaningless outside the mask.
    """
    return (logprobs.float() - sampling_logprobs.float()).detach().exp().clamp(max=clip_max)


def token_mean(per_token: Tensor, mask: Tensor, num_tokens: float) -> Tensor:
    """Compute this part's contribution to a mean over tokens: `sum_i m_i x_i / num_tokens`.

    The denominator is that of the whole mini-batch: for any split into micro-batches and ranks, the parts sum to the
    same mean, and their gradients to the same gradient.

    Args:
        per_token: `(..., T)`, any unit.
        mask: True on real tokens, bool, same shape.
        num_tokens: Number of real tokens of the whole mini-batch, on all ranks.

    Returns:
        float32 scalar, in the unit of `per_token`.
    """
    return zero_outside(per_token, mask).sum() / num_tokens


def sequence_weights(mask: Tensor, num_tokens: float, reduce_sum: ReduceSum | None = None) -> Tensor:
    """Return token weights whose weighted mean over all tokens is a mean over responses of their tokens' means.

        w_it = num_tokens / (n l_i),    of n responses with l_i tokens

    Args:
        mask: True on the loss tokens of this rank's part of the mini-batch, bool `(B, T)`.
        num_tokens: Number of loss tokens of the whole mini-batch, on all ranks.
        reduce_sum: Sums over all ranks, each of which must call this; None for one process.

    Returns:
        float32 `(B, 1)`.
    """
    lengths = mask.sum(dim=1, keepdim=True).float()
    num_responses = (lengths > 0).sum()
    num_responses = num_responses if reduce_sum is None else reduce_sum(num_responses)
    return num_tokens / (num_responses * lengths.clamp(min=1))


def approx_kl(logprobs: Tensor, old_logprobs: Tensor) -> Tensor:
    """Estimate the KL between the policy and the sampling policy per token: `0.5 (logprob - old_logprob)^2`.

    Schulman's k2 (*Approximating KL Divergence*, 2020): biased, but never negative and of low variance near 0.

    Args:
        logprobs: Log-probabilities under the policy being trained, nats, `(..., T)`.
        old_logprobs: Log-probabilities under the sampling policy, nats, `(..., T)`.

    Returns:
        Nats, float32 `(..., T)`; meaningless outside the response mask.
    """
    return 0.5 * (logprobs.float() - old_logprobs.float()).square()


def explained_variance(values: Tensor, returns: Tensor, mask: Tensor, reduce_sum: ReduceSum | None = None) -> Tensor:
    """Compute the share of the returns' variance that the values explain: `1 - Var(R - V) / Var(R)`.

    Args:
        values: Value estimates, `(B, T)`, in the reward's unit.
        returns: `(B, T)`, in the reward's unit.
        mask: True on real tokens, bool `(B, T)`.
        reduce_sum: Sums over all ranks, each of which must call this; None for one process.

    Returns:
        float32 scalar: 1 for perfect values, 0 for constant ones, below 0 for worse ones; 0 for returns that are
            constant up to rounding.
    """
    residual_var = masked_var(returns.float() - values.float(), mask, reduce_sum)
    returns_var = masked_var(returns, mask, reduce_sum)
    # GAE adds advantages to values in float32: the rounding is relative to the larger of values and returns.
    size = masked_mean(returns.float().square() + values.float().square(), mask, reduce_sum)
    return torch.where(returns_var > 1e-10 * size, 1 - residual_var / returns_var, 0.0)
