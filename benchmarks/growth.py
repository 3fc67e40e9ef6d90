"""Measure how the cost of an update grows with its episodes and with the length of its responses.

Each size runs in its own process with one thread; responses have full length, so that the work is known. Cost per
episode and cost per response token would stay the same if growth were linear.
"""

from __future__ import annotations

import argparse
import dataclasses
from statistics import median

from measure import PHASES, measure_alone
from workloads import Workload, llama

BASE = Workload(
    llama(4, 128, 2048) | {"max_position_embeddings": 2048}, (32, 64), 64, batch_size=8, micro_batch_size=8
)
NEVER = 10**6
"""Mean length, tokens, of responses that do not end early."""
TOY = Workload(
    llama(1, 32, 64) | {"max_position_embeddings": 2048}, (8, 16), 1024, NEVER, num_ppo_epochs=1, rollout_batch_size=64
)
SIZES = {
    "episodes": [dataclasses.replace(BASE, batch_size=8 * times) for times in (1, 2, 4)],
    "response length": [dataclasses.replace(BASE, response_length=length) for length in (64, 256, 1024)],
    "episodes of 1,024 tokens, toy": [dataclasses.replace(TOY, batch_size=size) for size in (64, 512)],
}


def rows(kind: str, num_updates: int) -> list[list[str]]:
    """Measure the sizes of one kind and make the lines of the table."""
    table, first = [], None
    for workload in SIZES[kind]:
        result = measure_alone(workload, num_updates)
        seconds = {phase: median(update[phase] for update in result["updates"]) for phase in PHASES}
        num_tokens = workload.batch_size * workload.response_length
        per_token = sum(seconds.values()) / num_tokens
        first = first or per_token
        size = workload.response_length if kind == "response length" else workload.batch_size
        phases = [f"{value:.2f}" for value in seconds.values()]
        costs = [f"{1e3 * per_token:.2f}", f"{per_token / first:.2f}x", f"{result['memory']:.0f}"]
        table.append([kind, str(size), *phases, *costs])
        print(*table[-1], sep=" | ", flush=True)
    return table


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(allow_abbrev=False, description=__doc__)
    parser.add_argument("--updates", type=int, default=3, help="the first is not measured")
    parser.add_argument("--kinds", nargs="+", choices=SIZES, default=[*SIZES])
    arguments = parser.parse_args()
    columns = ["grows", "to", *PHASES, "ms per response token", "of the first", "MB"]
    measured = [row for kind in arguments.kinds for row in rows(kind, arguments.updates)]
    lines = [columns, ["---"] * len(columns), *measured]
    print("\n".join(f"| {' | '.join(line)} |" for line in lines))


if __name__ == "__main__":
    main()
