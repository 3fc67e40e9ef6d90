"""Frozen models: no gradients, offloading, and the frozen-weight cast."""

from __future__ import annotations

import copy
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import LlamaForCausalLM, LlamaForSequenceClassification

from rlhf_ppo import PPOTrainer
from rlhf_ppo.models import frozen
from rlhf_ppo.models.frozen import Frozen, FrozenPolicy, Offload, cast_frozen_weights
from rlhf_ppo.models.heads import StoredLinear
from rlhf_ppo.models.policy_and_value import PolicyAndValue
from rlhf_ppo.training.construction import place_frozen
from tests.conftest import tiny_policy, tiny_scorer
from tests.runs import QUICK, assert_identical, history, parameters


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


# ---- Weights that stay on the CPU ----


def addresses(model: nn.Module) -> list[int]:
    return [value.data_ptr() for value in [*model.parameters(), *model.buffers()]]


def test_weights_are_lent_for_the_time_of_a_context() -> None:
    """The device is the CPU, too: what is lent are copies at other addresses."""
    model = tiny_scorer(tie_word_embeddings=True)
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    offload = Offload(model, torch.device("cpu"))
    home = addresses(model)
    for _ in range(2):
        with offload():
            assert not set(addresses(model)) & set(home)
            assert all(torch.equal(value, expected[name]) for name, value in model.state_dict().items())
        assert addresses(model) == home
    with pytest.raises(RuntimeError, match="inside"), offload():
        raise RuntimeError("inside")
    assert addresses(model) == home


@pytest.mark.parametrize(("device", "stays_home"), [("cuda", True), ("cpu", False)])
def test_only_an_accelerator_borrows(device: str, stays_home: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlhf_ppo.processes.distributed.zero_stage", lambda _: None)
    monkeypatch.setattr("rlhf_ppo.processes.distributed.is_fsdp", lambda _: False)
    accelerator: Any = SimpleNamespace(device=torch.device(device))
    placed = place_frozen(Frozen(tiny_scorer()), accelerator, offload=True)
    assert isinstance(placed.offload, Offload) == stays_home
    assert {value.device.type for value in placed.parameters()} == {"cpu"}
    with Frozen(tiny_scorer()).offload():  # one that was not offloaded
        pass


class NothingStays(Offload):
    """Counts its uses, and leaves NaN where the weights were while they are not lent."""

    uses = -1  # the constructor returns them, too

    def _return(self) -> None:
        self.uses += 1
        for weight in self._weights:
            weight.data = torch.full_like(weight, torch.nan)


def test_offloaded_models_give_the_same_run(make_trainer: Callable[..., Any]) -> None:
    """Reference and reward model are lent once in each of two updates, and never read while they are not there."""
    runs = []
    for offloads in (False, True):
        trainer = make_trainer(ref_model=tiny_policy(seed=3), reward_model=tiny_scorer(seed=4))
        frozen = [trainer.reference.model, trainer.scorer.sources["reward_model"].scorer] if offloads else []
        for model in frozen:
            model.offload = NothingStays(model, torch.device("cpu"))
        trainer.train()
        assert [model.offload.uses for model in frozen] == [2] * len(frozen)
        runs.append({"history": history(trainer), "parameters": parameters(trainer)})
    assert_identical(*runs)


def test_the_constructor_offloads_whole_models_but_no_adapter_over_the_policys_base(
    make_trainer: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Moving the latter would take the policy's own weights away."""
    asked: dict[str, bool] = {}

    def place(model: nn.Module, accelerator: Any, offload: bool) -> nn.Module:
        asked[f"{type(model).__name__} {len(asked)}"] = offload
        return place_frozen(model, accelerator, offload)

    monkeypatch.setattr("rlhf_ppo.training.construction.place_frozen", place)
    over_base = get_peft_model(scorer_over(tiny_policy()), LoraConfig(target_modules=["q_proj"]))
    make_trainer(
        peft_config=LoraConfig(target_modules=["q_proj"]), value_model=None, share_base_model=True,
        reward_model=[over_base, tiny_scorer(seed=4)], ref_model=tiny_policy(), offload_frozen=True,
    )  # fmt: skip
    assert asked == {"FrozenPolicy 0": True, "FrozenScorer 1": False, "FrozenScorer 2": True}


def scorer_over(policy: LlamaForCausalLM) -> LlamaForSequenceClassification:
    scorer = tiny_scorer()
    scorer.model.load_state_dict(policy.model.state_dict())
    return scorer


# ---- Frozen-weight cast ----


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
    monkeypatch.setattr(frozen, "_frozen_layers", lambda modules: [])
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
    assert cast_frozen_weights(modules, torch.bfloat16) == 14  # seven in each of two layers
    assert set(types(modules[0]).values()) == {torch.float32}, "it is trained"
    for name, dtype in types(modules[1]).items():
        assert (dtype == torch.bfloat16) == ("_proj" in name), name  # not norms, nor the head that is the embedding


def test_nothing_is_stored_without_autocast_or_twice() -> None:
    modules = modules_of()
    assert cast_frozen_weights(modules, None) == 0
    assert cast_frozen_weights(modules, torch.bfloat16) == 15
    assert cast_frozen_weights(modules, torch.bfloat16) == 0


def test_what_would_change_a_result_is_put_back() -> None:
    """A layer's weight is read in 32 bits by something else than its own multiplication."""
    modules = modules_of()
    layer: Any = modules[1].model.model.layers[0]  # pyright: ignore
    layer.register_forward_hook(lambda _, inputs, output: output + layer.mlp.down_proj.weight.float().sum())
    before = copy.deepcopy(modules[1].state_dict())
    assert cast_frozen_weights(modules, torch.bfloat16) == 0
    for name, value in modules[1].state_dict().items():
        assert value.dtype == torch.float32 and torch.equal(value, before[name]), name


def test_a_stored_model_computes_in_32_bits_outside_autocast() -> None:
    """As a callback does that generates by itself."""
    plain = tiny_policy(seed=3)
    module = FrozenPolicy(copy.deepcopy(plain), 1.0)
    cast_frozen_weights([module], torch.bfloat16)
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
    cast_frozen_weights([PolicyAndValue(model, tiny_scorer(seed=2), 1.0)], torch.bfloat16)
    assert wrapped and all(value.dtype == torch.float32 for value in model.parameters() if id(value) in wrapped)


def _base(part: Any) -> list[Tensor]:
    return list(part.base_layer.parameters()) if hasattr(part, "base_layer") else []
