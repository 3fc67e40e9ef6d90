"""The line that stands for a log, by hand."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlhf_ppo.reporting.console import RunPosition, format_duration, format_number, log_line, summary_table

TRAINING = {
    "loss": 0.1, "episode": 448, "objective/scores": -0.5304, "objective/kl": -0.0001, "response/length_mean": 8.75,
    "response/ended_frac": 0.5, "grad_norm": 3.0,
}  # fmt: skip
EVALUATION = {
    "eval_score": 1.25, "eval_kl": 12.5, "eval_response_length_mean": 10.0, "eval_ended_frac": 1.0,
    "eval_runtime": 0.26,
}  # fmt: skip


@pytest.mark.parametrize(
    ("logs", "line"),
    [
        (
            TRAINING,
            "update     7/20 | episode   448 | score  -0.530 | KL  0.000 | length    8.8 | ended  50% | 4.0 s "
            "| 0:00:52 left",
        ),
        (EVALUATION, "evaluated  7/20 | score   1.250 | KL 12.500 | length   10.0 | ended 100% | 0.3 s"),
        ({"eval_red_score": 1.0, "eval_red_runtime": 2.0}, "evaluated red  7/20 | score   1.000 | 2.0 s"),
        ({"loss": 0.1, "objective/kl": 1e7}, "update     7/20 | KL 1.0e+07 | 4.0 s | 0:00:52 left"),
        (
            {"loss": 6.2694, "mean_token_accuracy": 0.1113, "grad_norm": 1.0},
            "update     7/20 | loss   6.269 | right tokens  11% | 4.0 s | 0:00:52 left",
        ),
        (
            {"eval_loss": 0.6936, "eval_accuracy": 0.5125, "eval_margin": -0.0007, "eval_runtime": 0.26},
            "evaluated  7/20 | loss   0.694 | right pairs  51% | margin -0.001 | 0.3 s",
        ),
        ({"mine": 0.5, "word": "yes", "epoch": 0.1}, "mine 0.500 | word yes"),
        ({"train_runtime": 12.0, "epoch": 1.0}, None),
        ({"epoch": 1.0}, None),
    ],
)
def test_a_log_is_one_line(logs, line):
    assert log_line(logs, RunPosition(7, 20, 4.0)) == line


def test_before_the_first_update_no_time_is_known():
    assert log_line(TRAINING | {"objective/kl": None}, RunPosition(0, 20, None)) == (
        "update     0/20 | episode   448 | score  -0.530 | length    8.8 | ended  50%"
    )
    assert log_line({"eval_runtime": 0.2}, RunPosition(0, -1, None)) == "evaluated 0 | 0.2 s"  # outside a run


@pytest.mark.parametrize(
    ("width", "line"),
    [
        (80, "update     7/20 | episode   448 | score  -0.530 | KL  0.000 | ended  50% | 4.0 s"),
        (79, "update     7/20 | score  -0.530 | KL  0.000 | ended  50% | 4.0 s"),
        (60, "update     7/20 | score  -0.530 | KL  0.000 | ended  50%"),
        (30, "update     7/20"),
    ],
)
def test_a_narrow_terminal_drops_the_least_important_figures(width, line):
    assert log_line(TRAINING, RunPosition(7, 20, 4.0), width) == line


numbers = st.floats(allow_nan=True, allow_infinity=True)


@given(
    st.dictionaries(st.sampled_from([*TRAINING, *EVALUATION, "epoch", "x"]), numbers),
    st.integers(0, 10**7),
    st.integers(-1, 10**7),
    st.none() | st.floats(0, 1e6),
    st.none() | st.integers(1, 200),
)
def test_any_log_is_at_most_one_line_that_fits(logs, update, num_updates, seconds, width):
    line = log_line(logs, RunPosition(update, num_updates, seconds), width)

    assert line is None or (line.isprintable() and (width is None or len(line) <= width))


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0.000"),
        (7.5e-5, "7.50e-05"),
        (999.5, "999.500"),
        (1348.189, "1348"),
        (-123456.7, "-123457"),
        (2e6, "2.00e+06"),
    ],
)
def test_numbers_of_any_size_are_short(value, text):
    assert format_number(value) == text and len(text) <= 9


def test_durations():
    assert [format_duration(seconds) for seconds in (0.4, 59.6, 3599.6, 100 * 3600)] == [
        "0:00:00", "0:01:00", "1:00:00", "100:00:00",
    ]  # fmt: skip


def test_the_table_compares_the_first_log_with_the_last():
    history = [
        {"loss": 1.0, "step": 1, "objective/scores": 1.0, "rewards/a/mean": 0.0, "rewards/b/mean": 1.0},
        {"eval_runtime": 1.0, "eval_score": 0.25, "step": 1},
        {"loss": 1.0, "step": 4, "objective/scores": 4.0, "rewards/a/mean": 2.0, "rewards/b/mean": 2.0},
        {"loss": 1.0, "step": 9, "objective/scores": 2.0, "rewards/a/mean": 1.0, "rewards/b/mean": 1.0, "episode": 72},
        {"train_runtime": 75.0, "step": 9},
    ]

    table = summary_table(history)

    assert table is not None and str(table.title) == "9 updates, 72 episodes, 0:01:15 since the run was started"
    rows = list(zip(*(map(str, column.cells) for column in table.columns), strict=True))
    assert rows == [
        ("score", "1.000", "2.000", "1.000", "4.000"),
        ("a", "0.000", "1.000", "0.000", "2.000"),
        ("b", "1.000", "1.000", "1.000", "2.000"),
        ("held-out score", "0.250", "0.250", "0.250", "0.250"),
    ]
    assert summary_table([{"eval_runtime": 1.0, "eval_score": 0.25}]) is None
    assert summary_table([{"loss": 1.0, "grad_norm": 2.0}]) is None  # of another trainer


def test_only_the_metrics_of_the_trainer_are_shares():
    history = [
        {
            **{"loss": 1.0, "step": 1, "objective/scores": 1.0, "response/ended_frac": 0.5},
            **{"rewards/market_share/mean": 3.2, "rewards/words per second/mean": 0.25},
        }
    ]

    table = summary_table(history)

    assert table is not None
    first = dict(zip(*([*map(str, column.cells)] for column in table.columns[:2]), strict=True))
    assert first == {
        "score": "1.000", "market_share": "3.200", "words per second": "0.250", "share that ended": "50%",
    }  # fmt: skip
