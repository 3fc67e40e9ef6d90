"""Frozen weights in the type that autocast casts them to: the same bits, half the memory, no casts."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from peft import LoraConfig
from torch import Tensor, nn

from rlhf_ppo import PPOTrainer
from rlhf_ppo.models import storing
from rlhf_ppo.models.policy_and_value import PolicyAndValue
from rlhf_ppo.models.reference import FrozenPolicy
from rlhf_ppo.models.stored_linear import StoredLinear
from rlhf_ppo.models.storing import store_frozen
from tests.conftest import tiny_policy, tiny_scorer
from tests.runs import QUICK, history

MakeTrainer = Callable[..., PPOTrainer]
IDS = torch.tensor([[3, 4, 5, 6, 7, 8], [3, 9, 5, 6, 1, 8]])
MASK = torch.ones_like(IDS, dtype=torch.bool)
LORA: dict[str, Any] = {"target_modules": "all-linear", "init_lora_weights": False, "task_type": "CAUSAL_LM"}
CASES: dict[str, dict[str, Any]] = {
    "a reference and a reward model of their own": {"reward_model": tiny_scorer(seed=5)},
    "LoRA": {"peft_config": LoraConfig(**LORA)},
    "LoRA, and a whole module": {"peft_config": LoraConfig(**LORA, modules_to_save=["embed_tokens"])},
    "LoRA over a tied head": {"peft_config": LoraConfig(**LORA), "model": {"tie_word_embeddings": True}},
    "one base": {"peft_config": LoraConfig(**LORA), "share_base_model": True, "value_model": None},
    "offloaded": {"offload_frozen": True, "ref_model": tiny_policy(seed=4)},
}


def trainer_of(make_trainer: MakeTrainer, case: str, **changes: Any) -> PPOTrainer:
    given = copy.deepcopy(CASES[case])
    model = tiny_policy(**given.pop("model", {}))
    return make_trainer(**{**QUICK, "bf16": True, "model": model, **given, **changes})


@pytest.mark.parametrize("case", CASES)
def test_a_run_is_the_same_to_the_bit(case: str, make_trainer: MakeTrainer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Losses, gradients, KL, samples and the weights that are trained."""
    stored = trainer_of(make_trainer, case)
    models = [stored.model, stored.reference.model, *stored.reward_models]
    layers = [layer for model in models if model is not None for layer in model.modules()]
    assert any(isinstance(layer, StoredLinear) for layer in layers)
    stored.train()
    monkeypatch.setattr(storing, "_frozen_layers", lambda modules: [])
    plain = trainer_of(make_trainer, case)
    plain.train()
    assert history(stored) == history(plain)
    trained = {name: value for name, value in stored.model.named_parameters() if value.requires_grad}
    for name, value in plain.model.named_parameters():
        if value.requires_grad:
            assert torch.equal(trained[name], value), name


def modules_of(**changes: Any) -> list[nn.Module]:
    policy = tiny_policy(**changes)
    model = PolicyAndValue(policy, tiny_scorer(seed=2), 1.0)
    return [model, FrozenPolicy(tiny_policy(seed=3, **changes), 1.0)]


def types(model: nn.Module) -> dict[str, torch.dtype]:
    return {name: value.dtype for name, value in model.named_parameters()}


def test_only_what_linear_layers_multiply_by_is_stored() -> None:
    modules = modules_of(tie_word_embeddings=True)
    assert store_frozen(modules, torch.bfloat16) == 14  # seven in each of two layers
    assert set(types(modules[0]).values()) == {torch.float32}, "it is trained"
    for name, dtype in types(modules[1]).items():
        assert (dtype == torch.bfloat16) == ("_proj" in name), name  # not norms, nor the head that is the embedding


def test_nothing_is_stored_without_autocast_or_twice() -> None:
    modules = modules_of()
    assert store_frozen(modules, None) == 0
    assert store_frozen(modules, torch.bfloat16) == 15
    assert store_frozen(modules, torch.bfloat16) == 0


def test_what_would_change_a_result_is_put_back() -> None:
    """A layer's weight is read in 32 bits by something else than its own multiplication."""
    modules = modules_of()
    layer: Any = modules[1].model.model.layers[0]  # pyright: ignore
    layer.register_forward_hook(lambda _, inputs, output: output + layer.mlp.down_proj.weight.float().sum())
    before = copy.deepcopy(modules[1].state_dict())
    assert store_frozen(modules, torch.bfloat16) == 0
    for name, value in modules[1].state_dict().items():
        assert value.dtype == torch.float32 and torch.equal(value, before[name]), name


def test_a_stored_model_computes_in_32_bits_outside_autocast() -> None:
    """As a callback does that generates by itself."""
    plain = tiny_policy(seed=3)
    module = FrozenPolicy(copy.deepcopy(plain), 1.0)
    store_frozen([module], torch.bfloat16)
    for layer in plain.modules():
        if isinstance(layer, nn.Linear):
            layer.weight.data = layer.weight.data.bfloat16().float()
    with torch.no_grad():
        ours, theirs = (model(input_ids=IDS).logits for model in (module.model, plain.eval()))
    assert ours.dtype == torch.float32 and torch.equal(ours, theirs)


@pytest.mark.parametrize("kind", ["DoRA", "IA3"])
def test_what_an_adapter_may_read_by_itself_keeps_its_type(kind: str) -> None:
    from peft import IA3Config, get_peft_model

    config = LoraConfig(**LORA, use_dora=True) if kind == "DoRA" else IA3Config(task_type="CAUSAL_LM")
    model = get_peft_model(tiny_policy(), config)
    wrapped = {id(value) for part in model.modules() for value in _base(part)}
    store_frozen([PolicyAndValue(model, tiny_scorer(seed=2), 1.0)], torch.bfloat16)
    assert wrapped and all(value.dtype == torch.float32 for value in model.parameters() if id(value) in wrapped)


def _base(part: Any) -> list[Tensor]:
    return list(part.base_layer.parameters()) if hasattr(part, "base_layer") else []
