"""A long run with everything on costs as much at its end as at its beginning.

`make test-growth` makes 2,000 updates; the number of the other targets shows that the test itself works.
"""

from __future__ import annotations

import gc
import os
import sys
import threading
import time
from pathlib import Path
from statistics import median
from types import FrameType
from typing import Any

import pytest
from datasets import Dataset
from transformers import TrainerCallback

from rlhf_ppo import PPOTrainer
from rlhf_ppo.checkpoints import run as run_module
from tests.conftest import count_w4, prompt_rows, tiny_policy, tiny_scorer
from tests.faults.conftest import make_saving

NUM_UPDATES = int(os.environ.get("NUM_UPDATES", "64"))
EVERY = max(4, NUM_UPDATES // 40)
"""How often it is measured, saved, evaluated and sampled."""


class Measures(TrainerCallback):
    """Notes what the process holds after each save, and what an update took since the last: calls, and CPU time."""

    def __init__(self) -> None:
        self.measured: dict[str, list[float]] = {}
        self.calls, self.spent, self.last_step = 0, time.process_time(), 0

    def count(self, frame: FrameType, event: str, argument: Any) -> None:
        """Count a call, as a profiler does."""
        self.calls += event in ("call", "c_call")

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Begin to count."""
        sys.setprofile(self.count)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Count no more."""
        sys.setprofile(None)

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Measure."""
        sys.setprofile(None)
        updates = state.global_step - self.last_step
        checkpoint = Path(args.output_dir, f"checkpoint-{state.global_step}")
        sizes = {path.name: path.stat().st_size for path in checkpoint.rglob("*") if path.is_file()}
        gc.collect()
        now = {
            "memory (MB)": int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20,
            "descriptors": len(os.listdir("/proc/self/fd")),
            "threads": threading.active_count(),
            "objects": len(gc.get_objects()),
            "a save (KB)": sum(sizes.values()) / 1024,
            "calls of an update": self.calls / updates,
            "seconds of an update": (time.process_time() - self.spent) / updates,
        }
        for name, value in now.items():
            self.measured.setdefault(name, []).append(value)
        self.calls, self.spent, self.last_step = 0, time.process_time(), state.global_step
        sys.setprofile(self.count)


async def slow_length(completion_ids: list[list[int]], log_metric: Any, **columns: Any) -> list[float]:
    """A reward function of the kind that an event loop runs, which logs."""
    log_metric("longest", float(max(map(len, completion_ids))))
    return [float(len(ids)) for ids in completion_ids]


def everything_on(output_dir: Path, measures: Measures) -> PPOTrainer:
    """A trainer that evaluates, samples, logs, saves, scales and rewards in every way."""
    run = {
        "total_episodes": 2 * NUM_UPDATES, "save_steps": EVERY, "save_total_limit": 2, "logging_steps": 1,
        "eval_strategy": "steps", "eval_steps": EVERY, "num_sample_generations": NUM_UPDATES // EVERY,
        "report_to": "tensorboard", "score_scaling": True, "whiten_rewards": True,
        "load_best_model_at_end": True, "metric_for_best_model": "score", "learning_rate": 1e-5,
    }  # fmt: skip
    given = {
        "reward_funcs": [count_w4, slow_length],
        "reward_model": tiny_scorer(seed=5),
        "ref_model": tiny_policy(seed=6),
        "eval_dataset": Dataset.from_list(prompt_rows(4, seed=1)),
        "callbacks": [measures],
    }
    return make_saving(output_dir, **run, given=given)


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="memory and descriptors are read from /proc")
@pytest.mark.timeout(120 + 2 * NUM_UPDATES)
def test_a_long_run_does_not_grow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_module, "NUM_KEPT", min(run_module.NUM_KEPT, NUM_UPDATES // 8))
    measures = Measures()
    everything_on(tmp_path, measures).train()
    quarters = {}
    for name, values in measures.measured.items():
        quarter = len(values) // 4
        quarters[name] = median(values[quarter : 2 * quarter]), median(values[-quarter:])
    print(f"{NUM_UPDATES} updates, second and last quarter: {quarters}")
    for name in ("descriptors", "threads"):  # pools start a thread when they need it
        assert quarters[name][1] - quarters[name][0] <= 2, quarters
    before, after = quarters["memory (MB)"]
    assert after - before < 8 + NUM_UPDATES / 100, quarters
    calls = quarters["calls of an update"]  # the seconds are printed only: they depend on the machine
    assert calls[1] < 1.05 * calls[0], quarters
    save = quarters["a save (KB)"]
    assert save[1] < 1.02 * save[0], quarters
