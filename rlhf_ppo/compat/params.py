"""AITraining's `LLMTrainingParams`, the options of `aitraining llm`, and the trainers' arguments."""

import importlib.util
import os
from collections.abc import Collection, Mapping
from dataclasses import Field, dataclass, fields
from typing import Any, Literal, get_type_hints

from transformers import TrainingArguments
from trl.trainer.model_config import ModelConfig

from rlhf_ppo.config.checks import AtLeastOne, ShareBelowOne, check_ranges, check_type, ranges_of
from rlhf_ppo.config.checks import option as _option
from rlhf_ppo.terminal import redacted, visible_logger

TRAINERS = ("ppo", "reward", "sft")
OF_LORA = ("lora_r", "lora_alpha", "lora_dropout", "target_modules")
"""Supported values of `trainer`."""


@dataclass(repr=False)
class LLMTrainingParams:
    """Parameters of a training run, with AITraining's names.

    Raises:
        ValueError: A parameter is out of its range, contradicts another or has no effect, or one that another needs is
            missing.
    """

    # --- What and where ---
    model: str = _option("google/gemma-3-270m", "Directory or hub name of the model to train.")
    project_name: str = _option("project-name", "Directory of the result, and name of the repository on the hub.")
    trainer: str = _option("default", "One of ppo, reward, sft.")
    data_path: str = _option("data", "A .jsonl, .json, .csv or .parquet file, a directory, or a hub name.")
    train_split: str = _option("train", "Split to train on.")
    valid_split: str | None = _option(None, "Split to evaluate on and to choose the best model.")
    max_samples: AtLeastOne | None = _option(None, "Number of rows to use, from the first on.")
    text_column: str = _option("text", "Column with the text (sft), the prompt (ppo) or the better response (reward).")
    prompt_text_column: str | None = _option(None, "Column with the prompt (ppo, reward).")
    rejected_text_column: str | None = _option(None, "Column with the worse response (reward).")
    chat_template: Literal["tokenizer", "none"] | None = _option(
        None,
        "`tokenizer`, as by default: the tokenizer's own template is applied to conversations, none to texts. `none` "
        "refuses conversations.",
    )
    block_size: int = _option(
        -1,
        "Maximum tokens of a text (sft, reward; -1: 1024). PPO drops prompts longer than half of it (-1: none).",
    )
    model_max_length: int = _option(
        2048, "Maximum length of a text, or of prompt and response, in tokens; 2048: the model's own limit."
    )
    padding: Literal["left", "right"] | None = _option(
        "right", "Padding side of the saved tokenizer; changes no number."
    )

    # --- Optimization ---
    lr: float = _option(3e-5, "Learning rate.")
    epochs: int = _option(1, "Passes over the data.")
    batch_size: AtLeastOne = _option(2, "Rows per device and step.")
    gradient_accumulation: AtLeastOne = _option(
        4, "Batches per optimizer step; in PPO, a factor of the rollout's size."
    )
    warmup_ratio: ShareBelowOne = _option(0.1, "Share of the steps with a rising learning rate.")
    optimizer: str = _option("adamw_torch", "Optimizer, by its name in transformers.")
    scheduler: str = _option("linear", "Learning-rate schedule, by its name in transformers.")
    weight_decay: float = _option(0.0, "Weight decay.")
    max_grad_norm: float = _option(1.0, "Maximum norm of the gradients; larger gradients are scaled down.")
    mixed_precision: Literal["fp16", "bf16"] | None = _option(
        None, "fp16 or bf16. None: that of `accelerate launch`, else 32 bits."
    )
    auto_find_batch_size: bool = _option(False, "Halve the batch size after an out-of-memory error (not with ppo).")
    disable_gradient_checkpointing: bool = _option(False, "Keep activations in memory: faster, more memory.")
    use_flash_attention_2: bool = _option(False, "Short for attn_implementation=flash_attention_2.")
    attn_implementation: str | None = _option(None, "Attention: eager, sdpa, flash_attention_2, ...")
    packing: bool | None = _option(None, "Put several short texts into one row (sft).", nargs="?", const=True)
    seed: int = _option(42, "Seed of all random numbers.")

    # --- Adapters ---
    peft: bool = _option(False, "Train LoRA adapters instead of all weights.")
    quantization: Literal["int4", "int8"] | None = _option(None, "Load the base model in 4 or 8 bits (with peft).")
    target_modules: str | None = _option("all-linear", "Modules that get adapters, separated by commas.")
    merge_adapter: bool = _option(True, "Save the merged model instead of the adapter.")
    lora_r: int = _option(16, "Rank of the adapters.")
    lora_alpha: int = _option(32, "Scale of the adapters, times 1/lora_r.")
    lora_dropout: float = _option(0.05, "Dropout in the adapters; PPO disables it.")

    # --- Logs, checkpoints, hub ---
    log: str = _option(
        "wandb", "Tracker: wandb, tensorboard, none, ...; without an installed wandb, wandb means none."
    )
    logging_steps: int = _option(-1, "Steps between two logs; -1: 1 in PPO, where a step is an update, 10 otherwise.")
    eval_strategy: str = _option("epoch", "When to evaluate on valid_split: epoch, steps or no.")
    save_strategy: str = _option("epoch", "When to save a checkpoint: epoch, steps or no.")
    save_steps: int = _option(500, "Steps between two checkpoints, and evaluations, with save_strategy=steps.")
    save_total_limit: int = _option(1, "Number of checkpoints to keep.")
    push_to_hub: bool = _option(False, "Upload the result to <username>/<project_name>.")
    username: str | None = _option(None, "Owner of the repository on the hub.")
    token: str | None = _option(None, "Access token of the hub.")

    # --- PPO ---
    model_ref: str | None = _option(None, "Reference model of the KL penalty; None: the initial model.")
    rl_gamma: float = _option(0.99, "Discount factor per token.")
    rl_gae_lambda: float = _option(0.95, "Lambda of generalized advantage estimation.")
    rl_kl_coef: float = _option(0.1, "Coefficient of the KL penalty.")
    rl_value_loss_coef: float = _option(1.0, "Weight of the value loss.")
    rl_clip_range: float = _option(0.2, "Clip range of the importance ratio around 1.")
    rl_value_clip_range: float = _option(0.2, "Clip range of a value around the rollout's estimate.")
    rl_reward_model_path: str | None = _option(None, "Reward model; this or model_ref must be given.")
    rl_reward_fn: str | None = _option(
        None, "A reward's name, package.module.function, file.py:function or a URL; `default` without a reward model."
    )
    rl_multi_objective: bool = _option(False, "Short for rl_env_type=multi_objective.")
    rl_reward_weights: dict[str, Any] | str | None = _option(
        None, "Weights of the rewards by name, as JSON; reward_model names the reward model."
    )
    rl_env_type: str | None = _option(None, "One of text_generation, multi_objective, preference_comparison.")
    rl_env_config: dict[str, Any] | str | None = _option(None, "Settings of the environment, as JSON.")
    rl_num_ppo_epochs: int = _option(4, "Passes over each rollout.")
    rl_chunk_size: int = _option(128, "Rows per forward pass in the rollout.")
    rl_mini_batch_size: AtLeastOne = _option(
        8, "Episodes per optimizer step and device; at most the episodes of one update."
    )
    rl_optimize_device_cache: bool = _option(True, "Empty the accelerator's cache after every update.")
    rl_max_new_tokens: int = _option(128, "Maximum length of a response, in tokens.")
    rl_top_k: int = _option(50, "Sample from the k most likely tokens; 0: from all tokens.")
    rl_top_p: float = _option(1.0, "Sample from the most likely tokens whose probabilities sum to p.")
    rl_temperature: float = _option(1.0, "Sampling temperature.")

    def __repr__(self) -> str:
        values = [(option.name, getattr(self, option.name)) for option in fields(self)]
        return f"{type(self).__name__}({', '.join(f'{name}={redacted(value, name)!r}' for name, value in values)})"

    def __post_init__(self) -> None:
        """Check the parameters that require each other."""
        for name, kind in get_type_hints(LLMTrainingParams).items():
            check_type(name, getattr(self, name), kind, "")
        check_ranges(self, ranges_of(LLMTrainingParams))
        unused = [
            f"{option.name}={redacted(getattr(self, option.name), option.name)!r}"
            for option in fields(self)
            if _is_set(self, option) and self.trainer not in _trainers_with(option.name)
        ]
        of_lora = [each.name for each in fields(self) if each.name in OF_LORA and _is_set(self, each)]
        for is_made, mistake in (
            (
                self.trainer not in TRAINERS,
                f"trainer={self.trainer!r} must be one of {list(TRAINERS)}; TRL has other trainers",
            ),
            (
                self.trainer == "ppo" and self.rl_reward_model_path is None and self.model_ref is None,
                "rl_reward_model_path=None and model_ref=None: give --rl-reward-model-path, a model trained with "
                "--trainer reward, or --model-ref, the model for the KL penalty, with --rl-reward-fn for the reward",
            ),
            (
                self.rl_reward_fn == "custom",
                "--rl-reward-fn custom needs the function: write package.module.function or path/file.py:function, "
                "with the arguments prompt, generated and full_text, or GRPOTrainer's",
            ),
            (
                self.rl_multi_objective and self.rl_env_type not in (None, "multi_objective"),
                f"rl_multi_objective=True contradicts rl_env_type={self.rl_env_type!r}: leave one of them out",
            ),
            (
                self.rl_env_config is not None and self.environment is None,
                "rl_env_config is given without rl_env_type: give --rl-env-type too",
            ),
            (
                self.use_flash_attention_2 and self.attn_implementation not in (None, "flash_attention_2"),
                f"use_flash_attention_2=True contradicts attn_implementation={self.attn_implementation!r}: leave one "
                "of them out",
            ),
            (
                not self.peft and bool(of_lora),
                f"leave out options that have no effect without peft: {', '.join(of_lora)}; or give --peft",
            ),
            (
                bool(unused),
                f"leave out options that trainer={self.trainer!r} does not use: {', '.join(unused)}",
            ),
        ):
            if is_made:
                raise ValueError(mistake)

    @property
    def environment(self) -> str | None:
        """Type of the environment: `rl_env_type`, or "multi_objective" with `rl_multi_objective`."""
        return "multi_objective" if self.rl_multi_objective else self.rl_env_type


def _is_set(params: LLMTrainingParams, option: Field[Any]) -> bool:
    """Return whether a parameter has another value than its default; False is as good as None."""
    value = getattr(params, option.name)
    return value != option.default and bool(value or option.default)


def _trainers_with(name: str) -> Collection[str]:
    """Return the trainers in which a parameter has an effect."""
    some = {"auto_find_batch_size": ("reward", "sft"), "packing": ("sft",), "prompt_text_column": ("ppo", "reward")}
    return some.get(name, ("ppo",) if name.startswith("rl_") else TRAINERS)


# ---- Arguments of PPOTrainer and of TRL's trainers ----

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


def training_arguments(params: LLMTrainingParams) -> dict[str, Any]:
    """Return the arguments that all three trainers have."""
    evaluates = params.valid_split is not None and params.eval_strategy != "no"
    default_steps = 1 if params.trainer == "ppo" else 10
    precision = params.mixed_precision or os.environ.get("ACCELERATE_MIXED_PRECISION")
    return {
        **_renamed(params, TRAINING),
        "per_device_eval_batch_size": params.batch_size,
        "logging_steps": default_steps if params.logging_steps == -1 else params.logging_steps,
        "report_to": _tracker(params.log),
        "eval_strategy": params.eval_strategy if evaluates else "no",
        "eval_steps": params.save_steps if params.save_strategy == "steps" else None,  # so that the best is saved
        "load_best_model_at_end": evaluates and params.save_strategy == params.eval_strategy,
        "bf16": precision == "bf16",
        "fp16": precision == "fp16",
        "hub_model_id": f"{params.username}/{params.project_name}" if params.username else None,
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
    """Return the arguments of model loading and adapters, a `ModelConfig` of TRL."""
    modules = params.target_modules.split(",") if params.target_modules else None
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


def _renamed(params: LLMTrainingParams, names: Mapping[str, str]) -> dict[str, Any]:
    return {new: getattr(params, old) for old, new in names.items()}


def _num_mini_batches(params: LLMTrainingParams) -> int:
    """Return the number of mini-batches of a device's episodes; fewer episodes than one mini-batch are one."""
    num_episodes = params.batch_size * params.gradient_accumulation
    size = min(params.rl_mini_batch_size, num_episodes)
    if num_episodes % size:
        raise ValueError(
            f"--rl-mini-batch-size {params.rl_mini_batch_size} does not divide the {num_episodes} episodes of an "
            f"update (--batch-size {params.batch_size} x --gradient-accumulation {params.gradient_accumulation})"
        )
    return num_episodes // size


def _max_prompt_length(params: LLMTrainingParams) -> int | None:
    limits = [params.block_size // 2] if params.block_size > 0 else []
    if params.model_max_length != LLMTrainingParams.model_max_length:
        limits.append(params.model_max_length - params.rl_max_new_tokens)
    return min(limits, default=None)


def _tracker(name: str) -> str:
    if name == "wandb" and importlib.util.find_spec("wandb") is None:
        visible_logger(__name__).warning_once(  # its import takes a second
            "log='wandb', but wandb is not installed, so nothing is reported; pip install wandb"
        )
        return "none"
    return name
