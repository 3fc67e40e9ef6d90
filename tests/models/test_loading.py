"""Models by object and by directory, and the value model that is made when none is given."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import PartialState
from peft import LoraConfig, PeftModel, TaskType, get_peft_model
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from rlhf_ppo.models.adapters import add_value_adapter
from rlhf_ppo.models.heads import last_token_score, token_values
from rlhf_ppo.models.loading import (
    check_value_model,
    load_classifier,
    load_policy,
    make_value_model,
    prepare_trainable,
    why_not_loaded,
)
from rlhf_ppo.models.packing import hidden_states
from rlhf_ppo.models.unwrapping import backbone
from rlhf_ppo.run.datasets import policy_tokenizer
from tests.conftest import tiny_policy, tiny_scorer

IDS = torch.arange(1, 31).view(3, 10)
MASK = torch.ones(3, 10, dtype=torch.bool)


def adapted(model: Any, task: TaskType, **overrides: Any) -> Any:
    torch.manual_seed(9)
    config = LoraConfig(task_type=task, target_modules=["q_proj", "v_proj"], init_lora_weights=False, **overrides)
    return get_peft_model(model, config)


def states(model: Any) -> Tensor:
    with torch.no_grad():
        return hidden_states(model.eval(), IDS, MASK)


# ---- From directories ----


@pytest.mark.parametrize("load", [lambda path: load_policy(path, "model"), lambda path: policy_tokenizer(None, path)])
def test_a_directory_that_is_not_there_is_no_hub_error_alone(load: Any) -> None:
    with pytest.raises(ValueError, match="model='runs/stf' is not a directory, and the hub does not provide it"):
        load("runs/stf")
    reason = why_not_loaded(ValueError("Unrecognized configuration class"), "org/encoder", "cannot be loaded")
    assert reason == "cannot be loaded: Unrecognized configuration class"  # the hub gave it


def test_a_policy_comes_back_from_its_directory_in_float32(tmp_path: Path) -> None:
    policy = tiny_policy()
    policy.to(torch.bfloat16).save_pretrained(tmp_path)
    for path in (tmp_path, str(tmp_path)):
        loaded = load_policy(path, "model")
        assert {p.dtype for p in loaded.parameters()} == {torch.float32}
        for name, parameter in policy.named_parameters():
            assert torch.equal(loaded.get_parameter(name), parameter.float()), name


def test_an_adapters_directory_gives_the_adapted_policy(tmp_path: Path) -> None:
    tiny_policy().save_pretrained(tmp_path / "base")
    policy = adapted(load_policy(tmp_path / "base", "model"), TaskType.CAUSAL_LM)
    policy.save_pretrained(tmp_path / "adapter")
    assert not (tmp_path / "adapter" / "config.json").exists()
    loaded = load_policy(tmp_path / "adapter", "ref_model")
    assert torch.allclose(states(loaded), states(policy), atol=1e-6)
    assert not torch.allclose(states(loaded), states(tiny_policy()), atol=1e-2)


@pytest.mark.parametrize("tied", [False, True])
def test_a_reward_model_is_no_policy(tmp_path: Path, tied: bool) -> None:
    """Over tied embeddings no weight of the language model is missing; an adapter would be saved as it was."""
    tiny_scorer(tie_word_embeddings=tied).save_pretrained(tmp_path / "reward")
    base = AutoModelForSequenceClassification.from_pretrained(tmp_path / "reward")
    adapted(base, TaskType.SEQ_CLS).save_pretrained(tmp_path / "adapter")
    with pytest.raises(
        ValueError, match=r"ref_model='.*/reward' is a reward model \(LlamaForSequenceC.*\), not a lang"
    ):
        load_policy(tmp_path / "reward", "ref_model")
    with pytest.raises(ValueError, match=r"model='.*/adapter' is an adapter of a reward model \(task_type SEQ_CLS\)"):
        load_policy(tmp_path / "adapter", "model")
    with pytest.raises(ValueError, match=r"model has an adapter of a reward model .* an SFT model as model"):
        load_policy(adapted(tiny_policy(), TaskType.SEQ_CLS), "model")
    for directory in ("reward", "adapter"):
        load_classifier(tmp_path / directory, "value_model", is_value_model=True)


@pytest.mark.parametrize("argument", ["value_model", "value_model_path"])
def test_a_language_models_directory_gives_a_scalar_model_with_one_label(tmp_path: Path, argument: str) -> None:
    """`num_labels` is 2 in a configuration that says nothing about it."""
    tiny_policy().save_pretrained(tmp_path)
    assert "num_labels" not in json.loads((tmp_path / "config.json").read_text())
    loaded = load_classifier(tmp_path, argument, is_value_model=True)
    assert token_values(loaded, IDS, MASK, last=4).shape == (3, 4)
    assert torch.equal(states(loaded), states(tiny_policy()))


def test_an_adapter_brings_the_head_that_its_base_lacks_or_is_refused(tmp_path: Path) -> None:
    tiny_policy().save_pretrained(tmp_path / "base")
    for name, task in {"whole": TaskType.SEQ_CLS, "headless": None}.items():
        base = AutoModelForSequenceClassification.from_pretrained(tmp_path / "base", num_labels=1)
        get_peft_model(base, LoraConfig(task_type=task, target_modules=["q_proj"])).save_pretrained(tmp_path / name)
    first, again = (load_classifier(tmp_path / "whole", "reward_model") for _ in range(2))
    assert torch.equal(first(IDS).logits, again(IDS).logits)
    with pytest.raises(ValueError, match=r"adapter without a head: score.weight is neither in it nor in its base"):
        load_classifier(tmp_path / "headless", "reward_model")


def test_a_value_model_starts_from_a_language_models_adapter(tmp_path: Path, caplog: Any) -> None:
    """PEFT's class for it looks for `prepare_inputs_for_generation`, which a classifier does not have."""
    PartialState()  # as a trainer has it, for the warning of a new head
    tiny_policy().save_pretrained(tmp_path / "base")
    policy = adapted(load_policy(tmp_path / "base", "model"), TaskType.CAUSAL_LM)
    policy.save_pretrained(tmp_path / "adapter")
    loaded = load_classifier(tmp_path / "adapter", "value_model_path", is_value_model=True)
    (said,) = (message for message in caplog.messages if "A new head with random weights is trained." in message)
    assert "/adapter' is an adapter without a head: score.weight is neither in it nor in its base" in said
    assert torch.allclose(states(loaded), states(policy), atol=1e-5)
    assert token_values(loaded, IDS, MASK, last=4).shape == (3, 4)
    kept: Any = load_classifier(tmp_path / "adapter", "value_model", is_value_model=True, merges_adapter=False)
    assert torch.allclose(states(kept), states(policy), atol=1e-5)
    trained = {name for name, weight in kept.named_parameters() if weight.requires_grad}
    assert all(".lora_" in name or "score.modules_to_save" in name for name in trained)
    assert any("score.modules_to_save" in name for name in trained)


@pytest.mark.parametrize("task", [TaskType.SEQ_CLS, TaskType.CAUSAL_LM])
def test_a_value_model_of_a_merged_adapter_trains_as_a_whole(tmp_path: Path, task: TaskType) -> None:
    """PEFT leaves the base's weights frozen: the head alone would train."""
    PartialState()  # as a trainer has it, for the warning of a new head
    tiny_policy().save_pretrained(tmp_path / "base")
    kind = AutoModelForSequenceClassification if task == TaskType.SEQ_CLS else AutoModelForCausalLM
    adapted(kind.from_pretrained(tmp_path / "base", num_labels=1), task).save_pretrained(tmp_path / "adapter")
    loaded = load_classifier(tmp_path / "adapter", "value_model", is_value_model=True)
    assert all(parameter.requires_grad for parameter in loaded.parameters())
    with pytest.raises(ValueError, match="value_model starts from an adapter, and value_peft_config asks for another"):
        add_value_adapter(loaded, LoraConfig())


def test_a_wrapper_with_a_value_head_is_no_policy() -> None:
    wrapper = torch.nn.Module()
    wrapper.pretrained_model = tiny_policy()
    with pytest.raises(ValueError, match="model is a Module, not a decoder-only language model; load it with AutoMod"):
        load_policy(wrapper, "model")


@pytest.mark.parametrize("original", [tiny_policy, tiny_scorer])
def test_no_value_model_is_made_of_quantized_weights(original: Any) -> None:
    """They are codes: int8 weights up to 127 in place of fractions."""
    quantized = original()
    quantized.is_quantized = True
    with pytest.raises(
        ValueError, match=r"a copy of the quantized Llama\w+, .* share_base_model=True or value_model='po"
    ):
        make_value_model(quantized)


def test_two_labels_in_a_directory_are_an_error(tmp_path: Path) -> None:
    """Asked for one label, transformers would make a new head; the user's two must not vanish silently."""
    tiny_scorer(num_labels=2).save_pretrained(tmp_path / "two")
    base = AutoModelForSequenceClassification.from_pretrained(tmp_path / "two")
    adapted(base, TaskType.SEQ_CLS).save_pretrained(tmp_path / "adapter")
    expected = r"/two' holds score.weight of the shape \(2, 32\), .* has 2 labels, but one number per text is needed"
    for argument in ("reward_model", "value_model"):
        for directory in ("two", "adapter"):
            with pytest.raises(ValueError, match=f"{argument}=.*{expected}"):
                load_classifier(tmp_path / directory, argument, is_value_model=argument == "value_model")


# ---- The value model that is made ----


def test_made_from_the_reward_model_it_is_a_trainable_copy() -> None:
    reward_model = tiny_scorer().to(torch.bfloat16).eval().requires_grad_(False)
    value_model = make_value_model(reward_model)
    assert value_model.training and all(p.requires_grad for p in value_model.parameters())
    assert {p.dtype for p in value_model.parameters()} == {torch.float32}
    for name, parameter in reward_model.named_parameters():
        assert torch.equal(value_model.get_parameter(name), parameter.float())
        assert value_model.get_parameter(name).untyped_storage().data_ptr() != parameter.untyped_storage().data_ptr()
    assert not any(p.requires_grad for p in reward_model.parameters())


def test_adapters_of_the_reward_model_are_merged_into_the_copy() -> None:
    reward_model = adapted(tiny_scorer(), TaskType.SEQ_CLS)
    value_model = make_value_model(reward_model)
    assert not isinstance(value_model, PeftModel) and isinstance(reward_model, PeftModel)
    assert not any("lora" in name for name, _ in value_model.named_parameters())
    assert torch.allclose(
        last_token_score(value_model, IDS, MASK), last_token_score(reward_model, IDS, MASK), atol=1e-4
    )
    assert not torch.allclose(last_token_score(value_model, IDS, MASK), last_token_score(tiny_scorer(), IDS, MASK))


@pytest.mark.parametrize("argument", ["reward_model", "value_model"])
def test_an_adapter_that_transformers_has_loaded_is_merged_into_the_value_model(tmp_path: Path, argument: str) -> None:
    PartialState()  # as a trainer has it, for the warning of a new head
    tiny_policy().save_pretrained(tmp_path / "base")
    kind = AutoModelForSequenceClassification
    base = kind.from_pretrained(tmp_path / "base", num_labels=1)
    adapted(base, TaskType.SEQ_CLS).save_pretrained(tmp_path / "adapter")
    loaded = kind.from_pretrained(tmp_path / "adapter", num_labels=1)  # no PeftModel
    expected = loaded.eval()(IDS).logits[:, 0]
    value_model = (
        load_classifier(loaded, argument, is_value_model=True)
        if argument == "value_model"
        else make_value_model(loaded)
    )
    prepare_trainable(tiny_policy(), value_model)
    assert all(parameter.requires_grad for parameter in value_model.parameters())
    assert torch.allclose(last_token_score(value_model, IDS, MASK), expected, atol=1e-5)


def test_made_from_the_policy_its_values_are_zero_and_its_backbone_the_policys() -> None:
    policy = tiny_policy().eval().requires_grad_(False)
    value_model = make_value_model(policy)
    assert not token_values(value_model, IDS, MASK, last=10).any()
    assert torch.equal(states(value_model), states(policy))
    assert all(p.requires_grad for p in value_model.parameters())
    for name, parameter in backbone(policy).named_parameters():
        assert backbone(value_model).get_parameter(name).untyped_storage().data_ptr() != (
            parameter.untyped_storage().data_ptr()
        )
    check_value_model(value_model)
