"""Sampling of a token: inverse-CDF sampling, top-p, non-finite logits and the type of the head."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model

from rlhf_ppo.data.rollout import Prompts
from rlhf_ppo.generation import transformers_engine
from rlhf_ppo.generation.protocol import NonFiniteLogitsError
from rlhf_ppo.generation.transformers_engine import FiniteLogitsCheck, InverseCDFSampling, TransformersEngine
from tests.conftest import needs_continuous, tiny_policy
from tests.generation.test_dropping import greedy
from tests.runs import QUICK, At, MakeTrainer


def with_uniform(monkeypatch: pytest.MonkeyPatch, value: float) -> None:
    monkeypatch.setattr(torch, "rand_like", lambda like: torch.full_like(like, value))


def drawn(logits: torch.Tensor) -> torch.Tensor:
    scores = InverseCDFSampling()(None, logits)
    assert scores.isfinite().sum(dim=1).tolist() == [1] * len(logits)
    return scores.argmax(dim=1)


def test_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """`F = (0, 0.25, 0.25, 0.75, 1, 1)`."""
    logits = torch.tensor([[0.0, 0.25, 0.0, 0.5, 0.25, 0.0]]).log()
    for uniform, token in ((0.0, 1), (0.2, 1), (0.26, 3), (0.74, 3), (0.76, 4), (1 - 2**-53, 4), (1.0, 4)):
        with_uniform(monkeypatch, uniform)
        assert drawn(logits).item() == token, uniform


# ---- Non-finite logits ----


BROKEN = {
    "NaN": torch.tensor([0.0, torch.nan, 1.0]),
    "infinite": torch.tensor([0.0, torch.inf, 1.0]),
    "minus infinity throughout": torch.full((3,), -torch.inf),
}


def break_weights(now: Any) -> None:
    torch.nn.init.constant_(now.model.lm_head.weight, torch.nan)


@pytest.mark.parametrize("logits", BROKEN.values(), ids=BROKEN)
def test_one_broken_row_of_a_batch_is_an_error(logits: torch.Tensor) -> None:
    good = torch.tensor([0.0, -torch.inf, 1.0])
    with pytest.raises(NonFiniteLogitsError, match="NaN or infinite"):
        FiniteLogitsCheck()(None, torch.stack([good, logits]))


@pytest.mark.parametrize("engine", ["transformers", pytest.param("continuous", marks=needs_continuous)])
def test_a_run_says_in_which_update_the_policy_broke(engine: str, make_trainer: MakeTrainer) -> None:
    trainer = make_trainer(**QUICK, generation_engine=engine, callbacks=[At("on_step_end", 2, break_weights)])
    with pytest.raises(NonFiniteLogitsError, match=r"update 3: the policy \(LlamaForCausalLM\) .* NaN") as error:
        trainer.train()
    assert "learning_rate" in str(error.value) and "\n" not in str(error.value)


# ---- The type of the head ----


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
        return TransformersEngine(rows_per_call=2).sample(policy, PROMPTS, greedy()).ids

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
