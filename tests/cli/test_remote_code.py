"""Models that come with Python code: no command runs it, or asks on stdin, unless the user has allowed it."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from rlhf_ppo.cli.main import main
from tests.conftest import save_models, tiny_policy, tiny_scorer

CODE = """
from pathlib import Path
from transformers import AutoModel, LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification, LlamaModel
Path("was_run").touch()
class OwnConfig(LlamaConfig):
    model_type = "own"
class OwnModel(LlamaForCausalLM):
    config_class = OwnConfig
class OwnBody(LlamaModel):
    config_class = OwnConfig
AutoModel.register(OwnConfig, OwnBody)
class OwnScorer(LlamaForSequenceClassification):
    config_class = OwnConfig
"""


def with_code(path: Path) -> None:
    """Let a saved model need code that lies beside it."""
    config = json.loads((path / "config.json").read_text())
    classes = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnModel"}
    config |= {"model_type": "own", "auto_map": {**classes, "AutoModelForSequenceClassification": "own.OwnScorer"}}
    (path / "config.json").write_text(json.dumps(config))
    (path / "own.py").write_text(CODE)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("code")
    save_models(folder, plain=tiny_policy(), own=tiny_policy(), judge=tiny_scorer())
    for name in ("own", "judge"):
        with_code(folder / name)
    row = {"prompt": "w1 w2", "chosen": "w3", "rejected": "w4"}
    (folder / "rows.jsonl").write_text(f"{json.dumps(row)}\n" * 8)
    (folder / "texts.jsonl").write_text('{"text": "w1 w2"}\n' * 8)
    return folder


TRAIN = "--dataset_name rows.jsonl --use_cpu --bf16 false --report_to none --output_dir out"
JUDGE = "judge --dataset_name rows.jsonl --num_prompts 2 --max_new_tokens 2 --output_dir judged"
COMMANDS = [
    f"{JUDGE} --model own --opponent_column chosen --judge length",
    f"{JUDGE} --model_column chosen --opponent_column rejected --judge_model judge",
    f"train {TRAIN} --sft_model_path own --reward_funcs length",
    f"train {TRAIN} --sft_model_path plain --reward_model_path judge",
    f"estimate {TRAIN} --sft_model_path own --reward_funcs length",
    f"reward {TRAIN} --model_name_or_path judge",
]


@pytest.mark.parametrize("command", COMMANDS)
def test_code_is_refused_in_a_sentence_and_nobody_is_asked(
    command: str, place: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    def ask(*_: Any) -> str:
        raise AssertionError("asked on stdin")

    monkeypatch.chdir(place)
    monkeypatch.setattr("builtins.input", ask)
    with pytest.raises(SystemExit) as raised:
        main(command.split())
    said = capsys.readouterr().err.strip().splitlines()[-1]
    assert raised.value.code == 2 and "trust_remote_code" in said, said
    assert not os.path.exists("was_run")
