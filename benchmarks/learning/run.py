"""Train every cell (task, variant, seed) that has not been trained yet, each in its own process with one thread.

    pip install --no-deps --target trl-1.12.0 trl==1.12.0
    python benchmarks/learning/run.py --data ../shared/data --seeds 5 --against-trl trl-1.12.0 --jobs 2
    python benchmarks/learning/report.py

It may be killed at any moment: finished cells stay in `results.jsonl` of the work directory, one line a cell, with
the commit of the code; the same command resumes. `report.py` makes the tables and pictures of the documentation.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cell import EXAMPLES, TASKS, UNSEEN, module_of
from variants import AS_FAR_AS_TRL, NEEDS, RECOMMENDED, TRL, overrides, single_options

FOLDER = Path(__file__).parent
WORK = Path("runs/learning")
Cell = tuple[str, str, int]
"""Task, variant and seed."""


def read_results(work: Path) -> list[dict[str, Any]]:
    """Return the finished cells; a line that was cut off is none."""
    file = work / "results.jsonl"
    results = []
    for line in file.read_text(encoding="utf-8").splitlines() if file.exists() else ():
        try:
            results.append(json.loads(line))
        except ValueError:
            continue
    return results


def cells(tasks: Iterable[str], variants: Iterable[str], seeds: Iterable[int]) -> Iterator[Cell]:
    """Yield all cells that mean anything, seed by seed: so that each seed that is whole can be compared."""
    variants, tasks = list(variants), list(tasks)
    for seed in seeds:
        for task in tasks:
            chosen = [AS_FAR_AS_TRL[task]] if RECOMMENDED in variants and task in AS_FAR_AS_TRL else []
            for variant in dict.fromkeys((*variants, *chosen)):
                if task in NEEDS.get(variant, (task,)):
                    yield task, variant, seed


def code_version() -> dict[str, Any]:
    """Return the `commit` that the code is of, and whether it is `dirty`, changed since; nothing outside of git."""

    def git(*words: str) -> str:
        return subprocess.run(["git", *words], cwd=FOLDER, capture_output=True, text=True, check=True).stdout.strip()

    try:
        changed = git("status", "--porcelain", "--", "../../rlhf_ppo", ".", ":!results.jsonl")
        return {"commit": git("rev-parse", "HEAD"), "dirty": bool(changed)}
    except (OSError, subprocess.CalledProcessError):
        return {}


@dataclass
class Runner:
    """Starts the cells' processes and keeps what they print.

    Attributes:
        work: Where results, logs and the tasks' models are.
        data: Where the tasks' data are.
        trl: A Python interpreter with TRL 1.12.0, or the folder that `pip install --target` wrote it into.
        options: Of `cell.py`.
        purpose: `report`, or `selection` for runs by which something is chosen.
    """

    work: Path
    data: Path
    trl: Path | None = None
    options: tuple[str, ...] = ()
    purpose: str = "report"
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def __call__(self, cell: Cell) -> bool:
        """Train a cell; tell whether it was finished."""
        began, code = time.monotonic(), code_version()
        task, variant, seed = cell
        command = [self._python(variant), str(FOLDER / "cell.py"), task, variant, str(seed), *self.options]
        command += [f"--data={self.data}", f"--work={self.work}"]
        logs = self.work / "logs"
        logs.mkdir(parents=True, exist_ok=True)
        log = logs / f"{task}-{variant}-{seed}.log".replace("/", "_")
        with log.open("w") as errors:
            run = subprocess.run(
                command, env=self._environment(variant), stdout=subprocess.PIPE, stderr=errors, text=True
            )
        print(f"{task} {variant} {seed}: {self._ended(run, log, code)}, {time.monotonic() - began:.0f} s", flush=True)
        return run.returncode == 0

    def _ended(self, run: subprocess.CompletedProcess[str], log: Path, code: dict[str, Any]) -> str:
        if run.returncode:
            return f"failed ({run.returncode}), see {log}"
        line = run.stdout.splitlines()[-1]
        cell = json.loads(line) | {"purpose": self.purpose, **code}
        with self._lock, (self.work / "results.jsonl").open("a", encoding="utf-8") as results:
            results.write(f"\n{json.dumps(cell)}\n")  # what was cut off before does not spoil this line
        first, final = cell["first"], cell["final"]
        return f"gold {first['gold']:.3f} to {final['gold']:.3f} at KL {final['kl']:.2f}"

    def _python(self, variant: str) -> str:
        is_interpreter = variant == TRL and self.trl is not None and not self.trl.is_dir()
        return str(self.trl) if is_interpreter else sys.executable

    def _environment(self, variant: str) -> dict[str, str]:
        paths = [str(FOLDER.parents[1])]
        if variant == TRL and self.trl is not None and self.trl.is_dir():
            paths.insert(0, str(self.trl.resolve()))
        return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}


def command_line(arguments: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        allow_abbrev=False, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tasks", nargs="+", choices=sorted({*TASKS, *UNSEEN, *EXAMPLES}), default=list(TASKS))
    parser.add_argument("--seeds", type=int, default=5, help="how many")
    parser.add_argument("--first-seed", type=int, default=0, help="choose on other seeds than you report")
    parser.add_argument(
        "--purpose", choices=("report", "selection"), default="report", help="selection: you choose by these runs"
    )
    parser.add_argument(
        "--against-trl", type=Path, help="a Python interpreter with trl==1.12.0, or the folder it was installed into"
    )
    parser.add_argument(
        "--options",
        nargs="*",
        default=single_options(),
        help="each is switched on alone: plain (none), names in variants.py, preset:NAME, or arguments NAME=VALUE,...",
    )
    parser.add_argument("--data", type=Path, required=True, help="holds stories260K, vader_lexicon and ethics_util")
    parser.add_argument("--work", type=Path, default=WORK, help="where models and results are kept")
    parser.add_argument("--jobs", type=int, default=2, help="processes at a time")
    for name in ("updates", "every", "num_prompts", "num_final"):
        parser.add_argument(f"--{name}", type=int, help="see cell.py; by default the task's")
    given = parser.parse_args(arguments)
    for variant in given.options:
        try:
            overrides(variant)
        except ValueError as error:
            parser.error(f"--options: {error}")
    if given.against_trl is not None and not given.against_trl.exists():
        parser.error(f"--against-trl: {given.against_trl} is not there")
    return given


def main() -> None:
    """Prepare the tasks, train the cells that are left, and say which have failed."""
    given = command_line()
    for task in given.tasks:
        module_of(task).prepare(given.data, given.work / task)
    sizes = {name: getattr(given, name) for name in ("updates", "every", "num_prompts", "num_final")}
    options = tuple(f"--{name}={value}" for name, value in sizes.items() if value is not None)
    runner = Runner(given.work, given.data, given.against_trl, options, given.purpose)
    variants = [*([TRL] if given.against_trl else []), *dict.fromkeys(given.options)]
    seeds = range(given.first_seed, given.first_seed + given.seeds)
    done = {(cell["task"], cell["variant"], cell["seed"]) for cell in read_results(given.work)}
    left = [cell for cell in cells(given.tasks, variants, seeds) if cell not in done]
    print(f"{len(done)} cells are finished, {len(left)} are left", flush=True)
    with ThreadPoolExecutor(given.jobs) as pool:
        finished = list(pool.map(runner, left))
    if not all(finished):
        raise SystemExit(f"{finished.count(False)} cells have failed; the same command tries them again")


if __name__ == "__main__":
    main()
