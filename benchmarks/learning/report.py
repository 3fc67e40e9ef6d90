"""Write what `run.py` found into the documentation: tables over seeds, the frontier of gold reward and KL, curves."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import intervals
import matplotlib
from cell import EXAMPLES, TASKS, UNSEEN
from run import WORK, read_results
from variants import AS_FAR_AS_TRL, OPTIONS, PLAIN, PRESET, RECOMMENDED, TRL

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "benchmarks" / "LEARNING.md"
ASSETS = ROOT / "benchmarks" / "assets"
HEAD = (
    "", "seeds", "gold", "KL", "training reward", "gold above TRL", "at equal KL", "improved", "collapsed",
    "health",
)  # fmt: skip
NAMES = {TRL: "TRL 1.12", PLAIN: "rlhf_ppo"} | {
    name: f"rlhf_ppo, {name.removeprefix(PRESET).replace(',', ', ')}"
    for name in (RECOMMENDED, *AS_FAR_AS_TRL.values())
}
PICTURES = {
    "frontier": "Gold reward against KL at the end of training: a dot for each run, a diamond for the mean over seeds",
    "curves": "Gold reward through training, on 128 responses: the mean over seeds, with its 95% interval",
    "options": "Gold reward and KL at the end: each run, and the mean over seeds; dashed: rlhf_ppo without an option",
    "examples": "A healthy run, one that over-optimises and one that collapses; dashed: a health check speaks first",
}
INTERVALS = (
    "In brackets: 95% intervals of Student's t over seeds. *Gold above TRL* is paired by seed where the seeds are the "
    "same, else Welch's. *At equal KL* is the difference that the KL does not explain, by analysis of covariance; *no "
    "overlap*: no KL is within the range of both. *(selection)*: runs that served to choose."
)
Cell = dict[str, Any]


def collapsed(cell: Cell) -> bool:
    """Tell whether a run ended with a lower gold reward than it started with, or nearly always says the same."""
    first, final = cell["first"], cell["final"]
    return not final["gold"] >= first["gold"] or final["unique"] < 0.2 * first["unique"]


def by_seed(cells: Sequence[Cell], key: str = "gold") -> dict[int, float]:
    """Return a figure of the end of each run, by its seed."""
    return {cell["seed"]: cell["final"][key] for cell in cells}


def above(cells: Sequence[Cell], others: Sequence[Cell]) -> str:
    """Print how far the gold reward is above that of others, with the interval of the difference."""
    if not others or cells is others:
        return "-"
    return intervals.difference(by_seed(cells), by_seed(others)).shown(signed=True)


def above_at_equal_kl(cells: Sequence[Cell], others: Sequence[Cell]) -> str:
    """Print how far the gold reward is above that of others with the same KL; nothing where no KL is the same."""
    ours, theirs = ([(each["final"]["kl"], each["final"]["gold"]) for each in side] for side in (cells, others))
    if cells is others or min(len(ours), len(theirs)) < 2 or len(ours) + len(theirs) < 4:
        return "-"
    found = intervals.at_equal(ours, theirs)
    return "no overlap" if found is None else found.shown(signed=True)


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
    chose = all(cell.get("purpose") == "selection" for cell in cells)
    return [
        NAMES.get(name, f"`{name}`") + (" (selection)" if chose else ""),
        str(len(cells)),
        intervals.mean(finals["gold"]).shown(),
        intervals.mean(finals["kl"]).shown(2),
        intervals.mean(finals["reward"]).shown(),
        above(cells, trl),
        above_at_equal_kl(cells, trl),
        str(improved),
        str(sum(map(collapsed, cells))),
        "-" if name == TRL else ", ".join(alarms) or "none",
    ]


def variants_of(cells: Sequence[Cell]) -> dict[str, list[Cell]]:
    """Group cells by their variant: TRL, plain, the options in the table's order, then what was named by hand.

    Runs that served to choose count only where a variant has no others.
    """
    groups: dict[str, list[Cell]] = {}
    for cell in cells:
        groups.setdefault(cell["variant"], []).append(cell)
    for name, group in groups.items():
        groups[name] = [cell for cell in group if cell.get("purpose") != "selection"] or group
    order = [TRL, PLAIN, *OPTIONS]

    def place(name: str) -> tuple[int, str]:
        return (order.index(name) if name in order else len(order), name)

    return {name: groups[name] for name in sorted(groups, key=place)}


def written(results: Sequence[Cell]) -> Iterator[str]:
    """Yield the lines of the page, a table for each task."""
    yield INTERVALS
    yield ""
    for task in dict.fromkeys(cell["task"] for cell in results if cell["task"] in (*TASKS, *UNSEEN)):
        groups = variants_of([cell for cell in results if cell["task"] == task])
        cells = [cell for group in groups.values() for cell in group]
        first = intervals.mean([cell["first"]["gold"] for cell in groups.get(PLAIN, cells)]).shown()
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
    yield from alarms(results)


def alarms(results: Sequence[Cell]) -> Iterator[str]:
    """Yield in how many of our healthy runs a health check spoke, and when it did in those made to go wrong."""
    ours = [cell for cell in results if cell["task"] in TASKS and cell["variant"] != TRL]
    healthy = [cell for cell in ours if not collapsed(cell)]
    spoke = sum(bool(cell["health"]) for cell in healthy)
    yield f"Of {len(healthy)} runs of rlhf_ppo that improved, health checks spoke in {spoke}."
    for task, name in EXAMPLES.items():
        for cell in results:
            if cell["task"] == task and task not in TASKS:
                when = ", ".join(f"`{check}` at update {update}" for check, update in cell["health"].items()) or "none"
                yield ""
                yield f"Run that was made to be {name}, {cell['num_updates']} updates, seed {cell['seed']}: {when}."


def mean_points(cells: Sequence[Cell], key: str) -> list[float]:
    """Return the mean over seeds of each evaluation's figure."""
    return [
        fmean(values) for values in zip(*([point[key] for point in cell["points"]] for cell in cells), strict=True)
    ]


def draw(results: Sequence[Cell], shown: Sequence[str], folder: Path) -> None:
    """Draw gold reward against KL at the end, and gold reward against updates, a panel for each task.

    Args:
        results: All cells.
        shown: Variants that have a colour; of the others the mean at the end only, in grey.
        folder: Where `learning-frontier.svg` and `learning-curves.svg` are written.
    """
    from matplotlib.figure import Figure

    tasks = list(dict.fromkeys(cell["task"] for cell in results if cell["task"] in TASKS))
    for name, label in (("frontier", "KL to the reference, nats"), ("curves", "updates")):
        figure = Figure(figsize=(4.5 * len(tasks), 3.8), layout="constrained")
        for axes, task in zip(figure.subplots(1, len(tasks), squeeze=False)[0], tasks, strict=True):
            groups = variants_of([cell for cell in results if cell["task"] == task])
            for variant in shown:
                if variant in groups:
                    (ends if name == "frontier" else line)(axes, groups[variant], NAMES.get(variant, variant))
            if name == "frontier":
                ends_of_others(axes, [cells for variant, cells in groups.items() if variant not in shown])
            axes.set(title=task, xlabel=label, ylabel="gold reward, held-out prompts")
            axes.legend(fontsize=8, loc="lower right")
        figure.savefig(folder / f"learning-{name}.svg", metadata={"Date": None})


def ends(axes: Any, cells: Sequence[Cell], label: str) -> None:
    """Draw where each run of a variant ends, and the mean over seeds larger."""
    kl, gold = ([cell["final"][key] for cell in cells] for key in ("kl", "gold"))
    (mean,) = axes.plot(fmean(kl), fmean(gold), "D", label=label, zorder=3, markeredgecolor="white")
    axes.scatter(kl, gold, color=mean.get_color(), s=9, alpha=0.6)


def ends_of_others(axes: Any, others: Sequence[Sequence[Cell]]) -> None:
    """Draw the mean over seeds of the other variants; the label says how many are too far away to be shown."""
    means = [tuple(fmean(cell["final"][key] for cell in cells) for key in ("kl", "gold")) for cells in others]
    near = [mean for mean in means if mean[0] <= 1.5 * axes.get_xlim()[1]]
    if near:
        far = f", {len(means) - len(near)} further right" if len(near) < len(means) else ""
        axes.scatter(*zip(*near, strict=True), color="0.7", marker="D", s=16, zorder=0, label=f"others{far}")


def draw_ends(results: Sequence[Cell], file: Path) -> None:
    """Draw each variant's gold reward and KL at the end of training, two panels for each task."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogLocator, NullFormatter, ScalarFormatter

    tasks = list(dict.fromkeys(cell["task"] for cell in results if cell["task"] in TASKS))
    counts = [len(variants_of([cell for cell in results if cell["task"] == task])) for task in tasks]
    figure = Figure(figsize=(9, sum(counts) * 0.19 + 0.8 * len(tasks)), layout="constrained")
    rows = figure.subplots(len(tasks), 2, squeeze=False, sharey="row", height_ratios=counts)
    for pair, task in zip(rows, tasks, strict=True):
        groups = variants_of([cell for cell in results if cell["task"] == task])
        for axes, (key, label) in zip(pair, (("gold", "gold reward"), ("kl", "KL, nats")), strict=True):
            means = {name: fmean(by_seed(cells, key).values()) for name, cells in groups.items()}
            names = [NAMES.get(name, name.removeprefix(PRESET)) for name in groups]
            axes.plot(list(means.values()), names, "o", markersize=4)
            for label_of, cells in zip(names, groups.values(), strict=True):
                runs = list(by_seed(cells, key).values())
                axes.plot(runs, [label_of] * len(runs), ".", color="C0", markersize=3, alpha=0.5)
            if PLAIN in means:
                axes.axvline(means[PLAIN], linestyle="--", color="0.6", linewidth=0.8)
            if max(means.values()) > 8 * min(means.values()) > 0:
                axes.set_xscale("log")
                axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
                axes.xaxis.set_major_formatter(ScalarFormatter())
                axes.xaxis.set_minor_formatter(NullFormatter())
            axes.set_title(f"{task}: {label}", fontsize=8)
            axes.tick_params(labelsize=7)
        pair[0].invert_yaxis()
    figure.savefig(file, metadata={"Date": None})


PANELS = {
    "objective/scores": "what training pays",
    "gold": "gold reward, held-out prompts",
    "objective/kl": "KL to the reference, nats",
    "policy/entropy_avg": "entropy, nats per token",
}


def draw_examples(results: Sequence[Cell], file: Path) -> bool:
    """Draw a healthy run, one that over-optimises and one that collapses; dashed: where a health check spoke first.

    Args:
        results: All cells.
        file: The picture, which is left as it is where not all three runs are there.

    Returns:
        Whether it was drawn.
    """
    from matplotlib.figure import Figure

    found = {cell["task"]: cell for cell in results if cell["variant"] == PLAIN and cell["seed"] == 0}
    if not set(EXAMPLES) <= set(found):
        return False
    figure = Figure(figsize=(3 * len(PANELS), 2.2 * len(EXAMPLES)), layout="constrained")
    for axes, (task, name) in zip(figure.subplots(len(EXAMPLES), len(PANELS)), EXAMPLES.items(), strict=True):
        cell = found[task]
        for panel, (key, label) in zip(axes, PANELS.items(), strict=True):
            points = [(point["update"], point["gold"]) for point in cell["points"]]
            values = (
                list(zip(*points, strict=True)) if key == "gold" else (cell["curves"]["step"], cell["curves"][key])
            )
            panel.plot(*values)
            panel.set_title(f"{name}: {label}", fontsize=8)
            for update in {min(cell["health"].values())} if cell["health"] else ():
                panel.axvline(update, linestyle="--", color="0.5")
    figure.savefig(file, metadata={"Date": None})
    return True


def line(axes: Any, cells: Sequence[Cell], label: str) -> None:
    """Draw the mean over seeds of each evaluation, with its 95% interval as a band."""
    updates, gold = mean_points(cells, "update"), mean_points(cells, "gold")
    (drawn,) = axes.plot(updates, gold, marker=".", label=label)
    if len(cells) > 1:
        by_point = zip(*([point["gold"] for point in cell["points"]] for cell in cells), strict=True)
        halves = [intervals.mean(values).half for values in by_point]
        edges = ([mean + sign * half for mean, half in zip(gold, halves, strict=True)] for sign in (-1, 1))
        axes.fill_between(updates, *edges, alpha=0.2, color=drawn.get_color())


def main() -> None:
    """Read the command line; write the page and the pictures."""
    parser = argparse.ArgumentParser(allow_abbrev=False, description=__doc__)
    parser.add_argument("--work", type=Path, default=WORK, help="that of run.py")
    parser.add_argument("--page", type=Path, default=PAGE)
    parser.add_argument("--assets", type=Path, default=ASSETS)
    parser.add_argument("--shown", nargs="*", default=list(NAMES), help="variants that have a colour")
    given = parser.parse_args()
    results = read_results(given.work)
    if not results:
        parser.error(f"--work: {given.work} has no results; run.py makes them")
    matplotlib.rcParams["svg.hashsalt"] = "learning"  # the same results give the same files
    draw(results, given.shown, given.assets)
    draw_ends(results, given.assets / "learning-options.svg")
    pictures = ["frontier", "curves", "options"]
    if draw_examples(results, given.assets / "learning-examples.svg"):
        pictures.append("examples")
    shown_below = [f"\n![{PICTURES[name]}](assets/learning-{name}.svg)" for name in pictures]
    given.page.write_text("\n".join([*written(results), *shown_below]) + "\n", encoding="utf-8")
    print(f"{given.page} and the pictures in {given.assets} are written")


if __name__ == "__main__":
    main()
