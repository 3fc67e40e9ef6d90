"""Tools and environments that a command names."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from transformers.utils.chat_template_utils import get_json_schema

from rlhf_ppo.cli import commands
from rlhf_ppo.rewards.resolve import resolve_environments, resolve_tools
from tests.agents.chat import chat_model, chat_tokenizer

SOURCE = "class Maze:\n    def reset(self, **row): ...\n\ndef add(x: int) -> int:\n    return x\n\nnumber = 3\n"
OPTIONS = (
    "--sft_model_path chat --dataset_name tasks.jsonl --output_dir out --use_cpu --report_to none --stop_token eos"
)


def make_chat(prompt: list[dict[str, str]], **columns: Any) -> Any:
    """Save a chat model and eight rows here; return the tokenizer."""
    tokenizer = chat_tokenizer()
    chat_model(tokenizer).save_pretrained("chat")
    tokenizer.save_pretrained("chat")
    Path("tasks.jsonl").write_text((json.dumps({"prompt": prompt, **columns}) + "\n") * 8)
    return tokenizer


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "maze.py"
    path.write_text(SOURCE)
    return str(path)


def test_one_environment_is_a_factory_and_several_are_a_dict(file: str) -> None:
    assert resolve_environments(None) is None and resolve_tools(None) is None
    assert resolve_environments([f"{file}:Maze"]).__name__ == "Maze"
    assert [*resolve_environments([f"a={file}:Maze", f"b={file}:Maze"])] == ["a", "b"]
    assert [tool.__name__ for tool in resolve_tools([f"{file}:add"]) or []] == ["add"]


@pytest.mark.parametrize(
    ("resolve", "specs", "message"),
    [
        (resolve_environments, ["nowhere.py:Maze"], "environment holds 'nowhere.py:Maze', but there is no file"),
        (resolve_environments, ["{file}:Maze", "{file}:Maze"], "without a name: write name="),
        (resolve_tools, ["{file}:Maze"], "tools holds .* is a class"),
    ],
)
def test_a_wrong_name_is_one_sentence(file: str, resolve: Any, specs: list[str], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        resolve([spec.replace("{file}", file) for spec in specs])


def test_an_estimate_counts_the_descriptions_of_tools_and_the_whole_episode(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("box.py").write_text(
        "class Box:\n    def reset(self, **row): ...\n    def get_reward(self): return 1.0\n\n"
        '    def open(self) -> str:\n        """Open the box."""\n        return "empty"\n'
    )
    asked = [{"role": "user", "content": "Look."}]
    tokenizer = make_chat(asked)
    rates = "--response_length 300 --device_flops 4e6 --device_bandwidth 3e5 --environment box.py:Box"

    commands.estimate(f"{OPTIONS} {rates} --per_device_train_batch_size 6".split())
    said = " ".join(capsys.readouterr().out.split())
    found = re.search(r"episodes of (\d+) \+ (\d+) tokens", said)

    schema = get_json_schema(resolve_environments(["box.py:Box"]).open)
    shown = tokenizer.apply_chat_template(asked, tools=[schema], add_generation_prompt=True, return_dict=False)
    assert found is not None and [int(found[1]), int(found[2])] == [len(shown), 300]
