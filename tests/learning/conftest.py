"""Fixtures of the learning tests: the benchmark's stories, and VADER as their reward."""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer

from rlhf_ppo import PPOConfig, PPOTrainer
from tests.conftest import QUIET


@pytest.fixture
def stories(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The benchmark's file of that name."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks" / "learning"))
    return importlib.import_module("stories")


@pytest.fixture
def vader(stories: Any, shared_data: Path) -> Callable[..., list[float]]:
    """The compound valence of each response."""
    score = stories.vader(stories.read_lexicon(shared_data))

    def vader(completions: list[str], **columns: Any) -> list[float]:
        return score((), completions)

    return vader


@pytest.fixture
def story_trainer(stories: Any, shared_data: Path, tmp_path: Path) -> Callable[..., PPOTrainer]:
    """A function that makes a trainer of the 260K-parameter TinyStories model."""

    def rows(texts: list[str], num_rows: int) -> Dataset:
        return Dataset.from_dict({"prompt": list(itertools.islice(itertools.cycle(texts), num_rows))})

    def make(seed: int, num_updates: int, num_episodes: int, num_held_out: int, rewards: Any, **options: Any) -> Any:
        args = PPOConfig(
            output_dir=str(tmp_path / str(seed)), seed=seed, total_episodes=num_updates * num_episodes,
            per_device_train_batch_size=num_episodes, per_device_eval_batch_size=128, response_length=40,
            temperature=1.0, stop_token="eos", kl_coef=0.05, num_ppo_epochs=2, **QUIET, **options,
        )  # fmt: skip
        model = shared_data / "stories260K"
        return PPOTrainer(
            args, AutoTokenizer.from_pretrained(model), model=AutoModelForCausalLM.from_pretrained(model),
            reward_funcs=rewards, train_dataset=rows(stories.openings(stories.HEROES), num_episodes * num_updates),
            eval_dataset=rows(stories.openings(stories.HELD_OUT_HEROES), num_held_out),
        )  # fmt: skip

    return make
