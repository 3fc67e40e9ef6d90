"""A run watches its health: what it logs and says, once, and after a resume not again."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable
from typing import Any

import pytest
from transformers import TrainerCallback

from rlhf_ppo import PPOTrainer
from rlhf_ppo.config.arguments import HealthThresholds
from rlhf_ppo.reporting.health import HealthCallback, warnings_of
from rlhf_ppo.reporting.health_checks import CHECKS, RunContext
from rlhf_ppo.reporting.run_log import RunSettings, read_log
from tests.runs import QUICK, DieAt, RunDied, assert_identical, history

MakeTrainer = Callable[..., PPOTrainer]
KEYS = {check.key for check in CHECKS if check.reads == "updates"}
COLLAPSING = {
    "learning_rate": 0.3,
    "kl_coef": 0.0,
    "log_kl": True,
    "max_grad_norm": 1e3,
    "lr_scheduler_type": "constant",
}


class Tracker(TrainerCallback):
    """Stands where trackers do: before the user's own callbacks are logged to."""

    def __init__(self) -> None:
        self.logs: list[dict[str, Any]] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        self.logs.append(dict(logs))


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    messages = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    return [message.split(":")[0] for message in messages if message.startswith("Health")]


def test_a_run_made_to_collapse_is_told_once_of_each_sign(
    make_trainer: MakeTrainer, caplog: pytest.LogCaptureFixture
) -> None:
    tracker = Tracker()
    settings = {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 1, "total_episodes": 96}
    trainer = make_trainer(**settings, **COLLAPSING, callbacks=[tracker])
    trainer.train()
    found = {key for log in trainer.state.log_history for key in KEYS if log.get(key)}
    assert {"health/kl", "health/entropy", "health/repeated"} <= found
    assert sorted(said(caplog)) == sorted(f"Health ({key.removeprefix('health/')})" for key in found)
    [of_kl] = [record.getMessage() for record in caplog.records if "Health (kl)" in record.getMessage()]
    assert "nats per response" in of_kl and "raise kl_coef, lower learning_rate" in of_kl
    settings = RunSettings.load(str(trainer.args.output_dir)).health
    again = warnings_of(
        read_log(str(trainer.args.output_dir)),
        HealthThresholds(**settings["thresholds"]),
        RunContext(**settings["run"]),
    )
    messages = {check.message(words) for check in CHECKS for _, words in again.get(check.name, ())}
    assert messages == {record.getMessage() for record in caplog.records if "Health (" in record.getMessage()}
    updates = [log for log in trainer.state.log_history if "loss" in log]
    assert all(KEYS <= log.keys() and {log[key] for key in KEYS} <= {0.0, 1.0} for log in updates)
    of_training = [{key: log[key] for key in KEYS} for log in tracker.logs if "loss" in log]
    assert of_training == [{key: log[key] for key in KEYS} for log in updates]  # trackers get what is stored


def test_a_run_that_is_well_hears_nothing_and_the_checks_change_no_number(
    make_trainer: MakeTrainer, caplog: pytest.LogCaptureFixture
) -> None:
    ends = []
    for on in (True, False):
        trainer = make_trainer(total_episodes=32, learning_rate=1e-4, num_ppo_epochs=1, health_checks=on)
        trainer.train()
        logged = [{key: value for key, value in log.items() if key not in KEYS} for log in history(trainer)]
        assert any(KEYS & log.keys() for log in trainer.state.log_history) is on
        assert said(caplog) == [] and not any(log.get(key) for log in trainer.state.log_history for key in KEYS)
        ends.append((dict(trainer.model.state_dict()), logged))
    assert_identical(*ends)


def test_a_resumed_run_repeats_nothing(make_trainer: MakeTrainer, caplog: pytest.LogCaptureFixture) -> None:
    limits = {"explained_variance": 1e9, "explained_variance_logs": 1}
    settings = {**QUICK, "save_strategy": "steps", "save_steps": 1, "health_thresholds": limits}
    with pytest.raises(RunDied):
        make_trainer(**settings, callbacks=[DieAt("on_step_begin", 1)]).train()
    assert said(caplog).count("Health (explained_variance)") == 1
    resumed = make_trainer(**{**settings, "save_strategy": "no"})
    resumed.train(resume_from_checkpoint=True)
    logs = [log for log in resumed.state.log_history if "loss" in log]
    assert [log["health/explained_variance"] for log in logs] == [1.0, 1.0, 1.0]
    assert said(caplog).count("Health (explained_variance)") == 1


def test_what_went_away_and_comes_back_is_said_again(caplog: pytest.LogCaptureFixture) -> None:
    state, callback = FakeState(), HealthCallback(HealthThresholds(patience=1), RunContext())
    callback.on_train_begin(None, state, None)
    clipped = [0.9, 0.9, 0.1, 0.9] + [0.1] * 10 + [0.9, 0.9]
    for step, value in enumerate(clipped, start=1):
        logs = {"loss": 0.1, "policy/clipfrac_avg": value}
        state.log_history.append({**logs, "step": step})
        callback.on_log(None, state, None, logs=logs)
        assert logs["health/clip_fraction"] == float(value == 0.9)
    assert said(caplog) == ["Health (clip_fraction)"] * 2


def test_the_judge_is_heard_at_each_evaluation(caplog: pytest.LogCaptureFixture) -> None:
    """Between two logs, after the last one, in a run that goes on, and again after it was well for long."""
    limits, state = HealthThresholds(judge_falls=2), FakeState()
    callback = HealthCallback(limits, RunContext())

    def log(**logs: float) -> dict[str, float]:
        state.log_history.append({**logs, "step": len(state.log_history) + 1})
        callback.on_log(None, state, None, logs=logs)
        return logs

    callback.on_train_begin(None, state, None)
    for score in (1.0, 2.0, 3.0):
        assert "health/judge" not in log(loss=0.1, **{"objective/scores": score})
        assert log(eval_score=9 - score)["health/judge"] == float(score == 3)
        assert len(said(caplog)) == (score == 3)
    assert state.log_history[-1]["health/judge"] == 1.0

    callback = HealthCallback(limits, RunContext())  # of a run that goes on
    callback.on_train_begin(None, state, None)
    assert "health/judge" not in log(loss=0.1, **{"objective/scores": 4.0})
    assert log(eval_score=5.0)["health/judge"] == 1.0
    assert "health/judge" not in log(eval_other_score=1.0)  # of another data set
    assert said(caplog) == ["Health (judge)"]

    for verdict in (*range(10, 20), 9.0, 8.0):
        log(loss=0.1, **{"objective/scores": float(len(state.log_history))})
        log(eval_score=verdict)
    assert said(caplog) == ["Health (judge)"] * 2
    words = "eval_score has fallen from {} to {} while the score rose"
    assert warnings_of(state.log_history, limits, RunContext()) == {
        "judge": [(6, words.format(8, 6)), (len(state.log_history), words.format(19, 8))]
    }


def test_by_default_the_first_of_several_evaluation_sets_is_the_judge(
    make_trainer: MakeTrainer, caplog: pytest.LogCaptureFixture
) -> None:
    calls = itertools.count()

    def reward(prompts: list[str], **columns: Any) -> list[float]:
        """Rise from call to call, and fall on the prompts of the set "hard"."""
        score = next(calls) * (-1.0 if "w3" in prompts[0] else 1.0)
        return [score + index / 10 for index in range(len(prompts))]

    trainer = make_trainer(
        **QUICK,
        reward_funcs=[reward],
        eval_dataset={"hard": [{"prompt": "w3"}] * 2, "easy": [{"prompt": "w1"}] * 2},
        eval_strategy="steps",
        eval_steps=3,
        eval_on_start=True,
        health_thresholds={"judge_falls": 1},
    )
    trainer.train()
    checked = [log["health/judge"] for log in trainer.state.log_history if "eval_hard_score" in log]
    assert checked == [0.0, 1.0] and "eval_hard_score has fallen" in caplog.text
    assert "health/judge" not in trainer.evaluate()  # training has ended


class FakeState:
    is_world_process_zero = True

    def __init__(self) -> None:
        self.log_history: list[dict[str, Any]] = []


def test_a_users_own_callback_takes_the_place(make_trainer: MakeTrainer) -> None:
    own = HealthCallback(HealthThresholds(kl=3))
    trainer = make_trainer(**QUICK, callbacks=[own])
    callbacks = trainer.callback_handler.callbacks
    trainer.train()
    assert RunSettings.load(str(trainer.args.output_dir)).health["thresholds"]["kl"] == 3
    assert callbacks[0] is own and sum(isinstance(callback, HealthCallback) for callback in callbacks) == 1
    trainer.remove_callback(HealthCallback)
    assert not any(isinstance(callback, HealthCallback) for callback in trainer.callback_handler.callbacks)
