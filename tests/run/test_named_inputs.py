"""A tokenizer loaded from the model's directory."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conftest import make_tokenizer, save_models, tiny_policy
from tests.runs import MakeTrainer


@pytest.mark.parametrize("is_loaded", [False, True])
def test_the_tokenizer_of_the_models_directory_is_taken(
    is_loaded: bool, make_trainer: MakeTrainer, tmp_path: Path
) -> None:
    save_models(tmp_path, model=tiny_policy())
    model = str(tmp_path / "model")
    policy = type(tiny_policy()).from_pretrained(model) if is_loaded else model
    trainer = make_trainer(processing_class=None, model=policy)
    assert trainer.processing_class.get_vocab() == make_tokenizer().get_vocab()  # pyright: ignore
