"""Runs that are killed at random moments and restarted end where a run that was left alone ends, bit for bit.

Every other kill waits for a phase of the run that is short, so that evaluations, sample tables and the final save are
hit as well. `make test-kills` makes 100 kills of one process and 20 of two.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.distributed import processes
from tests.faults.train_until_killed import PHASES, samples, train
from tests.runs import assert_identical

NUM_KILLS = int(os.environ.get("NUM_KILLS", "10"))
Start = Callable[[Path], list[Any]]


def start_one(output_dir: Path) -> list[Any]:
    """Start a run in a process forked from one that has imported everything, which takes longer than the run."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.distributed.preload"])
    process = context.Process(target=train, args=(str(output_dir),))
    process.start()
    return [process]


def start_two(output_dir: Path) -> list[Any]:
    """Start a run in two processes, whose output goes into its directory."""
    output_dir.mkdir(exist_ok=True)
    call = "tests.faults.train_until_killed.train", {"output_dir": str(output_dir)}
    return processes.started("multi_gpu", [call], str(output_dir))


class Killer:
    """Lets runs go on for a random time and kills all their processes, in any order.

    Args:
        duration: Seconds that a run takes from its start to its end.

    Attributes:
        kills: How many there were, by the phase in which the run was.
    """

    def __init__(self, duration: float) -> None:
        self.random, self.duration = random.Random(0), duration
        self.kills: Counter[str] = Counter()

    def kill(self, run: list[Any], output_dir: Path) -> bool:
        """Kill a run, or let it end before; tell which."""
        aimed = self.random.choice([None, *PHASES[1:]])
        self._wait(run, self.random.uniform(0, self.duration / (1 if aimed is None else 2)), output_dir)
        if aimed is not None:
            self._wait(run, 60, output_dir, until=aimed)
            self._wait(run, self.random.uniform(0, 0.1), output_dir)
        phase = self.phase(output_dir)
        if not all(process.is_alive() for process in run):
            return False
        for process in self.random.sample(run, len(run)):
            process.kill()
            time.sleep(self.random.choice([0, 0.02]))
        for process in run:
            process.join()
        self.kills[phase] += 1
        return True

    def _wait(self, run: list[Any], seconds: float, output_dir: Path, until: str | None = None) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end and all(process.is_alive() for process in run):
            if until is not None and self.phase(output_dir) == until:
                return
            time.sleep(0.002)

    @staticmethod
    def phase(output_dir: Path) -> str:
        """Read what a run is doing."""
        path = output_dir / "phase.txt"
        return path.read_text() if path.exists() else ""


def end(output_dir: Path, world: int) -> tuple[Any, ...]:
    """Read all that a run has left: each rank's end, the sample tables, and the policy."""
    ranks = [torch.load(output_dir / f"end-{rank}.pt", weights_only=True) for rank in range(world)]
    return ranks, samples(output_dir), load_file(output_dir / "final" / "model.safetensors")


def wait_for_end(run: list[Any]) -> None:
    for process in run:
        process.join(300)
        assert process.exitcode == 0


def ends_as_one_that_was_left_alone(start: Start, world: int, num_kills: int, folder: Path) -> Killer:
    """Kill runs until there are so many kills; each ends as the first one does, which nothing disturbs."""
    wait_for_end(start(folder / "warm-up"))  # the first one also waits for the imports
    before = time.monotonic()
    wait_for_end(start(folder / "left-alone"))
    killer = Killer(time.monotonic() - before)
    expected = end(folder / "left-alone", world)
    assert_identical(end(folder / "warm-up", world), expected)
    assert len(expected[0][0]["history"]) > 5 and sorted(expected[1]) == [1, 3, 5, 7, 10]

    num_runs, starts = 0, []
    while killer.kills.total() < num_kills:
        num_runs += 1
        output_dir = folder / f"killed-{num_runs}"
        while len(list(output_dir.glob("end-*.pt"))) < world:
            run = start(output_dir)
            if killer.kills.total() >= num_kills or not killer.kill(run, output_dir):
                wait_for_end(run)
        assert_identical(end(output_dir, world), expected)
        starts += (output_dir / "starts.txt").read_text().split()
    print(f"{killer.kills.total()} kills in {num_runs} runs of {world} processes: {dict(killer.kills)}")
    assert len(set(starts)) > 1, "runs were resumed from checkpoints"
    return killer


@pytest.mark.slow
@pytest.mark.timeout(60 + 30 * NUM_KILLS)
def test_killed_runs_end_as_one_that_was_left_alone(tmp_path: Path) -> None:
    killer = ends_as_one_that_was_left_alone(start_one, 1, NUM_KILLS, tmp_path)
    assert NUM_KILLS < 100 or killer.kills.keys() >= set(PHASES)


@pytest.mark.distributed
@pytest.mark.timeout(180 + 12 * NUM_KILLS)
def test_two_killed_processes_end_as_two_that_were_left_alone(tmp_path: Path) -> None:
    ends_as_one_that_was_left_alone(start_two, 2, NUM_KILLS // 5, tmp_path)
