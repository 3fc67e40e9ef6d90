"""Heads: values, scores, and products in float32."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from numpy.testing import assert_allclose
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import AutoModelForSequenceClassification

from rlhf_ppo.data.rollout import Prompts
from rlhf_ppo.generation.continuous import ContinuousEngine
from rlhf_ppo.generation.transformers_engine import TransformersEngine
from rlhf_ppo.models import policy_and_value as logprobs_module
from rlhf_ppo.models.heads import (
    is_in_float32,
    last_token_score,
    multiply_in_float32,
    reads_last_token,
    scalar_head,
    token_values,
)
from rlhf_ppo.models.packing import hidden_states
from rlhf_ppo.models.policy_and_value import token_logprobs
from rlhf_ppo.models.unwrapping import output_layer
from tests.conftest import needs_continuous, tiny_policy, tiny_scorer
from tests.generation.test_dropping import greedy
from tests.models.architectures import tiny_model

CAUSAL = ["llama", "gpt2", "gpt_neox", "opt", "bloom", "gemma2", "qwen2", "mistral", "phi3"]


def tiny_classifier(family: str) -> Any:
    return tiny_model(family, AutoModelForSequenceClassification)


def ragged_batch() -> tuple[Tensor, Tensor]:
    """Rows with 6, 3 and 4 real tokens: not padded, on the left, on both sides. Some are id 0, the model's PAD."""
    ids = torch.randint(1, 32, (3, 6), generator=torch.Generator().manual_seed(0))
    mask = torch.tensor([[1, 1, 1, 1, 1, 1], [0, 0, 0, 1, 1, 1], [0, 1, 1, 1, 1, 0]], dtype=torch.bool)
    ids[0, -1] = ids[1, -1] = ids[2, 2] = 0
    return ids, mask


@pytest.mark.parametrize("model_type", CAUSAL)
def test_the_score_is_what_the_model_itself_says_of_the_unpadded_row(model_type: str) -> None:
    model, (ids, mask) = tiny_classifier(model_type), ragged_batch()
    assert reads_last_token(model)
    model.config.pad_token_id = -1  # or the model would take a real 0 at the end for padding
    own = torch.cat([model(input_ids=row[real][None]).logits[0] for row, real in zip(ids, mask, strict=True)])
    scores = last_token_score(model, ids, mask)
    assert scores.dtype == torch.float32 and scores.shape == (3,)
    assert_allclose(scores.detach(), own.detach(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("seed", range(4))
def test_a_causal_model_in_16_bits_is_known_by_its_score(seed: int, dtype: torch.dtype) -> None:
    assert reads_last_token(tiny_scorer(seed).to(dtype))


@pytest.mark.parametrize("model_type", CAUSAL)
def test_values_are_the_head_on_each_state_counted_from_the_right(model_type: str) -> None:
    model, (ids, mask) = tiny_classifier(model_type), ragged_batch()
    values = token_values(model, ids, mask, last=3)
    assert values.dtype == torch.float32 and values.shape == (3, 3)
    for row in range(3):
        real = mask[row].nonzero().squeeze(1)
        states = model.base_model(input_ids=ids[row, real][None]).last_hidden_state[0]
        own = scalar_head(model)(states).squeeze(1)
        for position, value in zip(real.tolist(), own, strict=True):
            if position >= 3:
                assert_allclose(values[row, position - 3].detach(), value.detach(), rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_the_head_computes_in_float32_whatever_the_layers_below_compute_in() -> None:
    model, (ids, mask) = tiny_classifier("llama"), ragged_batch()
    with torch.autocast("cpu", torch.bfloat16):
        states = hidden_states(model, ids, mask)
        values, scores = token_values(model, ids, mask, last=6), last_token_score(model, ids, mask)
    expected = (states.float() @ model.score.weight.T)[..., 0]
    torch.testing.assert_close(values, expected, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(scores, torch.stack([expected[0, 5], expected[1, 5], expected[2, 4]]))


def test_a_head_that_says_something_else_is_not_trusted() -> None:
    """Its name and shape are right, but the model itself adds to what the head says."""

    class Shifted(type(tiny_scorer())):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            output = super().forward(*args, **kwargs)
            output.logits = output.logits + 1
            return output

    model = tiny_scorer()
    model.__class__ = Shifted
    assert not reads_last_token(model)


# ---- Products in float32 ----


TARGETS, TEMPERATURE = torch.arange(3, 32), 0.7
TO_FLOAT32, BEYOND_BF16 = 3e-6, 3e-4
"""Relative differences: what float32 may be off by, and what 16 bits are off by at least."""

HEADS: dict[str, dict[str, Any]] = {
    "own weights": {"tie_word_embeddings": False},
    "tied": {"tie_word_embeddings": True},
    "LoRA": {"target_modules": ["q_proj", "lm_head"]},
    "a trained copy": {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
}


def policy_with(head: str, dtype: torch.dtype = torch.float32, in_float32: bool = True) -> Any:
    """A policy with large logits, its adapters and its own weights in one type."""
    given = dict(HEADS[head])
    policy: Any = tiny_policy(tie_word_embeddings=given.pop("tie_word_embeddings", False))
    policy.lm_head.weight.data *= 8
    if given:
        torch.manual_seed(0)
        policy = get_peft_model(policy, LoraConfig(init_lora_weights=False, **given))
    policy = policy.to(dtype)
    if in_float32:
        multiply_in_float32(output_layer(policy))
    return policy


@pytest.mark.parametrize("head", ["own weights", "LoRA"])
def test_the_next_trainer_of_a_model_multiplies_as_its_own_arguments_say(head: str, make_trainer: Any) -> None:
    policy = policy_with(head, in_float32=False)
    for in_float32 in (True, False):
        make_trainer(model=policy, lm_head_float32=in_float32)
        assert is_in_float32(output_layer(policy)) == in_float32


def exact(head: nn.Module, states: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Log-probabilities in float64 of the states and weights as they are stored, and their gradients."""
    weights = [value.detach().double().requires_grad_() for value in head.parameters() if value.requires_grad]
    states = states.detach().double().requires_grad_()
    if hasattr(head, "lora_A"):
        base = head.base_layer.weight.detach().double()  # pyright: ignore[reportAttributeAccessIssue]
        logits = states @ base.T + head.scaling["default"] * (states @ weights[0].T) @ weights[1].T  # pyright: ignore
    else:
        logits = states @ weights[0].T
    found = (logits / TEMPERATURE).log_softmax(-1)[torch.arange(len(TARGETS)), TARGETS]
    return found.detach(), list(torch.autograd.grad(found.sum(), [states, *weights]))


def off_by(ours: Tensor, theirs: Tensor) -> float:
    return float((ours.double() - theirs).norm() / theirs.norm())


@pytest.mark.parametrize("is_called", [False, True], ids=["fused", "called"])
@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float32], ids=["stored in bf16", "under autocast"])
@pytest.mark.parametrize("head", HEADS)
def test_logprobs_and_gradients_are_those_of_float64(
    head: str, stored: torch.dtype, is_called: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A gradient in 16 bits is that of float64, rounded once: its last bit is what may differ."""
    if is_called:
        monkeypatch.setattr(logprobs_module, "head_layers", lambda head, states: None)
    torch.manual_seed(1)
    states = torch.randn(len(TARGETS), 32).to(stored)
    under = torch.autocast("cpu", torch.bfloat16) if stored == torch.float32 else nullcontext()

    def computed(policy: Any) -> tuple[Tensor, list[Tensor], tuple[Tensor, list[Tensor]]]:
        own = states.clone().requires_grad_()
        layer = output_layer(policy)
        trained = [value for value in layer.parameters() if value.requires_grad]
        with under:
            found = token_logprobs(policy, own, TARGETS, TEMPERATURE)[0]
        return found.detach(), list(torch.autograd.grad(found.sum(), [own, *trained])), exact(layer, states)

    found, gradients, (expected, exact_gradients) = computed(policy_with(head, stored))
    assert found.dtype == torch.float32 and off_by(found, expected) < TO_FLOAT32
    for ours, theirs in zip(gradients, exact_gradients, strict=True):
        assert ours.dtype == stored
        assert off_by(ours, theirs) < (TO_FLOAT32 if stored == torch.float32 else 2**-8)
    found, gradients, (expected, exact_gradients) = computed(policy_with(head, stored, in_float32=False))
    assert off_by(found, expected) > BEYOND_BF16
    assert stored == torch.bfloat16 or off_by(gradients[0], exact_gradients[0]) > BEYOND_BF16


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float32], ids=["stored in bf16", "cast to bf16"])
@pytest.mark.parametrize("engine", ["transformers", pytest.param("continuous", marks=needs_continuous)])
@pytest.mark.parametrize("head", ["tied", "LoRA"])
def test_tokens_are_sampled_from_logits_in_float32(head: str, engine: str, stored: torch.dtype) -> None:
    policy, seen = policy_with(head, stored), []
    layer = output_layer(policy)
    before = [value for value in layer.parameters()]
    prompts = Prompts(torch.tensor([[3, 4, 5, 6], [7, 8, 9, 10]]), torch.ones(2, 4, dtype=torch.bool), {})
    layer.register_forward_hook(lambda module, given, logits: seen.append((given[0].detach(), logits.detach())))
    with torch.autocast("cpu", torch.bfloat16, enabled=stored == torch.float32):
        if engine == "transformers":
            TransformersEngine(rows_per_call=2).sample(policy, prompts, greedy())
        else:
            ContinuousEngine(2, torch.bfloat16).sample(policy, prompts, greedy())
    assert all(now is then for now, then in zip(layer.parameters(), before, strict=True))
    adapted: Any = layer
    weight = adapted.base_layer.weight if head == "LoRA" else adapted.weight
    for states, logits in seen:
        expected = states.double() @ weight.double().T
        if head == "LoRA":
            inner = states.double() @ adapted.lora_A["default"].weight.double().T
            expected += adapted.scaling["default"] * inner @ adapted.lora_B["default"].weight.double().T
        assert logits.dtype == torch.float32 and off_by(logits, expected) < TO_FLOAT32
    assert seen
