"""What a run prints, on a terminal and into a file."""

from __future__ import annotations

import io
import re
import sys
from collections.abc import Callable
from typing import Any, cast

import pytest
from datasets import Dataset
from transformers import ProgressCallback

from rlhf_ppo import PPOTrainer
from tests.conftest import prompt_rows
from tests.runs import QUICK, DieAt, RunDied

MakeTrainer = Callable[..., PPOTrainer]


def test_a_run_prints_a_line_for_each_log_and_a_table(
    make_trainer: MakeTrainer, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = {**QUICK, "disable_tqdm": False, "eval_strategy": "steps", "eval_steps": 3, "num_sample_generations": 1}
    trainer = make_trainer(**settings, eval_dataset=Dataset.from_list(prompt_rows(3)))
    trainer.train()
    printed = capsys.readouterr()
    lines = [line for line in printed.out.splitlines() if " | " in line]
    assert [re.split(r" +\| +", line)[0] for line in lines] == [
        "update    1/3", "update    2/3", "update    3/3", "evaluated 3/3",
    ]  # fmt: skip
    last = trainer.state.log_history[2]
    assert f"score {last['objective/scores']:>7.3f} | KL {last['objective/kl']:>6.3f} | " in lines[2]
    assert lines[2].endswith(" s | 0:00:00 left")
    assert "3 updates, 6 episodes, 0:00:0" in printed.out and "{" not in printed.out
    # Not a character that only a terminal understands, and no bars.
    assert not re.search("[\r\x1b]|it/s", printed.out + printed.err)
    assert "objective/entropy" in last and "time/score" in last  # what the line leaves out is logged
    # A table of samples that says the same is printed once.
    trainer.generate_completions()
    assert (printed.out + capsys.readouterr().out).count("After update 3") == 1
    cast(Any, trainer.policy_model).lm_head.weight.data.neg_()
    trainer.generate_completions()
    assert capsys.readouterr().out.count("After update 3") == 1


def test_only_the_main_process_prints(make_trainer: MakeTrainer, capsys: pytest.CaptureFixture[str]) -> None:
    trainer = make_trainer(**QUICK, disable_tqdm=False)
    capsys.readouterr()
    trainer.state.is_world_process_zero = False
    for callback in trainer.callback_handler.callbacks:
        callback.on_train_begin(trainer.args, trainer.state, trainer.control)
        callback.on_log(trainer.args, trainer.state, trainer.control, logs={"loss": 1.0})
        callback.on_train_end(trainer.args, trainer.state, trainer.control)
    assert capsys.readouterr().out == ""


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_the_bar_of_an_evaluation_is_gone_before_its_result(
    make_trainer: MakeTrainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bar of an evaluation without training stood in front of what was printed next."""
    trainer = make_trainer(
        **QUICK, disable_tqdm=False, eval_dataset=Dataset.from_list(prompt_rows(4)), per_device_eval_batch_size=1
    )
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setattr(sys, "stdout", terminal)
    trainer.evaluate()
    terminal.write("next")
    before, _, result = terminal.getvalue().rpartition("evaluated 0")
    assert "/4" in before and before.endswith("\r")
    assert not re.search("[\r]|it/s|batch/s|/4", result) and result.endswith(" s\nnext")


class Clock:
    """Shows a second more at each update."""

    now = 1000.0


def test_on_a_terminal_a_resumed_run_knows_what_is_left(
    make_trainer: MakeTrainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {**QUICK, "disable_tqdm": False, "save_strategy": "steps", "save_steps": 2, "total_episodes": 10}
    first = make_trainer(**settings, log_console="none", callbacks=[DieAt("on_step_begin", 2)])
    with pytest.raises(RunDied):
        first.train()
    bars: list[tuple[int, int, int]] = []

    class Watched(PPOTrainer):
        def collect_rollout(self, *args: Any) -> Any:
            Clock.now += 10.0
            return super().collect_rollout(*args)

        def log(self, *args: Any, **kwargs: Any) -> None:
            super().log(*args, **kwargs)
            bars.extend(
                (callback.training_bar.initial, callback.training_bar.n, callback.training_bar.total)
                for callback in self.callback_handler.callbacks
                if isinstance(callback, ProgressCallback) and callback.training_bar is not None
            )

    out, err = Terminal(), Terminal()
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(sys, "stderr", err)
    monkeypatch.setattr("rlhf_ppo.reporting.console.time.monotonic", lambda: Clock.now)
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setenv("NO_COLOR", "1")
    make_trainer(Watched, **{**settings, "save_strategy": "no"}).train(f"{first.args.output_dir}/checkpoint-2")
    lines = [line for line in out.getvalue().splitlines() if line.startswith("update")]
    assert [line.split(" | ")[-1] for line in lines] == ["0:00:20 left", "0:00:10 left", "0:00:00 left"]
    assert all(len(line) <= 120 for line in lines)
    assert bars[0] == (2, 3, 5)
    assert not re.search(r"\x1b\[[34]\d", out.getvalue())  # no colour
    # The bar is taken off the line before something is printed: its last drawing is of blanks.
    drawn = err.getvalue()
    assert "3/5" in drawn and re.search(r"\r +\r", drawn)


def test_the_bar_is_there_for_a_terminal_alone(
    make_trainer: MakeTrainer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """And with `log_console="none"` no lines and no table."""
    stream = Terminal()
    monkeypatch.setattr(sys, "stderr", stream)
    trainer = make_trainer(**QUICK, disable_tqdm=False, log_console="none")
    trainer.train()
    assert "3/3" in stream.getvalue() and stream.getvalue().endswith("\n")
    assert not re.search("update +1|loss|│", capsys.readouterr().out)


def test_what_is_logged_can_be_shown_whole(make_trainer: MakeTrainer, capsys: pytest.CaptureFixture[str]) -> None:
    make_trainer(**QUICK, log_console="full").train()
    printed = capsys.readouterr().out
    assert printed.count("'policy/approxkl_avg'") == 3 and "update " not in printed
