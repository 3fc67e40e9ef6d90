"""The logged numbers of a rollout, response by response, and their means between two logs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rlhf_ppo.algorithm.losses import explained_variance
from rlhf_ppo.algorithm.masked import ReduceSum, zero_outside
from rlhf_ppo.algorithm.moments import ScoreMoments
from rlhf_ppo.data.rollout import Rollout
from rlhf_ppo.processes.logs import get_logger
from rlhf_ppo.rewards.shaping import masked_kl, shape_scores, token_score_sums

if TYPE_CHECKING:
    from rlhf_ppo.config import PPOConfig

logger = get_logger(__name__)

LATEST = frozenset({"episode", "eps", "lr", "guard/skipped_rows", "guard/skipped_updates"})
"""Keys logged as they are now; all others are means (or minima, maxima) over the updates since the last log."""

_ODD = -7046029254386353131  # 2^64 divided by the golden ratio, as a signed number


def episode_columns(rollout: Rollout, scores: Tensor, kl: Tensor | None, kl_coef: float) -> dict[str, Tensor]:
    """Sum each response's per-token figures, over the tokens that the policy wrote.

    Args:
        rollout: `B` responses.
        scores: Scores after the missing-EOS penalty, float32 `(B,)`.
        kl: KL estimate per token, nats, `(B, T)`, 0 outside the mask; None without a reference, which costs nothing.
        kl_coef: Reward per nat.

    Returns:
        One float32 `(B,)` tensor per figure; `rewards/<name>` for each reward source.
    """
    return {
        "scores": scores,
        **({} if kl is None else {"kl": kl.sum(dim=1)}),
        "entropy": -zero_outside(rollout.logprobs, rollout.response_mask).sum(dim=1),
        "non_score_reward": torch.zeros_like(scores) if kl is None else (-kl_coef * kl).sum(dim=1),
        "length": rollout.response_mask.sum(dim=1).float(),
        "stopped": rollout.stopped.float(),
        **{f"rewards/{name}": values for name, values in rollout.scores_by_source.items()},
    }


def rollout_columns(
    rollout: Rollout, args: PPOConfig, kl_coef: float, score_unit: ScoreMoments | None
) -> dict[str, Tensor]:
    """Return the metrics of each episode of a rollout of training.

    Args:
        rollout: `B` scored responses.
        args: Gives what shapes the scores, and the KL estimator.
        kl_coef: Reward per nat.
        score_unit: The moments that scores are scaled by; None leaves them in the reward's unit.

    Returns:
        What `episode_columns` gives; with a `score_unit` also `raw_scores`, the scores in the reward's unit.
    """
    scores, token_scores = shape_scores(rollout, args, score_unit)
    raw = {} if score_unit is None else {"raw_scores": rollout.scores + token_score_sums(rollout)}
    kl = masked_kl(rollout, args.kl_estimator)
    return episode_columns(rollout, scores + token_scores.sum(dim=1), kl, kl_coef) | raw


def evaluation_columns(rollout: Rollout, args: PPOConfig, kl_coef: float) -> dict[str, Tensor]:
    """Return the metrics of each episode of an evaluation, whose scores are not shaped yet.

    Args:
        rollout: `B` scored responses.
        args: Gives the KL estimator.
        kl_coef: Reward per nat.

    Returns:
        What `episode_columns` gives, its `scores` without the rewards of single tokens; `token_scores` are their sums.
    """
    columns = episode_columns(rollout, rollout.scores, masked_kl(rollout, args.kl_estimator), kl_coef)
    return columns | {"token_scores": token_score_sums(rollout)}


def gather_columns(columns: Mapping[str, Tensor], gather: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
    """Collect every rank's rows of all columns in one exchange.

    Args:
        columns: Tensors `(B,)`.
        gather: Concatenates over ranks along the first dimension.

    Returns:
        The same columns, `(B * num_ranks,)` each, on the CPU.
    """
    gathered = gather(torch.stack(list(columns.values()), dim=1)).cpu()
    return dict(zip(columns, gathered.unbind(dim=1), strict=True))


def rollout_metrics(columns: Mapping[str, Tensor]) -> dict[str, float]:
    """Average per-episode figures over the episodes of all ranks.

    `objective/kl` (left out without a reference), `objective/entropy` and `objective/non_score_reward` are sums over a
    response's real tokens, then means over episodes;
    `objective/rlhf_reward = objective/scores + objective/non_score_reward`. Means of scores run over the episodes that
    have one. `objective/raw_scores`, with scaling only, is the mean before shaping, in the reward's unit.

    Args:
        columns: What `episode_columns` gave, gathered; NaN where an episode has no score.

    Returns:
        Metrics by their logged keys; those of scores are left out where no episode has one.
    """
    means = {name: float(values.mean()) for name, values in columns.items() if not name.startswith("rewards/")}
    score = columns["scores"].nanmean()
    metrics = {
        **({"objective/kl": means["kl"]} if "kl" in means else {}),
        "objective/entropy": means["entropy"],
        "objective/non_score_reward": means["non_score_reward"],
        "objective/rlhf_reward": float(score) + means["non_score_reward"],
        "objective/scores": float(score),
        "val/num_eos_tokens": float(columns["stopped"].sum()),
        "response/length_mean": means["length"],
        "response/length_min": float(columns["length"].min()),
        "response/length_max": float(columns["length"].max()),
        "response/ended_frac": means["stopped"],
    }
    if score.isnan():
        del metrics["objective/rlhf_reward"], metrics["objective/scores"]
    elif "raw_scores" in columns:
        metrics["objective/raw_scores"] = float(columns["raw_scores"].nanmean())
    for name, values in columns.items():
        scored = values[~values.isnan()]
        if name.startswith("rewards/") and len(scored) > 0:
            metrics[f"{name}/mean"] = float(scored.mean())
            metrics[f"{name}/std"] = float(scored.std()) if len(scored) > 1 else 0.0
    return metrics


def sampling_metrics(
    rollout: Rollout, weights: Tensor | None, reduce_sum: ReduceSum, gather: Callable[[Tensor], Tensor]
) -> dict[str, float]:
    """Compare an engine's log-probabilities with those of the training forward pass, under the names TRL has for it.

    Args:
        rollout: `B` responses.
        weights: What importance sampling makes of the two, `(B, T)`; None if the engine says no log-probabilities.
        reduce_sum: Adds a tensor up over ranks.
        gather: Concatenates over ranks along the first dimension.

    Returns:
        Mean and maximum of the absolute difference in nats, and mean and extremes of the weights, over the real
        tokens of all ranks. Nothing if the engine says no log-probabilities.
    """
    if weights is None or rollout.sampling_logprobs is None:
        return {}
    mask = rollout.response_mask
    difference = (rollout.logprobs - rollout.sampling_logprobs)[mask].abs()
    weights = weights[mask]
    sums = torch.stack([difference.sum(), weights.sum(), mask.sum().float()])
    of_differences, of_weights, num_tokens = reduce_sum(sums).tolist()
    extremes = torch.stack([difference.max(), -weights.min(), weights.max()])
    largest, smallest_weight, largest_weight = gather(extremes[None]).amax(dim=0).tolist()
    return {
        "sampling/sampling_logp_difference/mean": of_differences / num_tokens,
        "sampling/sampling_logp_difference/max": largest,
        "sampling/importance_sampling_ratio/min": -smallest_weight,
        "sampling/importance_sampling_ratio/mean": of_weights / num_tokens,
        "sampling/importance_sampling_ratio/max": largest_weight,
    }


def critic_metrics(
    values: Tensor, returns: Tensor, mask: Tensor, reduce_sum: ReduceSum, gather: Callable[[Tensor], Tensor]
) -> dict[str, float]:
    """Say what the value model expected of a rollout, and what came.

    Args:
        values: Estimates, `(B, T)`, in the reward's unit.
        returns: What the value model is to expect, `(B, T)`.
        mask: True on the tokens that are learned from, bool `(B, T)`.
        reduce_sum: Adds a tensor up over ranks.
        gather: Concatenates over ranks along the first dimension.

    Returns:
        Mean and extremes of the values, mean of the returns, and how much of their variance the values foresee, over
        the tokens of all ranks; of these only the last where there are none.
    """
    explained = {"val/explained_variance": float(explained_variance(values, returns, mask, reduce_sum))}
    sums = torch.stack([zero_outside(values, mask).sum(), zero_outside(returns, mask).sum(), mask.sum().float()])
    of_values, of_returns, num_tokens = reduce_sum(sums).tolist()
    lowest, highest = (
        values.float().masked_fill(~mask, torch.inf).min(),
        values.float().masked_fill(~mask, -torch.inf).max(),
    )
    extremes: list[float] = gather(torch.stack([-lowest, highest])[None]).amax(dim=0).tolist()
    if num_tokens == 0:
        return explained
    return explained | {
        "val/values_mean": of_values / num_tokens,
        "val/values_min": -extremes[0],
        "val/values_max": extremes[1],
        "val/returns_mean": of_returns / num_tokens,
    }


def unique_fraction(rollout: Rollout, gather: Callable[[Tensor], Tensor]) -> float:
    """Return the share of different responses among those of all ranks, in (0, 1].

    Responses are compared by `sum_t (y_t + 1) c^t` modulo 2^64, a polynomial of their tokens.

    Args:
        rollout: `B` responses of this rank.
        gather: Concatenates over ranks along the first dimension.
    """
    num_columns = rollout.response_mask.shape[1]
    response = rollout.query_responses[:, -num_columns:]
    tokens = (response + 1).masked_fill(~rollout.response_mask, 0)
    powers = torch.full_like(tokens[0], _ODD).cumprod(dim=0)
    sums = gather((tokens * powers).sum(dim=1))
    return len(sums.unique()) / len(sums)


def response_metrics(
    rollout: Rollout, columns: Mapping[str, Tensor], gather: Callable[[Tensor], Tensor]
) -> dict[str, float]:
    """Return `rollout_metrics`, and the share of different responses.

    Args:
        rollout: `B` responses of this rank.
        columns: Those of all ranks.
        gather: Concatenates over ranks along the first dimension.
    """
    return {**rollout_metrics(columns), "response/unique_frac": unique_fraction(rollout, gather)}


def warn_of_unscored(scores: Tensor) -> None:
    """Say how many episodes no reward scored, if there are any.

    Args:
        scores: Scores of the episodes of all ranks, `(N,)`; NaN where there is none.
    """
    num_unscored = int(scores.isnan().sum())
    if num_unscored > 0:
        logger.warning(
            f"{num_unscored} of {len(scores)} responses have a score of no reward (all returned None, or what was not "
            "finite was left out); they are left out of the losses and of the score metrics."
        )


EVALUATED = {
    "objective/scores": "score",
    "objective/kl": "kl",
    "objective/entropy": "entropy",
    "response/length_mean": "response_length_mean",
    "response/ended_frac": "ended_frac",
}
"""Metrics of training: what evaluation calls them."""


def evaluation_metrics(columns: Mapping[str, Tensor], prefix: str) -> dict[str, float]:
    """Average an evaluation's episodes, under the keys that `metric_for_best_model` names.

    Args:
        columns: What `episode_columns` gave, for all evaluation rows.
        prefix: Put before each key, with an underscore.

    Returns:
        `score`, `kl`, `entropy`, `response_length_mean`, `ended_frac` and `rewards/<name>/mean|std`; without those of
        scores where no row has one.
    """
    training = rollout_metrics(columns)
    names = EVALUATED | {key: key for key in training if key.startswith("rewards/")}
    return {f"{prefix}_{name}": training[key] for key, name in names.items() if key in training}


@dataclass
class MetricWindow:
    """Metrics of the updates since the last log.

    Attributes:
        updates: One dict for each update; saved with a checkpoint, so that a resumed run logs the same numbers.
    """

    updates: list[dict[str, float]] = field(default_factory=list)

    def add(self, metrics: Mapping[str, float]) -> None:
        """Append one update's metrics."""
        self.updates.append(dict(metrics))

    def drain(self) -> dict[str, float]:
        """Return the window's figures and start a new window."""
        keys = {key: None for update in self.updates for key in update}
        result = {key: _combine(key, [update[key] for update in self.updates if key in update]) for key in keys}
        self.updates = []
        return result


def _combine(key: str, values: list[float]) -> float:
    if key in LATEST:
        return values[-1]
    of_engine = key.startswith("sampling/")
    if key.endswith("_min") or (of_engine and key.endswith("/min")):
        return min(values)
    if key.endswith("_max") or (of_engine and key.endswith("/max")):
        return max(values)
    return sum(values) / len(values)
