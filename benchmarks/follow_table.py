"""Print the results of follow.py as a table: means over seeds, and differences from the separate value model.

    python benchmarks/follow_table.py [follow.jsonl]

Intervals are Student's t, 95%. At equal KL: by analysis of covariance, where the arms' KLs overlap.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parent / "learning"))
from intervals import at_equal, difference, mean  # pyright: ignore

COLUMNS = ("all ten", "six", "pairs", "KL, nats", "CPU minutes", "peak, GB")


def main() -> None:
    """Read the rows and print."""
    path = Path(sys.argv[1]) if sys.argv[1:] else Path(__file__).with_name("follow.jsonl")
    arms: dict[str, dict[int, dict[str, float]]] = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        numbers = (
            0.6 * row["single"] + 0.4 * row["pairs"], row["single"], row["pairs"], row["evaluation"]["kl"],
            row["cpu_seconds"] / 60, row["peak_mb"] / 1024,
        )  # fmt: skip
        arms.setdefault(row["arm"], {})[row["seed"]] = dict(zip(COLUMNS, numbers, strict=True))
    print(f"| | seeds | {' | '.join(COLUMNS)} |\n|---|{'---|' * (1 + len(COLUMNS))}")
    for arm, seeds in arms.items():
        cells = [
            mean([each[name] for each in seeds.values()]).shown(2 if name != "KL, nats" else 1) for name in COLUMNS
        ]
        print(f"| {arm} | {len(seeds)} | {' | '.join(cells)} |")
    print(f"\n| minus critic | {' | '.join(COLUMNS[:3])} | all ten, at equal KL |\n|---|---|---|---|---|")
    for arm in arms.keys() & {"one-body", "linear-head", "no-critic", "grpo", "trl-ppo"}:  # of as many updates
        sides = [arms[arm], arms["critic"]]
        cells = [
            difference(*({s: each[name] for s, each in side.items()} for side in sides)).shown(2, signed=True)
            for name in COLUMNS[:3]
        ]
        equal = at_equal(*([(each["KL, nats"], each["all ten"]) for each in side.values()] for side in sides))
        print(f"| {arm} | {' | '.join(cells)} | {equal.shown(2, signed=True) if equal else '-'} |")


if __name__ == "__main__":
    main()
