"""Run the workloads through our trainer of this checkout and of another one, in turn, and compare them pair by pair.

`python benchmarks/against.py --other DIR`, where `git worktree add DIR COMMIT` has put the other one: a process each,
with one thread, and the same models, prompts and arguments.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from statistics import median
from typing import Any

from measure import PHASES
from workloads import DEFAULTS, WORKLOADS

FOLDER = Path(__file__).parent


def measured(checkout: Path, workload: str, updates: int) -> dict[str, float]:
    """Train with a checkout's package; return medians over updates: CPU seconds by phase and in all, and memory."""
    command = [sys.executable, str(FOLDER / "measure.py"), "ours", workload, f"--updates={updates}"]
    environment = os.environ | {"PYTHONPATH": str(checkout.resolve()), "OMP_NUM_THREADS": "1"}
    run = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    result: dict[str, Any] = json.loads(run.stdout.splitlines()[-1])
    seconds = {key: median(update[key] for update in result["updates"]) for key in (*PHASES, "cpu")}
    return {**seconds, "MB": result["memory"]}


def main() -> None:
    """Measure and print a table: the median of each figure there and here, and of the ratios, with their range."""
    parser = argparse.ArgumentParser(allow_abbrev=False, description=__doc__)
    parser.add_argument("--other", type=Path, required=True, help="the root of the other checkout")
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=DEFAULTS["cpu"])
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--updates", type=int, default=3, help="of each process; the first is not measured")
    given = parser.parse_args()
    print("| workload | figure | there | here | ratio |\n| --- | --- | --- | --- | --- |")
    for name in given.workloads:
        pairs = [
            tuple(measured(checkout, name, given.updates) for checkout in (given.other, FOLDER.parent))
            for _ in range(given.pairs)
        ]
        for key in pairs[0][0]:
            there, here = (median(pair[side][key] for pair in pairs) for side in (0, 1))
            ratios = sorted(after[key] / before[key] for before, after in pairs)
            spread = f"{median(ratios):.3f} ({ratios[0]:.3f} to {ratios[-1]:.3f})"
            print(f"| {name} | {key} | {there:.2f} | {here:.2f} | {spread} |", flush=True)


if __name__ == "__main__":
    main()
