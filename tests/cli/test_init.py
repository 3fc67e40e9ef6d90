"""The file that `rlhf-ppo init` writes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from rlhf_ppo.cli.commands import parse_options
from rlhf_ppo.cli.errors import Problems
from rlhf_ppo.cli.pipeline import QUESTIONS, init
from rlhf_ppo.pipeline.steps import read_pipeline

ALL = "--model org/base --texts a.jsonl --preferences b.jsonl --prompts c.jsonl"


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.stdin.isatty", lambda: False, raising=False)


@pytest.mark.parametrize(
    ("options", "names"),
    [
        (ALL, ["sft", "reward", "ppo", "judge", "report"]),
        (f"{ALL} --judge_preferences d.jsonl", ["sft", "reward", "judge_reward", "ppo", "judge", "report"]),
        ("--model m --prompts c.jsonl --reward_funcs length", ["ppo", "judge", "report"]),
        ("--model ./m --preferences b --prompts c", ["reward", "ppo", "judge", "report"]),
        ("--model m --texts a --prompts c --reward-funcs f.py:g --judge_model j", ["sft", "ppo", "judge", "report"]),
    ],
)  # fmt: skip
def test_what_it_writes_is_what_the_pipeline_reads(options: str, names: list[str], capsys: Any) -> None:
    init(options.split())

    steps = read_pipeline("run.yaml").steps
    assert [step.name for step in steps] == names
    for step in steps:
        if step.kind != "report":
            parse_options("", step.command, step.argv(), problems := Problems())
            assert problems.messages == []
    ppo = next(step.options for step in steps if step.name == "ppo")
    assert ("reward_model_path" in ppo) == ("reward" in names)
    assert ("reward_funcs" in ppo) == ("--reward" in options)
    judge = next(step.options for step in steps if step.name == "judge")
    assert (judge.get("judge_model") == "runs/pipeline/judge_reward") == ("judge_reward" in names)
    assert capsys.readouterr().out == "run.yaml is written; read it, then: rlhf-ppo pipeline run.yaml\n"


def test_every_name_is_read_as_it_was_given() -> None:
    odd = {"model": "yes", "texts": "a: b", "preferences": "# c", "prompts": 'd "e" {f}', "output_dir": "007"}
    init([word for name, value in odd.items() for word in (f"--{name}", value)])

    said = yaml.safe_load(Path("run.yaml").read_text())
    assert (
        said["output_dir"] == "007"
        and said["sft"]["dataset_name"] == "a: b"
        and said["reward"]["dataset_name"] == "# c"
    )
    assert said["ppo"]["dataset_name"] == 'd "e" {f}' and said["sft"]["model_name_or_path"] == "yes"


def test_what_no_option_says_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    answers: Iterator[str] = iter(["", "base", "", "", "c.jsonl", "", "length"])
    asked: list[str] = []
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    monkeypatch.setattr("builtins.input", lambda question: (asked.append(question), next(answers))[1])
    init([])

    said = yaml.safe_load(Path("run.yaml").read_text())
    assert said["ppo"]["sft_model_path"] == "base" and said["ppo"]["reward_funcs"] == ["length"]
    assert said["output_dir"] == QUESTIONS["output_dir"][1] and len(asked) == 7  # the model twice: it is needed


def test_who_stops_answering_is_told_what_is_missing(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    def ended(_: str) -> str:
        raise EOFError

    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    monkeypatch.setattr("builtins.input", ended)
    with pytest.raises(SystemExit, match="2"):
        init(["--model", "m", "--prompts", "p"])

    assert capsys.readouterr().err == "rlhf-ppo init: error: --texts is missing: nobody answers any more\n"


def test_help_names_each_option_once(capsys: Any) -> None:
    with pytest.raises(SystemExit, match="0"):
        init(["--help"])

    assert "--model MODEL, --model" not in capsys.readouterr().out


def test_who_has_pairs_is_asked_for_others_for_the_judge(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    monkeypatch.setattr("builtins.input", lambda question: "d.jsonl" if "second reward" in question else "")
    init(ALL.split())

    assert yaml.safe_load(Path("run.yaml").read_text())["judge_reward"]["dataset_name"] == "d.jsonl"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("--prompts c", "--model is missing"),
        ("--model m", "--prompts is missing"),
        ("--model m --prompts c", "nothing pays PPO"),
        (f"{ALL} --judge_model j --judge_preferences d", "are two judges"),
        (f"{ALL} --file there.yaml", "file='there.yaml' is there already"),
        (f"{ALL} --fiel x", "unrecognized arguments: --fiel"),
    ],
)
def test_what_is_missing_is_named_where_nobody_answers(options: str, words: str, capsys: Any) -> None:
    Path("there.yaml").write_text("mine")
    with pytest.raises(SystemExit) as stopped:
        init(options.split())

    assert stopped.value.code == 2 and words in capsys.readouterr().err
    assert Path("there.yaml").read_text() == "mine" and not Path("run.yaml").exists()
