"""Curves of runs, and how runs are read and grouped."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.collections import PolyCollection

from rlhf_ppo.cli.main import plot
from rlhf_ppo.reporting.plots import mean_curve, plot_metrics
from rlhf_ppo.reporting.run_log import grouped_directories, read_log, training_log

LOG: list[dict[str, Any]] = [
    {"step": 1, "episode": 8, "objective/kl": 0.0, "objective/scores": -1.5},
    {"step": 2, "episode": 16, "objective/kl": 0.25, "objective/scores": 0.5},
    {"step": 2, "eval_objective/scores": 7.0},
    {"step": 3, "episode": 24, "objective/kl": 0.75, "objective/scores": 1.0},
    {"step": 3, "train_runtime": 12.0, "train_loss": 0.1},
]
SECOND = [{**entry, "objective/kl": entry["objective/kl"] + 1.0} for entry in LOG if "objective/kl" in entry]


def write_state(path: Path, log: list[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"log_history": log}))


def panel(figure: Any, metric: str) -> Any:
    (found,) = [axes for axes in figure.axes if axes.get_title(loc="left") == metric]
    return found


def lines(axes: Any) -> dict[str, tuple[list[float], list[float]]]:
    return {line.get_label(): (list(line.get_xdata()), list(line.get_ydata())) for line in axes.get_lines()}


def test_a_panel_shows_what_was_logged(tmp_path: Path) -> None:
    figure = plot_metrics([LOG], tmp_path / "new" / "curves.png")
    assert [axes.get_title(loc="left") for axes in figure.axes] == [
        *("objective/scores", "objective/kl", "eval_objective/scores")
    ]
    assert lines(panel(figure, "objective/kl")) == {"run 1": ([8, 16, 24], [0.0, 0.25, 0.75])}
    assert lines(panel(figure, "eval_objective/scores")) == {"run 1": ([16], [7.0])}
    assert (tmp_path / "new" / "curves.png").read_bytes().startswith(b"\x89PNG")
    shown = plot_metrics([LOG, SECOND], tmp_path / "two.svg", metrics=["objective/kl"], x="step")
    assert set(lines(panel(shown, "objective/kl"))) == {"run 1", "run 2"}
    runs = [tmp_path / "a" / "ppo", tmp_path / "b" / "ppo"]
    for run in runs:
        write_state(run / "trainer_state.json", LOG)
    shown = plot_metrics(runs, tmp_path / "runs.svg", metrics=["objective/kl"])
    assert set(lines(panel(shown, "objective/kl"))) == {"a/ppo", "b/ppo"}


def test_logs_that_hold_trainers_own_time_are_not_its_summary() -> None:
    timed = [{**entry, "train_runtime": 4.0} for entry in LOG]  # as with include_num_input_tokens_seen
    assert [entry["step"] for entry in training_log(timed)] == [1, 2, 2, 3]


def test_mean_curve_counts_only_the_runs_that_logged_a_point() -> None:
    logs = [[{"step": 1, "a": 1.0}, {"step": 2, "a": 4.0}], [{"step": 1, "a": 3.0}]]
    points, means, deviations = mean_curve(logs, "a", "step")
    np.testing.assert_array_equal(points, [1, 2])
    np.testing.assert_array_equal(means, [2.0, 4.0])
    np.testing.assert_allclose(deviations, [2**0.5, 0.0])


def test_the_command_draws_runs_that_differ_in_their_seed_as_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[Any] = []

    def kept(*given: Any, **named: Any) -> None:
        drawn.append(plot_metrics(*given, **named))

    monkeypatch.setattr("rlhf_ppo.reporting.plots.plot_metrics", kept)
    runs = [tmp_path / f"ppo-seed{seed}" for seed in (1, 2)]
    for seed, (run, log) in enumerate(zip(runs, (LOG, SECOND), strict=True)):
        write_state(run / "trainer_state.json", log)
        given = {"seed": seed, "output_dir": str(run), "gamma": 1 if seed else 1.0}
        (run / "ppo_settings.json").write_text(json.dumps({"arguments": given, "versions": {}, "made_of": {}}))
    plot([*map(str, runs), "--output", str(tmp_path / "curves.png")])
    axes = panel(drawn[0], "objective/kl")
    assert lines(axes) == {"ppo": ([8, 16, 24], [0.5, 0.75, 1.25])}
    assert [isinstance(each, PolyCollection) for each in axes.collections] == [True]
    assert list(grouped_directories([str(run) for run in runs], separately=True)) == ["ppo-seed1", "ppo-seed2"]
    copied = shutil.copytree(runs[0], tmp_path / "again")  # of the same seed
    twice = [str(runs[0]), str(copied), str(runs[1])]
    assert list(grouped_directories(twice).values()) == [[twice[0], twice[2]], [twice[1]]]


def test_a_log_is_that_of_the_newest_state(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="holds no run"):
        read_log(tmp_path)
    for step in (2, 10):
        write_state(tmp_path / f"checkpoint-{step}" / "trainer_state.json", LOG[: step // 2])
    assert len(read_log(tmp_path)) == 5
    write_state(tmp_path / "trainer_state.json", LOG[:2])
    assert len(read_log(tmp_path)) == 2 and len(read_log(tmp_path / "checkpoint-10")) == 5
