"""Health checks: each by hand, and a run that warns once of each finding, and not again after a resume."""

from __future__ import annotations

import dataclasses
import logging
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import TrainerCallback

from rlhf_ppo import PPOConfig
from rlhf_ppo.reporting.health import (
    CHECKS,
    HealthCallback,
    RunContext,
    add_console_and_health,
    deviation_weights,
    health_settings,
    warnings_of,
)
from rlhf_ppo.reporting.judgements import RewardAccuracy
from rlhf_ppo.reporting.run_log import RunSettings, read_log
from tests.conftest import tiny_scorer
from tests.runs import MakeTrainer, assert_identical, history

BY_NAME = {check.name: check for check in CHECKS}
KEYS = {check.key for check in CHECKS}
RUN = RunContext(num_episodes=8)
HEALTHY = {
    "loss": 0.1,
    "objective/kl": 4.0,
    "response/length_mean": 20.0,
    "response/unique_frac": 1.0,
    "policy/entropy_avg": 1.5,
    "val/explained_variance": 0.3,
    "rewards/a/std": 0.4,
}


def series(key: str, values: list[Any], **others: Any) -> list[dict[str, Any]]:
    return [{**HEALTHY, "step": step, **others, key: value} for step, value in enumerate(values, start=1)]


GAIN, CUT = "critic/gain_over_prompt", {"episode/cut_by_calls_frac": 0.3, "episode/cut_by_time_frac": 0.0}
# Check: logs just beyond the limit, logs just within, what the finding says.
CASES: dict[str, tuple[list[dict[str, Any]], list[dict[str, Any]], str]] = {
    "kl": (  # 20 tokens at 1 nat
        series("objective/kl", [0.0, 20.1, 21.0, 20.2]),
        series("objective/kl", [30.0, 30.0, 19.9, 30.0]),
        "20.2 nats per response, 1.01 per token",
    ),
    "kl_growth": (  # means of three: 0, 1, 2.8, 6, which rise by 1, 1.8 and 3.2
        series("objective/kl", [0.0] * 3 + [1.0] * 3 + [2.8] * 3 + [5.0, 6.0, 7.0]),
        series("objective/kl", [0.0] * 3 + [1.0] * 3 + [2.7] * 3 + [5.0, 6.0, 7.0]),
        "by 1, 1.8 and 3.2 nats",
    ),
    "entropy": (
        series("policy/entropy_avg", [2.0, 0.19, 0.1, 0.15]),
        series("policy/entropy_avg", [2.0, 0.19, 0.1, 0.21]),
        "2 to 0.15 nats",
    ),
    "repeated": (  # the second have few answers, such as yes and no
        series("response/unique_frac", [1.0, 0.1, 0.1, 0.1]),
        series("response/unique_frac", [0.3, 0.1, 0.1, 0.1]),
        "only 10% of the responses",
    ),
    "reward_variance": (
        series("rewards/a/std", [1.0, 0.05, 0.0, 0.04]),
        series("rewards/a/std", [1.0, 0.06, 0.0, 0.04]),
        "the same reward (a)",
    ),
    "reward_accuracy": (series("loss", [0.1]), series("loss", [0.1]), "the reward model is at chance, right on 51%"),
    "explained_variance": (
        series("val/explained_variance", [-0.1] * 19 + [0.0]),  # 0: the values have not changed at all
        series("val/explained_variance", [-0.1] * 19 + [0.01]),
        "below 0.01 for 20 logs: 0",
    ),
    "critic": (series(GAIN, [0.1], **{f"{GAIN}_low": 0.0}), series(GAIN, [0.1], **{f"{GAIN}_low": 0.01}), "+0.1 more"),
    "failed_calls": (
        series("tools/failure_frequency", [0.9, 0.6, 0.7]),
        series("tools/failure_frequency", [0.9, 0.5, 0.9]),
        "70% of the tool calls",
    ),
    "cut_episodes": (
        series("episode/cut_by_length_frac", [0.3, 0.4, 0.3], **CUT),
        series("episode/cut_by_length_frac", [0.3, 0.1, 0.3], **CUT),
        "60% of the episodes are cut",
    ),
}


@pytest.mark.parametrize("name", BY_NAME)
def test_a_check_warns_beyond_its_limit_only(name: str) -> None:
    beyond, within, words = CASES[name]
    check = BY_NAME[name]
    run = dataclasses.replace(RUN, reward_accuracy="at chance, right on 51%") if name == "reward_accuracy" else RUN

    assert words in (check.find(beyond, run) or "")
    assert {other for other, each in BY_NAME.items() if each.find(within, RUN)} == set()
    missing: Any = [{"loss": 0.1, "step": 1, key: None} for key in HEALTHY]
    assert check.find(missing, RUN) is None
    fields = {*PPOConfig.__dataclass_fields__}
    assert all(fields & {*re.findall(r"\w+", words)} for words in check.options)


def test_a_reward_model_is_at_chance_only_if_enough_pairs_say_so(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    trainer, scorer = make_trainer(), tiny_scorer()
    scorer.config._name_or_path = str(tmp_path)
    for accuracy, num_pairs, words in (
        (0.51, 400, "at chance, right on 51.0% of 400 held-out pairs (95% interval 46.1 to 55.9%)"),
        (0.3, 400, "at chance, right on 30.0% of 400 held-out pairs (95% interval 25.7 to 34.7%)"),
        (0.5, 4, "tested on too few pairs, right on 50.0% of 4 held-out pairs (95% interval 15.0 to 85.0%)"),
        (0.57, 2000, None),
    ):
        RewardAccuracy.of(accuracy, num_pairs).save(tmp_path)
        add_console_and_health(trainer, trainer.args, trainer.sizes, [scorer], {})
        assert health_settings(trainer.callback_handler.callbacks)["reward_accuracy"] == words, accuracy


@pytest.mark.parametrize(
    ("logging", "expected"),
    [({"logging_steps": 1}, 20), ({"logging_steps": 0.02}, 20), ({"logging_steps": 4}, 12)]
    + [({"logging_strategy": strategy, "logging_steps": 0}, 10) for strategy in ("no", "epoch")],
)
def test_a_run_that_logs_seldom_is_warned_earlier(
    make_trainer: MakeTrainer, logging: dict[str, Any], expected: int
) -> None:
    trainer = make_trainer(per_device_train_batch_size=8, gradient_accumulation_steps=1, total_episodes=800, **logging)
    assert health_settings(trainer.callback_handler.callbacks)["explained_variance_logs"] == expected


class Tracker(TrainerCallback):
    def __init__(self) -> None:
        self.logs: list[dict[str, Any]] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        self.logs.append(dict(logs))


def test_responses_that_differ_in_one_of_the_last_logs_are_not_repeated() -> None:
    assert BY_NAME["repeated"].find(series("response/unique_frac", [1.0, 0.1, 0.21, 0.1]), RUN) is None


@pytest.mark.parametrize(("clean", "warnings"), [(9, 1), (10, 2)])
@pytest.mark.parametrize("resumed_after", [None, 1, 5])
def test_a_check_is_silent_until_ten_logs_had_no_finding_also_after_a_resume(
    clean: int, warnings: int, resumed_after: int | None, caplog: pytest.LogCaptureFixture
) -> None:
    beyond, within = {**HEALTHY, GAIN: 0.1, f"{GAIN}_low": 0.0}, {**HEALTHY, GAIN: 0.1, f"{GAIN}_low": 0.1}
    state: Any = SimpleNamespace(log_history=[], is_world_process_zero=True)
    callback = HealthCallback(RUN)
    for step, figures in enumerate([beyond, *[within] * clean, beyond]):
        if step == resumed_after:
            callback = HealthCallback(RUN)
            callback.on_train_begin(None, state, None)
        state.log_history.append({**figures, "step": step})
        callback.on_log(None, state, None, logs=dict(figures))
    assert len(warned(caplog)) == warnings
    assert warnings_of(state.log_history, RUN)["critic"][-1][0] == (clean + 1 if warnings == 2 else 0)


def test_a_policy_that_never_calls_a_tool_is_named_one_that_has_stopped_is_not() -> None:
    find = BY_NAME["failed_calls"].find
    assert find(series("tools/call_frequency", [0.0, 0.0, 0.0]), RUN) == "no response has called a tool so far"
    assert find(series("tools/call_frequency", [0.1, 0.0, 0.0, 0.0]), RUN) is None


def warned(caplog: pytest.LogCaptureFixture) -> list[str]:
    messages = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    return [message for message in messages if message.startswith("Health")]


def test_a_collapsing_run_is_warned_once_of_each_finding(
    make_trained: MakeTrainer, caplog: pytest.LogCaptureFixture
) -> None:
    tracker = Tracker()
    trainer = make_trained(
        per_device_train_batch_size=8,
        gradient_accumulation_steps=1,
        total_episodes=96,
        learning_rate=0.3,
        kl_coef=1e-9,
        max_grad_norm=1e3,
        lr_scheduler_type="constant",
        callbacks=[tracker],
    )
    found = {key for log in trainer.state.log_history for key in KEYS if log.get(key)}
    assert {"health/kl", "health/entropy", "health/repeated"} <= found
    assert sorted(line.split(":")[0] for line in warned(caplog)) == sorted(f"Health ({key[7:]})" for key in found)
    updates = [log for log in trainer.state.log_history if "loss" in log]
    assert all(KEYS <= log.keys() and {log[key] for key in KEYS} <= {0.0, 1.0} for log in updates)
    of_trackers = [{key: log[key] for key in KEYS} for log in tracker.logs if "loss" in log]
    assert of_trackers == [{key: log[key] for key in KEYS} for log in updates]
    run = RunContext(**RunSettings.load(str(trainer.args.output_dir)).health)
    assert run == RunContext(8, explained_variance_logs=10, reward_weights={"count_w4": 1.0})
    again = warnings_of(read_log(str(trainer.args.output_dir)), run)
    messages = {check.message(words) for check in CHECKS for _, words in again.get(check.name, ())}
    assert messages == {*warned(caplog)}


def test_a_healthy_run_is_not_warned_and_the_checks_change_no_number(
    make_trained: MakeTrainer, caplog: pytest.LogCaptureFixture
) -> None:
    ends = []
    for on in (True, False):
        trainer = make_trained(total_episodes=32, learning_rate=1e-4, num_ppo_epochs=1, health_checks=on)
        logged = [{key: value for key, value in log.items() if key not in KEYS} for log in history(trainer)]
        assert any(KEYS & log.keys() for log in trainer.state.log_history) is on
        assert warned(caplog) == []
        ends.append((dict(trainer.model.state_dict()), logged))
    assert_identical(*ends)


def test_the_weights_of_a_list_are_recorded_by_name(make_trained: MakeTrainer) -> None:
    """The state of a run has the names in alphabetical order."""

    def zeta(completions: list[str], **_: Any) -> list[float]:
        return [2.0 * len(text) for text in completions]

    def alpha(completions: list[str], **_: Any) -> list[float]:
        return [0.0] * len(completions)

    trainer = make_trained(reward_funcs=[zeta, alpha], reward_weights=[0.5, 0.0], total_episodes=8)
    settings, log = RunSettings.load(str(trainer.args.output_dir)), read_log(str(trainer.args.output_dir))
    assert settings.made_of["reward_weights"] == settings.health["reward_weights"] == {"zeta": 0.5, "alpha": 0.0}
    found = deviation_weights(log[0], settings.made_of["reward_weights"])
    assert found == {"rewards/alpha/std": 0.0, "rewards/zeta/std": 0.5}


def test_a_reward_that_is_only_logged_hides_no_constant_one() -> None:
    logs = [
        {**HEALTHY, "step": step, "rewards/a/std": std, "rewards/b/std": 1.0} for step, std in enumerate((1, 0, 0, 0))
    ]
    find = BY_NAME["reward_variance"].find
    assert find(logs, RUN) is None
    assert "same reward (a)" in str(find(logs, dataclasses.replace(RUN, reward_weights={"a": 1.0, "b": 0.0})))
