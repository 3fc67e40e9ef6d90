"""Training curves, drawn from the log that Trainer keeps in `trainer_state.json`."""

from __future__ import annotations

import json
import os
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from math import ceil
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray
from transformers import TrainerState

Log = Sequence[Mapping[str, Any]]
"""A log history: one mapping of metric to value for each time that Trainer logged."""

Run = str | os.PathLike[str] | TrainerState | Log
"""A run: its output directory, its `trainer_state.json`, a `TrainerState` or a log history."""

PANELS: Mapping[str, str] = {
    "objective/scores": "mean score of a response",
    "objective/kl": "KL to the reference, nats per response",
    "objective/rlhf_reward": "score minus the KL penalty",
    "policy/entropy_avg": "entropy, nats per token",
    "val/ratio": "mean importance ratio",
    "policy/clipfrac_avg": "share of tokens clipped",
    "loss/value_avg": "value loss",
    "response/length_mean": "response length, tokens",
}
"""The metrics drawn by default, with what each says."""

_COLUMNS = 4


def plot_metrics(
    runs: Sequence[Run] | Mapping[str, Sequence[Run]],
    path: str | os.PathLike[str],
    metrics: Sequence[str] | None = None,
    x: str = "episode",
) -> Figure:
    """Draw one panel for each metric, with all runs over each other, and save the picture.

    Args:
        runs: Runs, each drawn as a line; or a mapping of label to the runs of one setting (its seeds), drawn as their
            mean and a band of one standard deviation.
        path: Where the picture is saved; its suffix chooses the format.
        metrics: Keys of the log. By default those of `PANELS` that the runs logged.
        x: The key on the horizontal axis: `"episode"`, or `"step"` for PPO updates.

    Returns:
        The figure, one axes for each metric in the order of `metrics`.

    Raises:
        TypeError: If `runs` is a single run.
        ValueError: If there is nothing to draw, or no run logged one of `metrics`.
        FileNotFoundError: If a directory holds no `trainer_state.json`.
    """
    groups = _read_groups(runs)
    shown = _logged_metrics(groups, metrics, x)
    columns = min(len(shown), _COLUMNS)
    rows = ceil(len(shown) / columns)
    figure = Figure(figsize=(4.2 * columns, 3.0 * rows + 0.4), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False).flatten()
    for panel, metric in zip(axes, shown, strict=False):
        _draw(panel, metric, groups, x)
    for unused in axes[len(shown) :]:
        unused.remove()
    if len(groups) > 1:
        handles, labels = axes[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=min(len(groups), 6), frameon=False)
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    return figure


def read_log(run: Run) -> Log:
    """Return the log history of a run.

    Args:
        run: An output directory (its own state, or else that of its newest checkpoint), a `trainer_state.json`, a
            `TrainerState` or a log history.

    Returns:
        The log history.

    Raises:
        TypeError: If `run` is none of these.
        FileNotFoundError: If there is no such file.
    """
    if isinstance(run, TrainerState):
        return run.log_history
    if isinstance(run, (str, os.PathLike)):
        return json.loads(_state_file(Path(run)).read_text(encoding="utf-8"))["log_history"]
    if isinstance(run, Mapping) or not all(isinstance(entry, Mapping) for entry in run):
        raise TypeError(
            f"a run is a path, a TrainerState or a list of log entries, got {type(run).__name__}; "
            "runs must be a list of runs, or a mapping of label to a list of runs"
        )
    return run


def mean_curve(
    logs: Sequence[Log], metric: str, x: str = "episode"
) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
    """Average a metric over runs at each point of the horizontal axis.

    Args:
        logs: The log histories of the runs.
        metric: The key to average.
        x: The key on the horizontal axis.

    Returns:
        The points, the mean at each, and the standard deviation over runs (n - 1 below; 0 for a single run). A run
        that did not log the metric at a point does not count there.
    """
    values: defaultdict[float, list[float]] = defaultdict(list)
    for log in logs:
        for entry in log:
            if metric in entry and x in entry:
                values[entry[x]].append(entry[metric])
    points = sorted(values)
    means = [np.mean(values[point]) for point in points]
    deviations = [np.std(values[point], ddof=1) if len(values[point]) > 1 else 0.0 for point in points]
    return np.array(points, float), np.array(means, float), np.array(deviations, float)


def _read_groups(runs: Sequence[Run] | Mapping[str, Sequence[Run]]) -> dict[str, list[Log]]:
    if isinstance(runs, Mapping):
        return {label: [read_log(run) for run in _listed(group)] for label, group in runs.items()}
    return {label: [read_log(run)] for label, run in zip(_labels(_listed(runs)), runs, strict=True)}


def _listed(runs: Sequence[Run]) -> Sequence[Run]:
    if isinstance(runs, (str, os.PathLike, TrainerState)):
        raise TypeError(f"runs is a single run ({runs!r}); pass a list of runs, or a mapping of label to such a list")
    return runs


def _labels(runs: Sequence[Run]) -> list[str]:
    paths = [Path(run) if isinstance(run, (str, os.PathLike)) else None for run in runs]
    names = [path.name if path else f"run {number}" for number, path in enumerate(paths, start=1)]
    if len(set(names)) == len(names):
        return names
    return [str(path) if path else name for path, name in zip(paths, names, strict=True)]


def _state_file(path: Path) -> Path:
    if path.is_file():
        return path
    if (path / "trainer_state.json").is_file():
        return path / "trainer_state.json"
    checkpoints = [file for file in path.glob("checkpoint-*/trainer_state.json") if _checkpoint_step(file) >= 0]
    if not checkpoints:
        raise FileNotFoundError(
            f"no trainer_state.json in {path} or its checkpoints; "
            "call trainer.save_state() after training, or set save_strategy"
        )
    return max(checkpoints, key=_checkpoint_step)


def _checkpoint_step(state_file: Path) -> int:
    found = re.fullmatch(r"checkpoint-(\d+)", state_file.parent.name)
    return int(found.group(1)) if found else -1


def _logged_metrics(groups: Mapping[str, list[Log]], metrics: Sequence[str] | None, x: str) -> list[str]:
    entries = [entry for logs in groups.values() for log in logs for entry in log if x in entry]
    logged = {key for entry in entries for key in entry}
    shown = [key for key in PANELS if key in logged] if metrics is None else list(metrics)
    missing = [key for key in shown if key not in logged]
    if missing:
        raise ValueError(f"metrics={missing} were logged by no run together with {x!r}; logged: {sorted(logged)}")
    if not shown:
        raise ValueError(
            f"there is nothing to draw: metrics={metrics} and the runs logged {sorted(logged)} with {x!r}"
        )
    return shown


def _draw(panel: Axes, metric: str, groups: Mapping[str, list[Log]], x: str) -> None:
    for label, logs in groups.items():
        points, means, deviations = mean_curve(logs, metric, x)
        marker = "o" if len(points) == 1 else None
        (line,) = panel.plot(points, means, label=label, linewidth=1.6, marker=marker, markersize=4)
        if len(logs) > 1:
            panel.fill_between(points, means - deviations, means + deviations, color=line.get_color(), alpha=0.2, lw=0)
    panel.set_title(metric, loc="left", fontsize=10, fontweight="bold", pad=20 if metric in PANELS else 6)
    panel.annotate(
        PANELS.get(metric, ""), (0, 1), (0, 5), "axes fraction", textcoords="offset points", fontsize=9, color="0.4"
    )
    panel.set_xlabel(x, fontsize=9)
    panel.tick_params(labelsize=8)
    panel.ticklabel_format(axis="y", useOffset=False)
    panel.grid(alpha=0.25)
    panel.spines[["top", "right"]].set_visible(False)
