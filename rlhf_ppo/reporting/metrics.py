"""The logged numbers: per-episode figures of a rollout, per-token figures of an update, means between two logs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from rlhf_ppo.algorithm.losses import PolicyLoss, ValueLoss, approx_kl
from rlhf_ppo.batch import Experience, Rollout
from rlhf_ppo.models.policy_and_value import PolicyAndValueOutput

LATEST = frozenset({"episode", "eps", "lr"})
"""Keys logged as they are now; all others are means (or minima, maxima) over the updates since the last log."""


def episode_columns(rollout: Rollout, scores: Tensor, kl: Tensor, non_score_reward: Tensor) -> dict[str, Tensor]:
    """Sum each response's per-token figures.

    Args:
        rollout: `B` responses.
        scores: What each response is worth, after the missing-EOS penalty, float32 `(B,)`.
        kl: KL estimate per token, nats, `(B, T)`, 0 outside the mask.
        non_score_reward: `-kl_coef * kl`, `(B, T)`.

    Returns:
        One float32 `(B,)` tensor per figure; `rewards/<name>` for each reward source.
    """
    return {
        "scores": scores,
        "kl": kl.sum(dim=1),
        "entropy": -rollout.logprobs.sum(dim=1),
        "non_score_reward": non_score_reward.sum(dim=1),
        "length": rollout.response_mask.sum(dim=1).float(),
        "stopped": rollout.stopped.float(),
        "scored": rollout.scored.float(),
        **{f"rewards/{name}": values for name, values in rollout.scores_by_source.items()},
    }


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

    `objective/kl`, `objective/entropy` and `objective/non_score_reward` are sums over a response's real tokens, then
    means over the episodes that were scored; `objective/rlhf_reward = objective/scores + objective/non_score_reward`.

    Args:
        columns: What `episode_columns` gave, gathered.

    Returns:
        Metrics by their logged keys; without those that are means over nothing.
    """
    scored = columns["scored"].bool()
    metrics = {
        "val/num_eos_tokens": float(columns["stopped"].sum()),
        "response/length_mean": float(columns["length"].mean()),
        "response/length_min": float(columns["length"].min()),
        "response/length_max": float(columns["length"].max()),
        "response/ended_frac": float(columns["stopped"].mean()),
    }
    if scored.any():
        for name in ("kl", "entropy", "non_score_reward", "scores"):
            metrics[f"objective/{name}"] = float(columns[name][scored].mean())
        metrics["objective/rlhf_reward"] = metrics["objective/scores"] + metrics["objective/non_score_reward"]
    for name, values in columns.items():
        given = values[~values.isnan()]
        if name.startswith("rewards/") and len(given) > 0:
            metrics[f"{name}/mean"] = float(given.mean())
            metrics[f"{name}/std"] = float(given.std()) if len(given) > 1 else 0.0
    return metrics


def evaluation_metrics(columns: Mapping[str, Tensor], prefix: str) -> dict[str, float]:
    """Average an evaluation's episodes, under the keys that `metric_for_best_model` names.

    Args:
        columns: What `episode_columns` gave, for all evaluation rows.
        prefix: Put before each key, with an underscore.

    Returns:
        `score`, `kl`, `entropy`, `response_length_mean`, `ended_frac` and `rewards/<name>/mean|std`.
    """
    names = {
        "objective/scores": "score",
        "objective/kl": "kl",
        "objective/entropy": "entropy",
        "response/length_mean": "response_length_mean",
        "response/ended_frac": "ended_frac",
    }
    training = rollout_metrics(columns).items()
    return {
        f"{prefix}_{names.get(key, key)}": value
        for key, value in training
        if key in names or key.startswith("rewards/")
    }


@dataclass
class UpdateStatistics:
    """Sums over the real tokens of an update's micro-batches; read once, at the end of the update.

    Attributes:
        sums: Per-token sums, in the order of `KEYS`, and the number of tokens last.
        ratios: Mean importance ratio of each micro-batch.
    """

    KEYS = (
        "policy/approxkl_avg",
        "policy/clipfrac_avg",
        "policy/entropy_avg",
        "loss/policy_avg",
        "loss/value_avg",
        "val/clipfrac_avg",
        "val/ratio",
    )

    sums: list[Tensor] = field(default_factory=list)
    ratios: list[Tensor] = field(default_factory=list)

    @torch.no_grad()
    def add(self, part: Experience, output: PolicyAndValueOutput, policy: PolicyLoss, value: ValueLoss) -> None:
        """Add one micro-batch.

        Args:
            part: The micro-batch.
            output: What the two models said.
            policy: The policy's per-token loss, `(B, T)` each field.
            value: The value model's per-token loss.
        """
        mask = part.loss_mask
        per_token = (
            approx_kl(output.logprobs, part.logprobs),
            policy.clipped,
            output.entropy,
            policy.loss,
            value.loss,
            value.clipped,
            policy.ratio,
        )
        sums = [values.float().masked_fill(~mask, 0.0).sum() for values in per_token]
        num_tokens = mask.sum().float()
        self.sums.append(torch.stack([*sums, num_tokens]))
        self.ratios.append(sums[-1] / num_tokens)

    def metrics(self, reduce_sum: Callable[[Tensor], Tensor], gather: Callable[[Tensor], Tensor]) -> dict[str, float]:
        """Average over all tokens of all ranks.

        Args:
            reduce_sum: Adds a tensor up over ranks.
            gather: Concatenates over ranks along the first dimension.

        Returns:
            Token means by `KEYS`, and `val/ratio_var`: the variance of the micro-batches' mean ratios, of all ranks.
            Nothing if there was no micro-batch; one without a scored response has no ratio.
        """
        if not self.sums:
            return {}
        *sums, num_tokens = reduce_sum(torch.stack(self.sums).sum(dim=0)).tolist()
        ratios = gather(torch.stack(self.ratios))
        ratios = ratios[~ratios.isnan()]
        means = {key: total / num_tokens for key, total in zip(self.KEYS, sums, strict=True)}
        return {**means, "val/ratio_var": float(ratios.var()) if len(ratios) > 1 else 0.0}


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
    if key.endswith("_min"):
        return min(values)
    if key.endswith("_max"):
        return max(values)
    return sum(values) / len(values)
