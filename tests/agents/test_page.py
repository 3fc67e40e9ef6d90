"""The page *Agents*: its snippets run, with a chat model that is made here."""

from __future__ import annotations

import importlib
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset

from tests.agents.chat import chat_model, chat_tokenizer, run_ours, run_trl, turn_text

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


def test_the_first_environment_trains_under_trl_and_here_with_the_same_tools(tmp_path: Path) -> None:
    """TRL does not know `turn_rewards` and `done`, which end and pay an episode here."""
    namespace: dict[str, Any] = {}
    exec(re.findall(r"```python\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL)[0], namespace)
    tokenizer, asked = chat_tokenizer(), [{"role": "user", "content": "Use the tool."}]
    script = [turn_text(tokenizer, "qwen3", ("add", {"number": number})) for number in (1, 2)] + ["Done<|im_end|>"]
    given = {"environment_factory": namespace["Counter"], "reward_funcs": None}
    rows = Dataset.from_list([{"prompt": asked, "target": 3}] * 2)
    trl, ours = (
        run(tmp_path / run.__name__, "qwen3", script, train_dataset=rows, **given) for run in (run_trl, run_ours)
    )

    assert [row[0] for row in ours.rows] == [row[0] for row in trl.rows]
    assert ours.metrics["rewards/Counter/mean"] == trl.metrics["rewards/Counter/mean"] == 1.0
    assert ours.metrics["rewards/turns/mean"] == pytest.approx(-0.02) and ours.metrics["episode/turns_mean"] == 2
    assert tokenizer.decode(ours.rows[0][0]).count('"name": "') == 1
    assert len(ours.rows[0][1]) < len(trl.rows[0][1])


@pytest.mark.parametrize(
    ("example", "options"),
    [
        ("agent_frozen_lake", ["--held_out", "64", "--options", '{"kl_coef": 0.02, "lam_policy": 0.8}']),
        (
            "agent_frozen_lake",
            ["--held_out", "64", "--size", "8", "--moves", "9", "--progress", "--credit", "episode"],
        ),
        ("agent_calculator", ["--price", "0.3"]),
    ],
)
def test_the_examples_run(
    example: str, options: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """For one update; what they learn is in `benchmarks/learning`, and the calculator's model learns nothing here."""
    monkeypatch.syspath_prepend(str(PAGE.parents[1] / "examples"))
    module = importlib.import_module(example)
    if hasattr(module, "imitate"):
        monkeypatch.setattr(module, "imitate", lambda *given, **how: None)
    monkeypatch.setattr(sys, "argv", [example, "--updates", "1", "--output_dir", str(tmp_path), *options])
    module.main()
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert len(found["curve"]) == 1 and 0 <= found["curve"][0] <= 1
