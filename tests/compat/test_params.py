"""AITraining's parameters: the documented defaults, and errors for what is not here."""

from __future__ import annotations

from dataclasses import fields

import pytest
from transformers import HfArgumentParser

from rlhf_ppo.compat.params import UNAVAILABLE, LLMTrainingParams, used_by

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
    "add_eos_token": True, "dpo_beta": 0.1, "max_prompt_length": 128, "max_completion_length": None,
    "auto_convert_dataset": False, "use_sharegpt_mapping": False, "sharegpt_mapping_enabled": False,
    "suggested_chat_template": None, "column_mapping": None, "runtime_mapping": None, "map_eos_token": False,
    "conversation_extension": 1, "apply_chat_template": True, "unsloth": False, "distributed_backend": None,
    "use_distillation": False, "teacher_model": None, "teacher_prompt_template": None,
    "student_prompt_template": "{input}", "distill_temperature": 3.0, "distill_alpha": 0.7,
    "distill_max_teacher_length": 512, "use_sweep": False, "sweep_backend": "optuna", "sweep_n_trials": 10,
    "sweep_metric": "eval_loss", "sweep_direction": "minimize", "sweep_params": None, "wandb_sweep": False,
    "wandb_sweep_project": None, "wandb_sweep_entity": None, "wandb_sweep_id": None, "wandb_run_id": None,
    "wandb_token": None, "wandb_visualizer": False, "use_enhanced_eval": False, "eval_metrics": "perplexity",
    "eval_dataset_path": None, "eval_batch_size": 8, "eval_save_predictions": False, "eval_benchmark": None,
    "chat_format": None, "token_weights": None, "custom_loss": None, "custom_loss_weights": None,
    "custom_metrics": None, "use_forward_backward": False, "forward_backward_loss_fn": None,
    "forward_backward_custom_fn": None, "gradient_accumulation_steps": 1, "manual_optimizer_control": False,
    "optimizer_step_frequency": 1, "grad_clip_value": 1.0, "sample_every_n_steps": 0, "sample_prompts": None,
    "sample_temperature": 1.0, "sample_top_k": 50, "sample_top_p": 1.0, "manual_checkpoint_control": False,
    "save_state_every_n_steps": 0, "load_state_from": None, "inference_prompts": None, "inference_max_tokens": 256,
    "inference_temperature": 1.0, "inference_top_p": 1.0, "inference_top_k": 50, "inference_output": None,
}  # fmt: skip


def test_every_documented_parameter_has_its_documented_default():
    assert {option.name: option.default for option in fields(LLMTrainingParams)} == DOCUMENTED


def parse(*words: str) -> LLMTrainingParams:
    return HfArgumentParser(LLMTrainingParams).parse_args_into_dataclasses(list(words))[0]


def test_scripts_may_pass_the_default_of_what_is_not_here():
    for name in UNAVAILABLE:
        LLMTrainingParams(trainer="sft", **{name: DOCUMENTED[name]})


OTHER = {bool: True, int: 77, float: 7.5, str: "other"}


@pytest.mark.parametrize("name", sorted(UNAVAILABLE))
def test_what_is_not_here_is_an_error_that_names_flag_value_and_fix(name):
    default = DOCUMENTED[name]
    value = not default if isinstance(default, bool) else OTHER[type(default) if default is not None else str]
    hint = LLMTrainingParams.__annotations__[name]
    if default is None and hint == int | None:
        value = 77

    with pytest.raises(ValueError) as error:
        LLMTrainingParams(trainer="sft", **{name: value})

    printed = "***" if name == "wandb_token" else value
    assert f"--{name.replace('_', '-')} {printed}" in str(error.value)
    assert str(error.value).endswith(UNAVAILABLE[name]) and len(UNAVAILABLE[name]) > 10


@pytest.mark.parametrize(
    ("words", "name", "value"),
    [
        ("--no-merge-adapter", "merge_adapter", False),
        ("--no_merge_adapter", "merge_adapter", False),
        ("--merge-adapter", "merge_adapter", True),
        ("--no-rl-optimize-device-cache", "rl_optimize_device_cache", False),
        ("--rl-optimize-device-cache false", "rl_optimize_device_cache", False),
        ("--rl_optimize_device_cache", "rl_optimize_device_cache", True),
        ("--rl-multi-objective true", "rl_multi_objective", True),
        ("--rl-multi-objective", "rl_multi_objective", True),
        ("--rl_multi_objective false", "rl_multi_objective", False),
        ("--peft", "peft", True),
        ("--peft false", "peft", False),
        ("--disable-gradient-checkpointing", "disable_gradient_checkpointing", True),
    ],
)
def test_switches_go_on_and_off(words, name, value):
    assert getattr(parse("--trainer", "ppo", "--model-ref", "x", *words.split()), name) is value


@pytest.mark.parametrize("trainer", ["default", "dpo", "orpo", "distillation", ""])
def test_other_trainers_are_refused(trainer):
    with pytest.raises(ValueError, match=rf"trainer='{trainer}' must be one of \['ppo', 'reward', 'sft'\]"):
        LLMTrainingParams(trainer=trainer)


@pytest.mark.parametrize(
    ("trainer", "given", "message"),
    [
        ("sft", {"rl_gamma": 0.5}, "--rl-gamma 0.5 has no meaning for trainer='sft', only for ppo"),
        ("reward", {"model_ref": "x"}, "--model-ref x has no meaning for trainer='reward', only for ppo"),
        ("reward", {"packing": True}, "--packing True has no meaning for trainer='reward', only for sft"),
        ("sft", {"rejected_text_column": "bad"}, "only for reward"),
        ("ppo", {"auto_find_batch_size": True, "model_ref": "x"}, "only for reward and sft"),
        ("sft", {"prompt_text_column": "p"}, "only for ppo and reward"),
        ("ppo", {}, "give --rl-reward-model-path, .* or --model-ref"),
        ("ppo", {"model_ref": "x", "rl_env_type": "chess"}, "--rl-env-type chess must be one of"),
        ("ppo", {"model_ref": "x", "rl_env_config": "{}"}, "--rl-env-config {} needs --rl-env-type"),
        (
            "ppo",
            {"model_ref": "x", "rl_env_type": "text_generation", "rl_multi_objective": True},
            "--rl-multi-objective contradicts --rl-env-type text_generation",
        ),
        ("sft", {"quantization": "int4"}, "--quantization int4 needs adapters.*add --peft"),
        ("sft", {"push_to_hub": True}, "--push-to-hub needs --username and --token"),
        ("sft", {"chat_template": "zephyr"}, "chat_template='zephyr' must be one of"),
        ("sft", {"padding": "up"}, "padding='up' must be one of"),
        ("sft", {"mixed_precision": "int8"}, "mixed_precision='int8' must be one of"),
    ],
)
def test_parameters_that_do_not_fit_are_errors(trainer, given, message):
    with pytest.raises(ValueError, match=message):
        LLMTrainingParams(trainer=trainer, **given)


def test_wrong_types_are_errors():
    with pytest.raises(TypeError, match="lr='3e-5' is not float"):
        LLMTrainingParams(trainer="sft", lr="3e-5")


def test_chat_template_none_may_be_written_out():
    assert LLMTrainingParams(trainer="sft", chat_template="none").chat_template is None


def test_every_rl_parameter_belongs_to_ppo_alone():
    assert {used_by(name) for name in DOCUMENTED if name.startswith("rl_")} == {("ppo",)}


@pytest.mark.parametrize(
    ("given", "environment"),
    [
        ({}, None),
        ({"rl_multi_objective": True}, "multi_objective"),
        ({"rl_multi_objective": True, "rl_env_type": "multi_objective"}, "multi_objective"),
        ({"rl_env_type": "text_generation"}, "text_generation"),
    ],
)
def test_the_environment(given, environment):
    assert LLMTrainingParams(trainer="ppo", model_ref="x", **given).environment == environment
