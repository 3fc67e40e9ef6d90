"""The page *Agents*: its snippets run, with a chat model that is made here."""

from __future__ import annotations

import importlib
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.agents.chat import chat_model, chat_tokenizer

PAGE = Path(__file__).parents[2] / "docs" / "agents.md"


def test_the_snippets_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    tokenizer = chat_tokenizer()
    chat_model(tokenizer).save_pretrained("models/chat")
    tokenizer.save_pretrained("models/chat")
    quick = "response_length=8, total_episodes=8, num_sample_generations=0, use_cpu=True, bf16=False"
    namespace: dict[str, Any] = {"__name__": "snippets"}
    for block in re.findall(r"^```python\n(.*?)^```", PAGE.read_text("utf-8"), re.DOTALL | re.MULTILINE):
        exec(compile(block.replace("response_length=400", quick), str(PAGE), "exec"), namespace)
    assert namespace["trainer"].state.global_step == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("example", "options"),
    [
        ("agent_frozen_lake", ["--held_out", "64", "--size", "8", "--moves", "9", "--progress"]),
        ("agent_calculator", ["--price", "0.3"]),
    ],
)
def test_the_examples_run(
    example: str, options: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """For one update; what they learn is in `benchmarks/learning`, and the calculator's model learns nothing here."""
    monkeypatch.syspath_prepend(str(PAGE.parents[1] / "examples"))
    module = importlib.import_module(example)
    monkeypatch.setattr("calculator_model.imitate", lambda *given, **how: None)
    monkeypatch.setattr(sys, "argv", [example, "--updates", "1", "--output_dir", str(tmp_path), *options])
    module.main()
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert len(found["curve"]) == 1 and 0 <= found["curve"][0] <= 1
