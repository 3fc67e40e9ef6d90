"""The report: its data are those of the log, its texts stay texts, and in a browser every panel and control works."""

from __future__ import annotations

import dataclasses
import html.parser
import json
import math
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rlhf_ppo.checkpoints.run import LOCK_NAME, Run, in_use, locked
from rlhf_ppo.cli.judge import JudgeArguments, add_verdicts, keep, keep_win_rate
from rlhf_ppo.cli.main import main
from rlhf_ppo.reporting import judgements, report
from rlhf_ppo.reporting.completion_files import TOKEN_VALUES, write_completions
from rlhf_ppo.reporting.critic_audit import AuditedPrefixes, CriticAudit, audit
from rlhf_ppo.reporting.health import CHECKS
from rlhf_ppo.reporting.report import SCRIPTS, watch_report, write_report
from rlhf_ppo.rewards.judges import Compared
from rlhf_ppo.terminal import visible
from tests.reporting.browser import CHROMIUM, Browser
from tests.runs import QUICK

HOSTILE = (
    "</script><script>window.hacked=1</script><img src=x onerror='hacked=1'>\u2028 \"&amp; {{ 7 * 7 }} <!-- \U0001f600"
)
VISIBLE = visible(HOSTILE)
UPDATES = (1, 2, 3, 4)


def log_of(seed: int) -> list[dict[str, Any]]:
    """Four logs of training and an evaluation."""
    entries: list[dict[str, Any]] = [
        {
            "step": step, "episode": 8 * step, "epoch": step / 9, "loss": 0.1, "objective/scores": seed + step / 3,
            "objective/kl": 0.1 * step * (seed + 1), "time/generate": float("nan") if step == 2 else 0.5,
            "rewards/" + HOSTILE + "/mean": 1.0, "health/entropy": float(step >= 3), "health/ratio": 0.0,
            "policy/entropy_avg": (seed + 1) / 10 if step >= 3 else 2.0,
        }
        for step in UPDATES
    ]  # fmt: skip
    return [*entries, {"step": 4, "eval_score": 0.5 + seed}, {"step": 4, "train_runtime": 3.0}]


def response(step: int, index: int) -> dict[str, Any]:
    texts = [HOSTILE, " gap", "", " end"]
    figures = [0.1234567 * (index - 3), None, -1.0, float("inf")]
    return {
        "step": step, "prompt": f"{HOSTILE} {index}" + " and so on" * 200 * (index == 5), "completion": "".join(texts),
        "score": None if index == 9 else index / 10 + step, "rewards/a": 1.0, "rewards/b": None, "kl": 0.5,
        "length": 3, "ended": index % 2 == 0, "extra/note": HOSTILE, "prompt_id": [5],
        "token_id": [5, 6, 7, 1], "token_text": texts,
        "token_written": [True, False, True, True], **{name: figures for name in TOKEN_VALUES},
    }  # fmt: skip


def make_run(folder: Path, seed: int = 0, **arguments: Any) -> Path:
    """Write what a run leaves behind."""
    folder.mkdir(parents=True)
    run = Run(f"run of {folder}")
    run.save(folder)
    (folder / "log_history.jsonl").write_text("".join(f"{json.dumps(entry)}\n" for entry in log_of(seed)))
    given = {"seed": seed, "output_dir": str(folder), "kl_coef": 0.05, "gamma": 1, "hub_token": "hf_secret"}
    given |= {"stop_strings": ["</a>", "."], "stop_token": None, "report_to": [], **arguments}
    settings = {
        "arguments": given,
        "versions": {"torch": "2.13.0"},
        "made_of": {"policy": "a/b", "rewards": [HOSTILE], "reward_funcs": [None]},
        "health": {"thresholds": {"entropy": 0.2, "patience": 1}, "run": {}},
    }
    (folder / "ppo_settings.json").write_text(json.dumps(settings))
    for step in UPDATES:
        write_completions(folder, [response(step, index) for index in range(10)], run)
        table = {"query": [HOSTILE, "second"], "model response": [f"{HOSTILE} {step}", ""], "score": [step, None]}
        (folder / "_samples").mkdir(exist_ok=True)
        pd.DataFrame(table).to_csv(folder / f"_samples/update-{step:05d}.csv", index=False)
    return folder


ORDERS = [(0.0, 1.0), (0.25, 0.75), (1.0, 0.0), (0.0, 0.0), (0.5, 0.5), (None, 1.0), (None, None)]
OUTCOMES = ["model", "model", "opponent", "tie", "tie", "none", "none"]


def judge_run(folder: Path, times: int = 1, seed: int = 0) -> Path:
    """Write what `rlhf-ppo judge` does: two wins, a loss, a tie by contradiction, another one, and two failures."""
    folder.mkdir(parents=True, exist_ok=True)
    compared = [Compared(*order) for order in ORDERS] * times
    texts = [f"{HOSTILE} {row}" for row in range(len(compared))]
    opponents = [None if row == 6 else "x" * row for row in range(len(compared))]
    table = pd.DataFrame({"prompt": texts, "model": texts, "opponent": opponents})
    found = add_verdicts(table, compared, is_scoring=False)
    args = JudgeArguments(
        "rows.jsonl", model=f"runs/ppo{seed or ''}", seed=seed, opponent_column="chosen", judge_model="gpt",
        judge_url="http://me:hf_secret@host/v1", output_dir=str(folder),
    )  # fmt: skip
    path = keep(table, folder, "judged")
    keep_win_rate(found, args, path)
    return path


def audit_run(folder: Path, seed: int = 0, **changes: Any) -> CriticAudit:
    """Write what an audit of a critic does: 30 prompts of 4 beginnings, and a critic with some noise."""
    rng = np.random.default_rng(seed)
    prompts, positions = np.repeat(np.arange(30), 4), np.tile([0, 5, 11, 19], 30)
    means = rng.normal(size=30)[prompts] * 0.5
    true = means + 0.03 * positions + rng.normal(size=120) * 0.4
    values = true + rng.normal(size=120) * 0.3
    returns = true[:, None] + rng.normal(size=(120, 8))
    found = audit(AuditedPrefixes(prompts, positions, *[values] * 3, true, means, returns), num_resamples=40)
    found = dataclasses.replace(found, **changes)
    found.save(folder)
    return found


@pytest.fixture
def runs(tmp_path: Path) -> list[Path]:
    """Two seeds of one setting, one of them judged, and one run of another."""
    seeds = [make_run(tmp_path / f"ours-seed{seed}", seed) for seed in (0, 1)]
    judge_run(seeds[0] / "judged")
    other = make_run(tmp_path / "other", 2, kl_coef=0.5)
    audit_run(seeds[1])
    audit_run(other, seed=1, findings=[f"{HOSTILE} is off."])
    return [*seeds, other]


class Page(html.parser.HTMLParser):
    """What a parser of HTML makes of the page."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: dict[str, str] = {}
        self.inside = ""
        self.feed(path.read_text(encoding="utf-8"))
        self.data = json.loads(self.texts["data"])

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self.inside = str(self.tags[-1][1].get("id")) if tag == "script" else ""

    def handle_endtag(self, tag: str) -> None:
        self.inside = ""

    def handle_data(self, data: str) -> None:
        if self.inside:
            self.texts[self.inside] = self.texts.get(self.inside, "") + data


def page_of(runs: list[Path], tmp_path: Path, verdicts: Sequence[Path] = ()) -> Page:
    return Page(write_report(runs, tmp_path / "new" / "report.html", verdicts))


def test_the_curves_are_those_of_the_log(runs: list[Path], tmp_path: Path) -> None:
    data = page_of(runs, tmp_path).data
    assert [(group["label"], group["runs"], group["seeds"]) for group in data["groups"]] == [
        ("ours", [0, 1], [0, 1]),
        ("other", [2], [2]),
    ]
    metrics = {metric["key"]: metric["curves"] for metric in data["metrics"]}
    logged = {key for entry in log_of(0) for key in entry if not key.startswith("health/")}
    assert metrics.keys() == {*map(visible, logged - {"step", "episode", "epoch", "train_runtime"})}
    logs = [log_of(seed)[:4] for seed in (0, 1, 2)]
    seeds, single = metrics["objective/kl"]
    assert single["mean"] == [entry["objective/kl"] for entry in logs[2]] and single["std"] == [0.0] * 4
    assert single["step"] == list(UPDATES) and single["episode"] == [8, 16, 24, 32]
    pairs = [[log[update]["objective/kl"] for log in logs[:2]] for update in range(4)]
    assert seeds["mean"] == pytest.approx([statistics.mean(pair) for pair in pairs])
    assert seeds["std"] == pytest.approx([statistics.stdev(pair) for pair in pairs])
    assert metrics["eval_score"][1] == {"step": [4], "episode": [32], "mean": [2.5], "std": [0.0]}
    assert metrics["time/generate"][1]["mean"] == [0.5, None, 0.5, 0.5]


def test_the_verdict_is_the_judges_or_says_what_the_log_shows(runs: list[Path], tmp_path: Path) -> None:
    judged, not_judged = page_of(runs, tmp_path).data["verdicts"]
    assert judged["outcome"] == "undecided" and judged["win_rate"] == pytest.approx(0.6)
    assert not_judged["outcome"] == "not judged" and not_judged["win_rate"] is None
    assert not_judged["sentence"] == "The score went from 2.33 to 3.33, at a KL of 1.2 nats per response."
    assert not_judged["reasons"][0] == "No judge compared this policy with the SFT model."
    for kl, words in ((0, "The score rose from 0 to 3 (95% interval 3 to 3)"), (1, "The score fell from 1 to -3")):
        log = [{"step": step, "objective/scores": -3.0 if kl else 3.0, "objective/kl": kl} for step in range(9)]
        write_log(runs[2], [{"step": 0, "objective/scores": float(kl), "objective/kl": kl}, *log[1:]])
        assert words in page_of(runs, tmp_path).data["verdicts"][1]["sentence"]


def test_key_figures_are_the_first_log_and_the_mean_of_the_last_with_its_interval(
    runs: list[Path], tmp_path: Path
) -> None:
    alone = make_run(tmp_path / "alone", 3, kl_coef=0.9)
    ended = [1.0, 0.9, 0.8, 0.7, 1.0, 1.0, 0.85]
    write_log(
        alone, [{"step": step, "objective/kl": 0, "response/ended_frac": each} for step, each in enumerate(ended)]
    )
    page = page_of([*runs, alone], tmp_path)
    figures = {figure["key"]: figure for figure in page.data["figures"]}

    assert list(figures) == [
        "objective/scores", "eval_score", "objective/kl", "response/ended_frac", "policy/entropy_avg"
    ]  # fmt: skip
    seeds, four_logs, _ = figures["objective/scores"]["groups"]
    half = 12.706 * 0.5  # seeds that end at 4/3 and 7/3: Student's t with one degree of freedom, times the error
    assert seeds == {name: pytest.approx(value) for name, value in zip(
        ("first", "last", "low", "high"), (5 / 6, 11 / 6, 11 / 6 - half, 11 / 6 + half), strict=True
    )}  # fmt: skip
    assert four_logs == {"first": pytest.approx(7 / 3), "last": pytest.approx(10 / 3), "low": None, "high": None}
    assert figures["eval_score"]["groups"] == [
        {"first": None, "last": 1.0, "low": pytest.approx(1 - half), "high": pytest.approx(1 + half)},
        {"first": None, "last": 2.5, "low": None, "high": None},
        None,
    ]
    mean, error = 0.95, statistics.stdev([1.0, 1.0, 0.85]) / 3**0.5
    assert figures["response/ended_frac"]["groups"] == [
        None,
        None,
        {"first": 1.0, "last": pytest.approx(mean), "low": pytest.approx(mean - 4.303 * error), "high": 1.0},
    ]  # fmt: skip


def test_score_against_kl_is_the_mean_over_seeds_and_over_stretches_of_updates(
    runs: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seeds, _ = page_of(runs, tmp_path).data["frontier"]
    assert seeds == [
        {"step": step, "kl": pytest.approx(0.15 * step), "score": pytest.approx(0.5 + step / 3)} for step in UPDATES
    ]
    monkeypatch.setattr(report, "MAX_FRONTIER", 2)
    seeds, _ = page_of(runs, tmp_path).data["frontier"]
    assert seeds == [
        {"step": 2, "kl": pytest.approx(0.225), "score": pytest.approx(1.0)},
        {"step": 4, "kl": pytest.approx(0.525), "score": pytest.approx(0.5 + 7 / 6)},
    ]
    write_log(runs[2], [{"step": 1, "objective/kl": 1.0}])
    assert page_of(runs, tmp_path).data["frontier"][1] == []


def test_health_checks_say_when_they_fired_and_what_they_said(runs: list[Path], tmp_path: Path) -> None:
    entropy, ratio, win_rate = page_of(runs, tmp_path).data["runs"][0]["health"]
    said = [{"step": 3, "words": "the entropy has fallen from 2 to 0.1 nats per token"}]
    assert entropy == {"check": "entropy", "first": 3, "last": 4, "fired": 2, "logs": 4, "said": said}
    assert ratio == {"check": "ratio", "first": None, "last": None, "fired": 0, "logs": 4, "said": []}
    assert (win_rate["check"], win_rate["fired"], win_rate["logs"]) == ("win_rate", 0, 1)


def test_the_audit_of_a_critic_is_that_of_its_file(runs: list[Path], tmp_path: Path) -> None:
    found = audit_run(runs[1])
    without, one, other = (run["critic"] for run in page_of(runs, tmp_path).data["runs"])
    assert without is None and other["findings"] == [f"{VISIBLE} is off."] and one["findings"] == found.findings
    assert one["figures"]["tau"] == found.figures["tau"]._asdict() and one["calibration"] == found.calibration
    assert (one["by_position"], one["num_prefixes"]) == (found.by_position, 120)


def test_samples_and_responses_are_those_of_the_files(runs: list[Path], tmp_path: Path) -> None:
    run = page_of(runs, tmp_path).data["runs"][1]
    assert [table["step"] for table in run["samples"]] == list(UPDATES)
    assert run["samples"][2]["rows"] == [
        {"prompt": VISIBLE, "response": f"{VISIBLE} 3", "score": 3.0},
        {"prompt": "second", "response": "", "score": None},
    ]
    table = runs[1] / "_samples/update-00001.csv"
    pd.DataFrame({"query": ["q"] * 2, "model response": ["a"] * 2, "score": [0.0, -1.0]}).to_csv(table, index=False)
    first, *_ = page_of(runs, tmp_path).data["runs"][1]["samples"]
    assert [row["score"] for row in first["rows"]] == [0.0, -1.0]
    assert [(update["step"], update["kept"], len(update["rows"])) for update in run["responses"]] == [
        (step, 10, 10) for step in UPDATES
    ]
    row = run["responses"][0]["rows"][4]
    assert row["text"] == [VISIBLE, " gap", "", " end"] and row["written"] == [True, False, True, True]
    assert list(row["tokens"]) == ["value", "advantage", "kl", "reward"]
    assert all(figures == [0.1235, None, -1.0, None] for figures in row["tokens"].values())
    assert row["prompt"] == f"{VISIBLE} 4" and row["score"] == pytest.approx(1.4) and row["rewards"]["b"] is None


def test_what_the_judge_said_is_that_of_its_files(runs: list[Path], tmp_path: Path) -> None:
    more, again = tmp_path / "kept", runs[0] / "judged" / "judged.parquet"
    for times in (1, 50):
        judge_run(more, times)
    page = page_of(runs, tmp_path, [more, again])
    inside, one, many = page.data["judged"]
    assert [each["name"] for each in (inside, one, many)] == ["ours-seed0/judged", "kept", "kept-2"]
    assert [inside[name] for name in ("wins", "losses", "ties", "failed")] == [2, 1, 2, 2]
    assert inside["win_rate"] == pytest.approx(3 / 5) and inside["agreement"] == pytest.approx(4 / 5)
    assert (inside["model"], inside["opponent"], inside["judge"]) == ("runs/ppo", "chosen", "gpt")
    assert [row["outcome"] for row in inside["rows"]] == OUTCOMES and "hf_secret" not in page.texts["data"]
    tie = inside["rows"][3]
    assert (tie["first"], tie["second"], tie["verdict"]) == (1.0, -1.0, 0.0)
    assert tie["model"] == f"{VISIBLE} 3" and tie["opponent"] == "xxx" and inside["rows"][6]["opponent"] is None
    assert len(many["rows"]) == 5 * judgements.MAX_PAIRS and (many["wins"], many["failed"]) == (100, 100)


def test_win_rates_that_differ_in_the_seed_have_a_mean(runs: list[Path], tmp_path: Path) -> None:
    other, alone = (judge_run(tmp_path / f"judge-seed{seed}", seed=seed) for seed in (1, 2))
    for path, changed in ((other, {"win_rate": 0.8}), (alone, {"options": {"judge_model": "another", "seed": 2}})):
        figures = path.with_name("win_rate.json")
        figures.write_text(json.dumps(json.loads(figures.read_text()) | changed))
    (mean,) = page_of(runs, tmp_path, [other, alone]).data["judged_seeds"]

    assert mean["names"] == ["ours-seed0/judged", "judge-seed1"]
    assert mean["mean"] == pytest.approx(0.7) and mean["standard_error"] == pytest.approx(0.1)
    assert page_of(runs, tmp_path, [judge_run(tmp_path / "same")]).data["judged_seeds"] == []  # the same seed twice


def test_settings_tell_what_is_not_the_default_and_no_secret(runs: list[Path], tmp_path: Path) -> None:
    page = page_of(runs, tmp_path)
    rows = {row["name"]: row for row in page.data["settings"]}
    kl_coef = rows["kl_coef"]
    assert kl_coef.pop("help").startswith("Coefficient of the per-token KL penalty")
    assert kl_coef == {
        "name": "kl_coef", "values": ["0.05", "0.5"], "default": "0.05", "changed": True, "differs": True
    }  # fmt: skip
    assert rows["stop_strings"]["values"] == ["</a>, ."] * 2 and rows["stop_token"]["values"] == ["not set"] * 2
    assert rows["output_dir"]["differs"] is False and rows["seed"]["differs"] is True
    assert not rows["report_to"]["changed"] and "reward_funcs" not in rows
    assert rows["gamma"]["values"] == ["1", "1"] and not rows["gamma"]["changed"]  # the default is 1.0
    assert "hub_token" not in rows and "hf_secret" not in page.texts["data"]
    assert page.data["versions"] == {"torch": "2.13.0"}


def test_hostile_texts_stay_text_and_nothing_is_fetched(runs: list[Path], tmp_path: Path) -> None:
    page = page_of(runs, tmp_path)
    source = (tmp_path / "new" / "report.html").read_text(encoding="utf-8")
    assert [tag for tag, _ in page.tags].count("script") == 1 + len(SCRIPTS) and "img" not in [
        tag for tag, _ in page.tags
    ]
    assert not any(name.startswith("on") or name == "src" for _, attributes in page.tags for name in attributes)
    assert "window.hacked" not in re.sub(r"\\u003c/script\\u003e\\u003cscript\\u003ewindow.hacked", "", source)
    policy = next(
        attributes["content"]
        for tag, attributes in page.tags
        if tag == "meta" and "content" in attributes and "default-src" in str(attributes["content"])
    )
    assert str(policy).startswith("default-src 'none'")
    links = [str(attributes.get("href")) for tag, attributes in page.tags if "href" in attributes]
    assert all(link.startswith(("#", "data:")) for link in links)


def test_a_long_run_stays_a_page_that_opens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = make_run(tmp_path / "long")
    lines = [json.dumps({"step": step, "episode": 8 * step, "objective/kl": step / 7}) for step in range(1, 5001)]
    (run / "log_history.jsonl").write_text("\n".join(lines) + "\n")
    monkeypatch.setattr(report, "MAX_TOKENS", 48)
    monkeypatch.setattr(report, "MAX_UPDATES", 3)
    data = page_of([run], tmp_path).data
    curve = data["metrics"][0]["curves"][0]
    assert 900 <= len(curve["step"]) <= report.MAX_POINTS and curve["step"][0] == 1 and curve["step"][-1] == 5000
    assert all(mean == step / 7 for step, mean in zip(curve["step"], curve["mean"], strict=True))
    shown = [(update["step"], update["kept"], len(update["rows"])) for update in data["runs"][0]["responses"]]
    assert shown == [(1, 10, 4), (3, 10, 4), (4, 10, 4)]  # 48 tokens: 3 updates of 4 responses of 4


def write_log(run: Path, entries: list[dict[str, Any]]) -> None:
    (run / "log_history.jsonl").write_text("".join(f"{json.dumps(entry)}\n" for entry in entries))


def test_a_curve_that_is_thinned_out_keeps_its_extremes(tmp_path: Path) -> None:
    """One spike up and one down in each of two seeds, which differ for one update only."""
    spikes, runs = {1234: 9.0, 3210: -8.0}, []
    for seed in (0, 1):
        runs.append(make_run(tmp_path / f"ours-seed{seed}", seed))
        apart = {2500: 20.0 * (2 * seed - 1)}
        values = ({**spikes, **apart}.get(step, step / 5001) for step in range(1, 5001))
        entries = [{"step": step, "episode": 8 * step, "objective/kl": kl} for step, kl in enumerate(values, start=1)]
        write_log(runs[-1], entries)
    for shown in (runs[:1], runs):
        curve = page_of(shown, tmp_path).data["metrics"][0]["curves"][0]
        drawn = dict(zip(curve["step"], zip(curve["mean"], curve["std"], strict=True), strict=True))
        assert len(drawn) <= report.MAX_POINTS and {1, 1234, 2500, 3210, 5000} <= drawn.keys()
        assert drawn[1234][0] == 9.0 and drawn[3210][0] == -8.0
    assert drawn[2500] == (0.0, pytest.approx(800**0.5))


def test_smoothing_of_a_thinned_curve_reads_the_mean_around_each_point(tmp_path: Path) -> None:
    """A curve of 10 and 0 in turn, of which the extremes are drawn, is smoothed to its mean; gaps do not count."""
    run = make_run(tmp_path / "long")
    kls = [math.nan if step % 100 == 0 else 10.0 * (step % 2) for step in range(1, 5001)]
    write_log(run, [{"step": step, "objective/kl": kl} for step, kl in enumerate(kls, start=1)])
    (curve,) = page_of([run], tmp_path).data["metrics"][0]["curves"]
    assert {*curve["mean"]} <= {0.0, 10.0, None} and len(curve["level"]) == len(curve["mean"]) < 1000
    assert statistics.mean(curve["level"]) == pytest.approx(5, abs=0.2)
    short = report.curve([log_of(0)], "objective/kl", {})
    assert short is not None and "level" not in short  # all points are drawn


@pytest.mark.parametrize("values", [[math.nan] * 3000, [math.nan, 1.0] * 1500])
def test_gaps_of_a_long_curve_are_no_extremes(values: list[float]) -> None:
    means = np.array(values)
    kept = report.drawn_points(means, np.zeros(3000))
    assert len(kept) <= report.MAX_POINTS and kept[0] == 0 and kept[-1] == 2999
    assert np.isnan(means).all() or (~np.isnan(means[kept])).sum() > 400


def test_the_work_of_a_report_grows_as_the_log_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls are counted, and the numbers that NumPy is given."""
    monkeypatch.setattr(report, "MAX_POINTS", 20)
    interpolated, interp = 0, np.interp

    def counted(x: Any, xp: Any, fp: Any) -> Any:
        nonlocal interpolated
        interpolated += np.size(x) + np.size(xp)
        return interp(x, xp, fp)

    monkeypatch.setattr(np, "interp", counted)

    def work(num_updates: int) -> tuple[int, int]:
        nonlocal interpolated
        run, calls, interpolated = make_run(tmp_path / f"long{num_updates}"), 0, 0
        first, *_, evaluation, _ = log_of(0)
        fires = {f"health/{check.name}": 1.0 for check in CHECKS if check.reads == "updates"}
        at = [{"step": step, "episode": 8 * step} for step in range(1, num_updates + 1)]
        write_log(run, [each for place in at for each in ({**first, **place, **fires}, {**evaluation, **place})])

        def count(frame: Any, event: str, argument: Any) -> None:
            nonlocal calls
            calls += event in ("call", "c_call")

        sys.setprofile(count)
        try:
            write_report([run], tmp_path / "report.html")
        finally:
            sys.setprofile(None)
        return calls, interpolated

    small, middle, large = work(200), work(400), work(800)
    for first, second, third in zip(small, middle, large, strict=True):
        assert third - second < 2.2 * (second - first)


def test_what_a_run_writes_makes_a_report(
    make_trainer: Any, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Without checkpoint or saved state, as of a run that goes on."""
    trainer = make_trainer(**QUICK, num_sample_generations=2)
    trainer.train()
    main(["report", str(trainer.args.output_dir), "--output", str(tmp_path / "a.html")])
    assert capsys.readouterr().out.splitlines()[-1] == f"The report is in {tmp_path / 'a.html'}."
    data = Page(tmp_path / "a.html").data
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    for metric in data["metrics"]:
        assert metric["curves"][0]["mean"] == [entry[metric["key"]] for entry in logs], metric["key"]
    assert [update["step"] for update in data["runs"][0]["responses"]] == [1, 2, 3]
    settings = {row["name"]: row for row in data["settings"]}
    assert settings["response_length"]["values"] == ["4"] and settings["response_length"]["changed"]
    assert settings["rewards"]["values"] == ["count_w4"] and not settings["gamma"]["changed"]


# ---- Watching a run ----


def refresh_of(path: Path) -> float | None:
    return Page(path).data["refresh_seconds"]


def test_a_watched_report_follows_the_run_until_it_ends(tmp_path: Path) -> None:
    """The run has no log at first; its lock is released at its end."""
    run, path = make_run(tmp_path / "one"), tmp_path / "report.html"
    log = (run / "log_history.jsonl").read_text()
    (run / "log_history.jsonl").unlink()

    def wait_for(step: int) -> None:
        deadline = time.monotonic() + 30
        while not path.exists() or Page(path).data["runs"][0]["last_step"] != step:
            assert watching.is_alive() and time.monotonic() < deadline
            time.sleep(0.01)

    watching = threading.Thread(target=watch_report, args=([run], path), kwargs={"seconds": 0.01})
    with locked(str(run)):
        watching.start()
        time.sleep(0.1)
        assert not path.exists()
        (run / "log_history.jsonl").write_text(log)
        wait_for(4)
        with open(run / "log_history.jsonl", "a") as file:
            file.write(json.dumps({**log_of(0)[0], "step": 5}) + "\n")
        wait_for(5)
        assert refresh_of(path) == 0.01
    watching.join(30)
    assert not watching.is_alive() and refresh_of(path) is None


def test_a_watched_run_may_begin_with_an_evaluation(tmp_path: Path) -> None:
    """With `eval_on_start` the first log is of no update."""
    run = make_run(tmp_path / "one")
    write_log(run, [{"eval_score": 0.25, "eval_runtime": 1.0, "step": 0}])
    (run / "trainer_state.json").unlink(missing_ok=True)
    data = Page(write_report([run], tmp_path / "report.html")).data
    assert data["runs"][0]["last_step"] == 0 and [figure["key"] for figure in data["figures"]] == ["eval_score"]


def test_ctrl_c_ends_the_watching_with_a_page_that_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, path = make_run(tmp_path / "one"), tmp_path / "report.html"

    def interrupt(seconds: float) -> None:
        assert refresh_of(path) == seconds == 10
        raise KeyboardInterrupt

    monkeypatch.setattr("rlhf_ppo.reporting.report.time.sleep", interrupt)
    with locked(str(run)):
        main(["report", str(run), "--watch", "--output", str(path)])
    assert refresh_of(path) is None


def test_a_run_of_another_process_is_in_use_until_that_process_ends(tmp_path: Path) -> None:
    hold = "import fcntl, sys; file = open(sys.argv[1], 'w'); fcntl.lockf(file, fcntl.LOCK_EX)"
    hold += "; print(flush=True); input()"
    lock = tmp_path / LOCK_NAME
    assert not in_use(tmp_path)
    with subprocess.Popen([sys.executable, "-c", hold, lock], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None and other.stdout.readline()
        assert in_use(tmp_path)
        other.communicate(b"\n")
    assert lock.exists() and not in_use(tmp_path)


# ---- Mistakes ----

LOG, TABLE, JUDGED = "log_history.jsonl", "completions/completions_00003.parquet", "judged/judged.parquet"
OF_A_NEWER_VERSION = json.dumps(
    {"arguments": {}, "versions": {}, "made_of": {}, "health": {"thresholds": {"of_tomorrow": 1.0}, "run": {}}}
)


def foreign_table(run: Path) -> bytes:
    """Return a table with the metadata of the run's own, and other columns."""
    pq.write_table(pa.table({"prompt": ["a"]}, metadata=pq.read_schema(run / TABLE).metadata), run / "foreign")
    return (run / "foreign").read_bytes()


@pytest.mark.parametrize(
    ("file", "content", "says"),
    [
        (LOG, None, "one holds no run: there is no trainer_state.json or log_history.jsonl; pass the output_dir"),
        (LOG, "", "one has logged nothing yet"),
        (LOG, '{"loss": 1.0, "step": 1}\n', "one is not a run of PPO: its log has loss, step and nothing of objec"),
        (LOG, '{"step": 1, "objective/kl": 0}\n{"st\n', "log_history.jsonl is damaged: line 2 is not an entry of"),
        ("trainer_state.json", '{"log_history": [{"ste', "trainer_state.json is not a trainer_state.json that Trai"),
        (TABLE, lambda run: (run / TABLE).read_bytes()[:-9], "completions_00003.parquet is damaged"),
        (TABLE, foreign_table, "completions_00003.parquet has no column 'step': it was not written by rlhf_ppo"),
        ("_samples/update-00002.csv", "query,score\na,b\n", "update-00002.csv is damaged"),
        ("ppo_settings.json", '{"arguments": [', "one cannot be read: its ppo_settings.json is cut off or no JSON"),
        ("critic_audit.json", '{"figures": {}}', "critic_audit.json is damaged: its critic_audit.json lacks num_prom"),
        ("ppo_settings.json", OF_A_NEWER_VERSION, "ppo_settings.json that is damaged, or of a newer rlhf_ppo: Type"),
        (JUDGED, lambda run: (run / JUDGED).read_bytes()[:-9], "judged.parquet cannot be read: "),
        (JUDGED, foreign_table, "was not written by `rlhf-ppo judge`: it has no model, opponent, verdict"),
        (JUDGED, None, "judged has no judged.parquet, which `rlhf-ppo judge --output_dir` writes there"),
        ("judged/win_rate.json", None, "judged.parquet has no win rate: it has no win_rate.json"),
    ],
)  # fmt: skip
def test_what_cannot_be_read_is_one_sentence(
    file: str, content: Any, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run(tmp_path / "one")
    judge_run(run / "judged")
    if callable(content):
        (run / file).write_bytes(content(run))
    elif content is None:
        (run / file).unlink()
    else:
        (run / file).write_text(content)
    assert says in sentence_of([str(run), "--judged", str(run / "judged")], tmp_path, capsys)


def test_a_run_that_is_given_twice_is_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = str(make_run(tmp_path / "one"))
    assert "one is given twice; name each run once" in sentence_of([run, f"{run}/../one"], tmp_path, capsys)


def sentence_of(words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """Return the one line with which the command ends, without a report."""
    with pytest.raises(SystemExit, match="2"):
        main(["report", "--output", str(tmp_path / "r.html"), *words])
    [sentence] = capsys.readouterr().err.splitlines()
    assert sentence.startswith("rlhf-ppo report: error: ") and not (tmp_path / "r.html").exists()
    return sentence


# ---- In a browser ----

LINES = "document.querySelectorAll('.panel .line').length"
COLOURS = "[...document.querySelectorAll('.tokens span')].slice(0, 9).map((each) => each.style.background).join()"
SHOWN = "[...document.querySelectorAll('.response .about b')].map((each) => each.textContent).join()"


@pytest.mark.thorough
@pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium")
def test_every_panel_is_drawn_and_every_control_works(runs: list[Path], tmp_path: Path) -> None:
    path = write_report(runs, tmp_path / "report.html", [judge_run(tmp_path / "kept", times=2)])
    num_metrics = len(Page(path).data["metrics"])
    with Browser() as browser:
        for width in (1280, 390):
            browser.open(path, width)
            assert browser.run("document.documentElement.scrollWidth") == width  # nothing sticks out
            bars = "[...document.querySelectorAll('#judged-table .rate')].map((each) => each.clientWidth)"
            assert min(browser.run(bars)) > 180  # an interval that can be read
            browser.run("document.getElementById('others').open = true")
            browser.run("new Promise((done) => setTimeout(done, 50))")  # until its panels are drawn
            assert browser.run("document.querySelectorAll('.panel').length") == num_metrics + 1  # and score against KL
            empty = "[...document.querySelectorAll('.panel')].filter((each) => !each.querySelector('.line')).length"
            assert browser.run(empty) == 0 and browser.run(LINES) == 2 * (num_metrics + 1)
            assert browser.run("document.querySelectorAll('.panel .band').length") == num_metrics
            health = browser.run("document.getElementById('health').innerText")
            assert "What to do: Raise kl_coef, lower learning_rate" in health and "at update 3, last at 4" in health
            assert [f"from 2 to 0.{seed + 1} nats per token" in health for seed in (0, 1, 2)] == [True] * 3
            verdicts = browser.run("document.getElementById('verdicts').innerText")
            assert "Undecided against the column chosen" in verdicts and "No judge compared this policy" in verdicts
            assert "60.0%" in browser.run("document.querySelector('[data-figure=win_rate]').innerText")
            assert "No finding from the other checks: ratio, win_rate." in health
            use_audits(browser)
            use_controls(browser)
        assert browser.complaints == [] and browser.run("window.hacked") is None
        assert {address for address in browser.requests if not address.startswith("data:")} == {path.as_uri()}


@pytest.mark.thorough
@pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium")
def test_runs_that_do_not_differ_in_their_seed_are_not_called_seeds(tmp_path: Path) -> None:
    with Browser() as browser:
        for seeds, called in (((0, 0), "run-0 and 1 more (2 runs)"), ((0, 1), "run (2 seeds)")):
            names = [f"run-{seed}" if len({*seeds}) == 1 else f"run-seed{seed}" for seed in (0, 1)]
            made = [make_run(tmp_path / called / name, seed) for name, seed in zip(names, seeds, strict=True)]
            browser.open(write_report(made, tmp_path / called / "report.html"), 390)
            assert browser.run("document.querySelector('#toggles').textContent") == called


@pytest.mark.thorough
@pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium")
def test_the_spread_of_heads_is_a_colour_of_the_runs_that_have_it(runs: list[Path], tmp_path: Path) -> None:
    spread = {"token_spread": [0.1, None, 0.2, 0.3]}
    for step in UPDATES:
        (runs[1] / f"completions/completions_{step:05d}.parquet").unlink()
        write_completions(runs[1], [response(step, row) | spread for row in range(10)], Run.load(runs[1]))
    with Browser() as browser:
        browser.open(write_report(runs, tmp_path / "report.html"), 390)
        for run, is_hidden in ((1, False), (0, True)):
            choose(browser, "responses-run", run)
            assert browser.run("document.getElementById('colour-spread').hidden") is is_hidden
            if not is_hidden:
                browser.click("#colour-spread input")
                assert "spread of the heads" in browser.run("document.getElementById('legend').innerText")
                assert len({*browser.run(COLOURS).split("rgba")}) > 2
                browser.click(".tokens span", 3)
                assert "spread of the heads 0.3" in browser.run("document.getElementById('inspector').innerText")
        assert browser.run("document.querySelector('input[name=colour]:checked').value") == "value"
        assert browser.complaints == [] and browser.run("document.documentElement.scrollWidth") == 390


@pytest.mark.thorough
@pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium")
def test_the_page_of_a_running_run_reloads_itself_at_the_same_place(tmp_path: Path) -> None:
    run, path = make_run(tmp_path / "one"), tmp_path / "report.html"
    write_report([run], path, refresh_seconds=0.5)
    with Browser() as browser:
        browser.open(path, 390)
        assert browser.run("document.getElementById('live').innerText") == "running"
        choose(browser, "responses-find", "gap")
        choose(browser, "samples-slider", 1)
        browser.click("input[name=colour]", 2)
        browser.run("document.getElementById('others').open = true; scrollTo({top: 1234, behavior: 'instant'})")
        write_log(run, [*log_of(0), {**log_of(0)[0], "step": 5}])
        write_report([run], path)
        loaded = "typeof data === 'object' && data.runs[0].last_step"
        browser.wait_until(f"{loaded} === 5 && document.readyState === 'complete'")
        browser.run("new Promise((done) => setTimeout(done, 200))")
        assert browser.run("scrollY") == 1234
        assert browser.run("document.getElementById('live').hidden")
        assert browser.run("document.getElementById('others').open")
        assert browser.run("document.getElementById('responses-find').value") == "gap"
        assert browser.run("document.querySelector('.tokens .hit') !== null")
        assert browser.run("document.getElementById('samples-step').textContent") == "2"
        assert browser.run("document.getElementById('responses-step').textContent") == "4"  # the last, as before
        assert browser.run("document.querySelector('input[name=colour]:checked').value") == "kl"
        assert browser.complaints == []


def use_audits(browser: Browser) -> None:
    """See the audit of one run, and choose the other's."""
    for run, says in ((1, "No defect found."), (2, "is off.")):
        choose(browser, "critic-run", run)
        assert says in browser.run("document.getElementById('critic-audit').innerText")
        bars = "#critic-audit .rate circle"
        assert browser.run(f"document.querySelectorAll('{bars}').length") == 8 + 5  # figures and positions
        assert browser.run("document.querySelectorAll('#critic-audit .fifth circle').length") == 5
        outside = (
            "[...document.querySelectorAll('#critic-audit .fifth line')].some((each) => each.y1.baseVal.value > 226)"
        )
        assert not browser.run(outside)


def use_controls(browser: Browser) -> None:
    """Use each control once, and see that it does what it says."""
    before = browser.run(LINES)
    browser.click(".chip", 0)
    assert browser.run(LINES) == before // 2 and browser.run("document.querySelectorAll('.band').length") == 0
    browser.click(".chip", 0)
    assert browser.run(LINES) == before

    axis = "document.querySelector('[data-metric=\"objective/kl\"] svg').textContent"
    steps = browser.run(axis)
    choose(browser, "axis", "episode")
    assert browser.run(axis) != steps
    choose(browser, "axis", "step")

    choose(browser, "find", "KL to")
    names = "[...document.querySelectorAll('.panel h4')].map((each) => each.textContent).join()"
    assert browser.run(names) == "objective/kl"
    choose(browser, "find", "")

    for name, what in (("samples", "#samples-list"), ("responses", "#histogram")):
        texts = set()
        for place, update in enumerate(UPDATES):
            choose(browser, f"{name}-slider", place)
            assert browser.run(f"document.getElementById('{name}-step').textContent") == str(update)
            texts.add(browser.run(f"document.querySelector('{what}').innerHTML"))
        assert len(texts) == len(UPDATES)

    by_colour = set()
    for place in range(4):
        browser.click("input[name=colour]", place)
        by_colour.add(browser.run("document.getElementById('legend').textContent"))
    assert len(by_colour) == 4 and "rgba" in browser.run(COLOURS)

    assert browser.run(SHOWN) == "4,4.1,4.2,4.3,4.4,4.5"
    browser.click("#more")
    assert browser.run(SHOWN) == "4,4.1,4.2,4.3,4.4,4.5,4.6,4.7,4.8,\u2013"
    choose(browser, "order", "worst")
    assert browser.run(SHOWN) == "4,4.1,4.2,4.3,4.4,4.5,4.6,4.7,4.8,\u2013"
    choose(browser, "order", "best")
    assert browser.run(SHOWN) == "4.8,4.7,4.6,4.5,4.4,4.3,4.2,4.1,4,\u2013"
    browser.click("#histogram rect[tabindex]", 0)
    assert browser.run(SHOWN) == "4"
    browser.click("#histogram rect[tabindex]", 0)

    unfold, is_folded = "#response-list .unfold", "document.querySelectorAll('#response-list .folded').length"
    assert browser.run(is_folded) == 1 and browser.run(f"document.querySelectorAll('{unfold}').length") == 1
    browser.click(unfold)
    assert (
        browser.run(is_folded) == 0 and browser.run(f"document.querySelector('{unfold}').textContent") == "Show less"
    )
    browser.click(unfold)
    assert browser.run(is_folded) == 1

    browser.click(".tokens span", 3)
    assert browser.run("document.getElementById('inspector').textContent").startswith(
        " end token 4, id 1 · value \u2013"
    )
    browser.press("ArrowLeft", 37)
    assert "(part of a character) token 3, id 7 · value \u22121" in browser.run(
        "document.getElementById('inspector').textContent"
    )
    browser.press("ArrowLeft", 37)
    assert "not written by the policy" in browser.run("document.getElementById('inspector').textContent")

    outcomes = "[...document.querySelectorAll('#judged-list .sample')].map((each) => each.dataset.outcome).join()"
    filters = "[...document.querySelectorAll('#judged-filter option')].map((each) => each.value).join()"
    assert browser.run(filters) == "all,model,opponent,tie,contradicted,none"
    for name, wanted in (("model", "model,model"), ("contradicted", "tie"), ("none", "none,none")):
        choose(browser, "judged-filter", name)
        assert browser.run(outcomes) == wanted
    choose(browser, "judged-of", 1)
    assert browser.run(outcomes) == ",".join([*OUTCOMES, "model"])
    browser.click("#judged-more")
    assert len(browser.run(outcomes).split(",")) == 14
    told = "document.getElementById('judged-table').textContent"
    assert "mean" not in browser.run(told)  # one seed only
    assert "60.0%" in browser.run(told) and "runs/ppo against chosen, judged by gpt" in browser.run(told)

    choose(browser, "judged-find", "x" * 10)
    assert browser.run(outcomes) == "tie,tie,none,none"
    assert browser.run("document.querySelectorAll('#judged-list mark').length") == 4

    choose(browser, "responses-run", "2")
    choose(browser, "samples-run", "1")
    search_responses(browser)
    change_charts(browser)
    browser.click("#settings-tables summary")
    choose(browser, "settings-find", "kl_c")
    assert browser.run("document.querySelector('#settings-tables details tbody').rows.length") == 1
    choose(browser, "settings-find", "")
    changed = (
        "[...document.querySelectorAll('#changed tbody tr')].map((each) => each.cells[0].firstChild.firstChild.data)"
    )
    assert "kl_coef" in browser.run(changed)
    chosen = browser.run("document.getElementById('chosen').innerText")
    assert "kl_coef 0.05 0.5" in " ".join(chosen.split()) and "stop_strings </a>, ." in chosen and "seed" not in chosen


def search_responses(browser: Browser) -> None:
    """Search a text that crosses tokens, in all updates, and one that no response has."""
    choose(browser, "responses-find", "GAP END")
    rows = "document.querySelectorAll('.response').length"
    assert browser.run("document.getElementById('found-in').textContent") == "Found at update" + "".join(
        f"{step}: 10 of 10" for step in UPDATES
    )
    assert browser.run("[...document.querySelectorAll('.tokens')[0].children].map((each) => each.className)") == [
        "", "hit gap", "hit part", "hit"
    ]  # fmt: skip
    browser.click("#found-in button", 1)
    assert browser.run("document.getElementById('responses-step').textContent") == str(UPDATES[1])
    choose(browser, "responses-find", "}} <!-- \U0001f600 7")
    assert browser.run(rows) == 1 and browser.run("document.querySelectorAll('.response mark').length") == 1
    choose(browser, "responses-find", "no such text")
    assert browser.run(rows) == 0 and "No response matches." in browser.run("document.body.innerText")
    choose(browser, "responses-find", "")


def change_charts(browser: Browser) -> None:
    """Smooth, change to a log axis, read health marks, enlarge, and download."""
    panel = "document.querySelector('[data-metric=\"objective/kl\"]')"
    line = f"{panel}.querySelector('.line').getAttribute('points')"
    plain = browser.run(line)
    choose(browser, "smoothing", 0.5)
    smoothed = browser.run(line)
    assert smoothed != plain and browser.run(f"{panel}.querySelectorAll('.raw').length") == 2
    y = [[float(point.split(",")[1]) for point in points.split()] for points in (plain, smoothed)]
    assert y[1][0] == y[0][0] and y[1][1] == pytest.approx((y[0][0] + 2 * y[0][1]) / 3, abs=0.11)  # 1/4 to 1/2
    choose(browser, "smoothing", 0)

    browser.click("#log")
    assert browser.run(line) != plain
    browser.click("#log")
    assert browser.run(line) == plain

    marks = "document.querySelectorAll('[data-metric=\"objective/kl\"] .mark').length"
    assert browser.run(marks) == 3  # one in each run
    title = browser.run(f"{panel}.querySelector('.mark title').textContent")
    assert title == "entropy, update 3: the entropy has fallen from 2 to 0.1 nats per token"
    browser.click("#marks")
    assert browser.run(marks) == 0
    browser.click("#marks")

    browser.click('[data-metric="objective/kl"] svg')
    opened = "document.getElementById('large').open && document.getElementById('large-title').textContent"
    assert browser.run(opened) == "objective/kl"
    assert browser.run("document.querySelectorAll('#large-chart .line').length") == 2
    assert browser.run("document.documentElement.scrollWidth <= innerWidth")
    browser.run("document.activeElement.blur()")
    browser.click("#large-after")
    assert browser.run(opened) not in (False, "objective/kl")
    browser.click("#large-before")
    browser.click("#large-chart .mark")
    assert "entropy: the entropy has fallen" in browser.run("document.getElementById('large-says').textContent")
    kept = downloads(browser, "#large-png", "#large-csv")
    assert [name for name, _ in kept] == ["objective-kl.png", "objective-kl.csv"]
    assert kept[0][1].startswith(b"\x89PNG") and len(kept[0][1]) > 10_000
    lines = kept[1][1].decode().splitlines()
    assert lines[0] == "run,step,episode,mean,std" and lines[-1].startswith("other,4,32,1.2")
    assert len(lines) == 9 and lines[1].startswith("ours (2 seeds),1,8,0.15")
    browser.click("#large-close")
    assert browser.run(opened) is False

    (kept,) = downloads(browser, '[data-metric="score against KL"] .tools button:nth-child(3)')
    assert kept[0] == "score-against-KL.csv" and kept[1].startswith(b"run,step,kl,score\r\n")


def downloads(browser: Browser, *selectors: str) -> list[tuple[str, bytes]]:
    """Click on buttons that download, and return the names and contents of the files."""
    found = []
    with tempfile.TemporaryDirectory() as folder:
        browser.save_downloads(folder)
        for selector in selectors:
            browser.click(selector)
            for _ in range(100):
                if files := [path for path in Path(folder).iterdir() if path.suffix in (".png", ".csv")]:
                    found.append((files[0].name, files[0].read_bytes()))
                    files[0].unlink()
                    break
                browser.run("new Promise((done) => setTimeout(done, 50))")
    return found


def choose(browser: Browser, name: str, value: str | float) -> None:
    """Give a menu, a slider or a field a value, as a user does."""
    browser.run(
        f"(() => {{ const it = document.getElementById('{name}'); it.value = {json.dumps(value)};"
        "for (const kind of ['input', 'change']) it.dispatchEvent(new Event(kind, {bubbles: true})); })()"
    )
