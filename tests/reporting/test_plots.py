import json

import numpy as np
import pytest
from matplotlib.collections import PolyCollection
from transformers import TrainerState

from rlhf_ppo.cli.main import plot, report
from rlhf_ppo.reporting import plots
from rlhf_ppo.reporting.plots import PANELS, mean_curve, plot_metrics
from rlhf_ppo.reporting.run_log import grouped_directories, read_log

LOG = [
    {"step": 1, "episode": 8, "objective/kl": 0.0, "objective/scores": -1.5},
    {"step": 2, "episode": 16, "objective/kl": 0.25, "objective/scores": 0.5},
    {"step": 2, "eval_objective/scores": 7.0},
    {"step": 3, "episode": 24, "objective/kl": 0.75, "objective/scores": 1.0},
    {"step": 3, "train_runtime": 12.0},
]
SECOND = [
    {**entry, **({"objective/kl": entry["objective/kl"] + 1.0} if "objective/kl" in entry else {})} for entry in LOG
]


def write_state(path, log):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"log_history": log}))


def panel(figure, metric):
    (found,) = [axes for axes in figure.axes if axes.get_title(loc="left") == metric]
    return found


def lines(axes):
    return {line.get_label(): (list(line.get_xdata()), list(line.get_ydata())) for line in axes.get_lines()}


def test_a_panel_shows_what_was_logged(tmp_path):
    figure = plot_metrics([LOG], tmp_path / "new" / "curves.png")

    assert [axes.get_title(loc="left") for axes in figure.axes] == [
        *("objective/scores", "objective/kl", "eval_objective/scores")
    ]
    assert lines(panel(figure, "objective/kl")) == {"run 1": ([8, 16, 24], [0.0, 0.25, 0.75])}
    assert lines(panel(figure, "objective/scores")) == {"run 1": ([8, 16, 24], [-1.5, 0.5, 1.0])}
    assert (tmp_path / "new" / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_all_that_was_logged_is_drawn_the_described_first(tmp_path):
    log = [
        {
            "step": 1,
            "episode": 8,
            "epoch": 0.5,
            "rewards/b/mean": 1.0,
            "a": 2.0,
            **dict.fromkeys(reversed(PANELS), 0.5),
        }
    ]

    figure = plot_metrics([log], tmp_path / "curves.png")

    assert [axes.get_title(loc="left") for axes in figure.axes] == [*PANELS, "a", "rewards/b/mean"]


def test_evaluations_lie_at_the_episodes_of_their_step(tmp_path):
    log = [
        *LOG,
        {"step": 5, "episode": 56, "objective/kl": 0.0},
        {"step": 4, "eval_score": 1.0},
        {"step": 0, "eval_score": 0.0},
    ]

    figure = plot_metrics([log], tmp_path / "curves.png")

    assert lines(panel(figure, "eval_score")) == {"run 1": ([0, 40], [0.0, 1.0])}
    assert lines(panel(figure, "eval_objective/scores")) == {"run 1": ([16], [7.0])}
    assert {axes.get_xlabel() for axes in figure.axes} == {"episodes"}
    assert "train_runtime" not in {axes.get_title(loc="left") for axes in figure.axes}


def test_several_runs_lie_over_each_other(tmp_path):
    figure = plot_metrics([LOG, SECOND], tmp_path / "curves.svg", metrics=["objective/kl"], x="step")

    drawn = lines(panel(figure, "objective/kl"))
    assert drawn == {"run 1": ([1, 2, 3], [0.0, 0.25, 0.75]), "run 2": ([1, 2, 3], [1.0, 1.25, 1.75])}
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["run 1", "run 2"]


def test_a_label_may_begin_with_an_underscore(tmp_path):
    figure = plot_metrics({"_mine": [LOG], "other": [SECOND]}, tmp_path / "curves.svg", metrics=["objective/kl"])
    assert [text.get_text() for text in figure.legends[0].get_texts()] == [" _mine", "other"]


@pytest.mark.parametrize(
    ("names", "label"),
    [
        (["ppo-seed42", "ppo-seed43"], "ppo"),
        (["run1", "run10"], "run1 and 1 more"),
        (["v2-a", "v2-b"], "v2"),
        (["v2", "v2-b"], "v2"),
    ],
)
def test_the_label_of_several_seeds_has_no_part_of_a_number(names, label, tmp_path):
    for seed, name in enumerate(names):
        run_of(tmp_path / name, seed, 0.1, [0, 1])
    assert list(grouped_directories([str(tmp_path / name) for name in names])) == [label]


def test_a_whole_number_is_the_same_setting_with_and_without_a_point(tmp_path):
    for seed, kl_coef in enumerate((1, 1.0, 2.0)):
        run_of(tmp_path / f"run-seed{seed}", seed, kl_coef, [0, 1])
    found = grouped_directories([str(tmp_path / f"run-seed{seed}") for seed in range(3)])
    assert [len(directories) for directories in found.values()] == [2, 1]


def run_of(folder, seed, kl_coef, scores):
    """A run of three updates, with its settings."""
    log = [{"step": step, "episode": 8 * step, "objective/scores": score} for step, score in enumerate(scores, 1)]
    write_state(folder / "trainer_state.json", log)
    arguments = {"seed": seed, "output_dir": str(folder), "kl_coef": kl_coef}
    settings = {"arguments": arguments, "versions": {}, "made_of": {"policy": "sft"}}
    (folder / "ppo_settings.json").write_text(json.dumps(settings))


def test_a_place_in_the_home_directory_is_written_there(tmp_path, monkeypatch):
    """A shell leaves `--output=~/curves.svg` as it is."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    run_of(tmp_path / "run", 0, 0.1, [0, 1, 2])
    plot(["run", "--output=~/curves.svg", "--metrics", "objective/scores"])
    report(["run", "--output=~/report.html"])
    assert {"curves.svg", "report.html"} <= {path.name for path in tmp_path.iterdir()}


@pytest.mark.parametrize("ending", ["png", "svg"])
def test_the_command_draws_runs_that_differ_in_their_seed_as_one(ending, tmp_path, monkeypatch):
    """Two settings of three and two seeds and a single run, over each other; mean and band by hand."""
    monkeypatch.chdir(tmp_path)
    for name, *run in (
        ("low-seed0", 0, 0.1, [0, 1, 2]), ("low-seed1", 1, 0.1, [3, 2, 6]), ("low-seed2", 2, 0.1, [6, 6, 4]),
        ("high-seed0", 0, 0.5, [1, 1, 1]), ("high-seed1", 1, 0.5, [3, 5, 1]), ("alone", 0, 0.9, [7, 8, 9]),
    ):  # fmt: skip
        run_of(tmp_path / name, *run)
    drawn = []
    monkeypatch.setattr(plots, "plot_metrics", lambda *args, **how: drawn.append(plot_metrics(*args, **how)))
    runs = ["low-seed0", "high-seed0", "low-seed1", "alone", "high-seed1/../high-seed1", "low-seed2"]
    plot([*runs, "--output", f"curves.{ending}"])

    axes = panel(drawn[0], "objective/scores")
    assert lines(axes) == {
        "low": ([8, 16, 24], [3, 3, 4]), "high": ([8, 16, 24], [2, 3, 1]), "alone": ([8, 16, 24], [7, 8, 9]),
    }  # fmt: skip
    bands = [
        {x: sorted({round(y, 9) for at, y in band.get_paths()[0].vertices if at == x}) for x in (8, 16, 24)}
        for band in axes.collections
        if isinstance(band, PolyCollection)
    ]
    two, eight, seven = (round(root**0.5, 9) for root in (2, 8, 7))
    assert bands == [
        {8: [0, 6], 16: [round(3 - seven, 9), round(3 + seven, 9)], 24: [2, 6]},  # deviations 3, sqrt(7), 2
        {8: [round(2 - two, 9), round(2 + two, 9)], 16: [round(3 - eight, 9), round(3 + eight, 9)], 24: [1]},
    ]
    assert [text.get_text() for text in drawn[0].legends[0].get_texts()] == ["low", "high", "alone"]
    head = (tmp_path / f"curves.{ending}").read_bytes()[:200]
    assert b"<?xml" in head if ending == "svg" else head.startswith(b"\x89PNG")

    plot(["low-seed0", "low-seed1", "--separately", "--output", f"curves.{ending}"])
    assert list(lines(drawn[1].axes[0])) == ["low-seed0", "low-seed1"] and not drawn[1].axes[0].collections
    with pytest.raises(SystemExit, match="2"):
        plot(["alone", "./alone"])


def test_mean_curve_counts_only_the_runs_that_logged_a_point():
    shorter = SECOND[:2]

    points, means, deviations = mean_curve([LOG, shorter], "objective/kl")

    np.testing.assert_array_equal(points, [8, 16, 24])
    np.testing.assert_allclose(means, [0.5, 0.75, 0.75])
    np.testing.assert_allclose(deviations, [0.5**0.5, 0.5**0.5, 0.0])


def test_a_run_is_read_from_wherever_trainer_left_its_state(tmp_path):
    write_state(tmp_path / "done" / "trainer_state.json", LOG)
    write_state(tmp_path / "done" / "checkpoint-3" / "trainer_state.json", LOG[:1])
    write_state(tmp_path / "killed" / "checkpoint-9" / "trainer_state.json", LOG[:1])
    write_state(tmp_path / "killed" / "checkpoint-10" / "trainer_state.json", LOG[:2])
    (tmp_path / "killed" / "checkpoint-11").mkdir()

    assert read_log(tmp_path / "done") == LOG
    assert read_log(str(tmp_path / "done" / "checkpoint-3" / "trainer_state.json")) == LOG[:1]
    assert read_log(tmp_path / "killed") == LOG[:2]
    state = TrainerState()
    state.log_history = LOG
    assert read_log(state) == LOG


def test_runs_are_named_by_directory_and_by_path_where_names_repeat(tmp_path):
    for folder in ("a/out", "b/out", "c"):
        write_state(tmp_path / folder / "trainer_state.json", LOG)

    figure = plot_metrics([tmp_path / "a/out", tmp_path / "c"], tmp_path / "1.png", metrics=["objective/kl"])
    assert list(lines(figure.axes[0])) == ["out", "c"]

    figure = plot_metrics([tmp_path / "a/out", tmp_path / "b/out"], tmp_path / "2.png", metrics=["objective/kl"])
    assert list(lines(figure.axes[0])) == [str(tmp_path / "a/out"), str(tmp_path / "b/out")]


def test_a_directory_without_a_state_is_an_error_that_says_what_to_do(tmp_path):
    with pytest.raises(
        FileNotFoundError,
        match=r"holds no run: there is no trainer_state\.json or log_history\.jsonl; pass the output_dir",
    ):
        plot_metrics([tmp_path], tmp_path / "curves.png")


@pytest.mark.parametrize("single", ["runs/out", TrainerState(), {"ours": "runs/out"}, LOG])
def test_a_single_run_is_refused(single, tmp_path):
    with pytest.raises(TypeError, match=r"list of runs|list of log entries"):
        plot_metrics(single, tmp_path / "curves.png")


def test_a_metric_that_no_run_logged_is_an_error_that_lists_the_others(tmp_path):
    with pytest.raises(ValueError, match=r"objective/klx.*logged: .*objective/kl"):
        plot_metrics([LOG], tmp_path / "curves.png", metrics=["objective/klx"])
    for nothing in ([], [{"step": 3, "train_runtime": 12.0, "epoch": 1.0}]):
        with pytest.raises(
            ValueError, match="nothing to draw of run 1: it has logged nothing; train with logging_strategy="
        ):
            plot_metrics([nothing], tmp_path / "curves.png")
    assert not (tmp_path / "curves.png").exists()
