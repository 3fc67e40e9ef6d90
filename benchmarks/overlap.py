"""Measure `generation_overlap`: the time of day of an update with and without it, one thread in each process.

Both runs take turns, so that a busy machine is busy for both. A second core must be free for the worker.
"""

from __future__ import annotations

import argparse
import os
from statistics import median

from measure import measure_alone
from workloads import WORKLOADS

NUM_FIRST = 2
"""Updates that are not measured: the first waits for the worker's imports."""


def seconds_of(workload: str, num_updates: int, overlap: int) -> list[float]:
    """Return the seconds of each update of a run."""
    os.environ["OMP_NUM_THREADS"] = "1"
    options = {"generation_overlap": overlap}
    result = measure_alone(WORKLOADS[workload], NUM_FIRST + num_updates, options)
    return [update["wall"] for update in result["updates"][NUM_FIRST - 1 :]]


def main() -> None:
    """Measure and print a line for each round."""
    parser = argparse.ArgumentParser(allow_abbrev=False, description=__doc__)
    parser.add_argument("--workload", choices=WORKLOADS, default="ragged")
    parser.add_argument("--updates", type=int, default=6, help=f"besides the first {NUM_FIRST}")
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    print("| round | without, s | with, s | without / with | load |\n| --- | --- | --- | --- | --- |", flush=True)
    for number in range(1, arguments.rounds + 1):
        without, ahead = (median(seconds_of(arguments.workload, arguments.updates, overlap)) for overlap in (0, 1))
        load = f"{os.getloadavg()[0]:.1f}"
        print(f"| {number} | {without:.2f} | {ahead:.2f} | {without / ahead:.2f}x | {load} |", flush=True)


if __name__ == "__main__":
    main()
