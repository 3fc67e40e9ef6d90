"""The page *Agents*: its snippets run, with a chat model that is made here."""

from __future__ import annotations

import re
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
    for block in re.findall(r"```python\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL):
        exec(compile(block.replace("response_length=400", quick), str(PAGE), "exec"), namespace)
    assert namespace["trainer"].state.global_step == 1
    lake = namespace["lake"]()
    assert lake.reset(seed=0) == " 0 0" and lake.respond("right") == " 0 1"
    assert lake.respond("fly") == " what ? 0 1"
