"""From scores to advantages: KL penalty and its coefficient, missing stop token, token rewards, GAE, and whitening.

Means, variances and moments are over the real tokens or scores of all ranks.
"""

from __future__ import annotations

import dataclasses
import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

ReduceSum = Callable[[Tensor], Tensor]
"""Sums a small tensor elementwise over all ranks, with the same result on each."""


# ---- Rewards ----


def kl_estimate(logprobs: Tensor, ref_logprobs: Tensor, estimator: str) -> Tensor:
    """Estimate `KL(policy || reference)` per token from the sampled token.

    With `d = logprob - ref_logprob` of the sampled token:

        k1 = d                       may be negative
        k3 = exp(-d) - 1 + d         never negative, with lower variance while the policies are close

    Both are unbiased estimates of the KL (J. Schulman, *Approximating KL Divergence*, 2020,
    joschu.net/blog/kl-approx.html). In the reward, only k1 gives the policy gradient of the KL; that of k3 is biased
    (*A Comedy of Estimators*, 2512.21852).

    Args:
        logprobs: Log-probabilities of the sampled tokens under the sampling policy, nats, `(B, T)`.
        ref_logprobs: The same under the reference, nats, `(B, T)`.
        estimator: "k1" or "k3".

    Returns:
        Nats, float32 `(B, T)`; meaningless outside the response mask, which `token_rewards` applies.
    """
    log_ratio = logprobs.float() - ref_logprobs.float()
    if estimator == "k1":
        return log_ratio
    # expm1: near d = 0, as at the start, k3 is about d^2 / 2, which exp(-d) - 1 would lose to rounding.
    return torch.expm1(-log_ratio) + log_ratio


def penalize_missing_eos(scores: Tensor, ended: Tensor, penalty: float | None) -> Tensor:
    """Subtract a penalty from the score of every response that did not end: `score - penalty * [not ended]`.

    A softer form of the *EOS trick* (N+ implementation details, 2403.17031, section 7), which replaces the score.

    Args:
        scores: `(B,)`, in the reward's unit.
        ended: Whether the response has a stop token or string, bool `(B,)`.
        penalty: Positive, in the reward's unit; None does not change the scores.

    Returns:
        float32 `(B,)`.
    """
    scores = scores.float()
    return scores if penalty is None else torch.where(ended, scores, scores - penalty)


def clip_scores(scores: Tensor, score_clip: float | None) -> Tensor:
    """Clip scores: `clip(score, -score_clip, score_clip)`.

    Args:
        scores: `(B,)`, in the reward's unit; NaN stays NaN.
        score_clip: Positive, in the reward's unit; None does not change the scores.

    Returns:
        float32 `(B,)`.
    """
    scores = scores.float()
    return scores if score_clip is None else scores.clamp(-score_clip, score_clip)


def replace_missing_eos(scores: Tensor, ended: Tensor, replacement: float | None) -> Tensor:
    """Replace the score of every response that did not end: `score if ended else replacement`.

    The *EOS trick* of the N+ implementation details, 2403.17031, section 7.

    Args:
        scores: `(B,)`, in the reward's unit; NaN, a missing score, stays NaN.
        ended: Whether the response has a stop token or string, bool `(B,)`.
        replacement: In the reward's unit; None does not change the scores.

    Returns:
        float32 `(B,)`.
    """
    scores = scores.float()
    return scores if replacement is None else torch.where(ended | scores.isnan(), scores, replacement)


def token_rewards(
    kl: Tensor | None, scores: Tensor, response_mask: Tensor, kl_coef: float, token_scores: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Compute token rewards: minus the KL penalty, plus token scores, plus the score at the last real token.

        non_score_reward_t = -kl_coef * kl_t
        reward_t = non_score_reward_t + token_score_t + score * [t is the response's last real token]

    Ziegler et al., 1909.08593, section 2 (eq. 2), spread over tokens as in 2403.17031, section 7.

    Args:
        kl: KL estimate per token, nats, `(B, T)`; None for no penalty.
        scores: Scores after the missing-EOS penalty, `(B,)`, in the reward's unit.
        response_mask: True on real tokens, the stop token included, bool `(B, T)`.
        kl_coef: Reward per nat.
        token_scores: Scores of single tokens, `(B, T)`, in the reward's unit, or None.

    Returns:
        `(non_score_reward, rewards)`, float32 `(B, T)`, 0 outside the mask.

    Raises:
        ValueError: There is a coefficient but no KL, as after a callback has raised `kl_coef` from 0.
    """
    if kl is None:
        if kl_coef > 0:
            raise ValueError(
                f"kl_coef={kl_coef} has no effect without a reference: start the run with a kl_coef above 0, or pass "
                "ref_model"
            )
        non_score_reward = torch.zeros_like(response_mask, dtype=torch.float32)
    else:
        non_score_reward = zero_outside(-kl_coef * kl.float(), response_mask)
    num_tokens_left = response_mask.flip(1).cumsum(dim=1).flip(1)
    is_last = response_mask & (num_tokens_left == 1)
    rewards = non_score_reward + zero_outside(scores[:, None].expand_as(is_last), is_last)
    return non_score_reward, rewards if token_scores is None else rewards + zero_outside(token_scores, response_mask)


class KLController(Protocol):
    """Interface of a controller that sets the coefficient of the KL penalty for each update."""

    @property
    def coef(self) -> float:
        """Reward per nat for the next update, finite and at least 0; a plain attribute suffices."""
        ...

    def update(self, mean_kl: float, num_episodes: int) -> None:
        """Set `coef` for the next update.

        Args:
            mean_kl: KL per response, summed over its tokens, averaged over the episodes of all ranks, nats.
            num_episodes: Number of episodes of the update, on all ranks.
        """
        ...

    def state_dict(self) -> Mapping[str, Any]:
        """Return the state for a checkpoint: tensors, numbers, strings, lists and dicts of these."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a result of `state_dict`."""
        ...


class _HasKLCoefficient(Protocol):
    """Arguments with a KL coefficient."""

    kl_coef: float


class FixedKLController:
    """Controller that returns the coefficient of the arguments.

    Args:
        args: Arguments with `kl_coef`, reward per nat.
    """

    def __init__(self, args: _HasKLCoefficient) -> None:
        self._args = args

    @property
    def coef(self) -> float:
        """Reward per nat."""
        return self._args.kl_coef

    def update(self, mean_kl: float, num_episodes: int) -> None:
        """Do nothing."""

    def state_dict(self) -> dict[str, Any]:
        """Return an empty state: a resumed run uses its own arguments."""
        return {}

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Do nothing."""


class AdaptiveKLController:
    """Controller that adapts the coefficient until the KL per response equals the target.

        coef <- coef (1 + clip(KL / target - 1, -0.2, 0.2) min(n / horizon, 1))

    after each update of n episodes. Ziegler et al., 1909.08593, section 2.2, whose updates are shorter than the
    horizon; the limit of one horizon keeps the factor between 0.8 and 1.2, and the coefficient positive.

    Args:
        coef: Reward per nat of the first update; positive.
        target: KL per response, summed over its tokens, nats; positive.
        horizon: Number of episodes, at least 1; a smaller horizon adapts faster.
    """

    def __init__(self, coef: float, target: float, horizon: float) -> None:
        self.coef, self.target, self.horizon = coef, target, horizon

    def update(self, mean_kl: float, num_episodes: int) -> None:
        """Change the coefficient by at most a fifth, times the episodes' share of the horizon; ignore a KL of NaN."""
        if math.isnan(mean_kl):
            return
        error = min(max(mean_kl / self.target - 1, -0.2), 0.2)
        moved = self.coef * (1 + error * min(num_episodes, self.horizon) / self.horizon)
        self.coef = min(max(moved, sys.float_info.min), sys.float_info.max)

    def state_dict(self) -> dict[str, float]:
        """Return the coefficient; target and horizon come from the arguments."""
        return {"coef": self.coef}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Restore the coefficient."""
        self.coef = state["coef"]


def check_coefficient(controller: KLController) -> None:
    """Raise a `ValueError` if a controller's coefficient is not finite, or negative, which would reward divergence."""
    coef = float(controller.coef)
    if not 0 <= coef < math.inf:
        raise ValueError(
            f"kl_controller: {type(controller).__name__}.coef={coef} must be finite and at least 0, or the penalty "
            "would reward divergence; bound it in the controller's update()"
        )


def gae(
    rewards: Tensor,
    values: Tensor,
    response_mask: Tensor,
    gamma: float,
    lam: float,
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
        lam: 0 for one-step TD errors, 1 for Monte-Carlo returns minus the value.
        bootstrap_values: Value estimate after the last real token, `(B,)`; 0 for rows that ended. None if all did.

    Returns:
        `(advantages, returns)`, not whitened, float32 `(B, T)`, 0 outside the mask.
    """
    order = response_mask.logical_not().to(torch.uint8).argsort(dim=1, stable=True)  # real tokens first, in order
    real = response_mask.gather(1, order)
    rewards = zero_outside(rewards, response_mask).gather(1, order)
    values = zero_outside(values, response_mask).gather(1, order)
    deltas = rewards + gamma * _next_values(values, real, bootstrap_values) - values
    advantages = _discounted_sums(deltas, gamma * lam)
    tokens = order.argsort(dim=1)
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
    lam: float,
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
    counted = zero_outside(rewards, response_mask)
    # On the CPU, where the order of summation is deterministic.
    sums = torch.zeros(counted.shape).scatter_add(1, turns.cpu(), counted.cpu()).to(counted.device)
    advantages, returns = gae(sums.gather(1, turns), values, starts, gamma, lam, bootstrap_values)
    positions = torch.arange(starts.shape[1], device=starts.device)
    first = torch.where(starts, positions, 0).cummax(dim=1).values
    return zero_outside(advantages.gather(1, first), response_mask), returns


def _next_values(values: Tensor, real: Tensor, bootstrap_values: Tensor | None) -> Tensor:
    """Shift values by one token; real tokens come first in their rows, other values are 0."""
    next_values = values.roll(-1, dims=1)
    next_values[:, -1] = 0.0
    if bootstrap_values is None:
        return next_values
    is_last = real.clone()
    is_last[:, :-1] &= ~real[:, 1:]
    return torch.where(is_last, bootstrap_values.float()[:, None], next_values)


def _discounted_sums(terms: Tensor, discount: float) -> Tensor:
    """Return `y_t = x_t + discount y_{t+1}`, computed on the CPU: on a GPU, each step would be a kernel launch."""
    sums = terms.T.cpu().clone(memory_format=torch.contiguous_format)
    steps = sums.unbind()
    for step, following in zip(steps[-2::-1], steps[:0:-1], strict=True):
        step += discount * following
    return sums.to(terms.device).T


# ---- Statistics over the real tokens of all ranks ----


def exact_type(device: torch.device) -> torch.dtype:
    """Return float64, in which sums of up to 2^29 equal float32 values are exact; float32 on Apple's GPUs."""
    return torch.float32 if device.type == "mps" else torch.float64


def zero_outside(values: Tensor, mask: Tensor) -> Tensor:
    """Replace values outside the mask by 0, in float32: `x_i if m_i else 0`.

    By selection, not multiplication: NaN and inf in the padding are removed, and its gradient is 0 even if the
    upstream gradient is not finite.

    Args:
        values: Any shape, any dtype, any unit.
        mask: True on the values to keep, bool, same shape.

    Returns:
        float32, same shape.
    """
    return torch.where(mask, values.float(), 0.0)


def masked_mean(values: Tensor, mask: Tensor, reduce_sum: ReduceSum | None = None) -> Tensor:
    """Average over real tokens: `mean = sum_i m_i x_i / sum_i m_i`, 0 if no rank has a real token.

    Args:
        values: Any shape, any unit.
        mask: True on real tokens, bool, same shape.
        reduce_sum: Sums over all ranks, each of which must call this; None for one process.

    Returns:
        float32 scalar in the unit of `values`, the same on every rank.
    """
    sums = torch.stack([zero_outside(values, mask).sum(), mask.sum().float()])
    total, num_tokens = sums if reduce_sum is None else reduce_sum(sums)
    return total / num_tokens.clamp(min=1)


def masked_var(values: Tensor, mask: Tensor, reduce_sum: ReduceSum | None = None) -> Tensor:
    """Compute the unbiased variance of real tokens: `sum_i m_i (x_i - mean)^2 / (sum_i m_i - 1)`, 0 below two tokens.

    In two passes, to avoid cancellation with a large mean. Equal values have a variance of exactly 0.

    Args:
        values: Any shape, any unit.
        mask: True on real tokens, bool, same shape.
        reduce_sum: Sums over all ranks, each of which must call this; None for one process.

    Returns:
        float32 scalar in the squared unit of `values`, the same on every rank.
    """
    return _mean_and_var(values, mask, reduce_sum)[1]


def masked_range(values: Tensor, mask: Tensor, gather: Callable[[Tensor], Tensor]) -> tuple[float, float]:
    """Find the lowest and the highest value of the real tokens of all ranks; inf and -inf if there are none.

    Args:
        values: Any shape, any unit.
        mask: True on real tokens, bool, same shape.
        gather: Concatenates over ranks along the first dimension; every rank calls this.
    """
    numbers = values.float()
    ends = torch.stack([-numbers.masked_fill(~mask, torch.inf).min(), numbers.masked_fill(~mask, -torch.inf).max()])
    negated, highest = gather(ends[None]).amax(dim=0)
    return -float(negated), float(highest)


def masked_whiten(
    values: Tensor, mask: Tensor, shift_mean: bool = True, reduce_sum: ReduceSum | None = None
) -> Tensor:
    """Scale to unit variance over real tokens: `(x - mean) / sqrt(var + 1e-8)`, plus `mean` unless `shift_mean`.

    Advantages are whitened with the mean removed, rewards with the mean kept (N+ implementation details, 2403.17031,
    section 7). Mean and variance are over the tokens of all ranks: the result does not depend on the split into ranks.
    Equal values become exactly 0, or do not change with `shift_mean=False`.

    Args:
        values: `(B, T)`, any unit.
        mask: True on real tokens, bool `(B, T)`.
        shift_mean: Whether the result has mean 0; False restores the original mean.
        reduce_sum: Sums over all ranks, each of which must call this; None for one process.

    Returns:
        float32 `(B, T)`, in standard deviations, 0 outside the mask.
    """
    mean, var = _mean_and_var(values, mask, reduce_sum)
    whitened = (values.float() - mean) * torch.rsqrt(var + 1e-8)
    return zero_outside(whitened if shift_mean else whitened + mean, mask)


def _mean_and_var(values: Tensor, mask: Tensor, reduce_sum: ReduceSum | None) -> tuple[Tensor, Tensor]:
    """Return mean and unbiased variance over the real tokens of all ranks; for equal values exactly the value and 0.

    The float32 mean of equal values may differ from them by rounding, which whitening would multiply by up to 1e4.
    Their mean in `exact_type` is exact, so a comparison with it detects them.
    """
    values, exact = zero_outside(values, mask), exact_type(values.device)
    sums = torch.stack([values.sum().to(exact), values.to(exact).sum(), mask.sum().to(exact)])
    total, exact_total, num_tokens = sums if reduce_sum is None else reduce_sum(sums)
    mean = total.float() / num_tokens.clamp(min=1).float()
    exact_mean = exact_total / num_tokens.clamp(min=1)
    squares = zero_outside(values - mean, mask).square()
    sums = torch.stack([squares.sum().to(exact), ((values.to(exact) != exact_mean) & mask).sum().to(exact)])
    total, num_others = sums if reduce_sum is None else reduce_sum(sums)
    var = total.float() / (num_tokens - 1).clamp(min=1).float()
    are_equal = num_others == 0
    return torch.where(are_equal, exact_mean.float(), mean), torch.where(are_equal, 0.0, var)


@dataclass
class ScoreMoments:
    """Mean and squared deviations of all scores of a run, updated per batch (Chan et al., 1979, *Updating formulae*).

    Attributes:
        count: Number of scores.
        mean: Mean score.
        squares: Sum of squared deviations from the mean.
    """

    count: float = 0.0
    mean: float = 0.0
    squares: float = 0.0

    def add(self, scores: Tensor, reduce_sum: ReduceSum) -> None:
        """Add a batch.

            d = mean_batch - mean        mean' = mean + d n_batch / n'        S' = S + S_batch + d^2 n n_batch / n'

        In float64 (see `exact_type`) sums of equal float32 scores are exact, and their deviation is 0.

        Args:
            scores: This rank's scores, `(N,)`; may be empty.
            reduce_sum: Sums over all ranks, each of which must call this.
        """
        scores = scores.to(exact_type(scores.device))
        sums = torch.stack((scores.new_tensor(len(scores)), scores.sum()))
        added, total = (float(value) for value in reduce_sum(sums))
        if added == 0:
            return
        mean, count = total / added, self.count + added
        squares = float(reduce_sum((scores - mean).square().sum()))
        distance = mean - self.mean
        self.mean += distance * added / count
        self.squares += squares + distance**2 * self.count * added / count
        self.count = count

    @property
    def std(self) -> float:
        """Unbiased standard deviation; 1 if it would be undefined, or no more than the rounding of float32 sums."""
        deviation = math.sqrt(self.squares / (self.count - 1)) if self.count > 1 else 0.0
        return deviation if deviation > 1e-6 * abs(self.mean) else 1.0

    def state_dict(self) -> dict[str, float]:
        """Return the fields, for a checkpoint."""
        return dataclasses.asdict(self)

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Restore a result of `state_dict`."""
        vars(self).update(state)
