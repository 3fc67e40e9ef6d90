"""Health of what is learned from: rewards, a held-out judge, values, gradients."""

from __future__ import annotations

import itertools
import statistics

from rlhf_ppo.config.health import HealthThresholds
from rlhf_ppo.reporting.health.history import History


def reward_variance(history: History, limits: HealthThresholds) -> str | None:
    """Find that every reward is the same for all responses, or nearly so compared with before."""
    if limits.reward_std is None or history.run.num_episodes < 2 or not history.updates:
        return None
    keys = [key for key in history.updates[-1] if key.startswith("rewards/") and key.endswith("/std")]
    found = {key: history.last(key, limits.patience) for key in keys}
    if not keys or not all(
        stds and max(stds) <= limits.reward_std * history.largest(key) for key, stds in found.items()
    ):
        return None
    names = ", ".join(key.removeprefix("rewards/").removesuffix("/std") for key in keys)
    return f"nearly all responses have the same reward ({names}): its standard deviation is {found[keys[0]][-1]:.2g}"


def judge(history: History, limits: HealthThresholds) -> str | None:
    """Find a judge, which training does not see, that falls `judge_falls` times in a row while the score rises."""
    if limits.judge_falls is None or len(history.evaluations) <= limits.judge_falls:
        return None
    last = history.evaluations[-limits.judge_falls - 1 :]
    verdicts = [float(log[history.run.judge]) for log in last]
    if not all(after < before for before, after in itertools.pairwise(verdicts)):
        return None
    between = (last[0]["step"], last[-1]["step"])
    # Scaled scores say little about a rise: the mean and the deviation that they are measured with move along.
    scores = history.between("objective/raw_scores", *between) or history.between("objective/scores", *between)
    half = len(scores) // 2
    if half == 0 or statistics.fmean(scores[half:]) <= statistics.fmean(scores[:half]):
        return None
    return f"{history.run.judge} has fallen from {verdicts[0]:.3g} to {verdicts[-1]:.3g} while the score rose"


def explained_variance(history: History, limits: HealthThresholds) -> str | None:
    """Find a value model that is worse than a constant, in `explained_variance_logs` logs in a row."""
    found = history.last("val/explained_variance", limits.explained_variance_logs)
    if limits.explained_variance is None or not found or max(found) >= limits.explained_variance:
        return None
    return (
        f"the explained variance has been below {limits.explained_variance:g} for {len(found)} logs: {found[-1]:.3g}"
    )


def gradient_spike(history: History, limits: HealthThresholds) -> str | None:
    """Find a gradient many times as large as the median of those before, and clipped."""
    if limits.gradient_spike is None or not history.last("grad_norm", 1):
        return None
    norm, usual, number = history.newest_and_usual("grad_norm")
    if number < limits.patience or norm <= max(limits.gradient_spike * usual, history.run.max_grad_norm):
        return None
    return f"the gradient norm is {norm:.3g}, where it was {usual:.3g}"


def no_gradient(history: History, limits: HealthThresholds) -> str | None:
    """Find that there is nothing to learn from, in `patience` logs in a row."""
    found = history.last("grad_norm", limits.patience)
    if limits.no_gradient is None or not found or max(found) > limits.no_gradient:
        return None
    return f"the gradient norm is {found[-1]:.2g}"
