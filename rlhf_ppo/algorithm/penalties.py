"""From one score per response to one reward per token: KL penalty, missing stop token, where the score lands."""

from __future__ import annotations

import torch
from torch import Tensor

from rlhf_ppo.algorithm.masked import zero_outside


def kl_estimate(logprobs: Tensor, ref_logprobs: Tensor, estimator: str) -> Tensor:
    """Estimate `KL(policy || reference)` per token from the sampled token alone.

    With `d = logprob - ref_logprob` of the sampled token:

        k1 = d                       a single token's may be negative
        k3 = exp(-d) - 1 + d         never negative, of lower variance while the policies are close

    As estimates of the KL both are unbiased (J. Schulman, *Approximating KL Divergence*, 2020,
    joschu.net/blog/kl-approx.html). In the reward only k1 gives the KL's own policy gradient; that of k3 is biased
    (*A Comedy of Estimators*, 2512.21852).

    Args:
        logprobs: Log-probabilities of the sampled tokens under the policy that sampled them, nats, `(B, T)`.
        ref_logprobs: The same under the reference, nats, `(B, T)`.
        estimator: "k1" or "k3".

    Returns:
        Nats, float32 `(B, T)`; meaningless outside the response mask, which `token_rewards` applies.

    Raises:
        ValueError: Any other estimator.
    """
    log_ratio = logprobs.float() - ref_logprobs.float()
    if estimator == "k1":
        return log_ratio
    if estimator == "k3":
        # expm1: near d = 0, where training starts, exp(-d) - 1 would round k3 (about d^2 / 2) away.
        return torch.expm1(-log_ratio) + log_ratio
    raise ValueError(
        f"kl_estimator={estimator!r} is unknown; use 'k1' (the log-ratio, whose gradient in the reward is unbiased) "
        "or 'k3' (never negative, lower variance)"
    )


def penalize_missing_eos(scores: Tensor, stopped: Tensor, penalty: float | None) -> Tensor:
    """Take the penalty off the score of every response that never stopped: `score - penalty * [not stopped]`.

    A softer form of the *EOS trick* (N+ implementation details, 2403.17031, section 7), which replaces the score.

    Args:
        scores: `(B,)`, in the reward's unit.
        stopped: Whether the response holds the stop token, bool `(B,)`.
        penalty: Positive, in the reward's unit; None leaves the scores as they are.

    Returns:
        float32 `(B,)`.
    """
    scores = scores.float()
    return scores if penalty is None else torch.where(stopped, scores, scores - penalty)


def clip_scores(scores: Tensor, score_clip: float | None) -> Tensor:
    """Keep scores within a distance of 0: `clip(score, -score_clip, score_clip)`.

    Args:
        scores: `(B,)`, in the reward's unit; NaN stays NaN.
        score_clip: Positive, in the reward's unit; None leaves the scores as they are.

    Returns:
        float32 `(B,)`.
    """
    scores = scores.float()
    return scores if score_clip is None else scores.clamp(-score_clip, score_clip)


def replace_missing_eos(scores: Tensor, stopped: Tensor, replacement: float | None) -> Tensor:
    """Give every response that never stopped the same score: `score if stopped else replacement`.

    The *EOS trick* of the N+ implementation details, 2403.17031, section 7.

    Args:
        scores: `(B,)`, in the reward's unit; NaN, for a response without a score, stays NaN.
        stopped: Whether the response holds the stop token, bool `(B,)`.
        replacement: In the reward's unit; None leaves the scores as they are.

    Returns:
        float32 `(B,)`.
    """
    scores = scores.float()
    return scores if replacement is None else torch.where(stopped | scores.isnan(), scores, replacement)


def token_rewards(
    kl: Tensor | None, scores: Tensor, response_mask: Tensor, kl_coef: float, token_scores: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Charge each token its KL, pay it its own reward, and pay the score at the last real token.

        non_score_reward_t = -kl_coef * kl_t
        reward_t = non_score_reward_t + token_score_t + score * [t is the response's last real token]

    Ziegler et al., 1909.08593, section 2 (eq. 2), spread over tokens as in 2403.17031, section 7.

    Args:
        kl: KL estimate per token, nats, `(B, T)`; None charges nothing.
        scores: One per response, after the missing-EOS penalty, `(B,)`, in the reward's unit.
        response_mask: True on real tokens, the stop token included, bool `(B, T)`.
        kl_coef: Reward per nat.
        token_scores: Rewards of single tokens, `(B, T)`, in the reward's unit; None: there are none.

    Returns:
        `(non_score_reward, rewards)`, float32 `(B, T)`, 0 outside the mask.

    Raises:
        ValueError: A response has no real token to pay its score at.
    """
    empty = ~response_mask.any(dim=1)
    if empty.any():
        raise ValueError(
            f"response_mask has no real token in row {int(empty.nonzero()[0])}; every response needs at least one, "
            "the stop token if nothing else"
        )
    if kl is None:
        non_score_reward = torch.zeros_like(response_mask, dtype=torch.float32)
    else:
        non_score_reward = zero_outside(-kl_coef * kl.float(), response_mask)
    num_tokens_left = response_mask.flip(1).cumsum(dim=1).flip(1)
    is_last = response_mask & (num_tokens_left == 1)
    rewards = non_score_reward + zero_outside(scores[:, None].expand_as(is_last), is_last)
    return non_score_reward, rewards if token_scores is None else rewards + zero_outside(token_scores, response_mask)
