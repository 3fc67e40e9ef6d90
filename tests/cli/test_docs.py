"""docs/command-line.md: its commands run one after the other, and its tables are the parameters'."""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import fields
from pathlib import Path

import pytest

from rlhf_ppo.cli.main import main
from rlhf_ppo.compat.params import UNAVAILABLE, LLMTrainingParams
from tests.conftest import make_tokenizer, tiny_policy

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
def test_the_commands_run_one_after_the_other(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    tiny_policy().save_pretrained("models/sft")
    make_tokenizer().save_pretrained("models/sft")
    rows = [{"prompt": f"w{index} w4", "chosen": " w4", "rejected": " w5"} for index in range(16)]
    for name, columns in (("prompts", ["prompt"]), ("pairs", ["prompt", "chosen", "rejected"])):
        lines = [json.dumps({column: row[column] for column in columns}) + "\n" for row in rows]
        Path(f"{name}.jsonl").write_text("".join(lines))

    blocks = re.findall(r"^```bash\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
    commands = [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    for command in commands:
        program, *words = shlex.split(command)
        assert program == "rlhf-ppo"
        main(words)

    assert len(commands) == 5 and Path("runs/policy/model.safetensors").exists()
    assert "Model win rate: " in capsys.readouterr().out
