"""A tokenizer loaded from the model's directory."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conftest import make_tokenizer, tiny_policy
from tests.runs import MakeTrainer


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
