"""A frozen head that autocast would cast at every token: cast once for a call, and then as it was."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model

from rlhf_ppo.data.prompts import Prompts
from rlhf_ppo.generation import transformers_engine
from rlhf_ppo.generation.transformers_engine import sample_responses
from tests.conftest import tiny_policy
from tests.generation.test_dropping import greedy

IDS = torch.tensor([[3, 4, 5, 6], [7, 8, 9, 10]])
PROMPTS = Prompts(IDS, torch.ones_like(IDS, dtype=torch.bool), {})


def policy_of(modules: list[str], tied: bool) -> Any:
    torch.manual_seed(0)
    config = LoraConfig(target_modules=modules, init_lora_weights=False, task_type="CAUSAL_LM")
    return get_peft_model(tiny_policy(tie_word_embeddings=tied), config)


@pytest.mark.parametrize(
    ("modules", "tied"), [(["q_proj"], True), (["q_proj", "lm_head"], False)], ids=["tied", "LoRA"]
)
def test_tokens_are_the_same_and_the_weight_too(
    modules: list[str], tied: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy, types = policy_of(modules, tied), []
    head = policy.get_base_model().lm_head
    layer = getattr(head, "base_layer", head)
    own = layer.weight
    layer.register_forward_pre_hook(lambda module, _: types.append(module.weight.dtype))

    def sampled() -> torch.Tensor:
        return sample_responses(policy, PROMPTS, greedy(), rows_per_call=2)

    with torch.autocast("cpu", torch.bfloat16):
        sampled()  # what is found out about a model, once
        types.clear()
        ours = sampled()
    assert set(types) == {torch.bfloat16} and layer.weight is own
    assert tied == (own is policy.get_input_embeddings().weight)
    with monkeypatch.context() as patch, torch.autocast("cpu", torch.bfloat16):
        patch.setattr(transformers_engine, "frozen_head_cast", lambda policy: torch.no_grad())
        assert torch.equal(sampled(), ours)
    types.clear()
    sampled()
    assert set(types) == {torch.float32}, "without autocast"


def test_it_comes_back_after_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = policy_of(["q_proj"], tied=True)
    monkeypatch.setattr(transformers_engine, "generate_dropping", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError), torch.autocast("cpu", torch.bfloat16):
        sample_responses(policy, PROMPTS, greedy(), rows_per_call=2)
    assert policy.get_base_model().lm_head.weight is policy.get_input_embeddings().weight
