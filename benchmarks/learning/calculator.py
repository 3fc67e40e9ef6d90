"""Train `examples/agent_calculator.py` with three seeds: where calls pay, and where each call costs.

    python benchmarks/learning/calculator.py  # the seeds that agents.jsonl lacks

Both runs of a seed begin with the same model. The same command continues after an interruption.
"""

from __future__ import annotations

import argparse
import copy
import json
import sys
import tempfile
import time

import torch
from lake import EXAMPLE, RESULTS, read_results
from run import code_version

sys.path.insert(0, str(EXAMPLE.parent))
import agent_calculator
import calculator_model

TOOL = agent_calculator.Calculator.calculate
SETTINGS = {"calculator": 0.0, "calculator, calls cost": 0.3}
"""Price of a call by the name of a setting."""


def train(seed: int, updates: int) -> None:
    """Train the settings of a seed that are missing, and store them."""
    torch.set_num_threads(1)
    done = {row["setting"] for row in read_results() if row.get("seed") == seed}
    start, tokenizer = time.process_time(), calculator_model.make_tokenizer(TOOL)
    model = calculator_model.make_model(tokenizer, TOOL, seed, 0.3)
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


def main() -> None:
    """Train what is missing."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--updates", type=int, default=20)
    given = parser.parse_args()
    for seed in given.seeds:
        train(seed, given.updates)


if __name__ == "__main__":
    main()
