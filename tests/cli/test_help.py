"""Help of the commands: quick, short, and in step with the options."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from trl.trainer.model_config import ModelConfig

from rlhf_ppo.cli import main
from rlhf_ppo.cli.commands import OPTIONS
from rlhf_ppo.cli.estimate import EstimateArguments
from rlhf_ppo.cli.main import page_of
from rlhf_ppo.cli.options import UNSUPPORTED, JudgeArguments, LLMCommand
from rlhf_ppo.compat.params import UNAVAILABLE, LLMTrainingParams

SOURCES = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
DATACLASSES = {
    **{command: (*classes, ModelConfig) for command, classes in OPTIONS.items()},
    "estimate": (EstimateArguments,),
    "judge": (JudgeArguments,),
    "llm": (LLMCommand, LLMTrainingParams),
}


def printed(argv: list[str], capsys: Any) -> str:
    try:
        main.main(argv)
    except SystemExit as ended:
        assert ended.code == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("argv", [["--help"], ["-h"], []], ids=str)
def test_the_list_begins_with_the_commands_for_a_first_try(argv, capsys):
    listed = re.findall(r"^  (\w+(?: train)?) ", printed(argv, capsys), re.MULTILINE)

    assert listed == list(main.COMMANDS) and listed[:4] == ["demo", "init", "pipeline", "train"]


@pytest.mark.parametrize("command", main.COMMANDS)
def test_every_command_shows_each_option_in_one_spelling(command, capsys):
    text = printed([*command.split(), "--help"], capsys)

    listed, _, examples = text.partition("Examples\n")
    options = re.findall(r"^ +(?:-h, )?--([\w-]+)", listed, re.MULTILINE)
    assert f"usage: rlhf-ppo {command} " in text and "Args:" not in text
    assert len(options) == len({option.replace("-", "_") for option in options}) > 0
    assert ("  rlhf-ppo" in examples) == (page_of(command) is not None)


@pytest.mark.parametrize("command", DATACLASSES)
def test_the_short_help_names_options_that_exist_with_their_defaults(command):
    page: Any = page_of(command)
    shown = {option.name: option.default for group in page.groups.values() for option in group}
    defaults = {option.name: option.default for each in DATACLASSES[command] for option in fields(each)}

    expected = {name: defaults[name] for name in shown}
    expected |= {name: None for name in ("dataset_name", "trainer") if name in shown}  # required
    assert shown == expected
    if command in ("sft", "reward", "train"):
        assert 20 <= len(shown) <= 40


def test_the_help_of_llm_lists_the_options_that_work(capsys):
    listed = set(re.findall(r"^  --([\w-]+)", printed(["llm", "--help"], capsys), re.MULTILINE))

    every = {option.name for each in (LLMCommand, LLMTrainingParams) for option in fields(each)}
    assert {name.replace("-", "_") for name in listed} == every - UNAVAILABLE.keys() - UNSUPPORTED.keys()


def test_all_options_are_shown_on_demand(capsys):
    text = printed(["train", "--help-all"], capsys)

    assert "--importance_sampling_clip_max" in text and "--learning_rate" in text and "--learning-rate" not in text
    assert re.search(r"--weight_decay [^-]+\(default: 0.0\)", text) and "(default: False)" not in text


@pytest.mark.parametrize("width", [60, 80, 200])
def test_help_wraps_at_words(width, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(width))
    for argv in ([], ["train", "--help"], ["pipeline", "--help"]):
        lines = printed(argv, capsys).splitlines()
        assert max(len(line.rstrip()) for line in lines) <= width


@pytest.mark.parametrize(
    "options", ["", "--version", "tran", "plot", *(f"{command} --help" for command in main.COMMANDS)], ids=str
)
def test_text_is_printed_without_importing_torch(options):
    program = (
        f"import sys; sys.argv[1:] = {options.split()}\nfrom rlhf_ppo.cli.main import main\ntry: main()\nfinally: "
        "print(sorted({'torch', 'transformers', 'accelerate', 'trl', 'matplotlib'} & sys.modules.keys()))"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=100, env=SOURCES)

    assert ended.stdout.endswith("[]\n") and "Traceback" not in ended.stderr
    assert ended.returncode == (2 if options in ("tran", "plot") else 0)
