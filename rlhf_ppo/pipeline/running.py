"""Running a pipeline's steps: those that are finished stay as they are, the one that was broken off goes on."""

from __future__ import annotations

import ctypes
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rlhf_ppo.checkpoints.jsonfile import read_object, write_json
from rlhf_ppo.checkpoints.lock import locked
from rlhf_ppo.checkpoints.run import numbered
from rlhf_ppo.pipeline.results import keep_win_rates
from rlhf_ppo.pipeline.steps import FINISHED, TRAINING, Pipeline, Step
from rlhf_ppo.terminal.foreign import print_text

_PR_SET_PDEATHSIG = 1


def run_pipeline(
    pipeline: Pipeline, start: Callable[[Sequence[str]], int], say: Callable[[str], object] = print_text
) -> int:
    """Run the steps that are left, each in a process of its own.

    A training step that was broken off goes on from its newest whole checkpoint; without one, and for the judge, it
    begins anew. A step counts as finished once its process has ended well. After the last one the judge's win rates
    are said and kept, those of all seeds together.

    Args:
        pipeline: The steps.
        start: Runs Python with these arguments and returns its exit code.
        say: Prints a line.

    Returns:
        The exit code of the step that failed, or 0.

    Raises:
        InUseError: The pipeline's directory has another one that runs.
        ValueError: A step is finished, but with other options than the file has now.
    """
    pipeline.output_dir.mkdir(parents=True, exist_ok=True)
    with locked(str(pipeline.output_dir)):
        return _run_steps(pipeline, start, say)


def _run_steps(pipeline: Pipeline, start: Callable[[Sequence[str]], int], say: Callable[[str], object]) -> int:
    finished = finished_steps(pipeline)
    for step in pipeline.steps:
        if step.name in finished:
            say(f"{step.name}: finished before, in {step.output_dir}")
            continue
        words = [*_going_on(step), *step.argv()]
        launch = pipeline.launch if step.kind in TRAINING else ()
        say(f"{step.name}: {shlex.join(['rlhf-ppo', step.command, *words])}")
        code = start(["-m", *launch, *(["-m"] if launch else []), "rlhf_ppo", step.command, *words])
        if code:
            say(f"{step.name} has ended with exit code {code}; the same command goes on with it")
            return code
        finished[step.name] = _fingerprint(step)
        write_json(pipeline.output_dir / FINISHED, finished)
    if rates := keep_win_rates(pipeline):
        say("\n".join(rates.lines()))
    say(f"All steps are finished: {', '.join(step.name for step in pipeline.steps)}, in {pipeline.output_dir}")
    return 0


def finished_steps(pipeline: Pipeline) -> dict[str, Any]:
    """Return by name the options with which steps were finished.

    Args:
        pipeline: The steps as the file has them now.

    Raises:
        ValueError: One was finished with other options, or the list cannot be read.
    """
    path = pipeline.output_dir / FINISHED
    try:
        finished = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    except ValueError as error:
        raise ValueError(f"{path} cannot be read: {error}; remove it to run all steps again") from None
    for step in pipeline.steps:
        before, now = finished.get(step.name), _fingerprint(step)
        if before is None or before == now:
            continue
        changed = sorted(name for name in before.keys() | now.keys() if before.get(name) != now.get(name))
        shown = ", ".join(f"{name}={before.get(name)!r} is {now.get(name)!r} now" for name in changed)
        raise ValueError(
            f"{step.name} was finished with other options: {shown}; name another output_dir, or remove "
            f"{step.output_dir} and the entry {step.name!r} of {path}"
        )
    return finished


def _fingerprint(step: Step) -> dict[str, Any]:
    options: Mapping[str, Any] = {**step.options, "runs": list(step.runs)}
    return json.loads(json.dumps(options, default=str))


def _going_on(step: Step) -> list[str]:
    """Return the option that lets a step go on; of one that cannot, remove what it left."""
    if step.kind not in TRAINING:
        if step.kind == "judge":
            shutil.rmtree(step.output_dir, ignore_errors=True)
        return []
    if step.kind == "ppo":
        return ["--resume_from_checkpoint", "true"] if any(step.output_dir.glob("checkpoint-*")) else []
    checkpoint = newest_whole_checkpoint(step.output_dir)
    return [] if checkpoint is None else ["--resume_from_checkpoint", str(checkpoint)]


def newest_whole_checkpoint(output_dir: Path) -> Path | None:
    """Return the newest checkpoint of TRL's trainers that was written to its end, whose last file is the state.

    Args:
        output_dir: The run's directory.
    """
    for path in numbered(output_dir):
        try:
            read_object(path / "trainer_state.json")
        except ValueError:
            continue
        return path
    return None


def start_python(words: Sequence[str]) -> int:
    """Run Python, pass signals on to it, and wait for its end.

    Args:
        words: Its arguments.

    Returns:
        Its exit code; 128 and the signal's number where a signal ended it.
    """
    parent, signals = os.getpid(), signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])

    def begin() -> None:
        end_with_parent(parent)
        signal.pthread_sigmask(signal.SIG_SETMASK, signals)

    try:
        process = subprocess.Popen([sys.executable, *words], preexec_fn=begin)
        with _passing_on(process):
            signal.pthread_sigmask(signal.SIG_SETMASK, signals)  # one that came before is passed on now
            code = process.wait()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, signals)
    return 128 - code if code < 0 else code


def end_with_parent(parent: int) -> None:
    """Have SIGTERM sent to this process where its parent is killed, or the step would go on beside the next start.

    Args:
        parent: The parent, which may have been killed already.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:
            os.kill(os.getpid(), signal.SIGTERM)


@contextmanager
def _passing_on(process: subprocess.Popen[bytes]) -> Iterator[None]:
    """Pass SIGTERM on; SIGINT comes to the process by itself, from the terminal that both have."""
    handlers = {
        signal.SIGTERM: signal.signal(signal.SIGTERM, lambda number, _: process.send_signal(number)),
        signal.SIGINT: signal.signal(signal.SIGINT, lambda *_: None),
    }
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
