"""Write what `run.py` found into the documentation: tables over seeds, the frontier of gold reward and KL, curves."""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from run import WORK, read_results
from variants import OPTIONS, PLAIN, RECOMMENDED, TRL

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "benchmarks" / "LEARNING.md"
ASSETS = ROOT / "docs" / "assets"
HEAD = ("", "seeds", "gold", "KL", "training reward", "gold above TRL", "improved", "collapsed", "health")
NAMES = {TRL: "TRL 1.12", PLAIN: "rlhf_ppo", RECOMMENDED: "rlhf_ppo, recommended"}
Cell = dict[str, Any]


def mean_and_error(values: Sequence[float]) -> tuple[float, float]:
    """Return the mean and its standard error over seeds; NaN of a single one."""
    return fmean(values), stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.nan


def shown(values: Sequence[float], digits: int = 3) -> str:
    """Print a mean with its standard error."""
    mean, error = mean_and_error(values)
    return f"{mean:.{digits}f}" if math.isnan(error) else f"{mean:.{digits}f} ± {error:.{digits}f}"


def collapsed(cell: Cell) -> bool:
    """Tell whether a run ended with a lower gold reward than it started with, or nearly always says the same."""
    first, final = cell["first"], cell["final"]
    return not final["gold"] >= first["gold"] or final["unique"] < 0.2 * first["unique"]


def above(cells: Sequence[Cell], others: Sequence[Cell]) -> str:
    """Print how far the gold reward is above that of others, with the standard error of the difference."""
    if not others or cells is others:
        return "-"
    (mean, error), (base, base_error) = (
        mean_and_error([cell["final"]["gold"] for cell in each]) for each in (cells, others)
    )
    return f"{mean - base:+.3f} ± {math.hypot(error, base_error):.3f}"


def row(name: str, cells: Sequence[Cell], trl: Sequence[Cell]) -> list[str]:
    """Summarize the seeds of a variant.

    Args:
        name: The variant's.
        cells: One of each seed.
        trl: TRL's.
    """
    finals = {key: [cell["final"][key] for cell in cells] for key in ("gold", "kl", "reward")}
    improved = sum(cell["final"]["gold"] > cell["first"]["gold"] for cell in cells)
    alarms = sorted({check for cell in cells for check in cell["health"]})
    return [
        NAMES.get(name, f"`{name}`"),
        str(len(cells)),
        shown(finals["gold"]),
        shown(finals["kl"], 2),
        shown(finals["reward"]),
        above(cells, trl),
        str(improved),
        str(sum(map(collapsed, cells))),
        "-" if name == TRL else ", ".join(alarms) or "none",
    ]


def variants_of(cells: Sequence[Cell]) -> dict[str, list[Cell]]:
    """Group cells by their variant: TRL, plain, the options in the table's order, then what was named by hand."""
    groups: dict[str, list[Cell]] = {}
    for cell in cells:
        groups.setdefault(cell["variant"], []).append(cell)
    order = [TRL, PLAIN, *OPTIONS]
    return {name: groups[name] for name in sorted(groups, key=lambda name: (*_place(order, name), name))}


def _place(order: Sequence[str], name: str) -> tuple[int]:
    return (order.index(name) if name in order else len(order),)


def written(results: Sequence[Cell]) -> Iterator[str]:
    """Yield the lines of the page, a table for each task."""
    for task in dict.fromkeys(cell["task"] for cell in results):
        groups = variants_of([cell for cell in results if cell["task"] == task])
        cells = [cell for group in groups.values() for cell in group]
        first = shown([cell["first"]["gold"] for cell in groups.get(PLAIN, cells)])
        seconds = [cell["seconds"] for cell in cells]
        yield f"### {task.capitalize()}"
        yield ""
        yield (
            f"{cells[0]['num_updates']} updates; gold reward before training {first}; "
            f"{fmean(seconds):.0f} seconds a run (up to {max(seconds):.0f}), one thread."
        )
        yield ""
        for line in (HEAD, ["---"] * len(HEAD), *(row(*pair, groups.get(TRL, [])) for pair in groups.items())):
            yield f"| {' | '.join(line)} |"
        yield ""


def mean_points(cells: Sequence[Cell], key: str) -> list[float]:
    """Return the mean over seeds of each evaluation's figure."""
    return [
        fmean(values) for values in zip(*([point[key] for point in cell["points"]] for cell in cells), strict=True)
    ]


def draw(results: Sequence[Cell], shown_as_lines: Sequence[str], folder: Path) -> None:
    """Draw gold reward against KL, and against updates, a panel for each task.

    Args:
        results: All cells.
        shown_as_lines: Variants whose whole way is drawn; of the others the end only.
        folder: Where `learning-frontier.svg` and `learning-curves.svg` are written.
    """
    from matplotlib.figure import Figure

    tasks = list(dict.fromkeys(cell["task"] for cell in results))
    for name, key, label in (("frontier", "kl", "KL to the reference, nats"), ("curves", "update", "updates")):
        figure = Figure(figsize=(4.5 * len(tasks), 3.8), layout="constrained")
        for axes, task in zip(figure.subplots(1, len(tasks), squeeze=False)[0], tasks, strict=True):
            groups = variants_of([cell for cell in results if cell["task"] == task])
            for variant, cells in groups.items():
                if variant in shown_as_lines:
                    line(axes, cells, key, NAMES.get(variant, variant))
                elif name == "frontier":
                    end = [fmean(cell["final"][figure] for cell in cells) for figure in ("kl", "gold")]
                    axes.scatter(*end, color="0.6", s=12)
                    axes.annotate(variant, end, fontsize=5, color="0.4")
            axes.set(title=task, xlabel=label, ylabel="gold reward, held-out prompts")
            axes.legend(fontsize=8)
        figure.savefig(folder / f"learning-{name}.svg", metadata={"Date": None})


def line(axes: Any, cells: Sequence[Cell], key: str, label: str) -> None:
    """Draw the mean over seeds as a line, and over updates the standard error as a band."""
    x, gold = mean_points(cells, key), mean_points(cells, "gold")
    (drawn,) = axes.plot(x, gold, marker=".", label=label)
    if key == "update" and len(cells) > 1:
        by_point = zip(*([point["gold"] for point in cell["points"]] for cell in cells), strict=True)
        errors = [mean_and_error(values)[1] for values in by_point]
        ends = ([mean + sign * error for mean, error in zip(gold, errors, strict=True)] for sign in (-1, 1))
        axes.fill_between(x, *ends, alpha=0.2, color=drawn.get_color())


def main() -> None:
    """Read the command line; write the page and the pictures."""
    parser = argparse.ArgumentParser(allow_abbrev=False, description=__doc__)
    parser.add_argument("--work", type=Path, default=WORK, help="that of run.py")
    parser.add_argument("--page", type=Path, default=PAGE)
    parser.add_argument("--assets", type=Path, default=ASSETS)
    parser.add_argument("--lines", nargs="*", default=[TRL, PLAIN, RECOMMENDED], help="drawn as curves")
    given = parser.parse_args()
    results = read_results(given.work)
    if not results:
        parser.error(f"--work: {given.work} has no results; run.py makes them")
    given.page.write_text("\n".join(written(results)).rstrip() + "\n", encoding="utf-8")
    draw(results, given.lines, given.assets)
    print(f"{given.page} and two pictures in {given.assets} are written")


if __name__ == "__main__":
    main()
