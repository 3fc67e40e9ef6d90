"""Train `examples/agent_calculator.py` with three seeds: where calls pay, and where each call costs.

    python benchmarks/learning/calculator.py          # the seeds that agents.jsonl lacks
    python benchmarks/learning/calculator.py --table  # the table of the documentation

Both runs of a seed begin with the same model. The same command continues after an interruption.
"""

from __future__ import annotations

import argparse
import copy
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import Any

import torch
from intervals import mean
from lake import EXAMPLE, RESULTS, results
from run import code_version

sys.path.insert(0, str(EXAMPLE.parent))
import agent_calculator

SETTINGS = {"calculator": 0.0, "calculator, calls cost": 0.3}
"""Price of a call by the name of a setting."""


def train(seed: int, updates: int) -> None:
    """Train the settings of a seed that are missing, and store them."""
    torch.set_num_threads(1)
    done = {row["setting"] for row in results() if row.get("seed") == seed}
    start, tokenizer = time.process_time(), agent_calculator.make_tokenizer()
    model = agent_calculator.make_model(tokenizer, seed, 0.3)
    made = round(time.process_time() - start)
    for setting, price in SETTINGS.items():
        if setting not in done:
            with tempfile.TemporaryDirectory() as folder:
                options = argparse.Namespace(seed=seed, updates=updates, price=price, output_dir=folder)
                row = agent_calculator.train(options, tokenizer, copy.deepcopy(model))
            row = {"setting": setting, **row, "cpu_seconds_of_model": made, **code_version()}
            with RESULTS.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
            print(f"{setting}, seed {seed}: {row['before']} to {row['after']}", flush=True)


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Return the table of the documentation."""
    lines = [
        "| Setting | seed | right before | after | calls per episode before | after | CPU s, with the model's |",
        "|---|---|---|---|---|---|---|",
    ]
    for setting in SETTINGS:
        runs = sorted((row for row in rows if row["setting"] == setting), key=lambda row: row["seed"])
        for run in runs:
            before, after = run["before"], run["after"]
            seconds = run["cpu_seconds"] + run["cpu_seconds_of_model"]
            right = f"{before['right']:.1%} | {after['right']:.1%}"
            calls = f"{before['calls']:.2f} | {after['calls']:.2f}"
            lines.append(f"| {setting} | {run['seed']} | {right} | {calls} | {seconds} |")
        gained = mean([100 * (run["after"]["right"] - run["before"]["right"]) for run in runs])
        lines.append(f"| | mean | | {gained.shown(1, signed=True)} points | | | |")
    return "\n".join(lines)


def main() -> None:
    """Train what is missing, or print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--updates", type=int, default=20)
    parser.add_argument("--table", action="store_true")
    given = parser.parse_args()
    if given.table:
        print(table(results()))
        return
    for seed in given.seeds:
        train(seed, given.updates)


if __name__ == "__main__":
    main()
