"""Shaping of a rollout's scores, in this order: weighted sum, scaling, clipping, penalty of a missing stop token.

1. Each reward source's scores are weighted and summed (`rlhf_ppo.rewards.scorer`).
2. `score_scaling` divides by the standard deviation of all scores of the run so far, also for token rewards.
   `score_normalization` first subtracts the mean of all scores, once for each response.
3. `score_clip` limits the score's absolute value, not that of token rewards.
4. `missing_eos_penalty` lowers, or `missing_eos_score` replaces, the score of a response without the stop token.
"""

from __future__ import annotations

from torch import Tensor

from rlhf_ppo.algorithm.masked import ScoreMoments, zero_outside
from rlhf_ppo.algorithm.penalties import clip_scores, kl_estimate, penalize_missing_eos, replace_missing_eos
from rlhf_ppo.config import PPOConfig
from rlhf_ppo.data.rollout import Rollout


def shape_scores(rollout: Rollout, args: PPOConfig, unit: ScoreMoments | None = None) -> tuple[Tensor, Tensor]:
    """Scale and clip the scores, and apply `missing_eos_penalty` or `missing_eos_score`.

    Args:
        rollout: `B` scored responses.
        args: Gives `score_normalization`, `score_clip`, `missing_eos_penalty` and `missing_eos_score`.
        unit: Moments for the scaling; None leaves the scores in the reward's unit.

    Returns:
        The scores, paid at the last token, float32 `(B,)`, NaN for responses that no source scored; and the token
        rewards, float32 `(B, T)`, 0 outside the response mask.
    """
    std = 1.0 if unit is None else unit.std
    how = (args.score_normalization, args.score_clip, args.missing_eos_penalty, args.missing_eos_score)
    return rollout.once(
        ("shaped scores", unit, *how),
        lambda: (_shaped(rollout.scores, rollout.stopped, args, unit), _of_tokens(rollout) / std),
    )


def scores_in_reward_unit(
    scores: Tensor, token_scores: Tensor, stopped: Tensor, args: PPOConfig, unit: ScoreMoments | None
) -> Tensor:
    """Compute each response's shaped score, converted back to the reward's unit.

        score = mean + std * shaped score + sum of token rewards

    `mean` is 0 without `score_normalization`; `std` is 1 and `mean` 0 without scaling. Penalties and clip are thus
    multiples of the same standard deviation as in training.

    Args:
        scores: Weighted sums, before shaping, `(N,)`; NaN for responses that no source scored.
        token_scores: Sums of the token rewards, `(N,)`.
        stopped: Whether the response has its stop token or stop string, bool `(N,)`.
        args: As for `shape_scores`.
        unit: The moments of the run so far; None without `score_scaling` and `score_normalization`. Without any
            scores, before the first update, the moments of these scores are used.

    Returns:
        float32 `(N,)`, in the reward's unit.
    """
    if unit is None:
        return _shaped(scores, stopped, args) + token_scores
    if unit.count == 0:
        total = scores + token_scores
        unit = unit.including(total[~total.isnan()], lambda summand: summand)
    return _mean(args, unit) + unit.std * _shaped(scores, stopped, args, unit) + token_scores


def _shaped(scores: Tensor, stopped: Tensor, args: PPOConfig, unit: ScoreMoments | None = None) -> Tensor:
    if unit is not None:
        scores = (scores - _mean(args, unit)) / unit.std
    scores = penalize_missing_eos(clip_scores(scores, args.score_clip), stopped, args.missing_eos_penalty)
    return replace_missing_eos(scores, stopped, args.missing_eos_score)


def _mean(args: PPOConfig, unit: ScoreMoments) -> float:
    return unit.mean if args.score_normalization else 0.0


def masked_kl(rollout: Rollout, estimator: str) -> Tensor | None:
    """Return the KL estimate of each token, nats, float32 `(B, T)`, 0 outside the mask; None without a reference."""
    ref_logprobs, mask = rollout.ref_logprobs, rollout.response_mask
    if ref_logprobs is None:
        return None
    return rollout.once(
        ("KL", estimator), lambda: kl_estimate(rollout.logprobs, ref_logprobs, estimator).masked_fill(~mask, 0.0)
    )


def positive_responses(scores: Tensor, args: PPOConfig) -> Tensor | None:
    """Return the imitated responses: those with a score above `positive_nll_threshold`.

    Args:
        scores: As `objective/scores` has them, after all shaping, with the rewards of single tokens, `(B,)`.
        args: Gives the threshold.

    Returns:
        bool `(B,)`, False without a score; None with `positive_nll_coef` 0.
    """
    return None if args.positive_nll_coef == 0 else scores > args.positive_nll_threshold


def whole_scores(rollout: Rollout) -> Tensor:
    """Return the total score of each scored response before shaping, float32 `(num_scored,)`."""
    total = rollout.scores + token_score_sums(rollout)
    return total[~total.isnan()]


def token_score_sums(rollout: Rollout) -> Tensor:
    """Return the sum of each response's rewards of single tokens, before shaping, float32 `(B,)`."""
    return _of_tokens(rollout).sum(dim=1)


def _of_tokens(rollout: Rollout) -> Tensor:
    return zero_outside(rollout.token_scores, rollout.response_mask)
