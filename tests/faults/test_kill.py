"""Runs that are killed at random moments, or whose disk is full, resume and end as one left alone, bit for bit."""

from __future__ import annotations

import multiprocessing
import os
import random
import resource
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from safetensors import SafetensorError
from safetensors.torch import load_file

from rlhf_ppo import PPOConfig, PPOTrainer
from rlhf_ppo.run.checkpoints import last_complete_checkpoint
from tests.conftest import QUIET, count_w4, make_tokenizer, prompt_rows, tiny_policy, tiny_scorer
from tests.runs import assert_identical, end_of_run

NUM_KILLS = int(os.environ.get("NUM_KILLS", "6"))


def make(output_dir: str | Path, kind: type[PPOTrainer] = PPOTrainer, **overrides: Any) -> PPOTrainer:
    """A trainer of a run of eight updates, with evaluations, sample tables and a checkpoint after each update."""
    settings: dict[str, Any] = {
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "num_ppo_epochs": 2,
        "num_mini_batches": 2,
        "max_steps": 8,
        "response_length": 4,
        "stop_token": "eos",
        "learning_rate": 1e-3,
        "logging_steps": 3,
        "eval_strategy": "steps",
        "eval_steps": 3,
        "num_sample_generations": 4,
        "save_strategy": "steps",
        "save_steps": 1,
        "save_total_limit": 2,
        "whiten_rewards": True,
        "seed": 5,
    }
    return kind(
        PPOConfig(**{**QUIET, "output_dir": str(output_dir), **settings, **overrides}),
        make_tokenizer(),
        tiny_policy(),
        value_model=tiny_scorer(seed=2),
        train_dataset=Dataset.from_list(prompt_rows(16)),
        eval_dataset=Dataset.from_list(prompt_rows(5, seed=1)),
        reward_funcs=count_w4,
    )


def train(output_dir: str) -> None:
    """Start or resume the run, save the policy, and write the end."""
    torch.set_num_threads(1)
    trainer, checkpoint = make(output_dir), last_complete_checkpoint(output_dir)
    with Path(output_dir, "starts.txt").open("a") as file:
        file.write(f"{checkpoint}\n")
    trainer.train(resume_from_checkpoint=checkpoint)
    trainer.save_model(f"{output_dir}/final")
    torch.save(end_of_run(trainer), f"{output_dir}/end.pt.part")
    os.rename(f"{output_dir}/end.pt.part", f"{output_dir}/end.pt")


def started(output_dir: Path) -> Any:
    """Start the run in a process forked from one that has imported everything, which takes longer than the run."""
    output_dir.mkdir(exist_ok=True)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.preload"])
    process = context.Process(target=train, args=(str(output_dir),))
    process.start()
    return process


def end(output_dir: Path) -> tuple[Any, ...]:
    return torch.load(output_dir / "end.pt", weights_only=True), load_file(output_dir / "final" / "model.safetensors")


@pytest.mark.slow
@pytest.mark.timeout(120 + 30 * NUM_KILLS)
def test_killed_runs_end_as_one_that_was_left_alone(tmp_path: Path) -> None:
    seconds, draws = 0.0, random.Random(0)
    for name in ("warm-up", "alone"):  # the first one also waits for the imports
        before = time.monotonic()
        process = started(tmp_path / name)
        process.join()
        seconds = time.monotonic() - before
        assert process.exitcode == 0
    expected = end(tmp_path / "alone")
    kills = runs = 0
    starts: set[str] = set()
    while kills < NUM_KILLS:
        runs += 1
        output_dir = tmp_path / f"killed-{runs}"
        while not (output_dir / "end.pt").exists():
            process = started(output_dir)
            process.join(draws.uniform(0.2, 1.0) * seconds if kills < NUM_KILLS else None)
            if process.is_alive():
                kills += 1
                process.kill()
                process.join()
        assert_identical(end(output_dir), expected)
        starts |= {*(output_dir / "starts.txt").read_text().split()}
    assert starts > {"None"}, "some runs were resumed from checkpoints"


@contextmanager
def largest_file(size: int) -> Iterator[None]:
    """Let no file of this process grow beyond a size, as if the disk had no more."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("size", [5_000, 50_000])  # the models' files have 100 kB, random states 10
def test_a_full_disk_leaves_the_checkpoint_before_it_to_resume_from(size: int, tmp_path: Path) -> None:
    """The disk is full in the second update's checkpoint, at one of its files."""

    class Full(PPOTrainer):
        def _save_checkpoint(self, model: Any, trial: Any) -> None:
            with largest_file(size) if self.state.global_step == 2 else nullcontext():
                super()._save_checkpoint(model, trial)

    whole = make(tmp_path / "whole", max_steps=3)
    whole.train()
    with pytest.raises((OSError, RuntimeError, SafetensorError)):
        make(tmp_path / "run", Full, max_steps=3).train()
    assert last_complete_checkpoint(tmp_path / "run") == str(tmp_path / "run" / "checkpoint-1")
    resumed = make(tmp_path / "run", max_steps=3)
    resumed.train(resume_from_checkpoint=True)
    assert_identical(end_of_run(resumed), end_of_run(whole))
