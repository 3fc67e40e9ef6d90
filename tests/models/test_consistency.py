"""What is found out about an architecture before training: each kind of fault is seen, and sound models pass."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rlhf_ppo.models.consistency import check_consistent
from tests.conftest import tiny_policy
from tests.models.architectures import tiny_model

RECOMPUTING: Any = SimpleNamespace(gradient_checkpointing=True, gradient_checkpointing_kwargs=None)


def hooked(change: Any) -> Any:
    """A model whose embeddings are changed."""
    model = tiny_policy()
    model.model.embed_tokens.register_forward_hook(lambda module, inputs, output: change(output))
    return model


@pytest.mark.parametrize(("model", "message"), [
    (lambda: hooked(lambda x: x + torch.rand(1) * 1e-3), "LlamaForCausalLM, which computes at random"),
    (lambda: hooked(lambda x: x + random.random()), "computes at random"),
    (lambda: hooked(lambda x: x + x.mean(dim=1, keepdim=True)), "depends on later tokens"),
    (lambda: hooked(lambda x: x.roll(x.shape[1], 2)), "depend on the padding behind it"),
    (lambda: tiny_model("bert"), "BertLMHeadModel, in which a token's state depends on later tokens"),
    (lambda: tiny_model("cpmant"), "CpmAntForCausalLM, in which"),
])  # fmt: skip
def test_each_fault_is_named(model: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_consistent(model(), "model", None)


def test_training_mode_that_differs_from_evaluation_is_found() -> None:
    """A module that is in training mode because it recomputes, and does something of its own there."""
    model = tiny_policy()
    norm = model.model.norm
    norm.gradient_checkpointing = False
    norm.register_forward_hook(lambda module, inputs, output: output * (0.5 if module.training else 1.0))
    check_consistent(model, "model", None)
    with pytest.raises(ValueError, match="something else in training than in evaluation"):
        check_consistent(model, "model", RECOMPUTING)


def test_an_architecture_that_cannot_recompute_is_refused() -> None:
    model = tiny_policy()
    type(model).supports_gradient_checkpointing, before = False, type(model).supports_gradient_checkpointing
    try:
        with pytest.raises(ValueError, match=r"value_model: LlamaFor.* does not support .*_checkpointing=False"):
            check_consistent(model, "value_model", RECOMPUTING)
    finally:
        type(model).supports_gradient_checkpointing = before


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["llama", "jamba", "phimoe"])
def test_sound_models_pass_and_nothing_of_it_stays(family: str, dtype: torch.dtype) -> None:
    model = tiny_model(family).to(dtype).train()
    state, python_state = torch.get_rng_state(), random.getstate()
    check_consistent(model, "model", RECOMPUTING)
    assert torch.equal(torch.get_rng_state(), state) and random.getstate() == python_state
    assert all(module.training for module in model.modules()) and not model.is_gradient_checkpointing
