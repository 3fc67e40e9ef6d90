"""Mapping of AITraining's parameters to the arguments of `PPOTrainer` and of TRL's trainers."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from transformers import TrainingArguments
from trl.trainer.model_config import ModelConfig

from rlhf_ppo.compat.params import LLMTrainingParams
from rlhf_ppo.terminal.text import visible_logger

logger = visible_logger(__name__)

TRAINING: dict[str, str] = {
    "project_name": "output_dir",
    "lr": "learning_rate",
    "epochs": "num_train_epochs",
    "batch_size": "per_device_train_batch_size",
    "gradient_accumulation": "gradient_accumulation_steps",
    "warmup_ratio": "warmup_steps",  # a share, below 1
    "optimizer": "optim",
    "scheduler": "lr_scheduler_type",
    "weight_decay": "weight_decay",
    "max_grad_norm": "max_grad_norm",
    "seed": "seed",
    "save_strategy": "save_strategy",
    "save_steps": "save_steps",
    "save_total_limit": "save_total_limit",
    "push_to_hub": "push_to_hub",
    "token": "hub_token",
}
"""Parameter: the argument of `transformers.TrainingArguments` with the same value."""

PPO: dict[str, str] = {
    "rl_gamma": "gamma",
    "rl_gae_lambda": "lam",
    "rl_kl_coef": "kl_coef",
    "rl_value_loss_coef": "vf_coef",
    "rl_clip_range": "cliprange",
    "rl_value_clip_range": "cliprange_value",
    "rl_num_ppo_epochs": "num_ppo_epochs",
    "rl_chunk_size": "local_rollout_forward_batch_size",
    "rl_max_new_tokens": "response_length",
    "rl_top_k": "top_k",
    "rl_top_p": "top_p",
    "rl_temperature": "temperature",
}
"""Parameter: the argument of `PPOConfig` with the same value."""

MODEL: dict[str, str] = {
    "model": "model_name_or_path",
    "peft": "use_peft",
    "lora_r": "lora_r",
    "lora_alpha": "lora_alpha",
    "lora_dropout": "lora_dropout",
}
"""Parameter: the argument of TRL's `ModelConfig` with the same value."""


OTHERS: dict[str, str] = {
    "model": "sft_model_path",
    "rl_reward_model_path": "reward_model",
    "model_ref": "ref_model",
    "log": "report_to",
}
"""Parameter: the name in error messages of the argument that it determines."""


def training_arguments(params: LLMTrainingParams) -> dict[str, Any]:
    """Return the arguments that all three trainers have."""
    evaluates = params.valid_split is not None and params.eval_strategy != "no"
    default_steps = 1 if params.trainer == "ppo" else 10
    return {
        **_renamed(params, TRAINING),
        "per_device_eval_batch_size": params.batch_size,
        "logging_steps": default_steps if params.logging_steps == -1 else params.logging_steps,
        "report_to": _tracker(params.log),
        "eval_strategy": params.eval_strategy if evaluates else "no",
        "load_best_model_at_end": evaluates and params.save_strategy == params.eval_strategy,
        "bf16": params.mixed_precision == "bf16",
        "fp16": params.mixed_precision == "fp16",
        "hub_model_id": f"{params.username}/{params.project_name}" if params.push_to_hub else None,
    }


def arguments_of(params: LLMTrainingParams) -> dict[str, Any]:
    """Return the arguments of the configuration of `params.trainer`."""
    return {"ppo": ppo_arguments, "reward": reward_arguments, "sft": sft_arguments}[params.trainer](params)


def ppo_arguments(params: LLMTrainingParams) -> dict[str, Any]:
    """Return the arguments of `PPOConfig`, except those of the rewards."""
    return {
        **training_arguments(params),
        **_renamed(params, PPO),
        "gradient_checkpointing": not params.disable_gradient_checkpointing,
        "exp_name": params.project_name,
        "sft_model_path": params.model,
        **({} if params.rl_reward_model_path is None else {"reward_model_path": params.rl_reward_model_path}),
        "num_mini_batches": _num_mini_batches(params),
        "torch_empty_cache_steps": 1 if params.rl_optimize_device_cache else None,
        "max_prompt_length": _max_prompt_length(params),
        "stop_token": "eos",
    }


def reward_arguments(params: LLMTrainingParams) -> dict[str, Any]:
    """Return the arguments of TRL's `RewardConfig`."""
    renamed = hasattr(TrainingArguments, "activation_checkpointing")  # then the old name warns
    checkpointing = "activation_checkpointing" if renamed else "gradient_checkpointing"
    return {
        **training_arguments(params),
        checkpointing: not params.disable_gradient_checkpointing,
        "max_length": min(params.block_size if params.block_size > 0 else 1024, params.model_max_length),
        "auto_find_batch_size": params.auto_find_batch_size,
    }


def sft_arguments(params: LLMTrainingParams) -> dict[str, Any]:
    """Return the arguments of TRL's `SFTConfig`."""
    return {**reward_arguments(params), "packing": bool(params.packing)}


def model_arguments(params: LLMTrainingParams) -> ModelConfig:
    """Return the arguments of model loading and adapters."""
    modules = (params.target_modules or "").split(",") if params.target_modules else None
    scores = params.trainer == "reward"
    return ModelConfig(
        **_renamed(params, MODEL),
        lora_target_modules=modules,
        lora_task_type="SEQ_CLS" if scores else "CAUSAL_LM",
        lora_modules_to_save=["score"] if scores else None,
        load_in_4bit=params.quantization == "int4",
        load_in_8bit=params.quantization == "int8",
        attn_implementation="flash_attention_2" if params.use_flash_attention_2 else params.attn_implementation,
    )


@contextmanager
def explaining() -> Iterator[None]:
    """Add to errors the command-line option that set the argument.

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: An argument is out of its range.
    """
    try:
        yield
    except (TypeError, ValueError) as error:
        set_by = {new: old for table in (TRAINING, PPO, MODEL, OTHERS) for old, new in table.items()}
        flags = [f"{new} is --{old.replace('_', '-')}" for new, old in set_by.items() if f"{new}=" in str(error)]
        if not flags:
            raise
        kind = TypeError if isinstance(error, TypeError) else ValueError
        raise kind(f"{error} ({', '.join(flags)})") from error


def _renamed(params: LLMTrainingParams, names: Mapping[str, str]) -> dict[str, Any]:
    return {new: getattr(params, old) for old, new in names.items()}


def _num_mini_batches(params: LLMTrainingParams) -> int:
    """Return the number of mini-batches of a device's episodes; fewer episodes than one mini-batch are one."""
    num_episodes = params.batch_size * params.gradient_accumulation
    size = min(params.rl_mini_batch_size, num_episodes)
    if size < 1 or num_episodes % size:
        divisors = [number for number in range(1, num_episodes + 1) if num_episodes % number == 0]
        raise ValueError(
            f"--rl-mini-batch-size {params.rl_mini_batch_size} does not divide the {num_episodes} episodes of an "
            f"update (--batch-size {params.batch_size} x --gradient-accumulation {params.gradient_accumulation}); use "
            f"one of {divisors}"
        )
    return num_episodes // size


def _max_prompt_length(params: LLMTrainingParams) -> int | None:
    limits = [params.block_size // 2] if params.block_size > 0 else []
    if params.model_max_length != LLMTrainingParams.model_max_length:
        limits.append(params.model_max_length - params.rl_max_new_tokens)
    if limits and min(limits) < 1:
        raise ValueError(
            f"--block-size {params.block_size} and --model-max-length {params.model_max_length} leave no room for "
            f"prompts beside --rl-max-new-tokens {params.rl_max_new_tokens}; raise them"
        )
    return min(limits, default=None)


def _tracker(name: str) -> str:
    if name == "wandb" and importlib.util.find_spec("wandb") is None:
        logger.warning_once("log='wandb', but wandb is not installed, so nothing is reported; pip install wandb")
        return "none"
    return name
