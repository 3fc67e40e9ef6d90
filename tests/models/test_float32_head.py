"""The head in float32 under 16-bit arithmetic: what float64 says of the same states, wherever tokens get logits."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn

from rlhf_ppo import PPOTrainer
from rlhf_ppo.data.prompts import Prompts
from rlhf_ppo.generation.continuous import ContinuousEngine
from rlhf_ppo.generation.transformers_engine import sample_responses
from rlhf_ppo.models import logprobs as logprobs_module
from rlhf_ppo.models.float32_head import Float32Linear, is_in_float32, multiply_head_in_float32
from rlhf_ppo.models.logprobs import token_logprobs
from rlhf_ppo.models.unwrapping import output_layer
from tests.conftest import needs_continuous, tiny_policy
from tests.generation.test_dropping import greedy
from tests.runs import QUICK, history, parameters, record_rollouts

MakeTrainer = Callable[..., PPOTrainer]
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
    multiply_head_in_float32(policy, in_float32)
    return policy


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
            sample_responses(policy, prompts, greedy(), rows_per_call=2)
        else:
            ContinuousEngine(lambda: 2, torch.bfloat16).sample(policy, prompts, greedy())
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


def test_a_run_in_float32_is_the_same_to_the_bit(make_trainer: MakeTrainer) -> None:
    plain, option = (make_trainer(**QUICK, lm_head_float32=chosen) for chosen in (False, True))
    for trainer in (plain, option):
        trainer.train()
    assert history(plain) == history(option)
    weights = parameters(plain)
    assert all(torch.equal(value, weights[name]) for name, value in parameters(option).items())


def test_all_models_of_a_bf16_run_have_it_and_without_it_none(make_trainer: MakeTrainer) -> None:
    """The policy that has not learned is its reference; the policy's model, given again, is as it was."""
    policy, rollouts = tiny_policy(), []
    for chosen in (True, False):
        trainer = make_trainer(**QUICK, model=policy, bf16=True, lm_head_float32=chosen, learning_rate=0.0)
        rollouts.append(record_rollouts(trainer))
        trainer.train()
        assert trainer.reference is not None and trainer.reference.own_policy is not None
        for model in (policy, trainer.reference.own_policy):
            assert is_in_float32(output_layer(model)) == chosen
        first = rollouts[-1][0]
        assert torch.equal(first.logprobs, first.ref_logprobs)
        assert trainer.state.log_history[0]["val/first_logratio"] == pytest.approx(0, abs=1e-6)
    assert not torch.equal(*(each[0].logprobs for each in rollouts))


def test_a_head_of_another_kind_is_an_error(make_trainer: MakeTrainer) -> None:
    """With an adapter on it, too."""

    class Quantized(nn.Linear):
        pass

    policy = tiny_policy()
    policy.lm_head.__class__ = Quantized
    for given in ({}, {"peft_config": LoraConfig(target_modules=["q_proj", "lm_head"])}):
        with pytest.raises(ValueError, match=r"lm_head_float32=True, but the head of LlamaForCausalLM is a Quantized"):
            make_trainer(**QUICK, **given, model=policy, lm_head_float32=True)
    multiply_head_in_float32(policy, False)
    assert not any(isinstance(layer, Float32Linear) for layer in policy.modules())
