"""Compare PPO, with and without a critic, GRPO and TRL's PPO at equal CPU time: examples/follow_instructions.py.

    make chat-model
    pip install --no-deps --target trl-1.12.0 trl==1.12.0
    python benchmarks/equal_cost.py --dataset_name FILE --trl-path trl-1.12.0    # runs what is missing
    python benchmarks/equal_cost.py --table    # prints the tables, draws docs/assets/equal-cost.svg

Every method trains for 20 CPU minutes on five seeds with the preset's learning rate and KL coefficient, measured after
5, 10 and 20. Then each tries the same settings (`TRIALS`) for 10 minutes on two other seeds, and trains again with the
best of them below 12 nats of KL, if that is not the preset's; the table has both, as far as they have run. The
learning rate falls in a line to 0 at the last minute, so no method needs to know how many updates it will make. The
rows of `one-body` without `--decay` are the preset as it is: its rate falls over 36 updates, 18 to 20 CPU minutes. A
stopped run resumes at its last checkpoint, except TRL's PPO, which starts again. A run has one thread; `--jobs 2` runs
two at a time, which makes each slower.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import fmean
from typing import Any

FOLDER = Path(__file__).parent
sys.path.append(str(FOLDER / "learning"))
METHODS = {
    "one-body": "PPO, value head on the policy",
    "no-critic": "no critic",
    "grpo": "GRPO (TRL 1.16)",
    "critic": "PPO, value model of its own",
    "trl-ppo": "PPO of TRL 1.12",
}
TRIALS = ((5e-4, 0.05), (1e-3, 0.05))
"""Learning rate and KL coefficient; the first are those of the preset `recommended-lora`."""
SELECTION, FINAL = (11, 12), (1, 2, 3, 4, 5)
SELECTED_AT, MARKS, MOST_KL = 10, (5, 10, 20), 12
STEPS_PER_UPDATE = {"grpo": 8}
"""Of 32 answers, if not one: GRPO counts optimizer steps."""
START = 0.056
"""Accuracy before training: the row `start` of follow.jsonl."""


def label(method: str, trial: tuple[float, float]) -> str:
    """Name a method's trial in the rows."""
    return f"{method} {trial[0]:g} {trial[1]:g}"


def accuracy(row: dict[str, Any]) -> float:
    """Return the share of greedy answers that satisfy all: the mean over the ten constraints and pairs."""
    return 0.6 * row["single"] + 0.4 * row["pairs"]


def read(path: Path) -> dict[tuple[str, int, float], dict[str, Any]]:
    """Read the rows by label, seed and minutes; a mark that was measured twice counts once, the last time."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    rows = [json.loads(line) for line in lines]
    return {(row["arm"], row["seed"], row["minutes"]): row for row in rows}


def chosen(method: str, rows: dict[tuple[str, int, float], dict[str, Any]]) -> tuple[float, float] | None:
    """Return the trial with the largest accuracy below `MOST_KL`, or None until all trials have their rows."""
    measured: dict[tuple[float, float], list[dict[str, Any]]] = {
        trial: [row for seed in SELECTION if (row := rows.get((label(method, trial), seed, SELECTED_AT)))]
        for trial in TRIALS
    }
    if any(len(runs) < len(SELECTION) for runs in measured.values()):
        return None
    kl = {trial: fmean(run["evaluation"]["kl"] for run in runs) for trial, runs in measured.items()}
    allowed = [trial for trial in TRIALS if kl[trial] < MOST_KL] or [min(TRIALS, key=kl.__getitem__)]
    return max(allowed, key=lambda trial: fmean(accuracy(run) for run in measured[trial]))


def missing(rows: dict[tuple[str, int, float], dict[str, Any]]) -> list[tuple[str, tuple[float, float], int]]:
    """Return the runs without their last row: the final seeds, a seed of all methods before the next, then trials."""
    finals = [(name, TRIALS[0], seed) for seed in FINAL for name in METHODS]
    trials = [(name, trial, seed) for trial in TRIALS for seed in SELECTION for name in METHODS]
    best = {name: trial for name in METHODS if (trial := chosen(name, rows)) not in (None, TRIALS[0])}
    again = [(name, trial, seed) for seed in FINAL for name, trial in best.items()]
    runs = [*((run, MARKS[-1]) for run in (*finals, *again)), *((run, SELECTED_AT) for run in trials)]
    return [run for run, mark in runs if (label(*run[:2]), run[2], mark) not in rows]


def train(run: tuple[str, tuple[float, float], int], options: argparse.Namespace) -> None:
    """Train one run in a process of its own; it resumes where a checkpoint is."""
    method, trial, seed = run
    (rate, coefficient), name = trial, label(method, trial)
    directory = options.runs / f"{name.replace(' ', '_')}-{seed}"
    minutes = [SELECTED_AT] if seed in SELECTION else MARKS
    command = [
        sys.executable, FOLDER / "follow.py", method, f"--label={name}", f"--results={options.results}",
        f"--beta={coefficient}", "--decay", "--minutes", *minutes, f"--seed={seed}", f"--output_dir={directory}",
        f"--learning_rate={rate}", f"--kl_coef={coefficient}", "--lr_scheduler_type=constant", "--max_steps=400",
        "--use_cpu", "--report_to=none", "--disable_tqdm=True", f"--dataset_name={options.dataset_name}",
    ]  # fmt: skip
    if any(directory.glob("checkpoint-*")):
        command.append("--resume_from_checkpoint=True")
    paths = [str(FOLDER.parent), *([options.trl_path] if method == "trl-ppo" else [])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(reversed(paths)), "OMP_NUM_THREADS": "1"}
    directory.mkdir(parents=True, exist_ok=True)
    with (directory / "output.log").open("a") as log:
        done = subprocess.run([str(part) for part in command], env=environment, stdout=log, stderr=log, check=False)
    print(name, seed, "done" if done.returncode == 0 else f"failed, see {log.name}", flush=True)


def table(rows: dict[tuple[str, int, float], dict[str, Any]]) -> str:
    """Summarize the trials, and the final seeds of each that has them at each mark."""
    lines = ["| trial, 10 minutes | seeds | all ten | KL, nats | steps |", "|---|---|---|---|---|"]
    for name in METHODS:
        for trial in TRIALS:
            runs = [row for seed in SELECTION if (row := rows.get((label(name, trial), seed, SELECTED_AT)))]
            if runs:
                figures = ("".join(f"{accuracy(run):.2f} " for run in runs), f"{fmean(kl(run) for run in runs):.1f}")
                steps = fmean(run["steps"] for run in runs)
                lines.append(f"| {label(name, trial)} | {len(runs)} | {' | '.join(figures)} | {steps:.0f} |")
    titles = ["method", "CPU minutes", "seeds", "all ten", "six", "pairs", "KL, nats", "updates", "memory, GB"]
    lines += ["", f"| {' | '.join(titles)} |", "|---" * len(titles) + "|"]
    for name, trial, description in described():
        for mark in MARKS:
            runs = final_rows(name, trial, mark, rows)
            if runs:
                columns = [list(map(accuracy, runs)), *([run[key] for run in runs] for key in ("single", "pairs"))]
                figures = [shown(column) for column in columns]
                if mark == MARKS[-1]:
                    updates = fmean(run["steps"] for run in runs) / STEPS_PER_UPDATE.get(name, 1)
                    memory = max(run["peak_mb"] for run in runs) / 1000
                    figures += [shown(list(map(kl, runs))), f"{updates:.0f}", f"{memory:.1f}"]
                cells = " | ".join(figures + [""] * (6 - len(figures)))
                lines.append(f"| {description} | {mark} | {len(runs)} | {cells} |")
    return "\n".join(lines) + "\n"


def shown(values: list[float]) -> str:
    """Return the mean, with a 95% interval of three seeds or more."""
    from intervals import mean  # pyright: ignore

    return mean(values).shown(2) if len(values) >= 3 else f"{fmean(values):.2f}"


def kl(row: dict[str, Any]) -> float:
    """Return the KL to the start of sampled answers, nats an answer."""
    return row["evaluation"]["kl"]


def described() -> list[tuple[str, tuple[float, float], str]]:
    """Return each method with each trial, and what they are called in the tables."""
    return [
        (name, trial, text if trial == TRIALS[0] else f"{text}, rate {trial[0]:g}")
        for name, text in METHODS.items()
        for trial in TRIALS
    ]


def final_rows(
    method: str, trial: tuple[float, float], mark: float, rows: dict[tuple[str, int, float], dict[str, Any]]
) -> list[dict[str, Any]]:
    """Return a trial's rows of the final seeds at a mark."""
    return [row for seed in FINAL if (row := rows.get((label(method, trial), seed, mark)))]


def draw(rows: dict[tuple[str, int, float], dict[str, Any]], path: Path) -> None:
    """Draw the accuracy over CPU minutes of what has three seeds or more: means with 95% intervals."""
    import matplotlib.pyplot as plt
    from intervals import mean  # pyright: ignore

    plt.rcParams["svg.hashsalt"] = "equal-cost"  # the same rows give the same file
    figure, axes = plt.subplots(figsize=(6, 4))
    for name, trial, description in described():
        points = {mark: runs for mark in MARKS if (runs := final_rows(name, trial, mark, rows))}
        seeds = min(map(len, points.values()), default=0)
        if seeds < 3:
            continue
        values = [fmean(accuracy(run) for run in runs) for runs in points.values()]
        (line,) = axes.plot([0, *points], [START, *values], marker="o", label=f"{description}, seeds: {seeds}")
        halves = [0.0, *(mean([accuracy(run) for run in runs]).half for runs in points.values())]
        low, high = ([v + side * h for v, h in zip([START, *values], halves, strict=True)] for side in (-1, 1))
        axes.fill_between([0, *points], low, high, alpha=0.15, color=line.get_color())
    axes.set(xlabel="CPU minutes of training", ylabel="answers that satisfy all", ylim=(0, None), xlim=(0, None))
    axes.legend(fontsize="small", loc="center left", bbox_to_anchor=(1, 0.5))  # beside the bands
    figure.savefig(path, bbox_inches="tight", metadata={"Date": None})


def main() -> None:
    """Run what is missing, or print the tables."""
    parser = argparse.ArgumentParser(allow_abbrev=False, description=str(__doc__).partition("\n")[0])
    parser.add_argument("--dataset_name", help="questions besides the example's, as its option of the same name")
    parser.add_argument("--trl-path", help="where `pip install --no-deps --target PATH trl==1.12.0` put TRL's PPO")
    parser.add_argument("--results", type=Path, default=FOLDER / "equal_cost.jsonl", help="rows are appended")
    parser.add_argument("--runs", type=Path, default=Path("runs/equal_cost"), help="checkpoints and logs")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=[*METHODS])
    parser.add_argument("--most", type=int, help="stop after so many runs")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time")
    parser.add_argument("--table", action="store_true", help="print the tables and draw instead")
    options = parser.parse_args()
    if options.table:
        print(table(read(options.results)))
        draw(read(options.results), FOLDER.parent / "docs" / "assets" / "equal-cost.svg")
        return
    if options.dataset_name is None or ("trl-ppo" in options.methods and options.trl_path is None):
        parser.error("--dataset_name and, for trl-ppo, --trl-path must be given")
    runs = [run for run in missing(read(options.results)) if run[0] in options.methods][: options.most]
    with ThreadPoolExecutor(options.jobs) as pool:
        list(pool.map(lambda run: train(run, options), runs))


if __name__ == "__main__":
    main()
