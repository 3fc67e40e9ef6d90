"""A signal at every moment of a run: it ends in time, with a checkpoint to resume from bit for bit."""

from __future__ import annotations

import multiprocessing
import os
import re
import signal
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from rlhf_ppo.checkpoints import last_complete_checkpoint
from rlhf_ppo.processes.signals import SAME_SIGNAL
from tests.conftest import save_models, tiny_policy
from tests.faults.train_until_signalled import MOMENTS, make, run_command, train
from tests.runs import assert_identical, end_of_run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

SECONDS = 10.0
LASTS = "in_learning_that_lasts"
TAKES = "in_learning_that_takes_20_seconds"
FINISHED = {"in_the_first_update": 0, "in_learning": 3, "in_a_save": 3, "in_the_last_save": 4}
"""The update after which the run ends where that is not the second."""


@pytest.fixture(scope="module")
def silent_server() -> Iterator[str]:
    """A server that takes requests and never answers."""
    with socket.create_server(("127.0.0.1", 0), backlog=50) as server:
        yield f"http://127.0.0.1:{server.getsockname()[1]}/score"


@pytest.fixture(scope="module")
def start(silent_server: str) -> Callable[..., Any]:
    """Start a run in a process forked from one that has imported everything; return it at its moment."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.preload"])

    def start_run(output_dir: Path, moment: str | None = None, words: Sequence[str] = ()) -> Any:
        what = (run_command, list(words)) if moment is None else (train, moment, silent_server)
        process = context.Process(target=what[0], args=(str(output_dir), *what[1:]))
        process.start()
        while not Path(f"{output_dir}-ready").exists():
            assert process.is_alive(), Path(f"{output_dir}-stderr").read_text()
            time.sleep(0.01)
        time.sleep(0.1)  # the moment is told of just before it begins
        return process

    return start_run


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The end of the run that was left alone."""
    trainer = make(tmp_path_factory.mktemp("whole") / "run")
    trainer.train()
    return end_of_run(trainer)


ALL = {"in_a_reward_that_catches_errors", "in_a_save"}
"""Moments at which each signal is tried; at the others they take turns."""


NUMBERS = [signal.SIGTERM, signal.SIGINT, signal.SIGHUP]


@pytest.mark.parametrize(
    ("moment", "number"),
    [
        (moment, number)
        for index, moment in enumerate(sorted(MOMENTS.keys() - {LASTS, TAKES}))
        for number in (NUMBERS if moment in ALL else [NUMBERS[index % 3]])
    ],
)
def test_a_signal_ends_the_run_with_a_checkpoint(
    moment: str, number: signal.Signals, start: Any, whole: dict[str, Any], tmp_path: Path
) -> None:
    output_dir = tmp_path / "run"
    process = start(output_dir, moment)
    before = time.monotonic()
    os.kill(process.pid, number)
    process.join(2 * SECONDS)
    seconds, said = time.monotonic() - before, Path(f"{output_dir}-stderr").read_text()
    process.kill()

    assert process.exitcode == 128 + number, said
    assert seconds < SECONDS
    step = FINISHED.get(moment, 2)
    checkpoint = last_complete_checkpoint(str(output_dir))
    assert checkpoint == str(output_dir / f"checkpoint-{step}")
    assert "Traceback" not in said
    first, last = [line for line in said.splitlines() if line.startswith(number.name)]
    assert first.startswith(f"{number.name}: the run ends") and "A second signal ends the process at once" in first
    assert f"after update {step} of 4, with the checkpoint {checkpoint}; resume_from_checkpoint=True" in last
    assert not (output_dir / "model.safetensors").exists(), "no final model"
    resumed = make(output_dir)
    resumed.train(resume_from_checkpoint=True)
    assert resumed._initial_global_step == step
    assert_identical(end_of_run(resumed), whole)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_learning_is_not_waited_for(number: signal.Signals, start: Any, tmp_path: Path) -> None:
    process = start(tmp_path / "run", TAKES)
    before = time.monotonic()
    os.kill(process.pid, number)
    process.join(SECONDS)
    seconds = time.monotonic() - before
    process.kill()

    assert process.exitcode == 128 + number and seconds < SECONDS
    checkpoint = last_complete_checkpoint(str(tmp_path / "run"))
    assert checkpoint is not None and re.fullmatch("checkpoint-2-[12]", os.path.basename(checkpoint))
    said = Path(f"{tmp_path / 'run'}-stderr").read_text()
    assert f"{number.name}: the run ends with a checkpoint after the current pass of learning" in said


@pytest.mark.parametrize("second", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_ends_the_process_at_once(second: signal.Signals, start: Any, tmp_path: Path) -> None:
    output_dir = tmp_path / "run"
    process = start(output_dir, LASTS)
    said = Path(f"{output_dir}-stderr")
    for _ in range(2):  # as one: a scheduler may signal a process and what started it
        os.kill(process.pid, signal.SIGTERM)
    while "A second signal ends the process at once" not in said.read_text():
        assert process.is_alive()
        time.sleep(0.01)
    time.sleep(SAME_SIGNAL + 0.2)
    assert process.is_alive()
    before = time.monotonic()
    os.kill(process.pid, second)
    process.join(SECONDS)

    assert process.exitcode == 128 + second and time.monotonic() - before < SECONDS / 2  # learning lasts an hour
    assert f"{second.name}, the second signal" in said.read_text()


HANGS = """
import pathlib, time
def hangs(completions, **kwargs):
    pathlib.Path("{}-ready").touch()
    time.sleep(3600)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_command_ends_with_a_line_and_no_final_model(number: signal.Signals, start: Any, tmp_path: Path) -> None:
    """In training, where a reward hangs; Ctrl-C in the final save too."""
    ended = []
    for name in ("hangs", "saves")[: 1 if number == signal.SIGTERM else 2]:
        output_dir = tmp_path / name
        Path(tmp_path, "rewards.py").write_text(HANGS.format(output_dir))
        words = [*command(tmp_path), "--reward_funcs", f"{tmp_path}/rewards.py:hangs" if name == "hangs" else "length"]
        process = start(output_dir, words=words)
        os.kill(process.pid, number)
        process.join(2 * SECONDS)
        process.kill()
        ended.append(Path(f"{output_dir}-stderr").read_text())
        assert process.exitcode == 128 + number and "Traceback" not in ended[-1], ended[-1]
        assert not (output_dir / "model.safetensors").exists()
    assert f"checkpoint {tmp_path}/hangs/checkpoint-0; resume_from_checkpoint=True (--resume_from" in ended[0]
    assert [f"rlhf-ppo train: ended by SIGINT; earlier output is in {tmp_path}/saves" in ended[-1]] == [
        number == signal.SIGINT
    ]


def command(folder: Path) -> list[str]:
    """Save a policy and prompts; return the command that trains with them."""
    save_models(folder, sft=tiny_policy())
    (folder / "rows.jsonl").write_text('{"prompt": "w1 w2"}\n' * 8)
    options = f"--dataset_name {folder}/rows.jsonl --sft_model_path {folder}/sft --response_length 4 --max_steps 1"
    quiet = "--report_to none --use_cpu --per_device_train_batch_size 4 --num_sample_generations 0 --bf16 False"
    return ["train", *options.split(), *quiet.split()]
