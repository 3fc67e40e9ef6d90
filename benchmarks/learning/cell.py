"""Train one cell (task, variant, seed) in this process and print the result, as one line of JSON."""

from __future__ import annotations

import argparse
import json
import os
import resource
import tempfile
import time
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, cast

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")

import torch
from evaluation import Evaluator, Points
from libraries import LIBRARIES
from preferences import scores_of
from task import COMMON, Task, TaskModule, reward_of
from transformers import AutoModelForCausalLM
from variants import TRL, overrides

TASKS = ("stories", "preferences", "arithmetic")
UNSEEN = ("emotions", "exchanged")
"""Tasks by which nothing has been chosen."""
EXAMPLES = {"stories": "healthy", "hole": "over-optimised", "collapse": "collapsed"}
"""Tasks whose first run shows what a run looks like, well or not; the first is one of those to learn."""
CURVES = (
    "objective/scores", "objective/kl", "policy/entropy_avg", "policy/clipfrac_avg", "val/explained_variance",
    "loss/value_avg", "response/length_mean", "grad_norm", "policy/grad_norm", "val/grad_norm",
)  # fmt: skip
"""What is kept of each update's log."""


@dataclass(frozen=True)
class Sizes:
    """How much is done.

    Attributes:
        updates: PPO updates; None for the task's.
        every: Updates from one evaluation to the next; None for a sixth of the run.
        num_prompts: Held-out responses of an evaluation in between.
        num_final: Of that before training and at the end; None for the task's.
    """

    updates: int | None = None
    every: int | None = None
    num_prompts: int = 128
    num_final: int | None = None


def module_of(task: str) -> TaskModule:
    """Import a task's module."""
    return cast(TaskModule, import_module(task))


def run_cell(
    task: Task, variant: str, seed: int, sizes: Sizes, changes: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Train and evaluate.

    Args:
        task: What to learn.
        variant: See `variants.overrides`.
        seed: Of the training and of the sampled evaluations.
        sizes: How much.
        changes: Arguments of either library beside the variant's.

    Returns:
        `first` and `final`, the evaluations of the policy before and after; `points`, those in between; `curves`, a
        list over updates of each metric that was logged; `health`, the update at which each check that spoke did so
        first; and `seconds`.
    """
    began = time.monotonic()
    updates = sizes.updates or task.num_updates
    policy, reference = (AutoModelForCausalLM.from_pretrained(task.policy) for _ in range(2))
    evaluate = Evaluator(task, reference, reward_of(task, scores_of), seed)
    points = Points(evaluate, policy, sizes.every or max(1, updates // 6), sizes.num_prompts)
    num_final = sizes.num_final or task.num_final
    first = evaluate(policy, num_final)
    with tempfile.TemporaryDirectory() as folder:
        options = overrides(variant, task.arguments["learning_rate"])
        said = COMMON | task.arguments | options | (changes or {})
        batch_size = said["per_device_train_batch_size"] * said["gradient_accumulation_steps"]
        rows = {"total_episodes": updates * batch_size, "local_rollout_forward_batch_size": batch_size}
        train = LIBRARIES["trl" if variant == TRL else "ours"]
        log = train(task, policy, said | rows | {"output_dir": folder, "seed": seed}, points)
    return {
        "first": first,
        "final": evaluate(policy, num_final),
        "points": points.found,
        "curves": curves_of(log),
        "health": health_of(log),
        "num_updates": updates,
        "seconds": time.monotonic() - began,
    }


def curves_of(log: list[dict[str, Any]]) -> dict[str, list[float]]:
    """Return the values of each metric in a log, in order."""
    updates = [entry for entry in log if "objective/scores" in entry]
    return {key: [entry[key] for entry in updates if key in entry] for key in ("step", *CURVES) if key in updates[0]}


def health_of(log: list[dict[str, Any]]) -> dict[str, int]:
    """Return the first update at which each health check found something."""
    found: dict[str, int] = {}
    for entry in log:
        for key, value in entry.items():
            if key.startswith("health/") and value:
                found.setdefault(key.removeprefix("health/"), int(entry["step"]))
    return found


def main() -> None:
    """Read the command line, train, and print the cell."""
    parser = argparse.ArgumentParser(allow_abbrev=False, description=__doc__)
    parser.add_argument("task", choices=[*TASKS, *UNSEEN, *EXAMPLES])
    parser.add_argument("variant")
    parser.add_argument("seed", type=int)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--work", type=Path, required=True)
    for name in ("updates", "every", "num_prompts", "num_final"):
        parser.add_argument(f"--{name}", type=int, default=getattr(Sizes, name))
    parser.add_argument("--changes", type=json.loads, default={}, help="arguments of either library, as JSON")
    given = parser.parse_args()
    torch.set_num_threads(1)
    task = module_of(given.task).load(given.data, given.work / given.task)
    sizes = Sizes(given.updates, given.every, given.num_prompts, given.num_final)
    cell = {"task": given.task, "variant": given.variant, "seed": given.seed}
    before = time.process_time()
    cell |= run_cell(task, given.variant, given.seed, sizes, given.changes)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    found = json.dumps(cell | {"cpu_seconds": time.process_time() - before, "peak_mib": peak})
    print(json.dumps(json.loads(found, parse_float=lambda digits: round(float(digits), 5))))


if __name__ == "__main__":
    main()
