"""The figures from which on a run is said to be unwell."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, fields
from typing import Any


@dataclass(frozen=True)
class HealthThresholds:
    """From which figures on a health check says something; None turns a check off.

    A log is the mean over `logging_steps` updates. Figures that are noisy must be beyond their threshold in `patience`
    logs in a row.

    Attributes:
        patience: Logs in a row.
        first_logratio: Largest `val/first_logratio`, nats.
        kl: Largest `objective/kl`, the budget: nats per response. None: no budget.
        kl_per_token: Largest `objective/kl` per token of the mean response, nats.
        kl_growth: How many times faster the KL may rise than before, twice in a row; compared are the rises between
            four stretches of `patience` logs, each wholly above the one before, over which it must have doubled.
        negative_kl: Largest size of a negative `objective/kl` per token, nats.
        clip_fraction: Largest `policy/clipfrac_avg`.
        explained_variance: Smallest `val/explained_variance`.
        explained_variance_logs: How many logs in a row it must be below.
        entropy: Smallest `policy/entropy_avg`, as a share of the first one logged.
        length_limit: Largest `response/length_mean`, as a share of `response_length`, where responses were shorter
            at first.
        length_shrinks: Smallest `response/length_mean`, as a share of the first one logged.
        ended: Smallest `response/ended_frac`, where responses can end.
        reward_std: Smallest `rewards/<name>/std`, as a share of the largest one logged.
        judge_falls: How often in a row the held-out judge may fall while the score rises.
        gradient_spike: Largest `grad_norm`, as a multiple of the median before; only above `max_grad_norm`.
        no_gradient: Smallest `grad_norm`.
        unique: Smallest `response/unique_frac`, where it was larger than twice that at first.
    """

    patience: int = 3
    first_logratio: float | None = 0.1
    kl: float | None = None
    kl_per_token: float | None = 1.0
    kl_growth: float | None = 1.75
    negative_kl: float | None = 0.1
    clip_fraction: float | None = 0.4
    explained_variance: float | None = 0.0
    explained_variance_logs: int = 20
    entropy: float | None = 0.1
    length_limit: float | None = 0.95
    length_shrinks: float | None = 0.2
    ended: float | None = 0.05
    reward_std: float | None = 0.05
    judge_falls: int | None = 4
    gradient_spike: float | None = 20.0
    no_gradient: float | None = 1e-8
    unique: float | None = 0.2


_COUNTS = {"patience", "explained_variance_logs", "judge_falls"}
_ALWAYS = {"patience", "explained_variance_logs"}


def parse_thresholds(given: Any) -> dict[str, float | None] | None:
    """Read and check thresholds as they are given in Python, in YAML or on a command line.

    Args:
        given: A dict of `HealthThresholds`' fields, the JSON text of one, or None for the defaults.

    Raises:
        TypeError: It is something else, or a value is no number.
        ValueError: There is no such threshold, or a number is not finite, or a count not positive.
    """
    if isinstance(given, str):
        try:
            given = json.loads(given)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"health_thresholds={given!r:.80} is no JSON: {error}") from error
    if given is None:
        return None
    if not isinstance(given, dict):
        raise TypeError(
            f"health_thresholds={given!r} must be a dict of thresholds, such as "
            """{"kl": 30, "clip_fraction": null}; null (None) turns a check off"""
        )
    names = [field.name for field in fields(HealthThresholds)]
    for name, value in given.items():
        if name not in names:
            raise ValueError(f"health_thresholds has no {name!r}; there are {', '.join(names)}")
        _check(name, value)
    return {name: int(value) if name in _COUNTS and value is not None else value for name, value in given.items()}


def _check(name: str, value: Any) -> None:
    what = f"health_thresholds[{name!r}]={value!r}"
    if value is None and name not in _ALWAYS:
        return
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{what} must be a number" + ("" if name in _ALWAYS else ", or None to turn the check off"))
    if not math.isfinite(value):
        raise ValueError(f"{what} must be finite; None turns the check off")
    if name in _COUNTS and (value < 1 or value != int(value)):
        raise ValueError(f"{what} must be a whole number of at least 1")
