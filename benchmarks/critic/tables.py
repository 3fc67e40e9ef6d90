"""Print the tables of the documentation: means over seeds with 95% intervals of Student's t.

They are of `results.jsonl` (`measure.py`, `grpo.py`) and `fitted.jsonl` (`fitted.py`).
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean
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
    """Yield the lines of the tables of each task: audits, differences to a variant, and the use at inference."""
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
            if chosen := [cell for cell in cells if cell["inference"]]:
                yield from ("", *inference(chosen))


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


def inference(cells: list[Cell]) -> Iterator[str]:
    """Yield the lines of a table with the gold reward of each way to choose responses, paired with other ways."""
    ways = cells[0]["inference"]
    yield line("", "gold", "above random", "above best of 4 by the critic", "log-ratio", "tokens", "critic", "reward")
    yield line(*["---"] * 8)
    for way in ways:
        found = {name: fmean(cell["inference"][way][name] for cell in cells) for name in ways[way]}
        gold = {cell["seed"]: cell["inference"][way]["gold"] for cell in cells}
        above = [
            intervals.difference(gold, {cell["seed"]: cell["inference"][other]["gold"] for cell in cells})
            for other in ("random", "best of 4 by the critic")
        ]
        shown = (each.shown(signed=True).removesuffix(" paired") for each in above)
        costs = (f"{found[name]:.1f}" for name in ("tokens", "valued", "scored"))
        yield line(way, intervals.mean([*gold.values()]).shown(), *shown, f"{found['log_ratio']:.2f}", *costs)


def fitted(rows: list[Cell]) -> Iterator[str]:
    """Yield the lines of the tables of critics fitted to kept completions, and of runs that began with one.

    Args:
        rows: One of each seed and options; those with `purpose: selection` are of the fits by which these were chosen.
    """
    chose = [row for row in rows if row.get("purpose") == "selection"]
    for options in dict.fromkeys(" ".join(row["options"]) for row in rows if row not in chose):
        group = [row for row in rows if row not in chose and " ".join(row["options"]) == options]
        yield from ("", f"### Critics fitted with `{options}`", "", *fitted_alike(group))
    yield from ("", line("selection: runs", "options", "seed", "figures"), line(*["---"] * 4))
    for row in chose:
        ((start, found),) = row["figures"].items()
        figures = ", ".join(f"{name} {value}" for name, value in found.items())
        yield line(row["runs"], f"`{' '.join(row['options'])}`", row["seed"], f"{start}: {figures}")


def fitted_alike(rows: list[Cell]) -> Iterator[str]:
    """Yield the lines of the tables of critics that were fitted with the same options, one row of each seed."""
    shown = [name for name in rows[0]["figures"]["of the run"] if "pairs" not in name]
    yield from (line("critic", "seeds", *shown), line(*["---"] * (2 + len(shown))))
    for critic, figures in rows[0]["figures"].items():
        columns = [[row["figures"][critic][name] for row in rows] if name in figures else [] for name in shown]
        yield line(critic, len(rows), *(intervals.mean(column).shown() if column else "" for column in columns))
    golds = {start: {row["seed"]: row["gold"][start] for row in rows} for start in rows[0]["gold"]}
    yield from ("", line("a run's critic starts", "gold"), line("---", "---"))
    for start, gold in golds.items():
        yield line(start, intervals.mean([*gold.values()]).shown())
    yield from ("", f"difference: {intervals.difference(*reversed(golds.values())).shown(signed=True)}")


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
    if (file := given.work / "fitted.jsonl").exists():
        print("\n".join(fitted([json.loads(each) for each in file.read_text(encoding="utf-8").splitlines()])))


if __name__ == "__main__":
    main()
