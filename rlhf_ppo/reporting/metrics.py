"""Metrics of rollouts, evaluations and updates, their means between two logs, and times of the phases."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor

from rlhf_ppo.algorithm.advantages import (
    ReduceSum,
    ScoreMoments,
    kl_estimate,
    masked_range,
    token_rewards,
    zero_outside,
)
from rlhf_ppo.algorithm.losses import PolicyLoss, ValueLoss, approx_kl, explained_variance
from rlhf_ppo.data.rollout import Experience, Responses, Rollout, sent
from rlhf_ppo.models.policy_and_value import PolicyAndValueOutput
from rlhf_ppo.ranks.processes import get_logger
from rlhf_ppo.rewards.scorer import shape_scores, token_score_sums

if TYPE_CHECKING:
    from rlhf_ppo.config import PPOConfig


logger = get_logger(__name__)

T = TypeVar("T")

LATEST = frozenset({"episode", "eps", "lr"})
"""Keys logged with their latest value; others are means (or minima, maxima) over the updates since the last log."""

_HASH_BASE = -7046029254386353131  # 2^64 divided by the golden ratio, as a signed number


def episode_columns(rollout: Rollout, scores: Tensor, kl: Tensor | None) -> dict[str, Tensor]:
    """Sum each response's token values over the tokens that the policy wrote.

    Args:
        rollout: `B` responses.
        scores: Scores after the missing-EOS penalty, float32 `(B,)`.
        kl: KL estimate per token, nats, `(B, T)`, 0 outside the mask; None without a reference.

    Returns:
        Float32 `(B,)` tensors by name; `rewards/<name>` for each reward source.
    """
    return {
        "scores": scores,
        **({} if kl is None else {"kl": kl.sum(dim=1)}),
        "entropy": -zero_outside(rollout.logprobs, rollout.response_mask).sum(dim=1),
        "length": rollout.response_mask.sum(dim=1).float(),
        "ended": rollout.ended.float(),
        **{f"rewards/{name}": values for name, values in rollout.scores_by_source.items()},
    }


def rollout_columns(
    rollout: Rollout, args: PPOConfig, kl_coef: float, score_unit: ScoreMoments | None, rewards: Tensor
) -> dict[str, Tensor]:
    """Return the metrics of each episode of a rollout of training.

    Args:
        rollout: `B` scored responses.
        args: Gives the shaping of scores, and the KL estimator.
        kl_coef: Reward per nat.
        score_unit: The moments that scores are scaled by; None leaves them in the reward's unit.
        rewards: Token rewards from `shape_rewards`, `(B, T)`. What an overridden method adds to score and KL penalty
            is part of `non_score_reward`.

    Returns:
        The columns of `episode_columns`, and `non_score_reward`; with a `score_unit` also `raw_scores`, the scores in
        the reward's unit.
    """
    scores, token_scores = shape_scores(rollout, args, score_unit)
    raw = {} if score_unit is None else {"raw_scores": rollout.scores + token_score_sums(rollout)}
    kl = rollout.kl(args.kl_estimator)
    penalty, usual = token_rewards(kl, scores, rollout.response_mask, kl_coef, token_scores)
    non_score_reward = penalty.sum(dim=1) + (rewards - usual).nansum(dim=1)
    columns = episode_columns(rollout, scores + token_scores.sum(dim=1), kl)
    return columns | {"non_score_reward": non_score_reward} | raw


def evaluation_columns(rollout: Rollout, args: PPOConfig) -> dict[str, Tensor]:
    """Return the metrics of each episode of an evaluation, whose scores are not shaped yet.

    Args:
        rollout: `B` scored responses.
        args: Gives the KL estimator.

    Returns:
        The columns of `episode_columns`, with `scores` without token rewards; `token_scores` are the sums of those.
    """
    columns = episode_columns(rollout, rollout.scores, rollout.kl(args.kl_estimator))
    return columns | {"token_scores": token_score_sums(rollout)}


def gather_columns(columns: Mapping[str, Tensor], gather: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
    """Gather every rank's rows of all columns in one collective call.

    Args:
        columns: Tensors `(B,)`.
        gather: Concatenates over ranks along the first dimension.

    Returns:
        The same columns, `(B * num_ranks,)` each, on the CPU.
    """
    gathered = gather(torch.stack(list(columns.values()), dim=1)).cpu()
    return dict(zip(columns, gathered.unbind(dim=1), strict=True))


_OF_SCORES = ("objective/rlhf_reward", "objective/scores")


def rollout_metrics(columns: Mapping[str, Tensor]) -> dict[str, float]:
    """Average the episode columns of all ranks.

    `objective/kl` (left out without a reference), `objective/entropy` and `objective/non_score_reward` are sums over a
    response's real tokens, then means over episodes;
    `objective/rlhf_reward = objective/scores + objective/non_score_reward`. Means of scores run over the episodes that
    have one. `objective/raw_scores`, with scaling only, is the mean before shaping, in the reward's unit.

    Args:
        columns: The gathered `episode_columns`, in training with `non_score_reward`; NaN: no score.

    Returns:
        Metrics by their logged keys, without those of scores if no episode has one.
    """
    means = {name: float(values.mean()) for name, values in columns.items() if not name.startswith("rewards/")}
    score = columns["scores"].nanmean()
    metrics = {
        **({"objective/kl": means["kl"]} if "kl" in means else {}),
        "objective/entropy": means["entropy"],
        "objective/scores": float(score),
        "val/num_eos_tokens": float(columns["ended"].sum()),
        "response/length_mean": means["length"],
        "response/length_min": float(columns["length"].min()),
        "response/length_max": float(columns["length"].max()),
        "response/ended_frac": means["ended"],
    }
    if (non_score := means.get("non_score_reward")) is not None:  # an evaluation shapes no rewards
        metrics |= {"objective/non_score_reward": non_score, "objective/rlhf_reward": float(score) + non_score}
    if score.isnan():
        metrics = {key: value for key, value in metrics.items() if key not in _OF_SCORES}
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
    """Compare an engine's log-probabilities with those of the training forward pass, under TRL's names.

    Args:
        rollout: `B` responses.
        weights: Importance weights of the two, `(B, T)`; None if the engine returns no log-probabilities.
        reduce_sum: Adds a tensor up over ranks.
        gather: Concatenates over ranks along the first dimension.

    Returns:
        Mean and maximum of the absolute difference in nats, and mean and extremes of the weights, over the real
        tokens of all ranks; empty if the engine returns no log-probabilities.
    """
    sampling_logprobs, mask = rollout.responses.sampling_logprobs, rollout.response_mask
    if weights is None or sampling_logprobs is None:
        return {}
    difference = (rollout.logprobs - sampling_logprobs)[mask].abs()
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
    """Compare the value model's estimates with the returns.

    Args:
        values: Estimates, `(B, T)`, in the reward's unit.
        returns: Targets of the value model, `(B, T)`.
        mask: True on the tokens that are learned from, bool `(B, T)`.
        reduce_sum: Adds a tensor up over ranks.
        gather: Concatenates over ranks along the first dimension.

    Returns:
        Mean and extremes of the values, mean of the returns, and their explained variance, over the tokens of all
        ranks; only the explained variance if there are no tokens.
    """
    explained = {"val/explained_variance": float(explained_variance(values, returns, mask, reduce_sum))}
    sums = torch.stack([zero_outside(values, mask).sum(), zero_outside(returns, mask).sum(), mask.sum().float()])
    of_values, of_returns, num_tokens = reduce_sum(sums).tolist()
    lowest, highest = masked_range(values, mask, gather)
    if num_tokens == 0:
        return explained
    return explained | {
        "val/values_mean": of_values / num_tokens,
        "val/values_min": lowest,
        "val/values_max": highest,
        "val/returns_mean": of_returns / num_tokens,
    }


def unique_fraction(responses: Responses, gather: Callable[[Tensor], Tensor]) -> float:
    """Return the share of distinct responses of all ranks, in (0, 1].

    Responses are compared by `sum_t (y_t + 1) c^t` modulo 2^64, a polynomial of their tokens.

    Args:
        responses: `B` responses of this rank.
        gather: Concatenates over ranks along the first dimension.
    """
    tokens = (responses.response_ids + 1).masked_fill(~responses.response_mask, 0)
    powers = torch.full_like(tokens[0], _HASH_BASE).cumprod(dim=0)
    sums = gather((tokens * powers).sum(dim=1))
    return len(sums.unique()) / len(sums)


def warn_of_unscored(scores: Tensor) -> None:
    """Warn of episodes that no reward scored, if there are any.

    Args:
        scores: Scores of the episodes of all ranks, `(N,)`; NaN: no score.
    """
    num_unscored = int(scores.isnan().sum())
    if num_unscored > 0:
        logger.warning(
            f"{num_unscored} of {len(scores)} responses have no score (every reward whose weight is not 0 returned "
            "None, or the environment did not return). The losses and the score metrics leave them out."
        )


EVALUATED = {
    "objective/scores": "score",
    "objective/kl": "kl",
    "objective/entropy": "entropy",
    "response/length_mean": "response_length_mean",
    "response/ended_frac": "ended_frac",
}
"""Names of training metrics in an evaluation."""


def evaluation_metrics(columns: Mapping[str, Tensor], prefix: str) -> dict[str, float]:
    """Average an evaluation's episodes, under the keys that `metric_for_best_model` names.

    Args:
        columns: The `episode_columns` of all evaluation rows.
        prefix: Prefix of each key, before an underscore.

    Returns:
        `score`, `kl`, `entropy`, `response_length_mean`, `ended_frac` and `rewards/<name>/mean|std`; without those of
        scores if no row has one.
    """
    training = rollout_metrics(columns)
    names = EVALUATED | {key: key for key in training if key.startswith("rewards/")}
    return {f"{prefix}_{name}": training[key] for key, name in names.items() if key in training}


def named_apart(logged: Mapping[str, T], own: Container[str]) -> dict[str, T]:
    """Rename logged figures to `<name> logged` where the run uses the name itself.

    Args:
        logged: Metrics or columns by name.
        own: Names that the run uses itself.
    """
    return {f"{name} logged" if name in own else name: value for name, value in logged.items()}


# Updates


@dataclass
class UpdateStatistics:
    """Sums over the real tokens of an update's micro-batches; they are read once, at the end of the update.

    Attributes:
        sums: Per-token sums of each micro-batch, in the order of `KEYS` and `named`; last the number of tokens.
        named: Names of additional figures of the losses.
        watches_kl: Whether `KL` is one of these figures.
        num_epochs: Number of learned epochs, if a limit on the KL may end them early.
        losses: Loss of each optimizer step.
        grad_norms: Gradient norms of policy and value model at each optimizer step, float32 `(2,)`.
        ptx: Negative log-likelihood and tokens of the texts of each optimizer step, float32 `(2,)`.
        value_figures: Names of the value loss's additional figures: means over the tokens whose values count.
        grad_norm: Gradient norm of the last step, before clipping.
        shares_prefixes: Whether the models compute a beginning that several rows share only once.
        num_read: Tokens of the rows of all micro-batches, and how many of them the models computed.
    """

    KL = "policy/kl_avg"
    VALUED, OF_VALUES = "val/valued_frac", ("loss/value_avg", "val/clipfrac_avg")
    NORMS = ("policy/grad_norm", "val/grad_norm")

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
    named: tuple[str, ...] = ()
    watches_kl: bool = False
    num_epochs: int | None = None
    losses: list[Tensor] = field(default_factory=list)
    grad_norms: list[Tensor] = field(default_factory=list)
    ptx: list[Tensor] = field(default_factory=list)
    value_figures: frozenset[str] = frozenset()
    grad_norm: float | Tensor = 0.0
    shares_prefixes: bool = False
    num_read: tuple[int, int] = (0, 0)
    _first_of_epoch: int = 0

    @torch.no_grad()
    def add(self, part: Experience, output: PolicyAndValueOutput, policy: PolicyLoss, value: ValueLoss) -> None:
        """Add one micro-batch.

        Args:
            part: The micro-batch.
            output: The output of the two models.
            policy: The policy's per-token loss, `(B, T)` each field.
            value: The value model's per-token loss.
        """
        self._count_read(part)
        mask, figures = part.loss_mask, dict(value.figures)
        values_count = torch.ones_like(mask, dtype=torch.float32)
        if part.value_weights is not None:
            values_count = figures[self.VALUED] = (part.value_weights > 0).float()
        self.value_figures = frozenset(figures)
        figures |= policy.figures
        if self.watches_kl:
            figures[self.KL] = kl_estimate(part.logprobs, output.logprobs, "k3")
        kl = approx_kl(output.logprobs, part.logprobs)
        self.named = tuple(figures)
        figures |= {name: figures[name] * values_count for name in self.value_figures}
        of_values = [value.loss * values_count, value.clipped * values_count]
        of_policy = [kl, policy.clipped, output.entropy, policy.loss]
        per_token = (*of_policy, *of_values, policy.ratio, *figures.values())
        sums = [values.float().masked_fill(~mask, 0.0).sum() for values in per_token]
        self.sums.append(torch.stack([*sums, mask.sum().float()]))

    def _count_read(self, part: Experience) -> None:
        places = part.responses.places
        tree, num_tokens = places.tree if self.shares_prefixes else None, len(places.tokens)
        total, computed = self.num_read
        self.num_read = total + num_tokens, computed + (num_tokens if tree is None else len(tree.tokens))

    def begin_epoch(self) -> None:
        """Count an epoch."""
        self._first_of_epoch = len(self.sums)
        if self.watches_kl:
            self.num_epochs = (self.num_epochs or 0) + 1

    def kl_of_epoch(self, reduce_sum: Callable[[Tensor], Tensor]) -> float:
        """Return the mean KL to the policy that sampled, over the epoch's tokens of all ranks.

            k3 = rho - 1 - log rho,        rho = exp(logprob - old_logprob)

        J. Schulman, *Approximating KL Divergence* (2020).

        Args:
            reduce_sum: Adds a tensor up over ranks.

        Returns:
            Nats per token; 0 without a micro-batch. All ranks have micro-batches, or none has.
        """
        if len(self.sums) <= self._first_of_epoch:
            return 0.0
        column = len(self.KEYS) + self.named.index(self.KL)
        of_epoch = torch.stack(self.sums[self._first_of_epoch :])
        total, num_tokens = reduce_sum(of_epoch.sum(dim=0)[[column, -1]]).tolist()
        return total / num_tokens

    def _mean_grad_norms(self) -> Iterable[Tensor]:
        """Average over the steps, without steps that fp16's loss scaling skips because of overflow."""
        if not self.grad_norms:
            return ()
        norms = torch.stack(self.grad_norms).to(self.sums[0].device)  # on the CPU where FSDP2 offloads parameters
        return norms.where(norms.isfinite().all(dim=1, keepdim=True), math.nan).nanmean(dim=0)

    def metrics(self, reduce_sum: Callable[[Tensor], Tensor], gather: Callable[[Tensor], Tensor]) -> dict[str, float]:
        """Average over all tokens of all ranks.

        Args:
            reduce_sum: Adds a tensor up over ranks.
            gather: Concatenates over ranks along the first dimension.

        Returns:
            Token means by `KEYS` and `named`. `val/ratio_var` is the variance of the mean ratios of all ranks'
            micro-batches. `val/first_logratio` is the root mean square of the log-ratio before any step: the distance
            of two forward passes of the same policy. Metrics of values are means over the tokens whose values count.
            Empty if no micro-batch was added.
        """
        if not self.sums:
            return {}
        of_parts = torch.stack(self.sums)
        num_read = sent(torch.tensor(self.num_read, dtype=of_parts.dtype), of_parts.device)
        counted = torch.cat([of_parts.sum(dim=0), num_read, sum(self.ptx, of_parts.new_zeros(2))])
        *sums, num_tokens, total, computed, ptx, num_ptx_tokens = reduce_sum(counted).tolist()
        ratios, first_logratio = self._ratios(of_parts, gather)
        first, *norms = torch.stack([first_logratio, *self._mean_grad_norms()]).tolist()
        return {
            **self._token_means(sums, num_tokens),
            **{key: norm for key, norm in zip(self.NORMS, norms, strict=False) if math.isfinite(norm)},
            **({"loss/ptx_avg": ptx / num_ptx_tokens} if num_ptx_tokens > 0 else {}),
            **({} if self.num_epochs is None else {"policy/kl_stop_epoch": float(self.num_epochs)}),
            "val/ratio_var": float(ratios.var()) if len(ratios) > 1 else 0.0,
            "val/first_logratio": first,
            "batch/shared_frac": 1 - computed / total,
        }

    def _token_means(self, sums: list[float], num_tokens: float) -> dict[str, float]:
        """Average over the tokens; figures of values over the tokens whose values count."""
        means = {key: of_all / num_tokens for key, of_all in zip((*self.KEYS, *self.named), sums, strict=True)}
        share = means.pop(self.VALUED, None)
        if share is not None:
            for key in (self.value_figures | {*self.OF_VALUES}) - {self.VALUED}:
                means[key] /= share
        return means

    def _ratios(self, of_parts: Tensor, gather: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
        """Return the mean ratio of each micro-batch of all ranks, and the root mean square of the first log-ratios."""
        columns = [self.KEYS.index("val/ratio"), self.KEYS.index("policy/approxkl_avg"), -1]
        ratio_sums, halves_of_squares, num_tokens = gather(of_parts[:, columns]).unbind(dim=1)
        first_of_ranks = slice(None, None, len(of_parts))
        half_of_squares, num_first = halves_of_squares[first_of_ranks].sum(), num_tokens[first_of_ranks].sum()
        first_logratio = (2 * half_of_squares / num_first.clamp(min=1)).sqrt()
        return (ratio_sums / num_tokens)[num_tokens > 0], first_logratio


def combined(updates: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Combine the metrics of several updates: means, except of extremes and `LATEST`."""
    keys = dict.fromkeys(key for update in updates for key in update)
    return {key: _combine(key, [update[key] for update in updates if key in update]) for key in keys}


def _combine(key: str, values: list[float]) -> float:
    if key in LATEST:
        return values[-1]
    of_engine = key.startswith("sampling/")
    if key.endswith("_min") or (of_engine and key.endswith("/min")):
        return min(values)
    if key.endswith("_max") or (of_engine and key.endswith("/max")):
        return max(values)
    return sum(values) / len(values)


# Times of the phases of an update

_TO_LOWER = {
    "generate": "generation: lower local_rollout_forward_batch_size or response_length",
    "score": "the rewards: lower per_device_train_batch_size or response_length, or set offload_frozen=True",
    "evaluate": "the forward passes over the responses: lower local_rollout_forward_batch_size or response_length, or "
    "set offload_frozen=True",
    "learn": "learning: lower per_device_train_batch_size and raise gradient_accumulation_steps by the same factor, "
    "which keeps the rollout as it is; or set max_tokens_per_micro_batch or gradient_checkpointing=True",
}
_NOTE = "Out of memory in "
_OUT_OF_MEMORY = ("out of memory", "can't allocate memory", "not enough memory", "CUBLAS_STATUS_ALLOC_FAILED")


@contextmanager
def noting_out_of_memory(phase: str) -> Iterator[None]:
    """Add a note to out-of-memory errors with the phase and the arguments to lower.

    The error keeps its type, so that `except torch.OutOfMemoryError` still catches it.

    Args:
        phase: A phase of an update.
    """
    try:
        yield
    except (MemoryError, RuntimeError) as error:  # torch.OutOfMemoryError is a RuntimeError
        if isinstance(error, MemoryError) or any(words in str(error) for words in _OUT_OF_MEMORY):
            error.add_note(f"{_NOTE}{_TO_LOWER[phase]}. `rlhf-ppo estimate` tells how much memory a run takes.")
        raise


def note_on_memory(error: BaseException) -> str | None:
    """Return the note of `noting_out_of_memory` on an error, if any."""
    return next((note for note in getattr(error, "__notes__", ()) if note.startswith(_NOTE)), None)


def rate(name: str, number: float, seconds: float) -> dict[str, float]:
    """Return `number / seconds` under a metric's name; empty if no time has passed."""
    return {name: number / seconds} if seconds > 0 else {}


@dataclass
class PhaseTimer:
    """Adds up the wall-clock seconds of named phases.

    Attributes:
        seconds: Seconds by phase since the last `drain`.
        running: The phase that runs now; empty between phases.
    """

    seconds: dict[str, float] = field(default_factory=dict)
    running: str = ""

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Add the block's time to `name`; out-of-memory errors get a note on the phase."""
        start, self.running = time.perf_counter(), name
        try:
            with noting_out_of_memory(name):
                yield
        finally:
            self.running = ""
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start

    def move(self, seconds: float, phase: str, to: str) -> None:
        """Count seconds of a phase as those of another."""
        self.seconds[phase] = self.seconds.get(phase, 0.0) - seconds
        self.seconds[to] = self.seconds.get(to, 0.0) + seconds

    def drain(self) -> dict[str, float]:
        """Return `time/<phase>` in seconds, and reset."""
        result = {f"time/{name}": seconds for name, seconds in self.seconds.items()}
        self.seconds = {}
        return result
