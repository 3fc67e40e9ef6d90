"""Frozen models: nothing random, nothing trained, and what engines need to shard them."""

from __future__ import annotations

import torch

from rlhf_ppo.models.frozen import Frozen
from tests.conftest import tiny_scorer


def test_nothing_random_and_nothing_trained_is_left() -> None:
    model = tiny_scorer(attention_dropout=0.5).train()
    frozen = Frozen(model)
    assert frozen.model is model
    assert not any(module.training for module in frozen.modules())
    assert not any(parameter.requires_grad for parameter in frozen.parameters())
    ids = torch.tensor([[1, 2, 3]])
    outputs = [frozen.train().model(input_ids=ids).logits for _ in range(2)]
    assert torch.equal(*outputs), "dropout is still on"


def test_engines_find_the_configuration_and_the_blocks() -> None:
    frozen = Frozen(tiny_scorer())
    assert frozen.config is frozen.model.config
    assert frozen._no_split_modules == ["LlamaDecoderLayer"]
