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
        (resolve_environments, ["{file}:Other"], "has no 'Other'; it has .'Maze', 'add'."),
        (resolve_environments, ["{file}:number"], "cannot be called"),
        (resolve_environments, ["{file}:Maze", "{file}:Maze"], "without a name: write name="),
        (resolve_environments, ["Maze"], "write 'path/file.py:Class'"),
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

    commands.estimate(f"{OPTIONS} {rates} --tool_isolation process --per_device_train_batch_size 6".split())
    said = " ".join(capsys.readouterr().out.split())
    found = re.search(r"episodes of (\d+) \+ (\d+) tokens", said)
    assert "6 processes of environments" in said

    schema = get_json_schema(resolve_environments(["box.py:Box"]).open)
    shown = tokenizer.apply_chat_template(asked, tools=[schema], add_generation_prompt=True, return_dict=False)
    assert found is not None and [int(found[1]), int(found[2])] == [len(shown), 300]


ROW = "    def reset(self, **row): ...\n    def get_reward(self): return 1.0\n"

WRONG = {
    "class Maze:\n    def __init__(self, size): ...\n"
    + ROW: r"has the parameters \(size\) \(missing a required argument",
    "class Maze:\n    def get_reward(self): return 1.0\n": "Maze has no method `reset`",
    "class Maze:\n    def reset(self, prompt): ...\n" + ROW.splitlines()[1]: (
        r"row 0 of train_dataset does not fit `reset\(prompt\)` of environment Maze .*argument 'level'"
    ),
    "class Maze:\n" + ROW.replace("**row", "target, **row"): r"`reset\(target, \*\*row\)` .*argument: 'target'",
    "class Maze:\n" + ROW + "    def go(self, way: int): ...\n": "tool 'go' cannot be described .* has no docstring",
    "class Maze:\n" + ROW + '    def go(self, way):\n        """Go."""\n': "missing a type hint",
    "class Maze:\n"
    + ROW
    + '    def go(self, way: int):\n        """Go."""\n': "no description for the argument 'way'",
}


@pytest.mark.parametrize("source", WRONG)
@pytest.mark.parametrize("command", ["train", "estimate"])
def test_an_environment_that_cannot_be_trained_is_one_sentence(
    command: str, source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    make_chat([{"role": "user", "content": "Look."}], level=1)
    Path("maze.py").write_text(source)

    with pytest.raises(SystemExit) as ended:
        getattr(commands, command)(f"{OPTIONS} --response_length 30 --environment maze.py:Maze".split())

    said = capsys.readouterr().err.splitlines()
    assert ended.value.code == 2
    assert [line for line in said if re.search(rf"rlhf-ppo {command}: error: .*{WRONG[source]}", line)] == said[-1:]
