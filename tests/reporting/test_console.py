"""The terminal output of a run: a line for each log, and a table."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import pytest
from datasets import Dataset

from rlhf_ppo.reporting.console import LogLines, log_line
from tests.conftest import prompt_rows
from tests.runs import QUICK, MakeTrainer

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
        (
            {"loss": 0.1, "objective/scores": 0.5, "tools/call_frequency": 0.25},
            "update     7/20 | score   0.500 | calls 0.25 | 4.0 s | 0:00:52 left",
        ),
        (
            {"eval_score": 0.5, "eval_tools/call_frequency": 1.5, "eval_runtime": 1.0},
            "evaluated  7/20 | score   0.500 | calls 1.50 | 1.0 s",
        ),
        (EVALUATION, "evaluated  7/20 | score   1.250 | KL 12.500 | length   10.0 | ended 100% | 0.3 s"),
        ({"eval_red_score": 1.0, "eval_red_runtime": 2.0}, "evaluated red  7/20 | score   1.000 | 2.0 s"),
        (
            {"eval_exec_runtime": 9.0, "eval_score": 1.0, "eval_runtime": 2.0},
            "evaluated  7/20 | score   1.000 | 2.0 s",
        ),
        (
            {"loss": 0.1, "objective/kl": 1.0, "exec_runtime": 9.0},
            "update     7/20 | KL  1.000 | 4.0 s | 0:00:52 left",
        ),
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
        ({"train_runtime": 12.0, "train_loss": 0.1, "epoch": 1.0}, None),
        ({"train_score": 1.0, "train_runtime": 2.0}, "evaluated train  7/20 | score   1.000 | 2.0 s"),
        ({"epoch": 1.0}, None),
    ],
)
def test_a_log_is_one_line(logs: dict[str, Any], line: str | None) -> None:
    assert log_line(logs, 7, 20, 4.0) == line


@pytest.mark.parametrize("log_console", ["line", "full", "none"])
def test_what_a_run_prints(make_trained: MakeTrainer, capsys: pytest.CaptureFixture[str], log_console: str) -> None:
    held_out = {"eval_strategy": "steps", "eval_steps": 3, "eval_dataset": Dataset.from_list(prompt_rows(3))}
    make_trained(**{**QUICK, "disable_tqdm": False, "log_console": log_console}, **held_out)
    printed = capsys.readouterr().out
    lines = [re.split(r" +\| +", line)[0] for line in printed.splitlines() if " | " in line]
    expected = ["update    1/3", "update    2/3", "update    3/3", "evaluated 3/3"]
    assert lines == (expected if log_console == "line" else [])
    assert ("3 updates" in printed) == (log_console == "line")
    assert ("objective/entropy" in printed) == (log_console == "full")
    assert "\x1b" not in printed


def test_the_end_of_training_is_told_once_after_the_first_update(monkeypatch: Any, capsys: Any) -> None:
    clock = iter([0.0, 100.0, 112.5, 113.0, 200.0])
    monkeypatch.setattr("rlhf_ppo.reporting.console.time.monotonic", lambda: next(clock))
    lines, state = LogLines(), SimpleNamespace(global_step=7, max_steps=20, is_world_process_zero=True)
    lines.on_train_begin(None, state, None)
    for step in (8, 9):  # 12 of 13 updates are left after the first
        lines.on_epoch_begin(None, state, None)
        state.global_step = step
        lines.on_step_end(None, state, None)
    printed = capsys.readouterr().out
    assert printed.startswith("The first update took 12.5 s. At that rate training ends in 0:02:30, on ")
    assert printed.count("first update") == 1
