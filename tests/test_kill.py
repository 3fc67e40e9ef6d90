"""Runs that are killed at random moments and restarted end where a run that was left alone ends, bit for bit."""

from __future__ import annotations

import multiprocessing
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.runs import assert_identical
from tests.workers.train_until_killed import samples, train

pytestmark = pytest.mark.slow

NUM_KILLS = 10


@pytest.fixture(scope="module")
def start() -> Callable[[Path], Any]:
    """Start a run in a process forked from one that has imported everything, which takes longer than the run."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([train.__module__])

    def start_run(output_dir: Path) -> Any:
        process = context.Process(target=train, args=(str(output_dir),))
        process.start()
        return process

    return start_run


def wait_for_end(process: Any) -> None:
    process.join(300)
    assert process.exitcode == 0


def end(output_dir: Path) -> tuple[Any, Any]:
    return torch.load(output_dir / "end.pt", weights_only=True), samples(output_dir)


def test_killed_runs_end_as_one_that_was_left_alone(start: Callable[[Path], Any], tmp_path: Path) -> None:
    wait_for_end(start(tmp_path / "warm-up"))  # the first one also waits for the imports
    before = time.monotonic()
    wait_for_end(start(tmp_path / "left-alone"))
    duration = time.monotonic() - before
    expected = end(tmp_path / "left-alone")
    assert_identical(end(tmp_path / "warm-up"), expected)
    assert len(expected[0]["history"]) > 5 and sorted(expected[1]) == [1, 3, 5, 7, 10]

    moments = random.Random(0)
    num_kills, num_runs, starts = 0, 0, []
    while num_kills < NUM_KILLS:
        num_runs += 1
        output_dir = tmp_path / f"killed-{num_runs}"
        while not (output_dir / "end.pt").exists():
            process = start(output_dir)
            if num_kills < NUM_KILLS:
                process.join(moments.uniform(0, duration))
            else:
                process.join()
            if process.exitcode is None:
                process.kill()
                process.join()
                num_kills += 1
            else:
                assert process.exitcode == 0
        assert_identical(end(output_dir), expected)
        starts += (output_dir / "starts.txt").read_text().split()
    assert len(set(starts)) > 3, "runs were resumed from several checkpoints"
