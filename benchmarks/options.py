"""Measure what one argument changes in the time and the memory of an update, each in a process of its own, one thread.

Seconds are CPU seconds of this process, the median over the updates after the first; the first compiles, and is reported
apart. The peak of memory is that above the models': activations, logits, gradients, the optimizer's state, and what a
compiler holds.
"""

from __future__ import annotations

import argparse
import dataclasses
import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from statistics import median
from typing import Any

import torch
from measure import PHASES, measure
from workloads import WORKLOADS

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "gradient_checkpointing": {"gradient_checkpointing": True},
    "max_tokens_per_micro_batch=1024": {"max_tokens_per_micro_batch": 1024},
    "LoRA": {"adapters": True},
    "LoRA, gradient_checkpointing": {"adapters": True, "gradient_checkpointing": True},
    "torch_compile": {"torch_compile": True},
}
COLUMNS = ["", "first update, s", "update, s", "of plain", *PHASES, "MB above the models", "of plain"]


def measure_alone(workload: str, name: str, num_updates: int) -> dict[str, Any]:
    """Measure our trainer with one thread and one of the options."""
    torch.set_num_threads(1)
    options = dict(OPTIONS[name])
    models = adapters() if options.pop("adapters", False) else {}
    # One pass of all episodes at once, so that what is kept for the backward pass shows.
    whole = dataclasses.replace(WORKLOADS[workload], micro_batch_size=WORKLOADS[workload].batch_size)
    return measure("ours", whole, num_updates, options, **models)


def adapters() -> dict[str, Any]:
    """Make the adapters of policy and value model, on all linear layers below the heads."""
    from peft import LoraConfig

    return {name: LoraConfig(target_modules="all-linear") for name in ("peft_config", "value_peft_config")}


def row(name: str, result: dict[str, Any], plain: dict[str, Any]) -> list[str]:
    """Make a line of the table.

    Args:
        name: The option's.
        result: What was measured with it.
        plain: What was measured without.
    """
    seconds = {phase: median(update[phase] for update in result["updates"]) for phase in PHASES}
    of_plain = sum(median(update[phase] for update in plain["updates"]) for phase in PHASES)
    first, total = sum(result["first"][phase] for phase in PHASES), sum(seconds.values())
    memory = [f"{result['memory']:.0f}", f"{result['memory'] / plain['memory']:.2f}x"]
    times = [f"{first:.2f}", f"{total:.2f}", f"{total / of_plain:.2f}x", *(f"{each:.2f}" for each in seconds.values())]
    return [name, *times, *memory]


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workload", choices=WORKLOADS, default="long-prompt")
    parser.add_argument("--updates", type=int, default=4, help="the first is reported apart")
    parser.add_argument("--options", nargs="+", choices=OPTIONS, default=list(OPTIONS), help="besides plain")
    arguments = parser.parse_args()
    print(*(f"| {' | '.join(line)} |" for line in (COLUMNS, ["---"] * len(COLUMNS))), sep="\n", flush=True)
    plain = None
    for name in dict.fromkeys(["plain", *arguments.options]):
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
            result = pool.submit(measure_alone, arguments.workload, name, arguments.updates).result()
        plain = plain or result
        print(f"| {' | '.join(row(name, result, plain))} |", flush=True)


if __name__ == "__main__":
    main()
