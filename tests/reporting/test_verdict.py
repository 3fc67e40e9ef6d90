"""The verdict from the files of runs: outcome, interval, reasons and next step."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from rlhf_ppo.reporting.judgements import RewardAccuracy
from rlhf_ppo.reporting.run_log import RecordedRun, find_state
from rlhf_ppo.reporting.verdict import recorded_runs, verdict_of

FIRST = {
    "loss": 0.1, "objective/scores": 0.0, "objective/kl": 0.0, "response/length_mean": 20.0,
    "policy/entropy_avg": 2.0, "rewards/reward/std": 1.0,
}  # fmt: skip
LAST = FIRST | {"objective/scores": 0.5, "objective/kl": 4.0}
GOOD = RewardAccuracy(0.72, (0.66, 0.78), 200)
MakeRun = Callable[..., RecordedRun]


@pytest.fixture
def make_run(tmp_path: Path) -> MakeRun:
    def make(
        rate: float | None = None, accuracy: RewardAccuracy | None = GOOD, seed: int = 0, step: int = 100,
        opponent: str = "out/sft", judge: str = "out/judge_reward", half: float = 0.05, wins: int = 60,
        judged_by: Sequence[str] = ("out/reward", "reward"), length_controlled: float | None = None, **last: float,
    ) -> RecordedRun:  # fmt: skip
        folder, reward = tmp_path / f"ppo-seed{seed}", tmp_path / "reward"
        (folder / "judged").mkdir(parents=True), reward.mkdir(exist_ok=True)
        changes = {name.replace("__", "/"): value for name, value in last.items()}
        logs = [{**FIRST, "step": 1, "episode": 8}, {**LAST, **changes, "step": step, "episode": 8 * step}]
        (folder / "trainer_state.json").write_text(json.dumps({"log_history": logs}))
        settings = {
            "arguments": {
                "output_dir": f"out/{folder.name}", "seed": seed, "sft_model_path": "out/sft", "stop_token": "eos"
            },
            "made_of": {"policy": "out/sft", "rewards": [str(reward)], "reward_identities": ["weights 1", "a.py:f "]},
        }  # fmt: skip
        (folder / "ppo_settings.json").write_text(json.dumps(settings))
        if accuracy is not None:
            accuracy.save(reward)
        if rate is not None:
            judged = {"win_rate": rate, "interval": [rate - half, rate + half], "wins": wins, "losses": 40, "ties": 0}
            judged["length_controlled"] = length_controlled
            options = {"opponent": opponent, "judge_model": judge}
            path = folder / "judged" / "win_rate.json"
            path.write_text(json.dumps({**judged, "failed": 0, "judge_identities": judged_by, "options": options}))
        [run] = recorded_runs([folder])
        return run

    return make


def test_the_interval_decides(make_run: MakeRun) -> None:
    sentences = {
        0.56: "Better than out/sft: the policy wins 56.0% of 100 prompts (95% interval 51.0 to 61.0%).",
        0.44: "Worse than out/sft: the policy wins 44.0% of 100 prompts (95% interval 39.0 to 49.0%).",
        0.54: "Undecided against out/sft: the policy wins 54.0% of 100 prompts (95% interval 49.0 to 59.0%), "
        "and the interval includes 50%.",
        0.55: "Undecided against out/sft: the policy wins 55.0% of 100 prompts (95% interval 50.0 to 60.0%), "
        "and the interval includes 50%.",
    }
    for seed, (rate, sentence) in enumerate(sentences.items()):
        found = verdict_of([make_run(rate, seed=seed)])
        assert found.sentence == sentence and found.outcome == sentence.split()[0].lower()
        assert found.opponent == "out/sft"
    unjudged = verdict_of([make_run(seed=9)])
    assert unjudged.outcome == "not judged" and unjudged.win_rate is None and "rlhf-ppo judge" in unjudged.sentence


def test_the_win_rate_of_a_checkpoint_is_not_the_policys(make_run: MakeRun) -> None:
    run = make_run(0.44)
    newest = json.loads((run.directory / "judged" / "win_rate.json").read_text())
    newest |= {"win_rate": 0.9, "options": newest["options"] | {"model": str(run.directory / "checkpoint-40")}}
    (run.directory / "judged" / "win_rate-2.json").write_text(json.dumps(newest))
    assert verdict_of(recorded_runs([run.directory])).sentence.startswith("Worse than out/sft: the policy wins 44.0%")


def test_seeds_widen_the_interval(make_run: MakeRun) -> None:
    """Mean .6, standard error over seeds .1 / sqrt(3), Student's quantile 4.303, half-width over prompts .05."""
    found = verdict_of([make_run(rate, seed=seed) for seed, rate in enumerate((0.5, 0.6, 0.7))])
    width = ((4.303 * 0.1 / 3**0.5) ** 2 + 0.05**2) ** 0.5
    assert found.interval == pytest.approx((0.6 - width, 0.6 + width)) and found.outcome == "undecided"
    assert "wins 60.0% of 100 prompts (95% interval over prompts and 3 seeds 34.7 to 85.3%)" in found.sentence
    assert found.seeds == (0, 1, 2)


def test_seeds_count_that_were_judged_alike(make_run: MakeRun) -> None:
    """Against the opponent and by the judge of the first run; of each run the newest of them."""
    runs = [
        make_run(0.7),
        make_run(0.6, seed=1),
        make_run(0.1, seed=2, judge="b"),
        make_run(0.2, seed=3, opponent="b"),
    ]
    newer = json.loads((runs[2].directory / "judged" / "win_rate.json").read_text())
    newer["options"]["judge_model"] = "c"
    (runs[1].directory / "judged" / "win_rate-2.json").write_text(json.dumps(newer))
    found = verdict_of(runs)
    assert (
        found.win_rate == pytest.approx(0.65)
        and found.seeds == (0, 1)
        and "over prompts and 2 seeds" in found.sentence
    )
    assert verdict_of([make_run(seed=4), *runs[3:]]).opponent == "b"


@pytest.mark.parametrize(
    ("rates", "wins", "advice"),
    [
        ((0.5, 0.6, 0.7), 160, "The seeds differ: train more seeds."),
        ((0.5, 0.6, 0.7), 40, "About 100 prompts would decide a win rate of 60.0%: judge more (`num_prompts`)."),
        ((0.54,), 60, "About 600 prompts would decide a win rate of 54.0%: judge more (`num_prompts`)."),
    ],
)
def test_an_undecided_verdict_asks_for_what_lacks(
    rates: Sequence[float], wins: int, advice: str, make_run: MakeRun
) -> None:
    runs = [make_run(rate, seed=seed, wins=wins) for seed, rate in enumerate(rates)]
    assert verdict_of(runs).reasons[-1] == advice


CHANCE = RewardAccuracy(0.52, (0.45, 0.59), 200)
REASONS: dict[str, tuple[dict[str, Any], str]] = {
    "chance": ({"accuracy": CHANCE}, "The reward model is at chance, right on 52.0% of 200 held-out pairs (95% "
               "interval 45.0 to 59.0%): train it longer"),
    "weak": ({"accuracy": RewardAccuracy(0.58, (0.52, 0.64), 200)}, "The reward model is weak"),
    "kl": ({"objective__kl": 11.0}, "0.55 nats of KL per token: raise kl_coef"),
    "still": ({"objective__kl": 0.1}, "hardly changed, 0.10 nats of KL per response: raise learning_rate"),
    "still at 0": ({"objective__kl": -0.001}, "hardly changed, 0.00 nats"),
    "short": ({"response__length_mean": 9.9}, "Responses went from 20.0 to 9.9 tokens"),
    "long": ({"response__length_mean": 41.0}, "Responses went from 20.0 to 41.0 tokens"),
    "entropy": ({"policy__entropy_avg": 0.5}, "entropy has fallen from 2.00 to 0.50"),
    "exploits": ({}, "The score rose from 0.00 to 0.50, but the judge does not agree"),
    "no rise": ({"objective__scores": 0.05}, "The score has not risen, from 0.00 to 0.05: raise total_episodes"),
    "cut": ({"response__ended_frac": 0.3}, "Only 30% of the responses end by themselves: raise response_length, or "
            "first train on texts that end."),
    "own": ({"judged_by": ["weights 1"], "accuracy": CHANCE, "objective__kl": 11.0, "policy__entropy_avg": 0.5},
            "The judge is PPO's own reward"),
    "few prompts": ({"wins": -11}, "Only 29 prompts were judged: judge more (`num_prompts`)."),
    "few": ({"step": 20, "objective__scores": 0.5}, "Training was short, 20 updates"),
}  # fmt: skip


@pytest.mark.parametrize("name", REASONS)
def test_a_losing_run_has_its_reason(name: str, make_run: MakeRun) -> None:
    settings, reason = REASONS[name]
    found = verdict_of([make_run(0.4, **settings)])
    assert any(reason in each for each in found.reasons), found.reasons
    assert [*found.lines()][1].startswith("Why: ") and len(found.reasons) <= 3


@pytest.mark.parametrize(
    "last",
    [
        {},
        {"objective__kl": 9.9},  # of 20 tokens
        {"objective__kl": 0.21},
        {"response__length_mean": 10.1},
        {"response__length_mean": 39.9},
        {"policy__entropy_avg": 0.61},  # of 2
        {"response__ended_frac": 0.51},
    ],
)
def test_a_better_run_just_within_each_limit_has_no_reason(last: dict[str, float], make_run: MakeRun) -> None:
    assert verdict_of([make_run(0.6, **last)]).reasons == ()


@pytest.mark.parametrize(("equal_length", "doubts"), [(0.45, True), (0.55, False)])
def test_a_policy_that_wins_by_its_length_is_doubted(equal_length: float, doubts: bool, make_run: MakeRun) -> None:
    found = verdict_of([make_run(0.6, length_controlled=equal_length)])
    sentence = "But: At equal length the policy wins 45.0%: the judge may prefer long responses."
    assert [*found.lines()][1:] == [sentence] * doubts


def test_first_and_last_are_tenths_of_the_logs(make_run: MakeRun) -> None:
    """Of 40 logs: the mean KL of the last four is 11, that of the last half below 6."""
    run = make_run(0.6)
    state = run.directory / "trainer_state.json"
    kls = [0.0] * 36 + [10.0, 11.0, 11.0, 12.0]
    logs = [{**LAST, "objective/kl": kl, "step": step, "episode": 8 * step} for step, kl in enumerate(kls, start=1)]
    state.write_text(json.dumps({"log_history": logs}))
    (reason,) = verdict_of(recorded_runs([run.directory])).reasons
    assert "0.55 nats of KL per token" in reason


@pytest.mark.parametrize(
    ("accuracy", "outcome", "state"),
    [
        (GOOD, "better", None),
        (CHANCE, "undecided", "at chance"),
        (RewardAccuracy(1.0, (0.44, 1.0), 3), "undecided", "tested on too few pairs: right on 100.0% of 3 held-out"),
    ],
)
def test_a_judge_at_chance_decides_nothing(
    accuracy: RewardAccuracy, outcome: str, state: str | None, make_run: MakeRun, tmp_path: Path
) -> None:
    run = make_run(0.84)
    (tmp_path / "judge_reward").mkdir()
    accuracy.save(tmp_path / "judge_reward")  # the judge's path was out/judge_reward before the move
    found = verdict_of([run])
    assert found.outcome == outcome
    assert (f"84.0% of 100 prompts (95% interval 79.0 to 89.0%), but the judge is {state}" in found.sentence) == (
        outcome == "undecided"
    )


@pytest.mark.parametrize(("judge", "outcome"), [("out/judge_reward", "undecided"), ("other/judge_reward", "better")])
def test_a_judge_from_elsewhere_has_not_the_accuracy_of_a_sibling(
    judge: str, outcome: str, make_run: MakeRun, tmp_path: Path
) -> None:
    run = make_run(0.84, judge=judge)
    (tmp_path / "judge_reward").mkdir()
    CHANCE.save(tmp_path / "judge_reward")
    assert verdict_of([run]).outcome == outcome


def test_a_judge_that_is_there_has_its_own_accuracy_or_none(
    make_run: MakeRun, tmp_path: Path, monkeypatch: Any
) -> None:
    run = make_run(0.84)
    for folder in (tmp_path / "judge_reward", tmp_path / "new/out/judge_reward"):
        folder.mkdir(parents=True)
    CHANCE.save(tmp_path / "judge_reward")
    monkeypatch.chdir(tmp_path / "new")
    assert verdict_of([run]).outcome == "better"


def test_a_judgement_is_of_the_policy_that_the_run_had_then(make_run: MakeRun) -> None:
    """A run that goes on in its directory, and a checkpoint, have none until they are judged."""
    run = make_run(0.6)
    path, state = run.directory / "judged" / "win_rate.json", run.directory / "trainer_state.json"
    log = json.loads(state.read_text())
    path.write_text(json.dumps(json.loads(path.read_text()) | {"run": {"updates": 100}}))
    for updates, outcome in ((100, "better"), (200, "not judged")):
        state.write_text(json.dumps(log | {"global_step": updates}))
        assert verdict_of(recorded_runs([run.directory])).outcome == outcome
    checkpoint = run.directory / "checkpoint-50"
    checkpoint.mkdir()
    state.write_text(json.dumps(log | {"global_step": 100}))
    (checkpoint / "trainer_state.json").write_text(json.dumps(log | {"global_step": 50}))
    os.utime(state, (0, 0))  # as a copy may have it
    assert verdict_of(recorded_runs([run.directory])).outcome == "better"
    assert verdict_of(recorded_runs([checkpoint])).outcome == "not judged"
    assert find_state(run.directory) == state


def test_rewards_that_are_only_logged_are_no_yardstick(make_run: MakeRun) -> None:
    """The score, of weight 1, has risen by 0.4 of its deviation; the judge of weight 0 has another unit."""
    run = make_run(0.4, objective__scores=0.4)
    run = dataclasses.replace(run, log=[{**entry, "rewards/held_out/std": 80.0} for entry in run.log])
    made_of = {**run.settings.made_of, "reward_weights": {"held_out": 0.0}}
    weighted = dataclasses.replace(run, settings=dataclasses.replace(run.settings, made_of=made_of))
    assert not any("exploits the reward" in reason for reason in verdict_of([run]).reasons)
    assert any("exploits the reward" in reason for reason in verdict_of([weighted]).reasons)
