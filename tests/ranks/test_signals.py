"""A signal at any moment ends the run after the update, with a checkpoint to resume from bit for bit."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from rlhf_ppo.ranks.signals import RunStopped, StopOnSignal
from tests.conftest import count_w4, prompt_rows
from tests.runs import QUICK, At, MakeTrainer, assert_identical, end_of_run

RUN: dict[str, Any] = {**QUICK, "save_strategy": "no", "eval_strategy": "steps", "eval_steps": 2}


def send(number: int) -> None:
    os.kill(os.getpid(), number)


def sending(event: str, number: int, step: int = 1) -> At:
    return At(event, step, lambda _: send(number))


def count_w4_after_a_signal(trainer_state: Any, **columns: Any) -> list[float]:
    if trainer_state.global_step == 1:
        send(signal.SIGINT)
    return count_w4(**columns)


@pytest.mark.parametrize(
    ("given", "number", "last"),
    [
        ({"reward_funcs": count_w4_after_a_signal}, signal.SIGINT, 2),
        ({"callbacks": [sending("on_optimizer_step", signal.SIGTERM)]}, signal.SIGTERM, 2),
        ({"callbacks": [sending("on_step_end", signal.SIGHUP)]}, signal.SIGHUP, 1),
        ({"callbacks": [sending("on_evaluate", signal.SIGTERM, 2)]}, signal.SIGTERM, 3),
    ],
    ids=["in a reward", "while learning", "at the end of an update", "in an evaluation"],
)
def test_the_run_ends_after_the_update_and_resumes_exactly(
    given: dict[str, Any],
    number: int,
    last: int,
    make_trainer: MakeTrainer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(count_w4_after_a_signal, "__name__", "count_w4")
    run = {"reward_funcs": count_w4, "eval_dataset": prompt_rows(2), **RUN}
    whole = make_trainer(**run)
    whole.train()
    before = signal.getsignal(number)

    stopped = make_trainer(**{**run, **given}, output_dir=str(tmp_path))
    with pytest.raises(RunStopped) as ended:
        stopped.train()

    checkpoint = str(tmp_path / f"checkpoint-{last}")
    assert ended.value.code == 128 + number and ended.value.checkpoint == checkpoint
    said = capfd.readouterr().err
    assert "A second signal ends the process at once" in said and f"with the checkpoint {checkpoint}" in said
    assert signal.getsignal(number) == before
    resumed = make_trainer(**run, output_dir=str(tmp_path))
    resumed.train(resume_from_checkpoint=True)
    assert_identical(end_of_run(resumed), end_of_run(whole))


def test_a_signal_after_the_last_update_ends_the_program_with_a_checkpoint(make_trainer: MakeTrainer) -> None:
    trainer = make_trainer(**RUN, eval_dataset=prompt_rows(2), callbacks=[sending("on_train_end", signal.SIGTERM, 3)])
    with pytest.raises(RunStopped) as ended:
        trainer.train()
    assert ended.value.code == 143 and Path(ended.value.checkpoint, "trainer_state.json").is_file()


def test_a_checkpoint_of_models_alone_is_not_said_to_resume(
    make_trainer: MakeTrainer, capfd: pytest.CaptureFixture[str]
) -> None:
    run = QUICK | {"save_strategy": "steps", "save_only_model": True}
    with pytest.raises(RunStopped):
        make_trainer(**run, callbacks=[sending("on_step_end", signal.SIGTERM)]).train()
    said = capfd.readouterr().err
    assert "start a new run with the checkpoint as model" in said and "resume_from_checkpoint" not in said


def test_a_second_signal_ends_the_process_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    codes: list[int] = []
    monkeypatch.setattr(os, "_exit", codes.append)
    listener = StopOnSignal(lambda flags: flags)
    with listener.listening():
        send(signal.SIGTERM)
        send(signal.SIGTERM)  # as one: a scheduler may signal a process and its parent
        assert listener.received == signal.SIGTERM and not codes
        listener.same_signal = 0.0
        send(signal.SIGINT)
    assert codes == [128 + signal.SIGINT]
