"""The report: its data are those of the log, and its texts stay texts."""

from __future__ import annotations

import html.parser
import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from rlhf_ppo.cli.main import main
from rlhf_ppo.reporting import report
from rlhf_ppo.reporting.completion_files import TOKEN_VALUES, write_completions
from rlhf_ppo.reporting.critic_audit import AuditedPrefixes, audit
from rlhf_ppo.reporting.plots import plot_metrics
from rlhf_ppo.reporting.report import SCRIPTS, first_and_last, report_data, write_report
from rlhf_ppo.reporting.run_log import RecordedRun, RunSettings
from rlhf_ppo.terminal import visible
from tests.runs import QUICK

HOSTILE = "</script><script>window.hacked=1</script><img src=x onerror='hacked=1'>\u2028 \"&amp; {{ 7 * 7 }} <!--"
UPDATES = (1, 2, 3, 4)


def log_of(seed: int) -> list[dict[str, Any]]:
    """Four logs of training and an evaluation."""
    entries: list[dict[str, Any]] = [
        {
            "step": step, "episode": 8 * step, "epoch": step / 9, "loss": 0.1, "objective/scores": seed + step / 3,
            "lr": 0.1, "learning_rate": 0.1, "objective/kl": 0.1 * step * (seed + 1),
            "time/generate": float("nan") if step == 2 else 0.5, "rewards/" + HOSTILE + "/mean": 1.0,
            "health/entropy": float(step == 4), "health/kl": 0.0,
            "policy/entropy_avg": (seed + 1) / 100 if step >= 2 else 2.0,
        }
        for step in UPDATES
    ]  # fmt: skip
    return [*entries, {"step": 4, "eval_score": 0.5 + seed}, {"step": 4, "train_runtime": 3.0, "train_loss": 0.1}]


def response(step: int, index: int) -> dict[str, Any]:
    figures = [0.1234567 * (index - 3), None, -1.0, float("inf")]
    return {
        "step": step, "prompt": f"{HOSTILE} {index}", "completion": "abc", "score": index / 10 + step,
        "rewards/a": 1.0, "kl": 0.5, "length": 3, "ended": index % 2 == 0, "extra/note": HOSTILE, "prompt_id": [5],
        "token_id": [5, 6, 7, 1], "token_text": [HOSTILE, " gap", "", " end"],
        "token_written": [True, False, True, True], **{name: figures for name in TOKEN_VALUES},
    }  # fmt: skip


def make_run(folder: Path, seed: int = 0, **arguments: Any) -> Path:
    """Write what a run leaves behind."""
    (folder / "_samples").mkdir(parents=True)
    (folder / "trainer_state.json").write_text(json.dumps({"log_history": log_of(seed)}))
    given = {"seed": seed, "output_dir": str(folder), "kl_coef": 0.05, "gamma": 1, "hub_token": "hf_secret"}
    settings = {
        "arguments": given | {"stop_strings": ["</a>", "."], "stop_token": None} | arguments,
        "versions": {"torch": "2.13.0"},
        "made_of": {"policy": "a/b", "rewards": [HOSTILE], "reward_funcs": [None]},
        "health": {"num_episodes": 8},
    }
    (folder / "ppo_settings.json").write_text(json.dumps(settings))
    for step in UPDATES:
        write_completions(folder, [response(step, index) for index in range(10)])
        table = {"query": [HOSTILE, "second"], "model response": [f"{HOSTILE} {step}", ""], "score": [step, None]}
        pd.DataFrame(table).to_csv(folder / f"_samples/update-{step:05d}.csv", index=False)
    return folder


@pytest.fixture
def runs(tmp_path: Path) -> list[Path]:
    """Two seeds of one setting, one of them audited, and one run of another."""
    seeds = [make_run(tmp_path / f"ours-seed{seed}", seed) for seed in (0, 1)]
    rng = np.random.default_rng(0)
    true = rng.normal(size=120)
    returns = true[:, None] + rng.normal(size=(120, 8))
    prefixes = AuditedPrefixes(np.repeat(np.arange(30), 4), true, np.zeros(120), returns)
    audit(prefixes, num_resamples=40).save(seeds[1])
    return [*seeds, make_run(tmp_path / "other", 2, kl_coef=0.5)]


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


def test_the_page_has_the_log_and_the_files_of_the_runs(runs: list[Path], tmp_path: Path) -> None:
    data = Page(write_report(runs, tmp_path / "new" / "report.html")).data
    assert [(group["label"], group["runs"]) for group in data["groups"]] == [("ours", [0, 1]), ("other", [2])]
    metrics = {metric["key"]: metric["curves"] for metric in data["metrics"]}
    assert "lr" in metrics and "learning_rate" not in metrics  # the same curve
    ours, other = metrics["objective/scores"]
    assert ours["step"] == [1, 2, 3, 4] and ours["episode"] == [8, 16, 24, 32]
    assert ours["mean"] == pytest.approx([0.5 + step / 3 for step in UPDATES])
    assert ours["std"] == pytest.approx([0.5**0.5] * 4) and other["std"] == [0.0] * 4
    assert metrics["time/generate"][0]["mean"][1] is None and metrics["eval_score"][0]["episode"] == [32]
    assert data["verdicts"][0]["sentence"].startswith("The score")
    [entropy] = [each for each in data["runs"][0]["health"] if each["check"] == "entropy"]
    assert (entropy["first"], entropy["last"], entropy["fired"], entropy["logs"]) == (4, 4, 1, 4)
    assert [(each["step"], "from 2 to 0.01" in each["words"]) for each in entropy["said"]] == [(4, True)]
    assert data["runs"][0]["critic"] is None
    assert (
        data["runs"][1]["critic"]["figures"]["tau"]
        == json.loads((runs[1] / "critic_audit.json").read_text())["figures"]["tau"]
    )
    samples = data["runs"][2]["samples"]
    assert [table["step"] for table in samples] == [1, 2, 3, 4]
    assert samples[1]["rows"][0] == {"prompt": visible(HOSTILE), "response": f"{visible(HOSTILE)} 2", "score": 2.0}
    assert samples[1]["rows"][1]["score"] is None
    row = data["runs"][2]["responses"][3]["rows"][2]
    assert (row["score"], row["kl"], row["length"], row["ended"]) == (pytest.approx(4.2), 0.5, 3, True)
    assert row["id"] == [5, 6, 7, 1] and row["extra"] == {"note": visible(HOSTILE)}
    assert row["tokens"]["advantage"] == [pytest.approx(-0.1235), None, -1.0, None]
    settings = {row["name"]: row for row in data["settings"]}
    assert settings["kl_coef"]["differs"] and settings["kl_coef"]["values"] == ["0.05", "0.5"]
    assert not settings["gamma"]["changed"] and "hub_token" not in settings


def add_judgement(run: Path, seed: int) -> None:
    """Write what `rlhf-ppo judge` leaves behind: one pair, won."""
    figures = {"win_rate": 1.0, "interval": [0.8, 1.0], "wins": 1, "losses": 0, "ties": 0, "failed": 0}
    options = {"model": str(run), "opponent": "a/b", "judge_model": "c", "seed": seed}
    (run / "judged").mkdir()
    of_run = {"seed": seed, "without_seed": "alike", "updates": None}
    (run / "judged/win_rate.json").write_text(json.dumps(figures | {"options": options, "run": of_run}))
    pair = {"prompt": "p", "model": "m", "opponent": "o", "verdict": 1.0}
    pd.DataFrame([pair]).to_parquet(run / "judged/judged.parquet")


# Script, its function (empty: all of it), the variable that it reads, and where its objects are in the data
READ = [
    ("overview", "verdict", "found", "verdicts"),
    ("overview", "winRates", "each", "verdicts"),
    ("overview", "tile", "figure", "figures"),
    ("overview", "tile", "each", "figures groups"),
    ("overview", "when", "found", "runs health"),
    ("overview", "check", "about", "checks *"),
    ("judged", "summary", "each", "judged|judged_seeds"),
    ("judged", "", "row", "judged rows"),
    ("critic", "show", "audit", "runs critic"),
    ("curves", "pointsOf", "curve", "metrics curves"),
    ("curves", "chartOf", "metric", "metrics"),
    ("responses", "samplesOf", "row", "runs samples rows"),
    ("responses", "list", "row", "runs responses rows"),
    ("responses", "response", "row", "runs responses rows"),
    ("settings", "", "row", "settings"),
    ("settings", "", "group", "groups"),
]


def objects_at(data: Any, path: str) -> list[dict[str, Any]]:
    """Return the objects at a path of keys; "*" takes all values of an object."""
    found = [data]
    for key in path.split():
        found = [item for each in found for item in ([*each.values()] if key == "*" else [each[key]])]
        found = [item for each in found for item in (each if isinstance(each, list) else [each]) if item is not None]
    return found


def test_the_scripts_read_what_the_data_have(runs: list[Path], tmp_path: Path) -> None:
    for seed in (0, 1):
        add_judgement(runs[seed], seed)
    data = Page(write_report(runs, tmp_path / "report.html")).data
    optional = {"level", "images"}  # of long curves, and of prompts with images
    for script, function, variable, paths in READ:
        body = Path(report.__file__).with_name("page").joinpath(f"{script}.js").read_text(encoding="utf-8")
        if function:
            body = re.split(rf"function {function}\(|const {function} =", body)[1].split("\n  }")[0]
        read = set(re.findall(rf"\b{variable}\??\.(\w+)", body))
        known = {key for path in paths.split("|") for each in objects_at(data, path) for key in each}
        assert read and read <= known | optional, f"{script} {function}: {paths} have no {sorted(read - known)}"


def test_hostile_texts_stay_text_and_nothing_is_fetched(runs: list[Path], tmp_path: Path) -> None:
    path = write_report(runs, tmp_path / "report.html")
    page, text = Page(path), path.read_text(encoding="utf-8")
    assert [tag for tag, _ in page.tags if tag == "script"] == ["script"] * (1 + len(SCRIPTS))
    addresses = [value for _, attributes in page.tags for name, value in attributes.items() if name in ("src", "href")]
    assert all(str(address).startswith(("#", "data:")) for address in addresses)
    assert "<img" not in text and "hf_secret" not in text and "\u2028" not in text


def test_a_report_replaces_no_file_of_another_kind(runs: list[Path], tmp_path: Path) -> None:
    (tmp_path / "rewards.py").write_text("mine")
    with pytest.raises(ValueError, match=r"rewards\.py exists and is not an HTML file"):
        write_report(runs, tmp_path / "rewards.py")
    with pytest.raises(ValueError, match="py"):
        plot_metrics(runs, tmp_path / "rewards.py")
    assert (tmp_path / "rewards.py").read_text() == "mine"


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("trainer_state.json", b'{"log_history": [{'),
        ("trainer_state.json", b"{}"),
        ("trainer_state.json", b'{"log_history": [1]}'),
        ("ppo_settings.json", b"[]"),
        ("critic_audit.json", b"{"),
        ("_completions/completions_00001.parquet", b"PAR1"),
        ("_samples/update-00001.csv", b""),
        ("judged/judged.parquet", b""),
    ],
)
def test_a_damaged_file_is_named(
    name: str, content: bytes, runs: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    add_judgement(runs[0], 0)
    damaged = runs[0] / name
    damaged.write_bytes(content)
    with pytest.raises(SystemExit) as ended:
        main(["report", str(runs[0]), "--output", str(tmp_path / "report.html")])
    assert ended.value.code == 2 and f"{damaged} cannot be read (" in capsys.readouterr().err


def test_first_and_last_by_hand() -> None:
    log = [{"a": float(value)} for value in (1, 2, 3, 4, 5, 9)]
    found = first_and_last([log], "a")
    assert found is not None
    half = 4.302653 * np.std([4, 5, 9], ddof=1) / math.sqrt(3)
    assert (found["first"], found["last"]) == (1.0, 6.0) and found["low"] == pytest.approx(6 - half, abs=0.01)
    seeds = first_and_last([[{"a": 1.0}, {"a": 2.0}], [{"a": 3.0}, {"a": 4.0}]], "a")
    assert seeds is not None and (seeds["first"], seeds["last"]) == (2.0, 3.0)
    assert first_and_last([[{"b": 1.0}]], "a") is None


def test_a_run_makes_a_report(make_trained: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trainer = make_trained(**QUICK, num_sample_generations=2)
    main(["report", trainer.args.output_dir, "--output", str(tmp_path / "report.html")])
    [run] = Page(tmp_path / "report.html").data["runs"]
    assert run["last_step"] == 3 and len(run["responses"]) == 3 and len(run["samples"]) == 2
    assert f"The report is in {tmp_path / 'report.html'}." in capsys.readouterr().out


def test_a_score_is_shown_in_the_unit_of_the_reward() -> None:
    """With score_scaling the scale of the logged score grows."""
    log = [{"step": n, "loss": 0.1, "objective/kl": 1.0, "objective/scores": 20 - n, "objective/raw_scores": 10.0 + n}
           for n in range(1, 11)]  # fmt: skip
    data = report_data([RecordedRun("a", Path("a"), log, RunSettings(), {}, {})])
    (score,) = (figure["groups"][0] for figure in data["figures"] if figure["key"] == "objective/scores")
    assert score["first"] < score["last"] and "The score rose" in data["verdicts"][0]["sentence"]
    assert data["frontier"][0][0]["score"] == 11.0
    drawn = {metric["key"]: metric["curves"][0]["mean"][0] for metric in data["metrics"]}
    assert (drawn["objective/scores"], drawn["objective/raw_scores"]) == (19, 11.0)
