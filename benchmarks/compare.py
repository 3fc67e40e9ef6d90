"""Run the workloads through both trainers, alternating; write the device's section of benchmarks/RESULTS.md."""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import subprocess
import sys
import time
from datetime import date
from pathlib import Path
from statistics import median
from typing import Any

import torch
from bound import NOMINAL_RATES, bandwidth, decoded_bytes, matmul_rate, update_flops
from measure import PHASES
from workloads import DEFAULTS, WORKLOADS, Workload

FOLDER = Path(__file__).parent
COLUMNS = ("workload", "threads", "s/update", "faster", "CPU s/update", "faster", *PHASES, "MB", "TRL's", "ratio",
           "of the bound", "learning")  # fmt: skip
LONGEST_COMPLAINT = 200
LEFT_OUT = "left out, its time was up"
"""What is said of a process that did not end within its workload's share of `--minutes`."""

Results = dict[str, list[dict[str, Any]]]
"""What `measure` printed, by trainer."""


def measurements(
    pythons: dict[str, str],
    workload: str,
    threads: int,
    rounds: int,
    updates: int,
    device: str = "cpu",
    deadline: float = math.inf,
) -> tuple[Results, dict[str, str]]:
    """Measure a workload with both trainers, one process each, in turn.

    Args:
        pythons: The interpreter of each trainer.
        workload: Its name.
        threads: CPU threads of each process.
        rounds: Processes of each trainer.
        updates: Updates of each process, the first of which is not measured.
        device: `cpu` or `cuda`.
        deadline: The time of `time.monotonic` after which no process starts or goes on.

    Returns:
        What the processes printed, by trainer; and by trainer the complaint of a process that failed or that there was
        no time for, after which it is not started again.
    """
    results: Results = {trainer: [] for trainer in pythons}
    failures: dict[str, str] = {}
    paths = {"PYTHONPATH": str(FOLDER.parent), "OMP_NUM_THREADS": str(threads)}
    if WORKLOADS[workload].autocast:
        paths["ACCELERATE_MIXED_PRECISION"] = "bf16"
    for _ in range(rounds):
        for trainer, python in pythons.items():
            if trainer in failures:
                continue
            command = [python, str(FOLDER / "measure.py"), trainer, workload]
            options = [f"--threads={threads}", f"--updates={updates}", f"--device={device}"]
            try:
                run = subprocess.run(
                    command + options, env=os.environ | paths, capture_output=True, text=True,
                    timeout=None if deadline == math.inf else max(0.0, deadline - time.monotonic()),
                )  # fmt: skip
            except subprocess.TimeoutExpired:
                failures[trainer] = LEFT_OUT
                continue
            if run.returncode == 0:
                results[trainer].append(json.loads(run.stdout.splitlines()[-1]))
            else:
                sys.stderr.write(run.stderr)
                failures[trainer] = complaint(run)
    return results, failures


def complaint(run: subprocess.CompletedProcess[str]) -> str:
    """Give the last line that a failed process wrote to stderr, shortened, as a table can hold it."""
    lines = run.stderr.split("\n")
    last = next((line.strip() for line in reversed(lines) if line.strip()), f"exit status {run.returncode}")
    return last.replace("|", "/")[:LONGEST_COMPLAINT]


def row(
    name: str,
    threads: int,
    results: Results,
    rates: tuple[float, float],
    device: str = "cpu",
    failures: dict[str, str] | None = None,
) -> list[str]:
    """Summarize a workload: medians over updates, ratios of TRL's to ours.

    Args:
        name: The workload's.
        threads: CPU threads of each process.
        results: What was measured, by trainer; nothing of one that failed, whose cells have a dash.
        rates: Of matrix multiplication, FLOP/s, and of reading memory, bytes/s.
        device: `cpu` or `cuda`.
        failures: What a trainer complained of that failed, which the first cell says.
    """
    ours, trl = (summary(results[trainer]) for trainer in ("ours", "trl"))
    phases = [f"{shown(ours, phase)} / {shown(trl, phase)}" for phase in PHASES]
    memory = [shown(ours, "memory", 0), shown(trl, "memory", 0), ratio(ours, trl, "memory")]
    speed = [
        cell
        for key in ("wall", "cpu")
        for cell in (f"{shown(ours, key)} / {shown(trl, key)}", bold(ratio(trl, ours, key)))
    ]
    failed = "".join(f" ({trainer} failed: {text})" for trainer, text in (failures or {}).items())
    shares = shares_of_bound(WORKLOADS[name], results["ours"], rates, threads if device == "cpu" else 1)
    return [name + failed, str(threads), *speed, *phases, *memory, *shares]


def summary(runs: list[dict[str, Any]]) -> dict[str, float] | None:
    """Give the medians over all updates of a trainer's processes, and of the processes' memory; None if none ended."""
    if not runs:
        return None
    updates = [update for run in runs for update in run["updates"]]
    return {key: median(update[key] for update in updates) for key in (*PHASES, "wall", "cpu")} | {
        "phases": median(sum(update[phase] for phase in PHASES) for update in updates),
        "memory": median(run["memory"] for run in runs),
    }


def shown(figures: dict[str, float] | None, key: str, digits: int = 2) -> str:
    """Print a figure, or a dash where there is none."""
    return "-" if figures is None else f"{figures[key]:.{digits}f}"


def ratio(above: dict[str, float] | None, below: dict[str, float] | None, key: str) -> str:
    """Print how many times one trainer's figure the other's is, or a dash where one is missing."""
    return "-" if above is None or below is None else f"{above[key] / below[key]:.2f}x"


def bold(cell: str) -> str:
    """Print a figure boldly."""
    return cell if cell == "-" else f"**{cell}**"


def shares_of_bound(
    workload: Workload, runs: list[dict[str, Any]], rates: tuple[float, float], threads: int
) -> list[str]:
    """Print which share of the time that the updates, and their learning phases, took they could not go below."""
    figures = summary(runs)
    if figures is None:
        return ["-", "-"]
    whole, learning = bounds(workload, runs, rates)
    return [f"{threads * whole / figures['phases']:.0%}", f"{threads * learning / figures['learn']:.0%}"]


def bounds(workload: Workload, runs: list[dict[str, Any]], rates: tuple[float, float]) -> tuple[float, float]:
    """Give the medians of the seconds that the updates and their learning phases cannot go below."""
    seconds = []
    for lengths in (update for run in runs for update in run["lengths"]):
        prompts, responses = (torch.tensor(side) for side in lengths)
        flops, learning = update_flops(
            workload.model, prompts, responses, workload.num_ppo_epochs, workload.lora_rank, workload.scorer
        )
        decoding = decoded_bytes(workload.model, int(responses.max()), multiplied(workload)) / rates[1]
        seconds.append((flops / rates[0] + decoding, learning / rates[0]))
    whole, learning = zip(*seconds, strict=True)
    return median(whole), median(learning)


def multiplied(workload: Workload) -> torch.dtype:
    """Give the type of the weights that products read."""
    return torch.bfloat16 if workload.autocast else workload.dtype


def utilization(name: str, runs: list[dict[str, Any]], gpu: str) -> str:
    """Say at which rate our learning phase did its useful FLOPs (model FLOPs utilization), as a line of a list.

    Args:
        name: The workload's.
        runs: What was measured of our trainer.
        gpu: The GPU's name, by which its nominal rate is known or not.
    """
    figures = summary(runs)
    if figures is None:
        return f"- *{name}*: not measured."
    rate = bounds(WORKLOADS[name], runs, (1.0, 1.0))[1] / figures["learn"]
    nominal = NOMINAL_RATES.get(gpu)
    share = "of an unknown nominal rate" if nominal is None else f"{rate / nominal:.0%} of {nominal / 1e12:.0f}"
    return f"- *{name}*: {rate / 1e12:.1f} TFLOP/s, {share}."


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


def machine(gpu: str | None) -> str:
    """Name the GPU that was measured, if one was, the CPU and the system."""
    cpu = f"{processor()}, {os.cpu_count()} cores, {platform.system()} {platform.machine()}"
    return cpu if gpu is None else f"{gpu}; {cpu}"


def command_line(arguments: list[str] | None = None) -> argparse.Namespace:
    """Read the command line; what is not given depends on the device."""
    parser = argparse.ArgumentParser(allow_abbrev=False, description=__doc__)
    parser.add_argument("--trl-python", required=True, help="the interpreter of the environment with trl==1.12.0")
    parser.add_argument("--device", choices=DEFAULTS, default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, help="by default those of the device")
    parser.add_argument("--threads", nargs="+", type=int, help="by default 1 and 2; on a GPU 1")
    parser.add_argument("--rounds", type=int, help="by default 2; on a GPU 1")
    parser.add_argument("--updates", type=int, default=4)
    parser.add_argument(
        "--minutes",
        type=float,
        default=math.inf,
        help="within which to end; workloads share them, and what there is no time for is left out, which is said",
    )
    parser.add_argument("--output", type=Path, default=FOLDER / "RESULTS.md", help="a copy of RESULTS.md")
    given = parser.parse_args(arguments)
    if given.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch finds no GPU here")
    given.workloads = given.workloads or DEFAULTS[given.device]
    given.rounds = given.rounds or (2 if given.device == "cpu" else 1)
    given.threads = given.threads or ([1, 2] if given.device == "cpu" else [1])
    if given.device == "cuda" and len(given.threads) > 1:
        parser.error(f"--threads {given.threads}: on a GPU give one number")
    try:
        with_section(given.output.read_text(), given.device, "")
    except (OSError, ValueError) as error:
        parser.error(f"--output {given.output} cannot take the table: {error}. Give a copy of RESULTS.md")
    return given


def section(given: argparse.Namespace, pythons: dict[str, str], rows: list[list[str]], notes: list[str]) -> str:
    """Put the rows into a table, after what they were measured on and before the notes."""
    gpu = torch.cuda.get_device_name() if given.device == "cuda" else None
    load = f"load average over the last 15 minutes {os.getloadavg()[2]:.1f}"
    facts = [
        f"{date.today().isoformat()}, on {machine(gpu)}; {load}.",
        f"rlhf_ppo with {versions(pythons['ours'])}.",
        f"TRL with {versions(pythons['trl'])}.",
        f"Processes of each trainer, in turn: {given.rounds}; measured updates of each process: {given.updates - 1}.",
    ]
    table = [f"| {' | '.join(cells)} |" for cells in (COLUMNS, ["---"] * len(COLUMNS), *rows)]
    parts = [[f"- {fact}" for fact in facts], table, *([notes] if notes else [])]
    return "\n\n".join("\n".join(part) for part in parts)


def with_section(text: str, device: str, content: str) -> str:
    """Replace what stands between the marks of a device's section.

    Args:
        text: Has the lines `<!-- compare.py DEVICE -->` and, after it, `<!-- end -->`.
        device: `cpu` or `cuda`.
        content: What stands there from now on.

    Raises:
        ValueError: If a mark is missing.
    """
    start, end = f"<!-- compare.py {device} -->\n", "<!-- end -->"
    before, found, rest = text.partition(start)
    _, closed, after = rest.partition(end)
    if not (found and closed):
        raise ValueError(f"it has no section from {start.strip()!r} to {end!r}")
    return f"{before}{start}{content}\n{end}{after}"


def main() -> None:
    """Read the command line, measure, print and write the table."""
    given = command_line()
    pythons = {"ours": sys.executable, "trl": given.trl_python}
    rows, notes, start = [], [], time.monotonic()
    num_runs = len(given.threads) * len(given.workloads)
    for threads in given.threads:
        torch.set_num_threads(threads)
        for name in given.workloads:
            deadline = start + 60 * given.minutes * (len(rows) + 1) / num_runs
            results, failures = measurements(
                pythons, name, threads, given.rounds, given.updates, given.device, deadline
            )
            dtype = multiplied(WORKLOADS[name])
            rates = matmul_rate(dtype, given.device), bandwidth(dtype, given.device)
            rows.append(row(name, threads, results, rates, given.device, failures))
            print(*rows[-1], sep=" | ", flush=True)
            if given.device == "cuda":
                torch.cuda.empty_cache()  # the next workload's processes need the memory
                notes.append(utilization(name, results["ours"], torch.cuda.get_device_name()))
            content = section(given, pythons, rows, notes)
            given.output.write_text(with_section(given.output.read_text(), given.device, content))


if __name__ == "__main__":
    main()
