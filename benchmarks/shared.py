"""Measure what is computed once for rows that begin alike: `python benchmarks/shared.py --trl-python PYTHON`.

The arms run in turn, each in its own process with one thread; the table has CPU seconds of an update (medians) and the
memory above that of the models, and goes to benchmarks/SHARED.md. Needs `make chat-model`.
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

import torch
from bound import bandwidth, decoded_bytes, matmul_rate, update_flops
from measure import PHASES
from workloads import WORKLOADS, Workload

FOLDER = Path(__file__).parent
CHATS, GROUPS = "smollm2-135m-chats", "smollm2-135m-groups"
HEADER = """# Rows that begin alike

SmolLM2-135M's shape with random weights, LoRA (the value model's weights are all trained), float32, one thread of a
CPU; 16 responses of 32 tokens, two passes. *chats*: questions in the model's own template, 16 a micro-batch.
*groups*: two prompts of 160 to 200 tokens, 8 responses each, 8 a micro-batch. *one body*: `value_model="policy"`.
*a function*: a reward of no cost instead of a reward model. GRPO has a KL penalty; it samples and scores under
*generate*, and learns under *score*. CPU seconds of this process; MB above the models. Each process has one
measured update, after one that is not. *Of the bound*: the seconds of the necessary products over computed tokens, at
the rate that matrices of 1024 x 1024 had in the same run, over those taken; of the whole update, and of learning.

"""
ARMS = {  # arguments of measure.py, by the label of the row
    "chats, two models": ("ours", CHATS),
    "chats, one body": ("ours", CHATS, "--one-body"),
    "chats, two models, not shared": ("ours", CHATS, "--unshared"),
    "chats, TRL's PPO": ("trl", CHATS),
    "groups, two models": ("ours", GROUPS),
    "groups, one body": ("ours", GROUPS, "--one-body"),
    "groups, one body, a function": ("ours", GROUPS, "--one-body", "--function"),
    "groups, two models, not shared": ("ours", GROUPS, "--unshared"),
    "groups, TRL's PPO": ("trl", GROUPS),
    "groups, TRL's GRPO, a function": ("grpo", GROUPS),
}


def measured(arguments: tuple[str, ...], trl_python: str) -> dict[str, Any]:
    """Run measure.py once; return what it printed."""
    python = trl_python if arguments[0] == "trl" else sys.executable
    environment = os.environ | {"PYTHONPATH": str(FOLDER.parent), "OMP_NUM_THREADS": "1"}
    command = [python, str(FOLDER / "measure.py"), *arguments, "--updates=2"]
    run = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(run.stdout.splitlines()[-1])


def bounds(workload: Workload, row: dict[str, Any]) -> tuple[float, float]:
    """Count the seconds that an update with shared beginnings, and its learning, cannot go below.

    Args:
        workload: What was run.
        row: What was measured: `lengths` of prompts and responses, `shared` fraction of their tokens, `rates` of
            products, FLOP/s, and of reading, bytes/s, and the arm's name.
    """
    prompts, responses = (torch.tensor(side) for side in row["lengths"][-1])
    rate, reading = row["rates"]
    flops, learning = update_flops(
        workload.model,
        prompts,
        responses,
        workload.num_ppo_epochs,
        workload.lora_rank,
        workload.scorer,
        computed=1 - row["shared"][-1],
        shares_prompts=workload.copies > 1,
        has_value_model="one body" not in row["arm"],
        has_reward_model="function" not in row["arm"],
    )
    return flops / rate + decoded_bytes(workload.model, int(responses.max())) / reading, learning / rate


def shares_of_bound(name: str, rows: list[dict[str, Any]]) -> str:
    """Print the share of the bound of an update, and of its learning: medians over the rows whose rates are known."""
    rows = [row for row in rows if row.get("rates") and row["lengths"]]
    if not rows:
        return ""
    seconds = [bounds(WORKLOADS[ARMS[name][1]], row) for row in rows]
    shares = [
        median(bound[place] / row["updates"][-1][key] for bound, row in zip(seconds, rows, strict=True))
        for place, key in enumerate(("cpu", "learn"))
    ]
    return f"{shares[0]:.0%}, {shares[1]:.0%}"


def table(results: dict[str, list[dict[str, Any]]]) -> str:
    """Summarize each arm: an update is all optimizer steps on the same responses, of which GRPO reads each alone."""
    columns = ("arm", "CPU s of an update, by round", "median", *PHASES, "MB", "tokens computed", "of the bound")
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for name, runs in results.items():
        updates = [run["updates"] if "GRPO" not in name else [total(run["updates"])] for run in runs]
        seconds = [update["cpu"] for run in updates for update in run]
        phases = [median(update[phase] for run in updates for update in run) for phase in PHASES]
        shared = runs[0].get("shared")
        kept = "" if not shared else f"{1 - median(shared):.0%}"
        figures = (f"{phase:.1f}" for phase in phases)
        memory = median(run["memory"] for run in runs)
        lines.append(
            f"| {name} | {', '.join(f'{value:.1f}' for value in seconds)} | **{median(seconds):.1f}** | "
            f"{' | '.join(figures)} | {memory:.0f} | {kept} | {shares_of_bound(name, runs)} |"
        )
    return "\n".join(lines) + "\n"


def total(steps: list[dict[str, float]]) -> dict[str, float]:
    """Add up GRPO's optimizer steps on the responses of its second generation, the last two that were read."""
    return {key: sum(step[key] for step in steps[-2:]) for key in steps[0]}


def main() -> None:
    """Measure; print and write the table after each process."""
    parser = argparse.ArgumentParser(allow_abbrev=False, description=str(__doc__).partition(":")[0])
    parser.add_argument("--trl-python", required=True, help="the interpreter of the environment with trl==1.12.0")
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--results", type=Path, default=FOLDER / "shared.jsonl", help="rows are appended")
    options = parser.parse_args()
    torch.set_num_threads(1)
    for _ in range(options.rounds):
        for name in options.arms:
            rates = {"rates": [matmul_rate(), bandwidth()]}
            row = {"arm": name, **rates, **measured(ARMS[name], options.trl_python)}
            with options.results.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
            rows = [json.loads(line) for line in options.results.read_text(encoding="utf-8").splitlines()]
            by_arm = {label: [row for row in rows if row["arm"] == label] for label in ARMS}
            (FOLDER / "SHARED.md").write_text(HEADER + table({label: runs for label, runs in by_arm.items() if runs}))
            print(name, [update["cpu"] for update in row["updates"]], row["memory"], flush=True)


if __name__ == "__main__":
    main()
