"""`rlhf-ppo estimate`: its arithmetic is that of real models of the same configurations."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, DynamicCache

from tests.conftest import save_models, tiny_policy, tiny_scorer

OPTIONS = (
    "--sft_model_path policy --reward_model_path reward --output_dir out --use_cpu --report_to none --bf16 False "
    "--per_device_train_batch_size 4 --gradient_accumulation_steps 2 --prompt_length 6 --response_length 10"
)


@pytest.fixture
def estimated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.chdir(tmp_path)
    save_models(policy=tiny_policy(), reward=tiny_scorer())

    def run(options: str = "") -> dict[str, int]:
        from rlhf_ppo.cli.estimate import estimate

        return estimate(f"{OPTIONS} {options}".split())

    return run


def size(*models: Any) -> int:
    return sum(weight.numel() * weight.element_size() for model in models for weight in model.parameters())


def test_the_weights_are_those_of_the_four_models(estimated: Any) -> None:
    policy, scorer, found = tiny_policy(), tiny_scorer(), estimated()
    trained = size(policy, scorer)
    assert found["weights"] == 2 * trained and found["gradients"] == trained and found["optimizer"] == 2 * trained
    assert estimated("--kl_coef 0")["weights"] == 2 * trained - size(policy)
    one_body = estimated("--value_model_path policy")
    head = 4 * 32 * (32 + 1 + 1)
    assert one_body["weights"] == found["weights"] - size(scorer) + head
    assert one_body["gradients"] == size(policy) + head
    lora = "--use_peft --lora_target_modules all-linear"
    alone, shared = estimated(f"{lora} --value_model_path policy"), estimated(f"{lora} --share_base_model")
    assert shared["gradients"] == 2 * (alone["gradients"] - head)


def test_without_a_reward_model_the_value_model_is_made_from_the_policy(
    estimated: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.cli.test_estimate.OPTIONS", OPTIONS.replace("--reward_model_path reward ", ""))
    assert estimated("--reward_funcs length")["weights"] == 2 * size(tiny_policy()) + size(tiny_scorer())


def test_a_whole_reward_model_is_held_beside_the_shared_base(estimated: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    shared = "--use_peft --lora_target_modules all-linear --share_base_model"
    with_scorer = estimated(shared)["weights"]
    monkeypatch.setattr("tests.cli.test_estimate.OPTIONS", OPTIONS.replace("--reward_model_path reward ", ""))
    assert with_scorer == estimated(f"{shared} --reward_funcs length")["weights"] + size(tiny_scorer())


def test_the_cache_is_that_of_a_generation_call(estimated: Any) -> None:
    model = AutoModelForCausalLM.from_pretrained("policy")
    cache: Any = model(torch.zeros(8, 16, dtype=torch.long), use_cache=True).past_key_values
    assert isinstance(cache, DynamicCache)
    held = sum(part.numel() * 4 for layer in cache.layers for part in (layer.keys, layer.values))
    assert estimated()["cache"] == held
    assert estimated("--local_rollout_forward_batch_size 2")["cache"] == held // 4


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_devices_share_what_the_stage_says(estimated: Any, stage: int) -> None:
    alone, found = estimated(), estimated(f"--num_devices 4 --zero_stage {stage}")
    for least, purpose in ((1, "optimizer"), (2, "gradients"), (3, "weights")):
        buffers = 2 if (purpose, stage) == ("gradients", 0) else 1  # DDP's
        assert found[purpose] == buffers * alone[purpose] // (4 if stage >= least else 1)
    assert found["cache"] == alone["cache"]


@pytest.mark.parametrize(
    ("stage", "weights", "gradients", "optimizer"),
    [
        (0, 22 * 1000, 8 * 1000, 8 * 1000),
        (1, 10 * 1000, 4 * 1000, 3 * 1000),
        (2, 10 * 1000, 1 * 1000, 3 * 1000),
    ],
)
def test_in_16_bits(
    estimated: Any, stage: int, weights: int, gradients: int, optimizer: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 1000 trained float32 weights and 4000 frozen ones, on 4 devices."""

    def models(*_: Any) -> Any:
        frozen = [torch.nn.Linear(40, 50, bias=False).requires_grad_(False) for _ in range(2)]
        policy: Any = torch.nn.Linear(20, 30, bias=False)
        policy.config = tiny_policy().config
        return policy, torch.nn.Linear(20, 20, bias=False), frozen

    monkeypatch.setattr("rlhf_ppo.cli.estimate.empty_models", models)
    found = estimated(f"--bf16 True --num_devices 4 --zero_stage {stage}")
    assert (found["weights"], found["gradients"], found["optimizer"]) == (weights, gradients, optimizer)


def test_an_adapter_is_all_that_learns_in_the_policy(estimated: Any) -> None:
    whole, lora = estimated(), estimated("--use_peft --lora_r 2 --lora_target_modules q_proj v_proj")
    adapters = [weight for name, weight in adapted().named_parameters() if "lora" in name]
    num_bytes = sum(weight.nbytes for weight in adapters)
    assert lora["gradients"] == size(tiny_scorer()) + num_bytes
    assert lora["weights"] == whole["weights"] - size(tiny_policy()) + num_bytes  # no second reference


def adapted() -> Any:
    from peft import LoraConfig, get_peft_model

    return get_peft_model(tiny_policy(), LoraConfig(r=2, target_modules=["q_proj", "v_proj"]))


def test_activations_and_logits_are_those_of_a_micro_batch(estimated: Any) -> None:
    """4 rows of 16 tokens in float32: 17 values of 4 bytes a hidden unit in a layer, and 4 + 4 bytes a logit."""
    config, tokens = tiny_policy().config, 4 * 16
    states = 4 * tokens * config.hidden_size
    found, whole = estimated(), estimated("--gradient_checkpointing False")
    assert found["activations"] == (config.num_hidden_layers + 17) * states
    assert whole["activations"] == 17 * config.num_hidden_layers * states
    assert found["logits"] == whole["logits"] == 8 * tokens * config.vocab_size
