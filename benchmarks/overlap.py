"""Measure `generation_overlap` or `reward_overlap`: the time of day of an update with and without it.

    python benchmarks/overlap.py
    python benchmarks/overlap.py --rewards waits numpy python

One thread for the models. Both runs take turns, so that a busy machine is busy for both. A second core must be free.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import numpy as np
from measure import measure_alone
from workloads import WORKLOADS

NUM_FIRST = 2
"""Updates that are not measured: the first waits for the worker's imports."""


def waits(completions: list[str], **_: Any) -> list[float]:
    """Wait for half a second, as for a server or a program."""
    time.sleep(0.5)
    return [float(len(text)) for text in completions]


def computes_in_numpy(completions: list[str], **_: Any) -> list[float]:
    """Multiply matrices for about half a second, without Python's lock."""
    matrix = np.full((512, 512), 1 / 512, dtype=np.float32)
    for _number in range(130):
        matrix = matrix @ matrix
    return [float(len(text)) for text in completions]


def computes_in_python(completions: list[str], **_: Any) -> list[float]:
    """Count for about half a second, with Python's lock."""
    total = 0
    for number in range(8_000_000):
        total += number & 1
    return [float(len(text)) for text in completions]


REWARDS: dict[str, Callable[..., list[float]]] = {
    "waits": waits, "numpy": computes_in_numpy, "python": computes_in_python
}  # fmt: skip


def seconds_of(workload: str, num_updates: int, options: dict[str, Any], **models: Any) -> list[float]:
    """Return the seconds of each update of a run."""
    os.environ["OMP_NUM_THREADS"] = "1"
    result = measure_alone(WORKLOADS[workload], NUM_FIRST + num_updates, options, **models)
    return [update["wall"] for update in result["updates"][NUM_FIRST - 1 :]]


def main() -> None:
    """Measure and print a line for each round."""
    parser = argparse.ArgumentParser(
        allow_abbrev=False, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workload", choices=WORKLOADS, default="ragged")
    parser.add_argument("--updates", type=int, default=6, help=f"besides the first {NUM_FIRST}")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rewards", choices=REWARDS, nargs="+", help="measure reward_overlap with these functions")
    arguments = parser.parse_args()
    runs: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
        (name, {"reward_overlap": True}, {"reward_funcs": [REWARDS[name]]}) for name in arguments.rewards or ()
    ]
    print("| | round | without, s | with, s | without / with | load |", "| --- " * 6 + "|", sep="\n", flush=True)
    for name, options, models in runs or [("generation_overlap", {"generation_overlap": 1}, {})]:
        for number in range(1, arguments.rounds + 1):
            without, beside = (
                median(seconds_of(arguments.workload, arguments.updates, given, **models)) for given in ({}, options)
            )
            seconds = f"{without:.2f} | {beside:.2f} | {without / beside:.2f}x"
            print(f"| {name} | {number} | {seconds} | {os.getloadavg()[0]:.1f} |", flush=True)


if __name__ == "__main__":
    main()
