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

from rlhf_ppo.algorithm.masked import ReduceSum, masked_var, zero_outside

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
        loss: The loss to minimise, float32 `(..., T)`, in the reward's unit squared, or nats.
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
    dual_clip: float | None = None,
) -> PolicyLoss:
    """Compute PPO's clipped policy loss.

        rho = exp(logprob - old_logprob)
        loss = w max(-A rho, -A clip(rho, 1 - cliprange, 1 + cliprange_high))
        with a dual clip c, for A < 0: loss = w min(that max, -c A)

    The clip removes the gradient of a token with A > 0 once its ratio is above 1 + cliprange_high, and of a token with
    A < 0 once its ratio is below 1 - cliprange. Above 1, a token with A < 0 is limited by the dual clip only.

    PPO, 1707.06347, section 3 (eq. 7, negated); two clip ranges: DAPO, 2503.14476, section 3.1; dual clip: Ye et al.,
    1912.09729, section 4.2.

    Args:
        logprobs: Log-probabilities of the sampled tokens under the policy being trained, nats, `(..., T)`.
        old_logprobs: The same under the sampling policy, nats, `(..., T)`.
        advantages: `(..., T)`, in standard deviations once whitened.
        cliprange: Largest useful distance of the ratio below 1.
        weights: Result of `importance_weights`, `(..., T)`; None: all 1.
        cliprange_high: Largest useful distance of the ratio above 1; None: `cliprange`.
        dual_clip: Ratio above which a token with A < 0 has no gradient, above 1; None: no limit.

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
    """Compute the policy loss with the ratio of the response, the geometric mean of its tokens' ratios.

        s_i = exp(mean_t(logprob_it - old_logprob_it))
        rho_it = stop(s_i) exp(logprob_it - stop(logprob_it))
        loss = w max(-A rho, -A clip(rho, 1 - cliprange, 1 + cliprange_high))

    The ratio's value is `s_i`; in the gradient, each token keeps its own advantage. With equal advantages it is GSPO.
    GSPO, 2507.18071, sections 4.1 and 4.3 (eqs. 5, 7 and 14).

    Args:
        logprobs: Log-probabilities of the sampled tokens under the policy being trained, nats, `(B, T)`.
        old_logprobs: The same under the sampling policy, nats, `(B, T)`.
        advantages: `(B, T)`, in standard deviations once whitened.
        mask: True on the loss tokens, bool `(B, T)`.
        cliprange: Largest useful distance of the response's ratio below 1.
        cliprange_high: The same above 1; None: `cliprange`.
        weights: Result of `importance_weights`, `(B, T)`; None: all 1.

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
    """Compute the policy gradient weighted by the clipped ratio; every token keeps its gradient.

        rho = exp(logprob - old_logprob)
        loss = -w stop(min(rho, max_weight)) A logprob

    CISPO of MiniMax-M1, 2506.13585, section 3.1 (eqs. 4 and 5), without a lower limit.

    Args:
        logprobs: Log-probabilities of the sampled tokens under the policy being trained, nats, `(..., T)`.
        old_logprobs: The same under the sampling policy, nats, `(..., T)`.
        advantages: `(..., T)`, in standard deviations once whitened.
        max_weight: Limit of the ratio.
        weights: Result of `importance_weights`, `(..., T)`; None: all 1.

    Returns:
        Loss and ratio of each token, `clipped` False, and `policy/weight_clipfrac_avg`, whether the ratio exceeds the
        limit. Meaningless outside the response mask.
    """
    ratio = (logprobs.detach().float() - old_logprobs.float()).exp()
    loss = -ratio.clamp(max=max_weight) * advantages.float() * logprobs.float()
    limited = ratio > max_weight
    figures = {"policy/weight_clipfrac_avg": limited.float()}
    return PolicyLoss(loss if weights is None else loss * weights, ratio, torch.zeros_like(limited), figures)


def masked_ratio_policy_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    low: float,
    high: float,
    weights: Tensor | None = None,
) -> PolicyLoss:
    """Compute the policy gradient of the tokens whose ratio lies inside a trust region; the others have no loss.

        rho = exp(logprob - old_logprob)
        loss = -w A rho [1 - low <= rho <= 1 + high]

    Unlike PPO's clip it drops a token on both sides, whatever the sign of its advantage. Direct double-sided
    importance sampling: GLM-5, 2602.15763, and SAO, 2607.07508.

    Args:
        logprobs: Log-probabilities of the sampled tokens under the policy being trained, nats, `(..., T)`.
        old_logprobs: The same under the sampling policy, nats, `(..., T)`.
        advantages: `(..., T)`, in standard deviations once whitened.
        low: Largest distance of the ratio below 1.
        high: Largest distance of the ratio above 1.
        weights: Result of `importance_weights`, `(..., T)`; None: all 1.

    Returns:
        Loss and ratio of each token, `clipped` outside the trust region; meaningless outside the response mask.
    """
    ratio = (logprobs.float() - old_logprobs.float()).exp()
    outside = (ratio < 1 - low) | (ratio > 1 + high)
    loss = (-advantages.float() * ratio).masked_fill(outside, 0.0)
    return PolicyLoss(loss if weights is None else loss * weights, ratio, outside)


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


def hl_gauss_targets(returns: Tensor, centers: Tensor) -> Tensor:
    """Spread each return over bins: the mass that a Gaussian around it has in each.

        p_i = (Phi((e_{i+1} - R) / sigma) - Phi((e_i - R) / sigma)) / (Phi((e_n - R) / sigma) - Phi((e_0 - R) / sigma))

    where `e` are the edges of the bins and `sigma = 0.75` widths of a bin, so that about six bins have mass. HL-Gauss:
    Farebrother et al., 2403.03950, section 3.1; a return outside the range counts as its nearest edge.

    Args:
        returns: Regression targets, `(..., T)`, in the reward's unit.
        centers: Centers of the bins, rising and equally far apart, `(num_bins,)`, in the reward's unit.

    Returns:
        Probabilities of the bins, float32 `(..., T, num_bins)`.
    """
    width = centers[1] - centers[0]
    edges = torch.cat((centers[:1] - width, centers)) + width / 2
    inside = returns.float().clamp(edges[0], edges[-1])[..., None]
    cumulative = torch.erf((edges - inside) / (0.75 * width * 2**0.5))  # 2 Phi - 1
    return cumulative.diff(dim=-1) / (cumulative[..., -1:] - cumulative[..., :1])


def hl_gauss_value_loss(logits: Tensor, returns: Tensor, centers: Tensor) -> ValueLoss:
    """Compute the cross-entropy of a value distribution with the return's, without clipping.

        loss = -sum_i p_i(R) log softmax(logits)_i

    Farebrother et al., 2403.03950, section 3. Its minimum is the entropy of `p`, about 1 nat.

    Args:
        logits: Logits of the model being trained, `(..., T, num_bins)`.
        returns: Regression targets, `(..., T)`, in the reward's unit.
        centers: Centers of the bins, `(num_bins,)`, in the reward's unit.

    Returns:
        Loss of each token in nats, `clipped` False, and `val/out_of_range_frac`, whether the return is outside the
        range; meaningless outside the response mask.
    """
    targets = hl_gauss_targets(returns, centers)
    loss = -(targets * logits.float().log_softmax(dim=-1)).sum(dim=-1)
    outside = (returns.float() - centers.mean()).abs() > (centers[-1] - centers[0] + centers[1] - centers[0]) / 2
    return ValueLoss(loss, torch.zeros_like(outside), {"val/out_of_range_frac": outside.float()})


def importance_weights(
    logprobs: Tensor, sampling_logprobs: Tensor, mask: Tensor, clip_max: float, mode: str = "token"
) -> Tensor:
    """Compute importance weights of the policy over the generation engine.

        rho_t = exp(logprob_t - sampling_logprob_t)
        token:     w_t = min(rho_t, clip_max)
        sequence:  w_t = min(prod_s rho_s, clip_max), the same for all tokens of a response
        masked:    w_t = rho_t  if 1 / clip_max <= rho_t <= clip_max, else 0

    Truncated importance sampling (Ionides, *Truncated Importance Sampling*, 2008), for engines whose arithmetic
    differs from that of training (Yao et al., *Your Efficient RL Framework Secretly Brings You Off-Policy RL
    Training*, 2025). "masked" is IcePop (Ling Team, *Every Step Evolves*, 2510.18855).

    Args:
        logprobs: Log-probabilities of the sampled tokens under the sampling policy, by the training forward pass,
            nats, `(..., T)`.
        sampling_logprobs: The same as reported by the engine, nats, `(..., T)`.
        mask: True on the tokens that the policy wrote, bool `(..., T)`.
        clip_max: Largest weight.
        mode: "token", "sequence" or "masked".

    Returns:
        Constant factors of the policy's per-token loss, float32 `(..., T)`; meaningless outside the mask.
    """
    log_ratio = (logprobs.float() - sampling_logprobs.float()).detach()
    if mode == "sequence":
        log_ratio = zero_outside(log_ratio, mask).sum(dim=-1, keepdim=True).expand(log_ratio.shape)
    weights = log_ratio.exp()
    if mode == "masked":
        return weights.masked_fill((weights < 1 / clip_max) | (weights > clip_max), 0.0)
    return weights.clamp(max=clip_max)


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

    Raises:
        ValueError: `num_tokens` is not positive.
    """
    if num_tokens <= 0:
        raise ValueError(f"num_tokens={num_tokens} is not positive; count the real tokens of the whole mini-batch")
    return zero_outside(per_token, mask).sum() / num_tokens


def aggregation_weights(
    mask: Tensor,
    aggregation: str,
    num_tokens: float,
    response_length: int,
    reduce_sum: ReduceSum | None = None,
) -> Tensor | None:
    """Return token weights whose weighted mean over the mini-batch's tokens is the selected aggregation.

        token:     w_it = 1                                  one mean over all tokens
        sequence:  w_it = num_tokens / (n l_i)               the mean of each of n responses, then over responses
        constant:  w_it = num_tokens / (n response_length)   the sum, divided by a constant

    "token": DAPO, 2503.14476, section 3.3; "constant": Dr. GRPO, 2503.20783, section 3.2.

    Args:
        mask: True on the loss tokens of this rank's part of the mini-batch, bool `(B, T)`.
        aggregation: "token", "sequence" or "constant".
        num_tokens: Number of loss tokens of the whole mini-batch, on all ranks.
        response_length: Longest response, in tokens.
        reduce_sum: Sums over all ranks, each of which must call this; None for one process.

    Returns:
        Weights, float32 `(B, 1)`; None for "token".

    Raises:
        ValueError: Any other aggregation.
    """
    if aggregation == "token":
        return None
    lengths = mask.sum(dim=1, keepdim=True).float()
    num_responses = (lengths > 0).sum()
    num_responses = num_responses if reduce_sum is None else reduce_sum(num_responses)
    if aggregation == "sequence":
        return num_tokens / (num_responses * lengths.clamp(min=1))
    if aggregation == "constant":
        return (num_tokens / (num_responses * response_length)).expand_as(lengths)
    raise ValueError(f"loss_aggregation={aggregation!r} is unknown; use 'token', 'sequence' or 'constant'")


def imitation_weights(
    mask: Tensor, is_positive: Tensor, num_tokens: float, reduce_sum: ReduceSum | None = None
) -> Tensor:
    """Return token weights whose weighted mean of -log pi over all tokens is the mean over positive responses.

        w_it = num_tokens / sum_j p_j l_j  if p_i, else 0

    where `p_i` is whether response `i` is positive, and `l_i` its length. All are 0 if no response is positive. VAPO,
    2504.05118 (positive example LM loss).

    Args:
        mask: True on the loss tokens of this rank's part of the mini-batch, bool `(B, T)`.
        is_positive: Which responses are imitated, bool `(B,)`.
        num_tokens: Number of loss tokens of the whole mini-batch, on all ranks.
        reduce_sum: Sums over all ranks, each of which must call this; None for one process.

    Returns:
        Weights, float32 `(B, T)`.
    """
    positive = mask & is_positive[:, None]
    num_positive = positive.sum()
    num_positive = num_positive if reduce_sum is None else reduce_sum(num_positive)
    return positive * (num_tokens / num_positive.clamp(min=1))


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
        float32 scalar: 1 for perfect values, 0 for constant ones, below 0 for worse ones; 0 for constant returns.
    """
    residual_var = masked_var(returns.float() - values.float(), mask, reduce_sum)
    returns_var = masked_var(returns, mask, reduce_sum)
    return torch.where(returns_var > 0, 1 - residual_var / returns_var, 0.0)
