"""Runs that are killed at random moments and restarted end where a run that was left alone ends, bit for bit.

Each kill waits for the phase that was hit least so far, so that evaluations, sample tables, checkpoints and the final
save are hit too, however few kills there are. `make test-kills` makes 100 kills of one process, 20 of two, and 20 of
one that samples ahead or of its worker.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from rlhf_ppo.reporting.completion_files import find_completions, read_completions
from tests.distributed import processes
from tests.faults.train_until_killed import PHASES, samples, train
from tests.runs import assert_identical

NUM_KILLS = int(os.environ.get("NUM_KILLS", "10"))
Start = Callable[[Path], list[Any]]


def start_one(output_dir: Path) -> list[Any]:
    """Start a run in a process forked from one that has imported everything, which takes longer than the run."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.preload"])
    process = context.Process(target=train, args=(str(output_dir),))
    process.start()
    return [process]


def start_two(output_dir: Path) -> list[Any]:
    """Start a run in two processes, whose output goes into its directory."""
    output_dir.mkdir(exist_ok=True)
    call = "tests.faults.train_until_killed.train", {"output_dir": str(output_dir)}
    return processes.started("multi_gpu", [call], str(output_dir))


def kill(process: Any) -> None:
    process.kill()


class Killer:
    """Kills all processes of runs, in any order, at a random moment of the phase that was hit least so far.

    Args:
        num_kills: How many kills there are to be.
        seconds: How long each phase takes; the whole run under "update".
        strikes: Functions that kill a process, used in turn.
    """

    def __init__(self, num_kills: int, seconds: dict[str, float], strikes: Sequence[Callable[[Any], None]]) -> None:
        self.random, self.num_kills, self.seconds = random.Random(0), num_kills, seconds
        self.strikes, self.kills, self.codes = itertools.cycle(strikes), Counter[str](), Counter[int]()

    @property
    def is_done(self) -> bool:
        """Whether there were enough kills, some in each phase."""
        return self.kills.total() >= self.num_kills and self.kills.keys() >= {*PHASES}

    def kill(self, run: list[Any], output_dir: Path) -> bool:
        """Kill a run, or let it end before; tell which."""
        aimed = min(PHASES, key=lambda phase: self.kills[phase])
        if aimed not in ("update", "final save"):  # which come once, evaluations and others several times
            self._wait(run, self.random.uniform(0, self.seconds["update"] / 2), output_dir)
        self._wait(run, 60, output_dir, until=aimed)
        self._wait(run, self.random.uniform(0, self.seconds[aimed]), output_dir)
        return self._kill(run, output_dir)

    def kill_before_first_checkpoint(self, run: list[Any], output_dir: Path) -> bool:
        """Kill a run when it has kept its first responses and has no checkpoint from which it could go on."""
        responses = output_dir / "completions" / "completions_00001.parquet"
        while not responses.exists() and all(process.is_alive() for process in run):
            time.sleep(0.001)
        return self._kill(run, output_dir)

    def _kill(self, run: list[Any], output_dir: Path) -> bool:
        phase = self.phase(output_dir)
        if not all(process.is_alive() for process in run):
            return False
        strike = next(self.strikes)
        for process in self.random.sample(run, len(run)):
            strike(process)
            time.sleep(self.random.choice([0, 0.02]))
        for process in run:
            process.join()
        if all(process.exitcode == 0 for process in run):  # it needed its worker no more
            return False
        self.kills[phase] += 1
        self.codes.update(process.exitcode for process in run)
        return True

    def _wait(self, run: list[Any], seconds: float, output_dir: Path, until: str | None = None) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end and all(process.is_alive() for process in run):
            if until is not None and self.phase(output_dir) == until:
                return
            time.sleep(0.001)

    @staticmethod
    def phase(output_dir: Path) -> str:
        """Read what a run is doing; before its first phase and between phases it makes updates."""
        path = output_dir / "phase.txt"
        return (path.read_text() if path.exists() else "") or "update"


def seconds_of_phases(output_dir: Path) -> dict[str, float]:
    """Read how long the phases of a run took, the longest of each."""
    seconds: dict[str, float] = {}
    for line in (output_dir / "seconds.txt").read_text().splitlines():
        name, _, value = line.partition(":")
        seconds[name] = max(seconds.get(name, 0.0), float(value))
    return seconds


def end(output_dir: Path, world: int) -> tuple[Any, ...]:
    """Read all that a run has left: each rank's end, the sample tables, the kept responses, and the policy."""
    ranks = [torch.load(output_dir / f"end-{rank}.pt", weights_only=True) for rank in range(world)]
    found = find_completions(output_dir)
    kept = {step: read_completions(path) for step, path in found.items()}
    others = {*(output_dir / "completions").iterdir()} - {*found.values()}
    starts_anew = (output_dir / "starts.txt").read_text().split().count("None")
    # None has a second file, or half of one, but the first updates of starts that were killed before a checkpoint.
    assert len(others) * world < starts_anew and all(
        "_00001" in path.stem and path.suffix == ".parquet" for path in others
    )
    return ranks, samples(output_dir), kept, load_file(output_dir / "final" / "model.safetensors")


def wait_for_end(run: list[Any]) -> None:
    for process in run:
        process.join(300)
        assert process.exitcode == 0


def ends_as_one_that_was_left_alone(
    start: Start, world: int, num_kills: int, folder: Path, strikes: Sequence[Callable[[Any], None]] = (kill,)
) -> Counter[int]:
    """Kill runs so many times; each ends as the first one does, which nothing disturbs. Return the exit codes."""
    wait_for_end(start(folder / "warm-up"))  # the first one also waits for the imports
    before = time.monotonic()
    wait_for_end(start(folder / "left-alone"))
    seconds = {"update": time.monotonic() - before, **seconds_of_phases(folder / "left-alone")}
    killer = Killer(num_kills, seconds, strikes)
    expected = end(folder / "left-alone", world)
    assert_identical(end(folder / "warm-up", world), expected)
    assert len(expected[0][0]["history"]) > 5 and sorted(expected[1]) == [1, 3, 5, 7, 10]
    assert list(expected[2]) == [1, 3, 6, 9, 10]

    num_runs, starts = 0, []
    run = start(folder / "killed-1")
    if not killer.kill_before_first_checkpoint(run, folder / "killed-1"):
        wait_for_end(run)
    while not killer.is_done:
        num_runs += 1
        output_dir = folder / f"killed-{num_runs}"
        while len(list(output_dir.glob("end-*.pt"))) < world:
            (output_dir / "phase.txt").unlink(missing_ok=True)
            run = start(output_dir)
            if killer.is_done or not killer.kill(run, output_dir):
                wait_for_end(run)
        assert_identical(end(output_dir, world), expected)
        starts += (output_dir / "starts.txt").read_text().split()
    print(
        f"{killer.kills.total()} kills in {num_runs} runs of {world} processes: {dict(killer.kills)}, {killer.codes}"
    )
    assert len(set(starts)) > 1, "runs were resumed from checkpoints"
    return killer.codes


@pytest.mark.slow
@pytest.mark.timeout(60 + 30 * NUM_KILLS)
def test_killed_runs_end_as_one_that_was_left_alone(tmp_path: Path) -> None:
    ends_as_one_that_was_left_alone(start_one, 1, NUM_KILLS, tmp_path)


@pytest.mark.distributed
@pytest.mark.timeout(180 + 12 * NUM_KILLS)
def test_two_killed_processes_end_as_two_that_were_left_alone(tmp_path: Path) -> None:
    ends_as_one_that_was_left_alone(start_two, 2, NUM_KILLS // 5, tmp_path)
