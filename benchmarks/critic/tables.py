"""Print the tables of the documentation: means over seeds with 95% intervals of Student's t.

They come from `results.jsonl` (`measure.py`, `grpo.py`).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
sys.path.insert(0, str(FOLDER.parent / "learning"))

import intervals  # noqa: E402
from run import read_results  # noqa: E402

FIGURES = {
    "explained_variance": "EV", "gain_over_prompt": "EV above the prompt's mean", 
    "gain_over_position": "above position",
    "gain_over_both": "above both", "tau": "tau", "tau_of_position": "tau of position",
    "tau_of_score": "tau of the beginning's score", "tau_ceiling": "ceiling", "slope": "slope",
}  # fmt: skip
Cell = dict[str, Any]


COMPARED = ("explained_variance", "gain_over_prompt", "tau", "slope")


def tables(results: list[Cell], against: str) -> Iterator[str]:
    """Yield the lines of the tables of each task: audits, and differences to a variant."""
    for task in dict.fromkeys(cell["task"] for cell in results):
        groups: dict[str, list[Cell]] = {}
        for cell in results:
            if cell["task"] == task:
                groups.setdefault(cell["variant"], []).append(cell)
        with_audit = {variant: [cell for cell in cells if "audit" in cell] for variant, cells in groups.items()}
        audited = {variant: cells for variant, cells in with_audit.items() if cells}
        yield from ("", f"### {task.capitalize()}", "")
        yield line("critic", "seeds", "named by the health check", *FIGURES.values())
        yield line(*["---"] * (3 + len(FIGURES)))
        for variant, cells in audited.items():
            named = sum("critic" in cell["health"] for cell in cells)
            figures = [intervals.mean([cell["audit"][name]["value"] for cell in cells]).shown(2) for name in FIGURES]
            yield line(f"`{variant}`", len(cells), named, *figures)
        yield from ("", *differences(groups, against))
        for variant, cells in audited.items():
            yield from ("", f"`{variant}`: {', '.join(sorted({each for cell in cells for each in cell['findings']}))}")


def differences(groups: dict[str, list[Cell]], against: str) -> Iterator[str]:
    """Yield the lines of a table of each variant's gold reward and its differences to another variant's, paired."""
    yield line("variant", "seeds", "gold", "KL", f"gold above `{against}`", *(FIGURES[name] for name in COMPARED))
    yield line(*["---"] * (5 + len(COMPARED)))
    theirs = groups.get(against, [])
    for variant, cells in groups.items():
        pairs: list[tuple[dict[int, float], dict[int, float]]] = [
            (
                {each["seed"]: each["final"]["gold"] for each in cells},
                {each["seed"]: each["final"]["gold"] for each in theirs},
            )
        ]
        for name in COMPARED:
            ours, others = (
                {each["seed"]: each["audit"][name]["value"] for each in side if "audit" in each}
                for side in (cells, theirs)
            )
            pairs.append((ours, others))
        shown = [
            intervals.difference(*pair).shown(signed=True).removesuffix(" paired")
            if all(pair) and variant != against
            else ""
            for pair in pairs
        ]
        gold, kl = (intervals.mean([each["final"][name] for each in cells]).shown() for name in ("gold", "kl"))
        yield line(f"`{variant}`", len(cells), gold, kl, *shown)


def line(*cells: object) -> str:
    """Return a row of a table."""
    return f"| {' | '.join(map(str, cells))} |"


def main() -> None:
    """Read the command line and print the tables."""
    parser = argparse.ArgumentParser(allow_abbrev=False, description=__doc__)
    parser.add_argument("--work", type=Path, default=FOLDER, help="that of measure.py; by default the kept results")
    parser.add_argument("--against", default="preset:recommended", help="the variant that others are compared with")
    given = parser.parse_args()
    print("\n".join(tables(read_results(given.work), given.against)))


if __name__ == "__main__":
    main()
