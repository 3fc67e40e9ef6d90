"""Health of the responses: their length, their end, and whether they differ."""

from __future__ import annotations

from rlhf_ppo.config.health import HealthThresholds
from rlhf_ppo.reporting.health.history import History


def length_limit(history: History, limits: HealthThresholds) -> str | None:
    """Find responses that have grown to `response_length`, in `patience` logs in a row."""
    found, first = history.last("response/length_mean", limits.patience), history.first("response/length_mean")
    if limits.length_limit is None or not history.run.can_end or not found:
        return None
    limit = limits.length_limit * history.run.response_length
    if first >= 0.8 * limit or min(found) < limit:
        return None
    return f"responses have grown from {first:.3g} to {found[-1]:.3g} tokens, of at most {history.run.response_length}"


def length_shrinks(history: History, limits: HealthThresholds) -> str | None:
    """Find responses that have become short, in `patience` logs in a row."""
    found, first = history.last("response/length_mean", limits.patience), history.first("response/length_mean")
    if limits.length_shrinks is None or not found or not max(found) < limits.length_shrinks * first:
        return None
    return f"responses have shrunk from {first:.3g} to {found[-1]:.3g} tokens"


def ended(history: History, limits: HealthThresholds) -> str | None:
    """Find responses that end no more, in `patience` logs in a row; that never did, where it changes their score."""
    found, first = history.last("response/ended_frac", limits.patience), history.first("response/ended_frac")
    if limits.ended is None or not history.run.can_end or not found or max(found) >= limits.ended:
        return None
    if first < 2 * limits.ended and not history.run.end_counts:
        return None
    before = f", where {1 - first:.0%} had none at first" if first > found[-1] else ""
    return f"{1 - found[-1]:.0%} of the responses have no stop token{before}"


def repeated(history: History, limits: HealthThresholds) -> str | None:
    """Find that the policy answers most prompts with the same words, in `patience` logs in a row."""
    found, first = history.last("response/unique_frac", limits.patience), history.first("response/unique_frac")
    if limits.unique is None or not found or max(found) >= limits.unique or first < 2 * limits.unique:
        return None
    return f"only {found[-1]:.0%} of the responses differ, where {first:.0%} did at first"
