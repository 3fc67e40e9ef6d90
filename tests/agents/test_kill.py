"""SIGTERM and SIGKILL in each phase of an episode, in threads and processes: bit for bit as if left alone."""

from __future__ import annotations

import functools
import multiprocessing
import os
import pickle
import signal
from pathlib import Path
from typing import Any

import pytest

from rlhf_ppo import PPOTrainer
from rlhf_ppo.training import episodes
from tests.agents.chat import ppo_config
from tests.agents.games import Game, Scored, reached
from tests.agents.test_resume import OPTIONS, Learning, outcome, player, tokenizer_of_words
from tests.runs import assert_identical

pytestmark = pytest.mark.slow


def train(folder: str, engine: str, isolation: str, kill: str | None, resume: bool, report: str) -> None:
    """Train three updates in a process of its own."""
    if kill is not None:
        os.environ["KILL"] = kill.replace("PROCESS", str(os.getpid()))
    sample = episodes.sample_with

    def sampling(*given: Any) -> Any:
        reached("generate")
        return sample(*given)

    episodes.sample_with = sampling
    options = {
        **{"overwrite_output_dir": not resume, "resume_from_checkpoint": resume},
        **{"generation_engine": engine, "tool_isolation": isolation},
    }
    trainer = PPOTrainer(
        ppo_config(folder, **OPTIONS, **options), tokenizer_of_words(), player(), callbacks=[Learning()],
        environment_factory=functools.partial(Scored, Game, None, None, "Invalid action."),
    )  # fmt: skip
    trainer.train()
    Path(report).write_bytes(pickle.dumps(outcome(trainer)))


def run(folder: Path, name: str, *given: Any) -> tuple[int | None, Any]:
    """Train in a new process; return its exit code and outcome."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.preload"])
    report = folder / f"{name}.pickle"
    process = context.Process(target=train, args=(str(folder / "run"), *given, str(report)))
    process.start()
    process.join(400)
    process.kill()
    return process.exitcode, pickle.loads(report.read_bytes()) if report.exists() else None


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    runs = {
        engine: run(tmp_path_factory.mktemp(engine), "alone", engine, "thread", None, False)[1]
        for engine in ("transformers", "continuous")
    }
    for found in runs.values():  # with each engine the importance ratio starts at 1
        assert [log["val/first_logratio"] for log in found["log"] if "val/first_logratio" in log] == [0.0] * 3
    return runs


TERM, KILL = int(signal.SIGTERM), int(signal.SIGKILL)
CASES = [
    ("generate", 6, TERM, "transformers", "thread"),
    ("generate", 7, KILL, "continuous", "process"),
    ("tool", 10, TERM, "continuous", "thread"),
    ("tool", 11, KILL, "transformers", "process"),
    ("reset", 12, TERM, "transformers", "process"),
    ("reset", 13, KILL, "continuous", "thread"),
    ("get_reward", 10, TERM, "continuous", "process"),
    ("get_reward", 11, KILL, "transformers", "thread"),
    ("learn", 6, TERM, "transformers", "process"),
    ("learn", 7, KILL, "continuous", "thread"),
    ("generate", 9, TERM, "continuous", "process"),
    ("tool", 12, TERM, "transformers", "process"),
]


@pytest.mark.parametrize(("phase", "at", "number", "engine", "isolation"), CASES)
def test_the_resumed_run_is_the_undisturbed_one(
    tmp_path: Path, undisturbed: dict[str, Any], phase: str, at: int, number: int, engine: str, isolation: str
) -> None:
    kill = f"{phase} {at} {number} PROCESS {tmp_path / 'count'}"
    code, nothing = run(tmp_path, "killed", engine, isolation, kill, False)
    assert nothing is None and code == (-KILL if number == KILL else 128 + TERM)

    code, found = run(tmp_path, "resumed", engine, isolation, None, True)
    assert code == 0
    assert_identical(found, undisturbed[engine])
