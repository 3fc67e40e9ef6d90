"""What becomes of a rollout's scores before they are paid, in this order: scaling, clipping, the missing stop token.

1. Each reward source's scores are weighted and added up (`rlhf_ppo.rewards.scorer`).
2. `score_scaling` divides by the standard deviation of all scores of the run so far; rewards of single tokens too.
   `score_normalization` subtracts the mean of all scores before that, once for each response.
3. `score_clip` limits the score's absolute value; rewards of single tokens stay.
4. `missing_eos_penalty` lowers, or `missing_eos_score` replaces, the score of a response without the stop token.
"""

from __future__ import annotations

from torch import Tensor

from rlhf_ppo.algorithm.masked import zero_outside
from rlhf_ppo.algorithm.moments import ScoreMoments
from rlhf_ppo.algorithm.penalties import clip_scores, kl_estimate, penalize_missing_eos, replace_missing_eos
from rlhf_ppo.config import PPOConfig
from rlhf_ppo.data.rollout import Rollout


def shape_scores(rollout: Rollout, args: PPOConfig, unit: ScoreMoments | None = None) -> tuple[Tensor, Tensor]:
    """Scale, clip, and apply what is said about responses without the stop token.

    Args:
        rollout: `B` scored responses.
        args: Gives `score_normalization`, `score_clip`, `missing_eos_penalty` and `missing_eos_score`.
        unit: What scores are scaled by; None leaves them in their own unit, in which an evaluation states them. A
            `score_clip` that is meant for scaled scores is then left out.

    Returns:
        The scores to pay at the last token, float32 `(B,)`, NaN for responses that no source scored; and the rewards
        of single tokens, float32 `(B, T)`, 0 outside the response mask.
    """
    std = 1.0 if unit is None else unit.std
    mean = unit.mean if unit is not None and args.score_normalization else 0.0
    clip = None if unit is None and args.counts_scores else args.score_clip
    scores = clip_scores((rollout.scores - mean) / std, clip)
    scores = penalize_missing_eos(scores, rollout.stopped, args.missing_eos_penalty)
    return replace_missing_eos(scores, rollout.stopped, args.missing_eos_score), _of_tokens(rollout) / std


def masked_kl(rollout: Rollout, estimator: str) -> Tensor | None:
    """Return the KL estimate of each token, nats, float32 `(B, T)`, 0 outside the mask; None without a reference."""
    if rollout.ref_logprobs is None:
        return None
    kl = kl_estimate(rollout.logprobs, rollout.ref_logprobs, estimator)
    return kl.masked_fill(~rollout.response_mask, 0.0)


def positive_responses(scores: Tensor, args: PPOConfig) -> Tensor | None:
    """Tell which responses are imitated: those that are paid more than `positive_nll_threshold`.

    Args:
        scores: As `objective/scores` has them, after all shaping, with the rewards of single tokens, `(B,)`.
        args: Gives the threshold.

    Returns:
        bool `(B,)`, False without a score; None with `positive_nll_coef` 0.
    """
    return None if args.positive_nll_coef == 0 else scores > args.positive_nll_threshold


def whole_scores(rollout: Rollout) -> Tensor:
    """Return what each scored response is worth in all, before shaping, float32 `(num_scored,)`."""
    total = rollout.scores + _of_tokens(rollout).sum(dim=1)
    return total[~total.isnan()]


def _of_tokens(rollout: Rollout) -> Tensor:
    return zero_outside(rollout.token_scores, rollout.response_mask)
