"""Each check by hand: what it finds, at which figure, and what it leaves alone."""

from __future__ import annotations

import dataclasses
import json
import re
import statistics
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlhf_ppo import PPOConfig
from rlhf_ppo.config.arguments import HealthThresholds, logging_interval, parse_thresholds
from rlhf_ppo.reporting.health import scaled_thresholds
from rlhf_ppo.reporting.health_checks import CHECKS, History, RunContext

ROOT = Path(__file__).parents[2]
BY_NAME = {check.name: check for check in CHECKS}
RUN = RunContext(response_length=50, max_grad_norm=1.0, num_episodes=8, reward_accuracy=0.6)
HEALTHY = {
    "loss": 0.1, "objective/scores": 0.5, "objective/kl": 4.0, "response/length_mean": 20.0,
    "response/ended_frac": 0.9, "response/unique_frac": 1.0, "val/first_logratio": 1e-6, "policy/clipfrac_avg": 0.1,
    "policy/entropy_avg": 1.5, "val/explained_variance": 0.3, "rewards/a/std": 0.4, "rewards/a/mean": 0.5,
    "grad_norm": 1.5,
}  # fmt: skip


def series(key: str, values: list[Any]) -> list[dict[str, Any]]:
    return [{**HEALTHY, "step": step, key: value} for step, value in enumerate(values, start=1)]


def cut(by_length: list[float], by_calls: list[float]) -> list[dict[str, Any]]:
    pairs = zip(series("episode/cut_by_length_frac", by_length), by_calls, strict=True)
    return [{**log, "episode/cut_by_calls_frac": calls, "episode/cut_by_time_frac": 0.0} for log, calls in pairs]


def judged(verdicts: list[float], scores: list[float]) -> list[dict[str, Any]]:
    pairs = zip(series("objective/scores", scores), verdicts, strict=True)
    return [
        log for training, verdict in pairs for log in (training, {"eval_score": verdict, "step": training["step"]})
    ]


def find(name: str, logs: list[dict[str, Any]], run: RunContext = RUN, **limits: Any) -> str | None:
    return BY_NAME[name].find(History(logs, run), HealthThresholds(**limits))


# Check: its metric, values just beyond the threshold, values just within, what the finding says.
OF_METRICS: dict[str, tuple[str, list[float], list[float], str]] = {
    "first_ratio": ("val/first_logratio", [0.0, 0.11], [0.11, 0.1], "the log-ratio is 0.11 nats"),
    # 20 tokens at 1 nat
    "kl": ("objective/kl", [0.0, 20.1, 21.0, 20.2], [30.0, 30.0, 19.9], "20.2 nats per response, 1.01 per token"),
    "kl_growth": (  # means of three: 0, 1, 2.8, 6, which rise by 1, 1.8 and 3.2
        "objective/kl", [0.0] * 3 + [1.0] * 3 + [2.8] * 3 + [5.0, 6.0, 7.0],
        [0.0] * 3 + [1.0] * 3 + [2.7] * 3 + [5.0, 6.0, 7.0], "by 1, 1.8 and 3.2 nats",
    ),
    "negative_kl": ("objective/kl", [-2.1, -2.5, -3.0], [-2.1, -1.9, -3.0], "is -3 nats per response"),
    "clip_fraction": ("policy/clipfrac_avg", [0.1, 0.41, 0.5, 0.45], [0.5, 0.5, 0.39], "45% of the tokens"),
    "entropy": ("policy/entropy_avg", [2.0, 0.19, 0.1, 0.15], [2.0, 0.19, 0.1, 0.21], "2 to 0.15 nats"),
    # The second were long from the beginning.
    "length_limit": ("response/length_mean", [20.0, 47.5, 48, 49], [45.0, 49, 49, 49], "to 49 tokens, of at most 50"),
    "length_shrinks": ("response/length_mean", [20.0, 3.9, 3.0, 2.0], [20.0, 4.1, 3.0, 2.0], "from 20 to 2 tokens"),
    # The second never ended, and it does not count.
    "ended": ("response/ended_frac", [0.8, 0.04, 0.04, 0.02], [0.0] * 4, "98% of the responses have no stop token"),
    # The second have few answers, such as yes and no.
    "repeated": ("response/unique_frac", [1.0, 0.1, 0.1, 0.1], [0.3, 0.1, 0.1, 0.1], "only 10% of the responses"),
    "reward_variance": ("rewards/a/std", [1.0, 0.05, 0.0, 0.04], [1.0, 0.06, 0.0, 0.04], "the same reward (a)"),
    "reward_accuracy": ("loss", [0.1], [0.1], "right on 59.0% of held-out pairs"),
    "explained_variance": ("val/explained_variance", [-0.1] * 20, [-0.1] * 19 + [0.01], "below 0 for 20 logs: -0.1"),
    "gradient_spike": ("grad_norm", [1.0, 2.0, 3.0, 41.0], [1.0, 2.0, 3.0, 39.0], "is 41, where it was 2"),
    "no_gradient": ("grad_norm", [1.0, 0.0, 0.0, 0.0], [0.0, 0.0, 1e-3], "is 0"),
    "failed_calls": ("tools/failure_frequency", [0.9, 0.6, 0.7], [0.9, 0.5, 0.9], "70% of the calls"),
    "no_calls": ("tools/call_frequency", [2.0, 0.09, 0.0, 0.05], [2.0, 0.09, 0.1, 0.05], "from 2 to 0.05 per episode"),
}  # fmt: skip


def rates(name: str, value: float, low: float, **others: float) -> list[dict[str, Any]]:
    return [{name: value, f"{name}_low": low, **others}]


CASES: dict[str, tuple[list[dict[str, Any]], list[dict[str, Any]], str]] = {
    name: (series(key, beyond), series(key, within), words)
    for name, (key, beyond, within, words) in OF_METRICS.items()
} | {
    "judge": (
        judged([5.0, 4.0, 3.0, 2.0, 1.0], [1.0, 2.0, 3.0, 4.0, 5.0]),
        judged([5.0, 4.0, 3.0, 3.0, 1.0], [1.0, 2.0, 3.0, 4.0, 5.0]),
        "eval_score has fallen from 5 to 1 while the score rose",
    ),
    "cut_episodes": (
        cut([0.3, 0.2, 0.1], [0.3, 0.4, 0.5]),
        cut([0.3, 0.1, 0.3], [0.3, 0.4, 0.3]),
        "60% of the episodes are cut",
    ),
    "win_rate": (
        rates("judged/win_rate", 0.45, 0.41, **{"judged/win_rate_high": 0.49}),
        rates("judged/win_rate", 0.46, 0.42, **{"judged/win_rate_high": 0.5}),
        "wins 45.0% of the judged prompts (95% interval 41.0 to 49.0%)",
    ),
    "critic": (
        rates("critic/gain_over_prompt", 0.1, 0.0, loss=0.0),
        rates("critic/gain_over_prompt", 0.1, 0.01, loss=0.0),
        "the values explain +0.1 more of the Monte Carlo returns' variance than the prompt's mean does (95% interval "
        "from 0)",
    ),
}


@pytest.mark.parametrize("name", BY_NAME)
def test_a_check_speaks_beyond_its_threshold_only(name: str) -> None:
    beyond, within, words = CASES[name]
    check = BY_NAME[name]

    run = dataclasses.replace(RUN, reward_accuracy=0.59) if name == "reward_accuracy" else RUN

    assert words in (find(name, beyond, run) or "")
    assert find(name, within) is None
    assert find(name, beyond, run, **{threshold: None for threshold in check.thresholds}) is None  # off
    assert {other for other in BY_NAME if find(other, within)} <= {"kl"}  # no other one speaks
    message = check.message(find(name, beyond, run) or "")
    assert message.startswith(f"Health ({name}): ") and all(option in message for option in check.options)


def test_what_else_a_check_goes_by() -> None:
    never_ended = series("response/ended_frac", [0.0, 0.0, 0.0])
    assert find("ended", never_ended, dataclasses.replace(RUN, end_counts=True)) == (
        "100% of the responses have no stop token"
    )
    cannot_end = dataclasses.replace(RUN, can_end=False)
    assert find("ended", CASES["ended"][0], cannot_end) is None
    assert find("length_limit", CASES["length_limit"][0], cannot_end) is None
    assert find("kl", series("objective/kl", [5.0] * 3), kl=4.5) == (
        "the KL to the reference is 5 nats per response, above the budget of 4.5"
    )
    assert find("gradient_spike", CASES["gradient_spike"][0], dataclasses.replace(RUN, max_grad_norm=50.0)) is None
    assert find("reward_variance", CASES["reward_variance"][0], dataclasses.replace(RUN, num_episodes=1)) is None
    another_reward_differs = [{**log, "rewards/b/std": 1.0} for log in CASES["reward_variance"][0]]
    assert find("reward_variance", another_reward_differs) is None
    clips_responses = dataclasses.replace(RUN, clips_tokens=False)
    assert find("clip_fraction", CASES["clip_fraction"][0], clips_responses) is None
    rises_by_noise = series("objective/kl", [3.0] * 3 + [3.1] * 3 + [3.3] * 3 + [3.7] * 3)
    assert find("kl_growth", rises_by_noise) is None
    one_is_lower = series("objective/kl", [0.0] * 3 + [1.0] * 3 + [2.8] * 3 + [2.7, 7.3, 8.0])
    assert find("kl_growth", one_is_lower) is None
    verdicts = [5.0, 4.0, 3.0, 2.0, 1.0]
    assert find("judge", judged(verdicts, [5.0, 4.0, 3.0, 2.0, 1.0])) is None  # so does the score


class CountedLog(dict[str, Any]):
    """A log that counts how often a metric is read from it."""

    num_reads = 0

    def get(self, key: str, default: Any = None) -> Any:
        CountedLog.num_reads += 1
        return super().get(key, default)

    def __getitem__(self, key: str) -> Any:
        CountedLog.num_reads += 1
        return super().__getitem__(key)


def test_a_check_of_a_log_does_not_read_all_before() -> None:
    """An evaluation after every fourth update; every score and gradient is such that each check looks all the way."""

    def num_reads(num_updates: int) -> int:
        history, CountedLog.num_reads = History((), RUN), 0
        for step in range(1, num_updates + 1):
            log = {**HEALTHY, "step": step, "objective/scores": float(step), "rewards/a/std": 0.0, "grad_norm": 99.0}
            history.add(CountedLog(log))
            if step % 4 == 0:
                history.add(CountedLog(step=step, eval_score=-float(step)))
            for check in CHECKS:
                check.find(history, HealthThresholds())
        return CountedLog.num_reads

    first, second, third = (num_reads(100 * 2**size) for size in range(3))
    assert third - second == pytest.approx(2 * (second - first), rel=0.01)


numbers = st.none() | st.floats() | st.integers(-3, 3)


@given(st.lists(st.dictionaries(st.sampled_from([*HEALTHY, "eval_score", "step"]), numbers), max_size=30))
def test_no_log_makes_a_check_fail(logs: list[dict[str, Any]]) -> None:
    history = History(logs, RUN)
    for check in CHECKS:
        finding = check.find(history, HealthThresholds(patience=2, judge_falls=1, explained_variance_logs=3))
        assert finding is None or finding.isprintable()


# ---- What a user is told, and sets ----


@given(st.lists(st.tuples(st.floats(-3, 3) | st.none(), st.booleans()), min_size=1, max_size=12))
def test_the_newest_value_is_compared_with_the_median_of_those_before(logs: list[tuple[float | None, bool]]) -> None:
    entries = [{"loss": 0.0, "a": value, "val/critic_warmup": float(warms)} for value, warms in logs]
    values = [value for value, warms in logs if value is not None and not warms]
    newest, usual, number = History(entries, RUN).newest_and_usual("a")
    assert number == max(len(values) - 1, 0)
    if values:
        assert newest == values[-1]
    if number:
        assert usual == statistics.median(values[:-1])


def test_every_option_that_is_named_exists() -> None:
    fields = {*PPOConfig.__dataclass_fields__}
    for check in CHECKS:
        assert check.options and all(fields & {*re.findall(r"\w+", words)} for words in check.options), check.name


def test_every_threshold_is_a_checks() -> None:
    of_checks = {name for check in CHECKS for name in check.thresholds}
    assert of_checks | {"patience", "explained_variance_logs"} == set(HealthThresholds.__dataclass_fields__)
    assert set(CASES) == set(BY_NAME)


def test_the_documentation_has_the_table() -> None:
    rows = [
        f"| `{check.name}` | {check.symptom} | {', '.join(f'`{name}`' for name in check.thresholds)} "
        f"| {check.cause} | {check.advice} |"
        for check in CHECKS
    ]
    page = (ROOT / "docs" / "health.md").read_text()
    assert [row for row in rows if row not in page] == []
    defaults = [f"| `{f.name}` | {f.default} |" for f in dataclasses.fields(HealthThresholds)]
    assert [row for row in defaults if row not in page] == []


def test_thresholds_are_read_from_text() -> None:
    given = {"kl": 30, "clip_fraction": None, "patience": 2.0}
    assert parse_thresholds(json.dumps(given)) == given == parse_thresholds(given)
    args = PPOConfig(output_dir="x", use_cpu=True, bf16=False, health_thresholds=json.dumps(given))
    assert args.given_thresholds() == given


def test_windows_shrink_in_a_short_run() -> None:
    """20 logs of a run of 20 updates; a threshold that was given stays."""

    def windows(num_updates: int, **given: Any) -> tuple[int, int | None]:
        args = PPOConfig(output_dir="x", use_cpu=True, eval_strategy="steps", **given)
        args.logging_steps = logging_interval(num_updates)
        found = scaled_thresholds(args, num_updates)
        return found.explained_variance_logs, found.judge_falls

    assert windows(20, eval_steps=5) == (10, 2) and windows(30, eval_steps=1) == (15, 4)
    assert windows(4000, eval_steps=10) == (20, 4)
    assert windows(20, eval_steps=5, health_thresholds={"judge_falls": 3, "explained_variance_logs": 15}) == (15, 3)
    assert [logging_interval(number) for number in (1, 20, 39, 40, 199, 200, 5000)] == [1, 1, 1, 2, 9, 10, 10]


@pytest.mark.parametrize(
    ("thresholds", "error", "words"),
    [
        ({"kll": 1}, ValueError, "health_thresholds has no 'kll'; there are patience, first_logratio, kl,"),
        ("{", ValueError, "health_thresholds='{' is not JSON"),
        ([1], TypeError, "must be a dict or the JSON text of an object, such as"),
        ({"kl": "much"}, TypeError, r"health_thresholds\['kl'\]='much' must be a number; None turns"),
        ({"kl": True}, TypeError, "must be a number"),
        ({"kl": float("nan")}, ValueError, "must be finite; None turns the check off"),
        ({"patience": None}, TypeError, r"\['patience'\]=None must be a number$"),
        ({"patience": 0}, ValueError, "whole number of at least 1"),
        ({"judge_falls": 1.5}, ValueError, "whole number of at least 1"),
    ],
)
def test_wrong_thresholds_are_named(thresholds: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        PPOConfig(output_dir="x", use_cpu=True, bf16=False, health_thresholds=thresholds)


def test_the_judge_is_compared_with_scores_in_the_reward_s_unit() -> None:
    """Normalized scores fall towards 0 as their running mean follows them."""
    logs = judged([5.0, 4.0, 3.0, 2.0, 1.0], [5.0, 4.0, 3.0, 2.0, 1.0])
    raw = [{**log, "objective/raw_scores": float(log["step"])} if "loss" in log else log for log in logs]
    assert find("judge", logs) is None and find("judge", raw) is not None
