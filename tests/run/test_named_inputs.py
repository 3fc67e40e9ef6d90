"""A tokenizer loaded from the model's directory, and data sets given as paths."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from datasets import Dataset, DatasetDict

from rlhf_ppo import PPOTrainer
from tests.conftest import make_tokenizer, tiny_policy

MakeTrainer = Callable[..., PPOTrainer]
ROWS = [{"prompt": f"w{index % 20} w3"} for index in range(16)]


@pytest.fixture
def model(tmp_path: Path) -> str:
    """A directory with a model and its tokenizer."""
    tiny_policy().save_pretrained(tmp_path / "model")
    make_tokenizer().save_pretrained(tmp_path / "model")
    return str(tmp_path / "model")


@pytest.mark.parametrize("is_loaded", [False, True])
def test_the_tokenizer_of_the_models_directory_is_taken(
    is_loaded: bool, model: str, make_trainer: MakeTrainer
) -> None:
    policy = type(tiny_policy()).from_pretrained(model) if is_loaded else model
    trainer = make_trainer(processing_class=None, model=policy)
    assert trainer.processing_class.get_vocab() == make_tokenizer().get_vocab()  # pyright: ignore


@pytest.mark.parametrize("kind", ["jsonl", "splits"])
def test_data_sets_are_loaded_from_paths(kind: str, tmp_path: Path, make_trainer: MakeTrainer) -> None:
    rows, path = Dataset.from_list(ROWS), tmp_path / f"prompts.{kind}"
    if kind == "jsonl":
        rows.to_json(path)
    else:
        DatasetDict({"train": rows, "test": rows.select(range(4))}).save_to_disk(path)
    trainer = make_trainer(train_dataset=path, eval_dataset=str(path), max_steps=1, total_episodes=None)
    trainer.train()
    assert (len(trainer.train_dataset), len(trainer.eval_dataset)) == (16, 4 if kind == "splits" else 16)  # pyright: ignore
