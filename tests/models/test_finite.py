"""Weights that are not finite are found when the trainer is made, and named by model and parameter."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from rlhf_ppo import PPOTrainer
from rlhf_ppo.models.finite import weights_not_finite
from rlhf_ppo.models.heads import reads_last_token
from rlhf_ppo.models.logprobs import check_logits
from rlhf_ppo.rewards.judges import RewardModelJudge
from tests.conftest import make_tokenizer, tiny_policy, tiny_scorer

BASE = "model.layers.0.mlp.up_proj.weight"
HEADS = {"model": "lm_head.weight", "ref_model": "lm_head.weight"}
MODELS = ["model", "ref_model", "value_model", "reward_model"]


def with_adapter(model: nn.Module, task: str) -> Any:
    peft = pytest.importorskip("peft")
    return peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["q_proj"], task_type=task))


def spoil(model: nn.Module, parameter: str, value: float) -> str:
    """Set one number of the first parameter whose name ends so, and return its whole name."""
    name, weight = next((name, weight) for name, weight in model.named_parameters() if name.endswith(parameter))
    with torch.no_grad():
        weight.view(-1)[-1] = value
    return name


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("part", ["base", "head", "adapter"])
@pytest.mark.parametrize("argument", MODELS)
def test_a_model_with_one_weight_that_is_not_finite_is_refused(
    argument: str, part: str, value: float, make_trainer: Callable[..., PPOTrainer]
) -> None:
    is_policy = argument in HEADS
    model: nn.Module = tiny_policy(seed=3) if is_policy else tiny_scorer(seed=3)
    parameter = {"base": BASE, "head": HEADS.get(argument, "score.weight"), "adapter": "lora_B.default.weight"}[part]
    if part == "adapter":
        model = with_adapter(model, "CAUSAL_LM" if is_policy else "SEQ_CLS")
    name = spoil(model, parameter, value)
    # Where none is given the value model is made from the policy.
    given: dict[str, Any] = {"value_model": None} | {argument: model}

    with pytest.raises(ValueError) as raised:
        make_trainer(**given)
    assert str(raised.value).startswith(f"{argument} has weights that are NaN or infinite (1 in {name})")
    assert "load" in str(raised.value)


def test_of_several_reward_models_the_bad_one_is_named(make_trainer: Callable[..., PPOTrainer]) -> None:
    scorers = [tiny_scorer(seed=3), tiny_scorer(seed=4)]
    spoil(scorers[1], BASE, math.nan)
    spoil(scorers[1], "score.weight", math.nan)
    with pytest.raises(ValueError, match=rf"^reward_model\[1\] has .* \(1 in {BASE} and in 1 other parameters\)"):
        make_trainer(reward_model=scorers)


def test_a_preference_model_is_checked_too(tmp_path: Path) -> None:
    scorer = tiny_scorer()
    spoil(scorer, "score.weight", math.nan)
    scorer.save_pretrained(tmp_path)
    make_tokenizer().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"^preference_model has weights that are NaN or infinite"):
        _ = RewardModelJudge(str(tmp_path)).model


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("place", [0, 17, -1])
def test_one_number_of_any_type_and_place_is_found(dtype: torch.dtype, value: float, place: int) -> None:
    layer = nn.Linear(1000, 3, dtype=dtype)
    assert weights_not_finite(layer) == {}
    with torch.no_grad():
        layer.weight.view(-1)[place] = value
    assert weights_not_finite(layer) == {"weight": 1}


def test_what_holds_no_numbers_is_passed_over() -> None:
    layer = nn.Linear(2, 2)
    layer.empty = nn.Parameter(torch.zeros(0))
    layer.quantized = nn.Parameter(torch.zeros(2, dtype=torch.uint8), requires_grad=False)
    layer.elsewhere = nn.Parameter(torch.zeros(2, device="meta"))
    assert weights_not_finite(layer) == {}


def test_probes_do_not_mistake_numbers_that_overflow_for_another_architecture() -> None:
    """NaN equals nothing, itself neither: that says nothing about where a head reads or about scaled logits."""
    scorer, policy = tiny_scorer(), tiny_policy()
    for model in (scorer, policy):
        spoil(model, "embed_tokens.weight", 0.0)
        with torch.no_grad():
            model.model.norm.weight.fill_(3e38)
    assert weights_not_finite(scorer) == {} == weights_not_finite(policy)
    assert reads_last_token(scorer)
    check_logits(policy)


def test_a_label_of_several_that_is_not_finite_is_told_as_such(make_trainer: Callable[..., PPOTrainer]) -> None:
    scorer = tiny_scorer(num_labels=2, id2label={0: "good", 1: "bad"})
    spoil(scorer, "score.weight", math.nan)
    with pytest.raises(ValueError, match=r"^reward_model has .* NaN or infinite \(1 in score.weight\)"):
        make_trainer(reward_model=scorer, reward_head="bad")
