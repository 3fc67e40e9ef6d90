"""Draw the CPU section of RESULTS.md: seconds of an update by phase, and memory by its holder, ours and TRL's.

python benchmarks/picture.py
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib
import torch
from compare import COLUMNS, FOLDER
from matplotlib.figure import Figure
from measure import PHASES
from workloads import WORKLOADS, make_models

PICTURE = FOLDER.parent / "docs" / "assets" / "speed.svg"
TRAINERS = ("ours", "TRL 1.12")
HOLDERS = ("gradients", "optimizer states", "activations, logits, fragments")
COLOURS = (("#4c78a8", "#f2b134", "#59a14f"), ("#9467bd", "#e377c2", "#8c8c8c"))
"""Of the phases, and of what holds memory."""


def measured(text: str) -> list[tuple[str, list[tuple[float, ...]], tuple[float, ...]]]:
    """Read the rows with one thread.

    Args:
        text: RESULTS.md.

    Returns:
        Of each workload its name; for each phase the CPU seconds of both trainers; the MB of both.
    """
    section = text.partition("<!-- compare.py cpu -->")[2].partition("<!-- end -->")[0]
    rows = [line.strip("| ").split(" | ") for line in section.splitlines() if line.startswith("| ")]
    first, memory = COLUMNS.index(PHASES[0]), COLUMNS.index("MB")
    return [
        (
            cells[0],
            [tuple(map(float, cell.split(" / "))) for cell in cells[first : first + len(PHASES)]],
            tuple(map(float, cells[memory : memory + 2])),
        )
        for cells in rows
        if cells[0] in WORKLOADS and cells[COLUMNS.index("threads")] == "1"
    ]


def trained_megabytes(name: str) -> float:
    """Return the MB of a workload's trained weights: gradients take as much, Adam's states twice as much."""
    with torch.device("meta"):
        models = make_models(WORKLOADS[name], "meta")
    if "peft_config" in models:
        from peft import get_peft_model

        models["model"] = get_peft_model(models["model"], models["peft_config"])
    trained = [models["model"], models["value_model"]]
    return sum(p.numel() * p.itemsize for model in trained for p in model.parameters() if p.requires_grad) / 1e6


def draw(text: str, file: Path) -> None:
    """Draw both panels into an SVG file."""
    rows = measured(text)
    figure = Figure(figsize=(9, 0.55 + 0.62 * len(rows)), layout="constrained")
    panels: Any = figure.subplots(1, 2)
    labels, places = [], []
    for number, (name, phases, megabytes) in enumerate(rows):
        weights = trained_megabytes(name)
        for trainer, (label, total) in enumerate(zip(TRAINERS, megabytes, strict=True)):
            places.append(-(number + 0.38 * trainer))
            labels.append(f"{name}, {label}" if trainer == 0 else label)
            held = (weights, 2 * weights, total - 3 * weights)
            of_phases = [seconds[trainer] for seconds in phases]
            for axes, parts, colours in zip(panels, (of_phases, held), COLOURS, strict=True):
                left = 0.0
                for width, colour in zip(parts, colours, strict=True):
                    axes.barh(places[-1], width, 0.34, left, color=colour, alpha=1 - 0.45 * trainer)
                    left += width
    for axes, title, names in zip(
        panels, ("CPU seconds of an update", "MB above the models"), (PHASES, HOLDERS), strict=True
    ):
        axes.set(title=title, yticks=places, yticklabels=labels)
        axes.legend(axes.patches[:3], names, fontsize=7, loc="center right")
        axes.tick_params(labelsize=8)
    panels[1].set_yticklabels([])
    figure.savefig(file, metadata={"Date": None})


if __name__ == "__main__":
    matplotlib.rcParams["svg.hashsalt"] = "speed"  # the same table gives the same file
    draw((FOLDER / "RESULTS.md").read_text("utf-8"), PICTURE)
