"""A finished run with two checkpoints, which every case damages, moves or resumes a copy of."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset

from rlhf_ppo import PPOConfig, PPOTrainer
from tests.conftest import QUIET, count_w4, make_tokenizer, prompt_rows, tiny_policy, tiny_scorer
from tests.runs import QUICK

SAVING: dict[str, Any] = {
    **QUICK, "total_episodes": 4, "save_strategy": "steps", "save_steps": 1, "logging_steps": 1, "learning_rate": 1e-3,
    "stop_token": "eos", "seed": 3,
}  # fmt: skip
"""Arguments of a run of two updates, each with a checkpoint."""


def make_saving(output_dir: Path, **overrides: Any) -> PPOTrainer:
    """A trainer of that run; keyword arguments of PPOTrainer in `given`, or else of PPOConfig."""
    given = {
        "processing_class": make_tokenizer(),
        "model": tiny_policy(),
        "value_model": tiny_scorer(seed=2),
        "train_dataset": Dataset.from_list(prompt_rows(8)),
        "reward_funcs": count_w4,
    }
    given |= overrides.pop("given", {})
    args = PPOConfig(**{**QUIET, "output_dir": str(output_dir), **SAVING, **overrides})
    return PPOTrainer(args, **given)


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a run that has written checkpoint-1 and checkpoint-2; not to be changed."""
    output_dir = tmp_path_factory.mktemp("faults") / "run"
    make_saving(output_dir).train()
    return output_dir


@pytest.fixture
def run(finished: Path, tmp_path: Path) -> Path:
    """A copy of the finished run."""
    return Path(shutil.copytree(finished, tmp_path / "run"))
