"""The fused log-probabilities and entropies against log_softmax over whole logits in float64, and their memory."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from numpy.testing import assert_allclose
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn

from rlhf_ppo.models import fused as fused_module
from rlhf_ppo.models import policy_and_value
from rlhf_ppo.models.fused import HeadFactors, LogitScaling, fused_logprobs
from rlhf_ppo.models.policy_and_value import head_layers, token_logprobs
from tests.conftest import tiny_policy
from tests.models.test_logprobs import tiny_model

TOKENS, WIDTH, VOCABULARY, RANK = 13, 8, 40, 3

HEADS: dict[str, tuple[bool, bool, LogitScaling]] = {
    "plain": (False, False, LogitScaling()),
    "temperature": (False, False, LogitScaling(temperature=0.7)),
    "bias": (True, False, LogitScaling(temperature=0.7)),
    "factor": (True, False, LogitScaling(factor=0.3, temperature=1.3)),
    "cap": (True, False, LogitScaling(cap=2.0, temperature=0.7)),
    "factor and cap": (False, False, LogitScaling(factor=0.5, cap=1.5, temperature=0.7)),
    "adapter": (False, True, LogitScaling(temperature=0.7)),
    "adapter, bias and cap": (True, True, LogitScaling(cap=2.0, temperature=0.7)),
}
"""Whether there are a bias and an adapter, and the scaling."""


def inputs(has_bias: bool, has_adapter: bool) -> tuple[dict[str, Tensor], Tensor]:
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    tensors = {"states": normal(TOKENS, WIDTH), "weight": normal(VOCABULARY, WIDTH)}
    if has_bias:
        tensors["bias"] = normal(VOCABULARY)
    if has_adapter:
        tensors |= {"inner": normal(TOKENS, RANK), "outer": normal(VOCABULARY, RANK)}
    return tensors, torch.randint(VOCABULARY, (TOKENS,), generator=generator)


def exact(tensors: dict[str, Tensor], targets: Tensor, scaling: LogitScaling) -> tuple[Tensor, Tensor]:
    """Whole logits in the tensors' precision."""
    logits = tensors["states"] @ tensors["weight"].T
    if "inner" in tensors:
        logits = logits + tensors["inner"] @ tensors["outer"].T
    if "bias" in tensors:
        logits = logits + tensors["bias"]
    logits = logits * scaling.factor
    if scaling.cap is not None:
        logits = scaling.cap * torch.tanh(logits / scaling.cap)
    distribution = (logits / scaling.temperature).log_softmax(-1)
    return distribution[torch.arange(len(targets)), targets], -(distribution.exp() * distribution).sum(-1)


def fused(
    tensors: dict[str, Tensor], targets: Tensor, scaling: LogitScaling, tokens_per_chunk: int
) -> tuple[Tensor, Tensor]:
    names = [("states", "weight"), ("inner", "outer")] if "inner" in tensors else [("states", "weight")]
    states, weights = (tuple(tensors[pair[index]] for pair in names) for index in (0, 1))
    head = HeadFactors(states, weights, tensors.get("bias"))
    return fused_logprobs(head, targets, scaling, tokens_per_chunk * VOCABULARY)


def leaves(tensors: dict[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    return {name: value.to(dtype).requires_grad_() for name, value in tensors.items()}


@pytest.mark.parametrize(
    ("tokens_per_chunk", "rows"),
    [(1, 1), (5, 1), (TOKENS, 1), (5, TOKENS), (2, 6)],
    ids=["a token", "5 tokens", "whole", "columns", "tokens and columns"],
)
@pytest.mark.parametrize("by", ["logprobs", "entropy", "both"])
@pytest.mark.parametrize("name", HEADS)
def test_values_and_gradients_are_those_of_whole_logits_in_float64(
    name: str, by: str, tokens_per_chunk: int, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fused_module, "_BLOCK_ON_CPU", 35)  # 35, 7 or 2 of the 40 columns at a time
    monkeypatch.setattr(fused_module, "_ROWS_ON_CPU", rows)
    has_bias, has_adapter, scaling = HEADS[name]
    tensors, targets = inputs(has_bias, has_adapter)
    ours, theirs = leaves(tensors, torch.float32), leaves(tensors, torch.float64)
    factors = torch.linspace(-1, 2, TOKENS, dtype=torch.float64)
    results = fused(ours, targets, scaling, tokens_per_chunk), exact(theirs, targets, scaling)
    for values, expected in zip(*results, strict=True):
        assert values.dtype == torch.float32
        assert_allclose(values.detach(), expected.detach(), rtol=1e-5, atol=1e-5)
    for logprobs_, entropy in results:
        loss = (logprobs_ * factors).sum() if by != "entropy" else 0.0
        if by != "logprobs":
            loss = loss + (entropy * factors.flip(0)).sum()
        loss.backward()  # pyright: ignore[reportAttributeAccessIssue]
    for key, value in theirs.items():
        assert value.grad is not None and ours[key].grad is not None
        scale = float(value.grad.abs().max())
        assert scale > 0.05
        assert_allclose(ours[key].grad, value.grad, rtol=0, atol=1e-5 * scale, err_msg=key)


def test_gradients_of_a_bfloat16_head_are_summed_in_float32() -> None:
    """`V` equal rows summed over 1024 tokens one by one: in bfloat16 the sum would stop growing at 128."""
    states = torch.ones(1024, 1, dtype=torch.bfloat16)
    weight = torch.zeros(2, 1, dtype=torch.bfloat16, requires_grad=True)
    head = HeadFactors((states,), (weight,), None)
    logprobs_, _ = fused_logprobs(head, torch.zeros(1024, dtype=torch.long), LogitScaling(), max_elements=2)
    logprobs_.sum().backward()
    assert weight.grad is not None and weight.grad.dtype == torch.bfloat16
    assert weight.grad.flatten().tolist() == [512.0, -512.0]  # 1024 x (1 - 1/2)


# ---- Which heads are taken apart ----


def test_a_called_head_and_one_taken_apart_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fallback, with one chunk and several, gradient of the entropy included."""
    model = tiny_model("gemma2")
    states, targets = torch.randn(11, 16), torch.randint(32, (11,))

    def gradients() -> list[Tensor]:
        ours = states.clone().requires_grad_()
        model.zero_grad()
        values, entropy = token_logprobs(model, ours, targets, 0.7)
        (values.sum() + (entropy * torch.arange(11)).sum()).backward()
        assert ours.grad is not None
        return [values.detach(), entropy.detach(), ours.grad, model.get_output_embeddings().weight.grad.clone()]

    apart = gradients()
    monkeypatch.setattr(policy_and_value, "head_layers", lambda head, states: None)
    for elements in (2**20, 4 * 32):
        monkeypatch.setattr(policy_and_value, "MAX_CHUNK_ELEMENTS", elements)
        for ours, theirs in zip(apart, gradients(), strict=True):
            assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5 * float(theirs.abs().max()))


def adapted(**config: Any) -> tuple[Any, nn.Module]:
    torch.manual_seed(0)
    config = {"target_modules": ["q_proj", "lm_head"], "init_lora_weights": False, **config}
    model = get_peft_model(tiny_policy(), LoraConfig(**config))
    return model, model.get_base_model().lm_head


def applied(factors: HeadFactors) -> Tensor:
    products = [states @ weight.T for states, weight in zip(factors.states, factors.weights, strict=True)]
    return sum(products[1:], products[0]) + (0.0 if factors.bias is None else factors.bias)


@pytest.mark.parametrize(
    ("config", "num_layers"),
    [({}, 2), ({"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}, 1)],
    ids=["LoRA", "trained copy"],
)
def test_an_adapted_head_is_taken_apart(config: dict[str, Any], num_layers: int) -> None:
    """Active, switched off, switched to a second adapter, and merged."""
    model, head = adapted(**config)
    model.add_adapter("other", LoraConfig(**{"target_modules": ["q_proj", "lm_head"], "r": 2, **config}))
    for name, parameter in model.named_parameters():
        if "lm_head" in name and (".other." in name or "modules_to_save" in name):
            parameter.data += torch.randn_like(parameter)
    states, seen = torch.randn(5, 32), []

    def check(expected: int) -> None:
        layers = head_layers(head, states)
        assert layers is not None and len(layers.layers) == expected
        assert_allclose(layers.apply(applied).detach(), head(states).detach(), rtol=1e-5, atol=1e-5)
        seen.append(head(states).detach())

    check(num_layers)
    with model.disable_adapter():
        check(1)
    model.set_adapter("other")
    check(num_layers)
    assert all((one - other).abs().max() > 0.1 for one, other in itertools.pairwise(seen))
    if num_layers == 2:
        head.merge()
        check(1)
