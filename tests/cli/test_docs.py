"""docs/command-line.md: its commands run one after the other, and its tables are the parameters'."""

from __future__ import annotations

import re
import shlex
from dataclasses import fields
from pathlib import Path

import pytest

from rlhf_ppo.cli.main import main
from rlhf_ppo.compat.params import UNAVAILABLE, LLMTrainingParams
from tests.conftest import save_models, tiny_policy, write_rows

PAGE = (Path(__file__).parents[2] / "docs" / "command-line.md").read_text()


def test_the_tables_list_every_option_with_its_default_or_what_to_use_instead():
    expected = [
        f"| `--{option.name.replace('_', '-')}` | {UNAVAILABLE[option.name]} |"
        if option.name in UNAVAILABLE
        else f"| `--{option.name.replace('_', '-')}` | `{option.default}` | {option.metadata['help']} |"
        for option in fields(LLMTrainingParams)
    ]

    assert sorted(re.findall(r"^\| `--.*$", PAGE, re.MULTILINE)) == sorted(expected)


@pytest.mark.slow
def test_the_commands_run_one_after_the_other(empty_place, monkeypatch, capsys):
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    save_models("models", sft=tiny_policy())
    prompts = [{"prompt": f"w{index} w4"} for index in range(16)]
    write_rows("prompts.jsonl", prompts)
    write_rows("pairs.jsonl", (row | {"chosen": " w4", "rejected": " w5"} for row in prompts))

    blocks = re.findall(r"^```bash\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
    commands = [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    for command in commands:
        program, *words = shlex.split(command)
        assert program == "rlhf-ppo"
        main(words)

    assert len(commands) == 5 and Path("runs/policy/model.safetensors").exists()
    assert "Model win rate: " in capsys.readouterr().out
