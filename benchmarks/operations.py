"""Show in which of torch's operations the second update of a workload spends its time, phase by phase."""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable
from typing import Any

import torch
from measure import given
from torch.profiler import ProfilerActivity, profile
from workloads import WORKLOADS, Workload, hyper_parameters

PHASES = {"generate": "generate_responses", "score": "score_responses", "learn": "learn"}
"""The method of the trainer that makes most of each phase."""


def profiled(workload: Workload) -> dict[str, list[Any]]:
    """Train for two updates, the second of them under torch's profiler.

    Args:
        workload: What to run, with our trainer.

    Returns:
        The figures of each operation by phase.
    """
    from rlhf_ppo import PPOConfig, PPOTrainer

    figures: dict[str, list[Any]] = {}
    with tempfile.TemporaryDirectory() as folder:
        trainer = PPOTrainer(PPOConfig(**hyper_parameters(workload, 2, folder)), **given(workload))

        def during(phase: str, function: Callable[..., Any]) -> Callable[..., Any]:
            def recorded(*args: Any, **kwargs: Any) -> Any:
                if trainer.state.global_step == 0 or phase in figures:  # score: the policy's and value model's passes
                    return function(*args, **kwargs)
                with profile(activities=[ProfilerActivity.CPU]) as profiler:
                    result = function(*args, **kwargs)
                figures[phase] = list(profiler.key_averages())
                return result

            return recorded

        for phase, method in PHASES.items():
            setattr(trainer, method, during(phase, getattr(trainer, method)))
        trainer.train()
    return figures


def rows(name: str, phase: str, figures: list[Any], count: int) -> list[list[str]]:
    """List the operations that take most of a phase's CPU time."""
    total = sum(figure.self_cpu_time_total for figure in figures)
    largest = sorted(figures, key=lambda figure: figure.self_cpu_time_total, reverse=True)[:count]
    return [
        [name, phase, f"`{figure.key}`", f"{figure.self_cpu_time_total / total:.0%}", str(figure.count)]
        for figure in largest
    ]


def main() -> None:
    """Profile and print a table."""
    parser = argparse.ArgumentParser(allow_abbrev=False, description=__doc__)
    parser.add_argument("workloads", nargs="*", default=["vocab-heavy", "ragged", "long-prompt"])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--operations", type=int, default=6, help="how many of each phase")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    table = [["workload", "phase", "operation", "of the phase", "calls"], ["---"] * 5]
    for name in arguments.workloads:
        for phase, figures in profiled(WORKLOADS[name]).items():
            table += rows(name, phase, figures, arguments.operations)
    print("\n".join(f"| {' | '.join(line)} |" for line in table))


if __name__ == "__main__":
    main()
