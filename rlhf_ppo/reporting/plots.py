"""Training curves, drawn from the log of Trainer."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from math import ceil
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray

from rlhf_ppo.data.files import replacing
from rlhf_ppo.reporting.run_log import History, Run, names_of, training_log
from rlhf_ppo.terminal import visible

PANELS: Mapping[str, str] = {
    "objective/scores": "mean score of a response",
    "objective/kl": "KL to the reference, nats per response",
    "objective/rlhf_reward": "score minus the KL penalty",
    "policy/entropy_avg": "entropy, nats per token",
    "val/ratio": "mean importance ratio",
    "policy/clipfrac_avg": "share of tokens clipped",
    "loss/value_avg": "value loss",
    "objective/raw_scores": "mean score before scaling",
    "response/length_mean": "response length, tokens",
    "response/length_min": "shortest response, tokens",
    "response/length_max": "longest response, tokens",
    "response/ended_frac": "share of responses that ended",
    "val/num_eos_tokens": "responses of an update that ended",
    "objective/entropy": "minus log-probability, nats per response",
    "objective/non_score_reward": "the KL penalty, per response",
    "policy/approxkl_avg": "how far an update moves the policy",
    "loss/policy_avg": "policy loss",
    "val/clipfrac_avg": "share of value losses clipped",
    "val/ratio_var": "variance of the importance ratio",
    "val/explained_variance": "share of the returns' variance explained",
    "loss": "policy loss plus weighted value loss",
    "grad_norm": "gradient norm before clipping",
    "lr": "learning rate of the update",
    "eps": "episodes per second",
    "eval_score": "mean score of held-out prompts",
    "eval_kl": "KL to the reference, held-out prompts",
    "time/generate": "seconds of an update, sampling",
    "time/score": "seconds of an update, rewards",
    "time/evaluate": "seconds of an update, forward passes",
    "time/learn": "seconds of an update, optimizer steps",
    "time/tokens_per_second": "response tokens per second",
}
"""The meaning of metrics. These are drawn first, in this order, then all other logged metrics."""

_AXES = {"episode": "episodes", "step": "updates"}
_COUNTERS = {*_AXES, "epoch", "total_flos", "num_input_tokens_seen"}
NOT_DRAWN = frozenset({*_COUNTERS, "learning_rate"})
"""Keys of a log that get no curve unless they are named: counters, and Trainer's key of `lr`."""

_COLUMNS = 4


def plot_metrics(
    runs: Sequence[Run] | Mapping[str, Sequence[Run]],
    path: str | os.PathLike[str],
    metrics: Sequence[str] | None = None,
    x: str = "episode",
) -> Figure:
    """Draw one panel per metric with all runs, and save the figure.

    Args:
        runs: Runs, each drawn as a line; or a mapping of label to the runs of one setting (its seeds), drawn as mean
            and a band of one standard deviation.
        path: The file; its suffix sets the format, such as .png, .svg or .pdf.
        metrics: Keys of the log; None: all logged metrics.
        x: The key of the horizontal axis: `"episode"`, or `"step"` for PPO updates.

    Returns:
        The figure, with one axes per metric, in order.

    Raises:
        ValueError: There is nothing to draw, a metric was not logged, or the suffix is not a format.
        FileNotFoundError: A directory holds no run.
    """
    groups = _read_groups(runs)
    shown = _logged_metrics(groups, metrics, x)
    columns = min(len(shown), _COLUMNS)
    rows = ceil(len(shown) / columns)
    path = Path(os.path.expanduser(path))
    figure = Figure(figsize=(4.2 * columns, 3.0 * rows + 0.4), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False).flatten()
    for panel, metric in zip(axes, shown, strict=False):
        _draw(panel, metric, groups, x)
    for unused in axes[len(shown) :]:
        unused.remove()
    if len(groups) > 1:
        handles, labels = axes[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=min(len(groups), 6), frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as temporary:
        figure.savefig(temporary, dpi=110, format=path.suffix.lower().lstrip("."))
    return figure


def mean_curve(
    logs: Sequence[History], metric: str, x: str = "episode"
) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
    """Compute a metric's mean over runs at each point of the horizontal axis.

    Args:
        logs: The log histories of the runs.
        metric: The metric's key.
        x: The key of the horizontal axis.

    Returns:
        The points, the mean at each, and the standard deviation over runs (denominator `n - 1`; 0 for a single run).
        Runs without the metric at a point are left out there.
    """
    entries = [entry for log in logs for entry in log if metric in entry and x in entry]
    positions, values = (np.fromiter((entry[key] for entry in entries), float, len(entries)) for key in (x, metric))
    points, numbers, counts = np.unique(positions, return_inverse=True, return_counts=True)
    with np.errstate(invalid="ignore"):  # values that are not finite stay as they are
        means = np.bincount(numbers, values, len(points)) / np.maximum(counts, 1)
        squares = np.bincount(numbers, (values - means[numbers]) ** 2, len(points))
        deviations = np.where(counts > 1, np.sqrt(squares / np.maximum(counts - 1, 1)), 0.0)
    return points, means, deviations


def _read_groups(runs: Sequence[Run] | Mapping[str, Sequence[Run]]) -> dict[str, list[History]]:
    if isinstance(runs, Mapping):
        return {label: [training_log(run) for run in group] for label, group in runs.items()}
    paths = [run if isinstance(run, str | os.PathLike) else f"run {number}" for number, run in enumerate(runs, 1)]
    return {label: [training_log(run)] for label, run in zip(names_of(paths), runs, strict=True)}


def _logged_metrics(groups: Mapping[str, list[History]], metrics: Sequence[str] | None, x: str) -> list[str]:
    """Return the metrics to draw: those that were logged together with `x`, the described ones first."""
    entries = (entry for logs in groups.values() for log in logs for entry in log if x in entry)
    logged = [key for key in dict.fromkeys(key for entry in entries for key in entry) if key not in _COUNTERS]
    if metrics is None:
        others = (key for key in logged if key not in {*PANELS, *NOT_DRAWN} and not key.startswith("health/"))
        metrics = [key for key in PANELS if key in logged]
        metrics += sorted(others, key=lambda key: (not re.fullmatch("rewards/.*/mean", key), key))
    missing = [key for key in metrics if key not in logged]
    if missing or not metrics:
        raise ValueError(
            f"nothing to draw of {missing or [*groups]}: no run has logged it together with {x!r} (--x step draws "
            f"logs of other trainers); logged: {sorted(logged)}"
        )
    return list(metrics)


def _label(text: str) -> str:
    """Return a text as a label: `$` would begin a formula, and legends leave out what begins with `_`."""
    label = visible(text, one_line=True).replace("$", r"\$")
    return f" {label}" if label.startswith("_") else label


def _draw(panel: Axes, metric: str, groups: Mapping[str, list[History]], x: str) -> None:
    for label, logs in groups.items():
        points, means, deviations = mean_curve(logs, metric, x)
        marker = "o" if len(points) == 1 else None
        (line,) = panel.plot(points, means, label=_label(label), linewidth=1.6, marker=marker, markersize=4)
        if len(logs) > 1:
            panel.fill_between(points, means - deviations, means + deviations, color=line.get_color(), alpha=0.2, lw=0)
    panel.set_title(_label(metric), loc="left", fontsize=10, fontweight="bold", pad=20 if metric in PANELS else 6)
    panel.annotate(
        PANELS.get(metric, ""), (0, 1), (0, 5), "axes fraction", textcoords="offset points", fontsize=9, color="0.4"
    )
    panel.set_xlabel(_label(_AXES.get(x, x)), fontsize=9)
    panel.tick_params(labelsize=8)
    panel.ticklabel_format(axis="y", useOffset=False)
    panel.yaxis.get_offset_text().set(x=1.0, ha="right", fontsize=8)  # the left holds the metric's meaning
    panel.grid(alpha=0.25)
    panel.spines[["top", "right"]].set_visible(False)
