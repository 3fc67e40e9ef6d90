"""Key figures of a report: the verdict, first and last values with intervals, and score against KL."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rlhf_ppo.config.arguments import HealthThresholds
from rlhf_ppo.reporting.health import warnings_of
from rlhf_ppo.reporting.health_checks import RunContext
from rlhf_ppo.reporting.plots import mean_curve
from rlhf_ppo.reporting.run_log import SETTINGS_NAME, Log, RecordedRun

MAX_FRONTIER = 120
"""Largest number of points of score against KL; each is the mean of a stretch of updates."""

_KEY_FIGURES = {
    "objective/scores": "score",
    "eval_score": "score of held-out prompts",
    "objective/kl": "KL to the reference, nats",
    "response/ended_frac": "responses that ended",
    "response/length_mean": "response length, tokens",
    "policy/entropy_avg": "entropy, nats per token",
}
_BOUNDS = {"response/ended_frac": (0, 1), "response/length_mean": (0, math.inf), "policy/entropy_avg": (0, math.inf)}
_MIN_LOGS = 6
"""Smallest number of logs of a single run for which an interval is computed."""
_STUDENT = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23)
"""The 97.5% quantiles of Student's t for 1 to 10 degrees of freedom."""


def key_figures(groups: Sequence[Sequence[Log]]) -> list[dict[str, Any]]:
    """Return the first and the last value of the main metrics, with 95% intervals.

    Args:
        groups: The logs of the runs of each group.

    Returns:
        `key`, `name`, `is_share` and `groups` of each metric that was logged; for each group `first`, `last`, `low`
        and `high` as of `first_and_last`, or None.
    """
    found = []
    for key, name in _KEY_FIGURES.items():
        figures = [first_and_last(logs, key) for logs in groups]
        if any(figures):
            for figure in filter(None, figures):
                _clip_interval(figure, *_BOUNDS.get(key, (-math.inf, math.inf)))
            is_share = _BOUNDS.get(key) == (0, 1)
            found.append({"key": key, "name": name, "is_share": is_share, "groups": figures})
    return found


def first_and_last(logs: Sequence[Log], key: str) -> dict[str, float | None] | None:
    """Return a metric at the first log and at the end of training.

    The end is the mean of the last tenth of a run's logs, at least three; with fewer than six logs, the last log.

    Args:
        logs: The logs of runs that differ only in their seed.
        key: The metric.

    Returns:
        `first` (None if each run logged the metric once) and `last`, means over runs; `low` and `high`, the 95%
        interval of `last` (Student's t) over runs, or for a single run over its last logs; None without an interval.
        None if no run logged the metric.
    """
    series = [[log[key] for log in of_run if key in log and math.isfinite(log[key])] for of_run in logs]
    series = [values for values in series if values]
    if not series:
        return None
    ends = [values[-max(3, len(values) // 10) :] if len(values) >= _MIN_LOGS else values[-1:] for values in series]
    means = [float(np.mean(end)) for end in ends]
    first = float(np.mean([values[0] for values in series])) if any(len(values) > 1 for values in series) else None
    last = float(np.mean(means))
    half = _half_interval(means if len(series) > 1 else ends[0])
    low, high = (None, None) if half is None else (last - half, last + half)
    return {"first": first, "last": last, "low": low, "high": high}


def _half_interval(values: Sequence[float]) -> float | None:
    """Return half the width of the 95% interval of a mean, or None for a single value."""
    freedom = len(values) - 1
    if freedom < 1:
        return None
    quantile = _STUDENT[freedom - 1] if freedom <= len(_STUDENT) else 1.96 + 2.5 / freedom
    return float(quantile * np.std(values, ddof=1) / math.sqrt(len(values)))


def _clip_interval(figure: dict[str, float | None], lowest: float, highest: float) -> None:
    for end in ("low", "high"):
        if (value := figure[end]) is not None:
            figure[end] = min(highest, max(lowest, value))


def headline(verdict: Mapping[str, Any], figures: Mapping[str, Any]) -> dict[str, Any]:
    """Return a verdict whose sentence says what the log shows if no judge compared the policy.

    Args:
        verdict: The result of `Verdict.as_json`.
        figures: The result of `first_and_last` for each metric.
    """
    found = {name: list(value) if isinstance(value, tuple) else value for name, value in verdict.items()}
    if verdict["outcome"] == "not judged":
        found["sentence"] = f"No judge compared this policy with the SFT model. {_of_log(figures)}"
    return found


def _of_log(figures: Mapping[str, Any]) -> str:
    """Say in a sentence how score, KL and the share of ended responses changed."""
    keys = ("objective/scores", "objective/kl", "response/ended_frac")
    (score, kl, ended), parts = map(figures.get, keys), []
    if score is not None and score["first"] is not None:
        first, last, low, high = (score[name] for name in ("first", "last", "low", "high"))
        rose = "rose" if last > first else "fell"
        change = "went" if low is None else "did not change clearly:" if low <= first <= high else rose
        spread = "" if low is None else f" (95% interval {low:.3g} to {high:.3g})"
        parts.append(f"the score {change} from {first:.3g} to {last:.3g}{spread}")
    if kl is not None:
        parts.append(f"the KL to the reference is {kl['last']:.3g} nats per response")
    if ended is not None:
        parts.append(f"{ended['last']:.0%} of responses ended")
    return f"{_sentence('; '.join(parts))}." if parts else "The log has no score."


def _sentence(words: str) -> str:
    return words[:1].upper() + words[1:]


def score_against_kl(logs: Sequence[Log]) -> list[dict[str, float]]:
    """Return the path of a group in the plane of KL and score.

    Args:
        logs: The logs of the runs, which are averaged.

    Returns:
        `step`, `kl` and `score` of at most `MAX_FRONTIER` points. Each point is the mean of a stretch of updates, and
        `step` is the last of them.
    """
    scores, kls = (mean_curve(logs, key, "step")[:2] for key in ("objective/scores", "objective/kl"))
    steps, in_scores, in_kls = np.intersect1d(scores[0], kls[0], assume_unique=True, return_indices=True)
    table = np.stack([steps, kls[1][in_kls], scores[1][in_scores]], axis=1)
    table = table[np.isfinite(table).all(axis=1)]
    parts = np.array_split(table, max(1, min(len(table), MAX_FRONTIER)))
    points = [(int(part[-1, 0]), *part[:, 1:].mean(axis=0).tolist()) for part in parts if len(part)]
    return [{"step": step, "kl": kl, "score": score} for step, kl, score in points]


def health_warnings(run: RecordedRun) -> dict[str, list[tuple[int, str]]]:
    """Return the updates and warnings of each health check; empty for a run without health settings.

    Args:
        run: The run.

    Raises:
        ValueError: Its settings are damaged.
    """
    if not (health := run.settings.health):
        return {}
    try:
        return warnings_of(run.log, HealthThresholds(**health["thresholds"]), RunContext(**health["run"]))
    except (KeyError, TypeError) as error:
        raise ValueError(
            f"the run {run.name} has a {SETTINGS_NAME} that is damaged, or of a newer rlhf_ppo: {error!r}"
        ) from error
