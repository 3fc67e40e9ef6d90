"""Run the workloads through both trainers, alternating, and write benchmarks/RESULTS.md."""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
from datetime import date
from pathlib import Path
from statistics import median
from typing import Any

import torch
from bound import bandwidth, decoded_bytes, matmul_rate, update_flops
from measure import PHASES
from workloads import WORKLOADS, Workload

FOLDER = Path(__file__).parent
COLUMNS = ("workload", "threads", "s/update", "faster", "CPU s/update", "faster", *PHASES, "MB", "TRL's", "ratio",
           "of the bound", "learning")  # fmt: skip


def measurements(
    pythons: dict[str, str], workload: str, threads: int, rounds: int, updates: int
) -> dict[str, list[dict[str, Any]]]:
    """Measure a workload with both trainers, one process each, in turn.

    Args:
        pythons: The interpreter of each trainer.
        workload: Its name.
        threads: CPU threads of each process.
        rounds: Processes of each trainer.
        updates: Updates of each process, the first of which is not measured.

    Returns:
        What `measure` printed, by trainer.
    """
    results: dict[str, list[dict[str, Any]]] = {trainer: [] for trainer in pythons}
    paths = {"PYTHONPATH": str(FOLDER.parent), "OMP_NUM_THREADS": str(threads)}
    for _ in range(rounds):
        for trainer, python in pythons.items():
            command = [python, str(FOLDER / "measure.py"), trainer, workload]
            options = [f"--threads={threads}", f"--updates={updates}"]
            run = subprocess.run(
                command + options, env=os.environ | paths, check=True, stdout=subprocess.PIPE, text=True
            )
            results[trainer].append(json.loads(run.stdout.splitlines()[-1]))
    return results


def row(name: str, threads: int, results: dict[str, list[dict[str, Any]]], rates: tuple[float, float]) -> list[str]:
    """Summarize a workload: medians over updates, ratios of TRL's to ours."""
    ours, trl = (
        {
            key: median(update[key] for run in results[trainer] for update in run["updates"])
            for key in (*PHASES, "wall")
        }
        | {"all": median(sum(update[p] for p in PHASES) for run in results[trainer] for update in run["updates"])}
        | {"memory": median(run["memory"] for run in results[trainer])}
        for trainer in ("ours", "trl")
    )
    whole, learning = bounds(WORKLOADS[name], results["ours"], rates)
    phases = [f"{ours[phase]:.2f} / {trl[phase]:.2f}" for phase in PHASES]
    memory = [f"{ours['memory']:.0f}", f"{trl['memory']:.0f}", f"{ours['memory'] / trl['memory']:.2f}x"]
    shares = [f"{threads * whole / ours['all']:.0%}", f"{threads * learning / ours['learn']:.0%}"]
    speed = [
        cell
        for key in ("wall", "all")
        for cell in (f"{ours[key]:.2f} / {trl[key]:.2f}", f"**{trl[key] / ours[key]:.2f}x**")
    ]
    return [name, str(threads), *speed, *phases, *memory, *shares]


def bounds(workload: Workload, runs: list[dict[str, Any]], rates: tuple[float, float]) -> tuple[float, float]:
    """Give the medians of the seconds that the updates and their learning phases cannot go below."""
    seconds = []
    for lengths in (update for run in runs for update in run["lengths"]):
        prompts, responses = (torch.tensor(side) for side in lengths)
        flops, learning = update_flops(workload.model, prompts, responses, workload.num_ppo_epochs)
        decoding = decoded_bytes(workload.model, int(responses.max())) / rates[1]
        seconds.append((flops / rates[0] + decoding, learning / rates[0]))
    whole, learning = zip(*seconds, strict=True)
    return median(whole), median(learning)


def versions(python: str) -> str:
    """Name the packages of an environment."""
    names = ["torch", "transformers", "accelerate", "trl"]
    code = f"import importlib.metadata as m; print(', '.join(f'{{n}} {{m.version(n)}}' for n in {names}))"
    return subprocess.run([python, "-c", code], check=True, capture_output=True, text=True).stdout.strip()


def processor() -> str:
    """Name the CPU, where the system tells."""
    file = Path("/proc/cpuinfo")
    names = [line.split(":", 1)[1].strip() for line in file.read_text().splitlines() if line.startswith("model name")]
    return names[0] if names else platform.processor()


def main() -> None:
    """Read the command line, measure, print and write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trl-python", required=True, help="the interpreter of the environment with trl==1.12.0")
    parser.add_argument(
        "--workloads", nargs="+", default=[name for name in WORKLOADS if name != "tiny"], choices=WORKLOADS
    )
    parser.add_argument("--threads", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--updates", type=int, default=4)
    parser.add_argument("--output", type=Path, default=FOLDER / "RESULTS.md")
    arguments = parser.parse_args()
    pythons = {"ours": sys.executable, "trl": arguments.trl_python}
    rows = []
    for threads in arguments.threads:
        torch.set_num_threads(threads)
        for name in arguments.workloads:
            results = measurements(pythons, name, threads, arguments.rounds, arguments.updates)
            rows.append(row(name, threads, results, (matmul_rate(), bandwidth())))
            print(*rows[-1], sep=" | ", flush=True)
    table = [list(COLUMNS), ["---"] * len(COLUMNS), *rows]
    lines = "\n".join(f"| {' | '.join(cells)} |" for cells in table)
    arguments.output.write_text(
        (FOLDER / "RESULTS.template.md")
        .read_text()
        .format(
            table=lines,
            date=date.today().isoformat(),
            machine=f"{processor()}, {os.cpu_count()} cores, {platform.system()} {platform.machine()}",
            ours=versions(pythons["ours"]),
            trl=versions(pythons["trl"]),
            rounds=arguments.rounds,
            updates=arguments.updates - 1,
            load=f"{os.getloadavg()[2]:.1f}",
        )
    )


if __name__ == "__main__":
    main()
