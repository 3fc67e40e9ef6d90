"""AITraining's parameters: the documented defaults, and parameters that another needs."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest

from rlhf_ppo.compat.params import LLMTrainingParams, arguments_of

# From AITraining's `LLMTrainingParams`, written down by hand.
DOCUMENTED = {
    "model": "google/gemma-3-270m", "project_name": "project-name", "trainer": "default", "data_path": "data",
    "train_split": "train", "valid_split": None, "max_samples": None, "text_column": "text",
    "prompt_text_column": None, "rejected_text_column": None, "chat_template": None, "block_size": -1,
    "model_max_length": 2048, "padding": "right", "lr": 3e-5, "epochs": 1, "batch_size": 2, "gradient_accumulation": 4,
    "warmup_ratio": 0.1, "optimizer": "adamw_torch", "scheduler": "linear", "weight_decay": 0.0, "max_grad_norm": 1.0,
    "mixed_precision": None, "auto_find_batch_size": False, "disable_gradient_checkpointing": False,
    "use_flash_attention_2": False, "attn_implementation": None, "packing": None, "seed": 42, "peft": False,
    "quantization": None, "target_modules": "all-linear", "merge_adapter": True, "lora_r": 16, "lora_alpha": 32,
    "lora_dropout": 0.05, "log": "wandb", "logging_steps": -1, "eval_strategy": "epoch", "save_strategy": "epoch",
    "save_steps": 500, "save_total_limit": 1, "push_to_hub": False, "username": None, "token": None,
    "model_ref": None, "rl_gamma": 0.99, "rl_gae_lambda": 0.95, "rl_kl_coef": 0.1, "rl_value_loss_coef": 1.0,
    "rl_clip_range": 0.2, "rl_value_clip_range": 0.2, "rl_reward_model_path": None, "rl_reward_fn": None,
    "rl_multi_objective": False, "rl_reward_weights": None, "rl_env_type": None, "rl_env_config": None,
    "rl_num_ppo_epochs": 4, "rl_chunk_size": 128, "rl_mini_batch_size": 8, "rl_optimize_device_cache": True,
    "rl_max_new_tokens": 128, "rl_top_k": 50, "rl_top_p": 1.0, "rl_temperature": 1.0,
}  # fmt: skip


def test_every_parameter_has_its_documented_default() -> None:
    assert {option.name: option.default for option in fields(LLMTrainingParams)} == DOCUMENTED


def test_a_token_is_not_shown() -> None:
    assert "secret" not in repr(LLMTrainingParams(trainer="sft", token="secret"))


def test_the_precision_is_the_launchers_if_none_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    def precisions(**options: Any) -> tuple[bool, bool]:
        arguments = arguments_of(LLMTrainingParams(model="m", trainer="sft", **options))
        return arguments["bf16"], arguments["fp16"]

    monkeypatch.delenv("ACCELERATE_MIXED_PRECISION", raising=False)
    assert precisions() == (False, False)
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    assert precisions() == (True, False)
    assert precisions(mixed_precision="fp16") == (False, True)


@pytest.mark.parametrize(("name", "value"), [("mixed_precision", "bfloat16"), ("quantization", "4bit")])
def test_a_word_that_is_no_choice_is_refused(name: str, value: str) -> None:
    with pytest.raises(ValueError, match=f"{name}='{value}' must be one of"):
        LLMTrainingParams(model="m", trainer="sft", **{name: value})
