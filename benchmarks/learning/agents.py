"""Write tables and picture of the page *Agents* from `agents.jsonl`, which `lake.py` and `calculator.py` fill.

python benchmarks/learning/agents.py
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import matplotlib
from intervals import mean
from lake import EPISODES, RESULTS, SETTINGS, STORED, read_results
from matplotlib.figure import Figure

PAGE = RESULTS.parents[2] / "docs" / "agents.md"
PICTURE = RESULTS.parents[2] / "docs" / "assets" / "agents.svg"
CALCULATOR = {"calculator": "calls are free", "calculator, calls cost": "each call costs 0.3"}
COMPARED = ("plain, longer", "one credit, longer")
Row = dict[str, Any]


def runs_of(rows: Sequence[Row], setting: str) -> list[Row]:
    """Return a setting's runs by seed."""
    return sorted((row for row in rows if row["setting"] == setting), key=lambda row: row["seed"])


def reached_at(run: Row, share: float) -> int | None:
    """Return the episodes after which an update's games are won as often as a share of the optimum, or None."""
    wanted = share * run["optimum"]
    return next((EPISODES * (place + 1) for place, won in enumerate(run["curve"]) if won >= wanted), None)


def lake_table(rows: Sequence[Row]) -> str:
    """Return the table of FrozenLake."""
    lines = [
        "| Setting | optimum, random | held-out games won, by seed | episodes to 0.9 of the optimum | CPU s |",
        "|---|---|---|---|---|",
    ]
    for setting in (*SETTINGS, *STORED):
        if runs := runs_of(rows, setting):
            won = ", ".join(f"{run['held_out']:.3f}" for run in runs)
            reached = ", ".join(f"{at:,}" if (at := reached_at(run, 0.9)) else "not reached" for run in runs)
            seconds = fmean(run["cpu_seconds"] for run in runs)
            share = f"{runs[0]['optimum']:.3f}, {runs[0]['random']:.4f}"
            lines.append(f"| {setting} | {share} | {won} | {reached} | {seconds:.0f} |")
    return "\n".join(lines)


def ratio(rows: Sequence[Row]) -> str:
    """Compare the episodes to 0.9 without a critic with those with one; a run that fails counts with its length."""
    critic, alike = (
        {run["seed"]: reached_at(run, 0.9) or EPISODES * len(run["curve"]) for run in runs_of(rows, setting)}
        for setting in COMPARED
    )
    ratios = [alike[seed] / critic[seed] for seed in sorted(critic.keys() & alike.keys())]
    of_means = fmean(alike.values()) / fmean(critic.values())
    return f"one credit / critic: of the means {of_means:.2f}; by seed {ratios}, mean {mean(ratios).shown(2)}"


def calculator_table(rows: Sequence[Row]) -> str:
    """Return the table of the calculator."""
    lines = [
        "| Setting | Seed | right before | after | calls per episode before | after | CPU s, with the model's |",
        "|---|---|---|---|---|---|---|",
    ]
    for setting, title in CALCULATOR.items():
        for run in runs_of(rows, setting):
            before, after = run["before"], run["after"]
            right = f"{before['right']:.1%} | {after['right']:.1%}"
            calls = f"{before['calls']:.2f} | {after['calls']:.2f}"
            seconds = run["cpu_seconds"] + run["cpu_seconds_of_model"]
            lines.append(f"| {title} | {run['seed']} | {right} | {calls} | {seconds} |")
    return "\n".join(lines)


def filled(page: str, rows: Sequence[Row]) -> str:
    """Return the page with the tables between its marks."""
    for name, table in {"lake": lake_table(rows), "calculator": calculator_table(rows)}.items():
        marks = rf"(<!-- {name} -->\n\n).*?(\n\n<!-- end -->)"
        page = re.sub(marks, lambda found, table=table: found[1] + table + found[2], page, flags=re.DOTALL)
    return page


def draw(rows: Sequence[Row], file: Path) -> None:
    """Draw the share of won games, and the calculator's accuracy and calls; a line for each seed."""
    figure = Figure(figsize=(9, 2.8), layout="constrained")
    lake, right, calls = figure.subplots(1, 3)
    for colour, (setting, label) in enumerate(zip(COMPARED, ("critic", "one credit"), strict=True)):
        _lines(lake, runs_of(rows, setting), "curve", EPISODES, label, f"C{colour}")
    for colour, (setting, label) in enumerate(CALCULATOR.items()):
        _lines(right, runs_of(rows, setting), "curve", 64, label, f"C{colour}")
        _lines(calls, runs_of(rows, setting), "calls", 64, label, f"C{colour}")
    for axes, title in (
        (lake, "FrozenLake: games won"),
        (right, "Calculator: right answers"),
        (calls, "Calls per episode"),
    ):
        axes.set(title=title, xlabel="episodes", ylim=(-0.03, 1.05))
        axes.legend(fontsize=7)
    figure.savefig(file, metadata={"Date": None})


def _lines(axes: Any, runs: Sequence[Row], key: str, episodes: int, label: str, colour: str) -> None:
    for run in runs:
        values = run[key]
        axes.plot([episodes * (place + 1) for place in range(len(values))], values, colour, label=label, linewidth=1)
        label = "_"  # only the first line is in the legend


def main() -> None:
    """Write the page's tables and picture; print the comparison of the critic with one credit."""
    matplotlib.rcParams["svg.hashsalt"] = "agents"  # the same results give the same file
    rows = read_results()
    PAGE.write_text(filled(PAGE.read_text("utf-8"), rows), "utf-8")
    print(ratio(rows))
    draw(rows, PICTURE)


if __name__ == "__main__":
    main()
