"""Runs whose tools misbehave: training continues, metrics count it, nothing is left behind."""

from __future__ import annotations

import gc
from pathlib import Path

import psutil
import pytest

from rlhf_ppo import PPOTrainer
from tests.agents.chat import ScriptedEngine, chat_model, chat_tokenizer, ppo_config, turn_text
from tests.environments.hostile import Hostile, do, do_async
from tests.environments.test_misbehaviour import (  # noqa: F401  the fixture is for all tests here
    DIES,
    FAILS,
    SUCCEEDS,
    assert_nothing_is_left,
    children,
    note_children,
)

QUESTION = [{"role": "user", "content": "Q"}]
SURVIVED = [*FAILS, *(what for what in SUCCEEDS if what != "100 MB"), "recursion", "forks and returns"]
HANGS = ["sleep", "spin", "object whose text hangs"]
ONLY_IN_A_PROCESS = [*DIES, "forks", "takes 4 GB", "power", "regex"]


@pytest.mark.parametrize(
    ("isolation", "deeds", "last"),
    [
        ("thread", [*SURVIVED, *HANGS], "spin"),
        pytest.param("process", [*SURVIVED, *HANGS, *ONLY_IN_A_PROCESS], "power", marks=pytest.mark.slow),
        pytest.param("process", [], "kills itself", marks=pytest.mark.slow),
    ],
)
def test_a_run_survives_its_tools(tmp_path: Path, isolation: str, deeds: list[str], last: str) -> None:
    """Each deed by a standalone tool, then one that costs the environment its episode."""
    tokenizer = chat_tokenizer()
    calls = [("do", {"what": what}) for what in deeds] + [
        ("do_async", {"what": what}) for what in ("sleep", "wait", "forks and returns")
    ]
    script = [turn_text(tokenizer, "qwen3", call) for call in [*calls, ("act", {"what": last})]]
    options = {
        **{
            "response_length": 14_000,
            "per_device_train_batch_size": 2,
            "tool_timeout": 1.5 if isolation == "thread" else 5.0,
            "max_steps": 1,
        },
        **{"tool_isolation": isolation, "max_tool_response_length": 40, "bootstrap_truncated": True},
        **{"tool_memory_limit": 500 if isolation == "process" else None},
    }
    model = chat_model(tokenizer)
    model.config.max_position_embeddings = 16_000
    trainer = PPOTrainer(
        ppo_config(tmp_path, **options), tokenizer, model, train_dataset=[{"prompt": QUESTION}] * 2,
        tools=[do, do_async], environment_factory=Hostile, engine=ScriptedEngine(tokenizer, script),
    )  # fmt: skip
    trainer.train()
    log = next(log for log in trainer.state.log_history if "objective/kl" in log)

    fine = (*SUCCEEDS, "forks", "forks and returns")
    failed = sum(given["what"] not in fine for _, given in calls) + 1
    assert log["tools/call_frequency"] == len(calls) + 1
    assert log["tools/failure_frequency"] == pytest.approx(failed / (len(calls) + 1))
    cut = "environment" if last == "kills itself" else "time"
    assert log[f"episode/cut_by_{cut}_frac"] == 1.0 and log["episode/turns_mean"] == len(calls) + 1

    del trainer
    gc.collect()
    _, left = psutil.wait_procs(children(), timeout=20)  # reaps forks, for which no tool waits
    for process in left:
        process.kill()  # it holds stdout
    assert left == []
    assert_nothing_is_left()
