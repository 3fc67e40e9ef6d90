"""PPO's clipped losses, token by token, and how tokens are averaged.

The losses know no mask: give them log-probabilities and values whose padding was replaced by selection (`zero_outside`
or `masked_fill`), so that it gets no gradient whatever it held, and average with `token_mean`, which drops it.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor

from rlhf_ppo.algorithm.masked import ReduceSum, masked_var, zero_outside

NO_FIGURES: Mapping[str, Tensor] = MappingProxyType({})


class PolicyLoss(NamedTuple):
    """What a policy loss knows of each token.

    Attributes:
        loss: To minimise, float32 `(..., T)`, in the advantage's unit.
        ratio: Importance ratio, new probability over old, float32 `(..., T)`.
        clipped: Whether the clip removes the token's gradient, bool `(..., T)`.
        figures: Anything else to log, `(..., T)` by the metric's name: its mean over the real tokens of an update.
    """

    loss: Tensor
    ratio: Tensor
    clipped: Tensor
    figures: Mapping[str, Tensor] = NO_FIGURES


class ValueLoss(NamedTuple):
    """What a value loss knows of each token.

    Attributes:
        loss: To minimise, float32 `(..., T)`, in the reward's unit squared.
        clipped: Whether the clipped branch is the larger loss, so that the token has no gradient, bool `(..., T)`.
        figures: Anything else to log, `(..., T)` by the metric's name: its mean over the real tokens of an update.
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
    dual_clip: float | None = None,
) -> PolicyLoss:
    """Reward a better token until its probability has moved by the clip range; a worse one without that mercy.

        rho = exp(logprob - old_logprob)
        loss = w max(-A rho, -A clip(rho, 1 - cliprange, 1 + cliprange_high))
        with a dual clip c, for A < 0: loss = w min(that max, -c A)

    PPO, 1707.06347, section 3 (eq. 7, negated); two clip ranges: DAPO, 2503.14476, section 3.1; dual clip: Ye et al.,
    1912.09729, section 4.2.

    Args:
        logprobs: Of the sampled tokens under the policy being trained, nats, `(..., T)`.
        old_logprobs: The same under the policy that sampled them, nats, `(..., T)`.
        advantages: `(..., T)`, in standard deviations once whitened.
        cliprange: How far the ratio may go from 1 and still be rewarded.
        weights: What `importance_weights` gave, `(..., T)`; None: all 1.
        cliprange_high: The same above 1; None: as below.
        dual_clip: From which ratio on a worse token has no gradient, above 1; None: from none.

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
    if dual_clip is not None:
        most = torch.where(advantages < 0, -dual_clip * advantages, torch.inf)
        loss, clipped = torch.minimum(loss, most), clipped | (loss > most)
    return PolicyLoss(loss if weights is None else loss * weights, ratio, clipped)


def sequence_clipped_policy_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    cliprange: float,
    cliprange_high: float | None = None,
    weights: Tensor | None = None,
) -> PolicyLoss:
    """Clip the ratio of a whole response, its tokens' geometric mean, instead of each token's.

        s_i = exp(mean_t(logprob_it - old_logprob_it))
        rho_it = stop(s_i) exp(logprob_it - stop(logprob_it))
        loss = w max(-A rho, -A clip(rho, 1 - cliprange, 1 + cliprange_high))

    Its value is that of `s_i`; its gradient leaves each token its own advantage, and is GSPO's where they are equal.
    GSPO, 2507.18071, sections 4.1 and 4.3 (eqs. 5, 7 and 14).

    Args:
        logprobs: Of the sampled tokens under the policy being trained, nats, `(B, T)`; whole responses.
        old_logprobs: The same under the policy that sampled them, nats, `(B, T)`.
        advantages: `(B, T)`, in standard deviations once whitened.
        mask: True on the tokens that are learned from, bool `(B, T)`.
        cliprange: How far the response's ratio may fall below 1.
        cliprange_high: How far it may rise above 1; None: as far.
        weights: What `importance_weights` gave, `(B, T)`; None: all 1.

    Returns:
        Loss, ratio and clip flag of each token; meaningless outside the response mask.
    """
    log_ratio = zero_outside(logprobs.float() - old_logprobs.float(), mask)
    mean = log_ratio.sum(dim=1, keepdim=True) / mask.sum(dim=1, keepdim=True).clamp(min=1)
    of_token = logprobs.float()
    return clipped_policy_loss(
        of_token, of_token.detach() - mean.detach(), advantages, cliprange, weights, cliprange_high
    )


def weight_clipped_policy_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    max_weight: float,
    weights: Tensor | None = None,
) -> PolicyLoss:
    """Weigh each token's policy gradient by its ratio, up to a limit; no token loses its gradient.

        rho = exp(logprob - old_logprob)
        loss = -w stop(min(rho, max_weight)) A logprob

    CISPO of MiniMax-M1, 2506.13585, section 3.1 (eqs. 4 and 5), without a lower limit.

    Args:
        logprobs: Of the sampled tokens under the policy being trained, nats, `(..., T)`.
        old_logprobs: The same under the policy that sampled them, nats, `(..., T)`.
        advantages: `(..., T)`, in standard deviations once whitened.
        max_weight: The largest ratio that counts.
        weights: What `importance_weights` gave, `(..., T)`; None: all 1.

    Returns:
        Loss and ratio of each token, none of them clipped; `policy/weight_clipfrac_avg`, whether the limit was
        reached. Meaningless outside the response mask.
    """
    ratio = (logprobs.detach().float() - old_logprobs.float()).exp()
    loss = -ratio.clamp(max=max_weight) * advantages.float() * logprobs.float()
    limited = ratio > max_weight
    figures = {"policy/weight_clipfrac_avg": limited.float()}
    return PolicyLoss(loss if weights is None else loss * weights, ratio, torch.zeros_like(limited), figures)


def clipped_value_loss(
    values: Tensor, old_values: Tensor, returns: Tensor, cliprange_value: float | None
) -> ValueLoss:
    """Pull values to the returns, but no further than the clip range from where they were.

        loss = 0.5 max((V - R)^2, (clip(V, V_old - cliprange_value, V_old + cliprange_value) - R)^2)

    Not in the PPO paper; from its authors' code, as in N+ implementation details, 2403.17031, section 7.

    Args:
        values: Estimates of the value model being trained, `(..., T)`, in the reward's unit.
        old_values: Estimates when the response was sampled, `(..., T)`.
        returns: What to fit, `(..., T)`, in the reward's unit.
        cliprange_value: In the reward's unit; None clips nothing, which Andrychowicz et al., 2006.05990, section 3.2,
            find no worse.

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
    """Say how much likelier the policy makes each token than the engine that drew it, up to a limit.

        w = min(exp(logprob - sampling_logprob), clip_max)

    Truncated importance sampling (Ionides, *Truncated Importance Sampling*, 2008), for engines whose arithmetic is not
    that of training (Yao et al., *Your Efficient RL Framework Secretly Brings You Off-Policy RL Training*, 2025).

    Args:
        logprobs: Of the sampled tokens under the policy when they were sampled, by the training forward, nats,
            `(..., T)`.
        sampling_logprobs: The same as the engine drew them, nats, `(..., T)`.
        clip_max: The largest weight.

    Returns:
        Constant factors of the policy's per-token loss, float32 `(..., T)`; meaningless outside the response mask.
    """
    return (logprobs.float() - sampling_logprobs.float()).exp().clamp(max=clip_max).detach()


def token_mean(per_token: Tensor, mask: Tensor, num_tokens: float) -> Tensor:
    """Give this part's share of a mean over tokens: `sum_i m_i x_i / num_tokens`.

    The denominator is one for the whole mini-batch: its parts, cut in any way over micro-batches and ranks, add up to
    the same mean, and their gradients to the same gradient.

    Args:
        per_token: `(..., T)`, any unit.
        mask: True on real tokens, bool, same shape.
        num_tokens: Real tokens of the whole mini-batch on all ranks.

    Returns:
        float32 scalar, in the unit of `per_token`.

    Raises:
        ValueError: `num_tokens` is not positive.
    """
    if num_tokens <= 0:
        raise ValueError(f"num_tokens={num_tokens} is not positive; count the real tokens of the whole mini-batch")
    return zero_outside(per_token, mask).sum() / num_tokens


def approx_kl(logprobs: Tensor, old_logprobs: Tensor) -> Tensor:
    """Estimate how far the policy has moved since it sampled, per token: `0.5 (logprob - old_logprob)^2`.

    Schulman's k2 (*Approximating KL Divergence*, 2020): biased, but never negative and of low variance near 0.

    Args:
        logprobs: Under the policy being trained, nats, `(..., T)`.
        old_logprobs: Under the policy that sampled, nats, `(..., T)`.

    Returns:
        Nats, float32 `(..., T)`; meaningless outside the response mask.
    """
    return 0.5 * (logprobs.float() - old_logprobs.float()).square()


def explained_variance(values: Tensor, returns: Tensor, mask: Tensor, reduce_sum: ReduceSum | None = None) -> Tensor:
    """Say how much of the returns' variance the values foresee: `1 - Var(R - V) / Var(R)`.

    Args:
        values: Value estimates, `(B, T)`, in the reward's unit.
        returns: `(B, T)`, in the reward's unit.
        mask: True on real tokens, bool `(B, T)`.
        reduce_sum: Sums over all ranks, each of which must make the same call; None when there is one process.

    Returns:
        float32 scalar: 1 for perfect values, 0 for constant ones, below 0 for worse; 0 where the returns do not vary.
    """
    residual_var = masked_var(returns.float() - values.float(), mask, reduce_sum)
    returns_var = masked_var(returns, mask, reduce_sum)
    return torch.where(returns_var > 0, 1 - residual_var / returns_var, 0.0)
