"""Measure how arguments change the time and the memory of an update, each in its own process with one thread.

`adamw_torch_8bit` needs `pip install torchao`.

Seconds are CPU seconds of the process. A compiler is at work in the first updates: they are reported as a sum, and an
update's seconds are the median of those after them. The peak of memory is without the models: activations, logits,
gradients, the optimizer's state, and what a compiler holds.
"""

from __future__ import annotations

import argparse
from statistics import median
from typing import Any

from measure import PHASES, measure_alone
from workloads import WORKLOADS, Workload, llama

SHAPES = {
    "small": Workload(llama(4, 128, 2048), (100, 200), 48, mean_length=30, micro_batch_size=16),
    **WORKLOADS,
}

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "gradient_checkpointing": {"gradient_checkpointing": True},
    "max_tokens_per_micro_batch=1024": {"max_tokens_per_micro_batch": 1024},
    "adamw_torch_8bit": {"optim": "adamw_torch_8bit"},
    "LoRA": {"adapters": True},
    "LoRA, gradient_checkpointing": {"adapters": True, "gradient_checkpointing": True},
    "torch_compile": {"torch_compile": True},
}
NUM_FIRST = 3
"""Updates that are not measured: new lengths make the compiler work again."""
COLUMNS = ["", f"first {NUM_FIRST}, s", "update, s", "of plain", *PHASES, "MB above the models", "of plain"]


def measure_option(workload: str, name: str, num_updates: int) -> dict[str, Any]:
    """Measure our trainer with one of the options."""
    options = dict(OPTIONS[name])
    models = adapters() if options.pop("adapters", False) else {}
    return measure_alone(SHAPES[workload], NUM_FIRST + num_updates, options, **models)


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
    first = [result["first"], *result["updates"][: NUM_FIRST - 1]]
    seconds, of_plain = (
        [median(update[phase] for update in measured["updates"][NUM_FIRST - 1 :]) for phase in PHASES]
        for measured in (result, plain)
    )
    times = [sum(update[phase] for update in first for phase in PHASES), sum(seconds)]
    ratios = [f"{sum(seconds) / sum(of_plain):.2f}x", *(f"{each:.2f}" for each in seconds)]
    memory = [f"{result['memory']:.0f}", f"{result['memory'] / plain['memory']:.2f}x"]
    return [name, *(f"{each:.2f}" for each in times), *ratios, *memory]


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(allow_abbrev=False, description=__doc__)
    parser.add_argument("--workload", choices=SHAPES, default="small")
    parser.add_argument("--updates", type=int, default=3, help=f"besides the first {NUM_FIRST}")
    parser.add_argument("--options", nargs="+", choices=OPTIONS, default=list(OPTIONS), help="besides plain")
    arguments = parser.parse_args()
    lines, plain = [COLUMNS, ["---"] * len(COLUMNS)], None
    for name in dict.fromkeys(["plain", *arguments.options]):
        result = measure_option(arguments.workload, name, arguments.updates)
        plain = plain or result
        lines.append(row(name, result, plain))
        print(*lines[-1], sep=" | ", flush=True)
    print("\n".join(f"| {' | '.join(line)} |" for line in lines))


if __name__ == "__main__":
    main()
