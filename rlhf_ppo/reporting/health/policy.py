"""Health of the policy: importance ratio, KL, clipping, entropy."""

from __future__ import annotations

import itertools
import statistics

from rlhf_ppo.config.health import HealthThresholds
from rlhf_ppo.reporting.health.history import History


def first_ratio(history: History, limits: HealthThresholds) -> str | None:
    """Find two forward passes of one policy that differ: before the first step all ratios are 1."""
    found = history.last("val/first_logratio", 1)
    if limits.first_logratio is None or not found or found[0] <= limits.first_logratio:
        return None
    return (
        f"before the first optimizer step of an update the log-ratio is {found[0]:.3g} nats (root mean square), not 0"
    )


def kl_budget(history: History, limits: HealthThresholds) -> str | None:
    """Find a KL beyond its budget, in `patience` logs in a row."""
    kls = history.last("objective/kl", limits.patience)
    lengths = history.last("response/length_mean", limits.patience)
    if not kls:
        return None
    if limits.kl is not None and min(kls) > limits.kl:
        return f"the KL to the reference is {kls[-1]:.3g} nats per response, above the budget of {limits.kl:g}"
    per_token = [kl / length for kl, length in zip(kls, lengths, strict=False) if length > 0]
    if limits.kl_per_token is not None and per_token and min(per_token) > limits.kl_per_token:
        return (
            f"the KL to the reference is {kls[-1]:.3g} nats per response, {per_token[-1]:.3g} per token, above "
            f"{limits.kl_per_token:g}"
        )
    return None


def kl_growth(history: History, limits: HealthThresholds) -> str | None:
    """Find a KL that doubles ever faster: each of three rises in a row is `kl_growth` times the one before."""
    if limits.kl_growth is None:
        return None
    stretches = history.stretches("objective/kl", limits.patience, 4)
    overlap = any(min(after) <= max(before) for before, after in itertools.pairwise(stretches))
    if not stretches or overlap:  # what overlaps may differ by noise alone
        return None
    means = [statistics.fmean(each) for each in stretches]
    first, second, third = (after - before for before, after in itertools.pairwise(means))
    # Where there is little KL yet, its first rise is always from nothing; where there is much, small rises are noise.
    has_risen = means[-1] > max(0.1 * max(history.first("response/length_mean"), 1), 2 * means[0])
    if has_risen and second > limits.kl_growth * first and third > limits.kl_growth * second:
        return f"the KL rises ever faster: by {first:.3g}, {second:.3g} and {third:.3g} nats in equal times"
    return None


def negative_kl(history: History, limits: HealthThresholds) -> str | None:
    """Find a KL far below 0, which that of samples of the policy is on average never."""
    kls = history.last("objective/kl", limits.patience)
    lengths = history.last("response/length_mean", limits.patience)
    if limits.negative_kl is None or not kls or len(lengths) < len(kls):
        return None
    if all(kl < -limits.negative_kl * length for kl, length in zip(kls, lengths, strict=True)):
        return f"the KL to the reference is {kls[-1]:.3g} nats per response: below 0 on average of all episodes"
    return None


def clip_fraction(history: History, limits: HealthThresholds) -> str | None:
    """Find updates so large that much of them is clipped, in `patience` logs in a row."""
    found = history.last("policy/clipfrac_avg", limits.patience)
    if limits.clip_fraction is None or not history.run.clips_tokens:
        return None
    if not found or min(found) <= limits.clip_fraction:
        return None
    return f"{found[-1]:.0%} of the tokens are clipped"


def entropy(history: History, limits: HealthThresholds) -> str | None:
    """Find a policy that is sure of every token, in `patience` logs in a row."""
    found, first = history.last("policy/entropy_avg", limits.patience), history.first("policy/entropy_avg")
    if limits.entropy is None or not found or not max(found) < limits.entropy * first:
        return None
    return f"the entropy has fallen from {first:.3g} to {found[-1]:.3g} nats per token"
