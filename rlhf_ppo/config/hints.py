"""Hints for arguments that PPO does not have, under the names of transformers and of TRL's trainers."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Self

_AUTOMATIC_MIXED_PRECISION = "PyTorch's mixed precision is always used: set fp16=True or bf16=True and drop it"

REMOVED: dict[str, str] = {
    "adafactor": "use optim='adafactor'",
    "dispatch_batches": "use accelerator_config={'dispatch_batches': ...}",
    "evaluation_strategy": "use eval_strategy",
    "fp16_backend": _AUTOMATIC_MIXED_PRECISION,
    "fp16_opt_level": _AUTOMATIC_MIXED_PRECISION,
    "fsdp_min_num_params": "use fsdp_config={'min_num_params': ...}",
    "fsdp_transformer_layer_cls_to_wrap": "use fsdp_config={'transformer_layer_cls_to_wrap': ...}",
    "group_by_length": "use train_sampling_strategy='group_by_length'",
    "half_precision_backend": _AUTOMATIC_MIXED_PRECISION,
    "include_inputs_for_metrics": "use reward_funcs, which receive prompts and responses",
    "include_tokens_per_second": "use include_num_input_tokens_seen='all'",
    "jit_mode_eval": "use torch_compile=True",
    "logging_dir": "set the environment variable TENSORBOARD_LOGGING_DIR",
    "mp_parameters": "SageMaker's model parallelism is not supported: use deepspeed or fsdp",
    "no_cuda": "use use_cpu",
    "past_index": "drop it: generation keeps its own cache",
    "per_gpu_eval_batch_size": "use per_device_eval_batch_size",
    "per_gpu_train_batch_size": "use per_device_train_batch_size",
    "push_to_hub_model_id": "use hub_model_id",
    "push_to_hub_organization": "use hub_model_id='organization/name'",
    "push_to_hub_token": "use hub_token",
    "ray_scope": "hyperparameter_search runs with Optuna, not with Ray: leave it out",
    "save_safetensors": "drop it: models are always saved as safetensors",
    "sharded_ddp": "use fsdp",
    "split_batches": "drop it: each process reads per_device_train_batch_size rows",
    "torchdynamo": "use torch_compile_backend",
    "tpu_metrics_debug": "use debug='tpu_metrics_debug'",
    "tpu_num_cores": "start the script with accelerate launch --tpu",
    "use_ipex": "drop it: PyTorch itself supports Intel's devices",
    "use_legacy_prediction_loop": "drop it: there is one evaluation loop",
    "use_mps_device": "drop it: Apple's device is used where there is one; use_cpu=True turns it off",
    "xpu_backend": "use ddp_backend",
}
"""Argument of the documented signature that transformers no longer has or reads: the alternative."""

_CLIP = "use cliprange"
_DPO = "PPO has no loss on pairs of answers; train a reward model on them with `rlhf-ppo reward`"
_SFT = "an option of SFT: PPO reads prompts only"
_OTHER_LOSS = "belongs to another loss; use policy_loss with a function of your own"
_ENTROPY = "use entropy_coef, which stays constant"
_EMA = "use reference_ema, which moves the reference after each update"
_CONTINUOUS = "use generation_engine='continuous'"
_CUT_WEIGHTS = "use importance_sampling_clip_max"
_LENGTHS = "use max_prompt_length and response_length"
_SAMPLING = "sampling has temperature, top_k, top_p and min_p, with which log-probabilities are computed too"
_LOADED = "load the model with from_pretrained(...) and pass it to PPOTrainer"
_TOKENIZER = "set it on the tokenizer that you pass as processing_class"
_PADDING = "drop it: rows are packed or cut to their longest"
_LOG = "use num_completions_to_keep, for output_dir/completions, and num_sample_generations, for tables"
_TRACKER = "use report_to, and the tracker's environment variables such as WANDB_PROJECT"
_ROWS = "use per_device_train_batch_size and gradient_accumulation_steps"
_NO_IMAGES = "drop it: prompts are texts"

CONFIG_HINTS: dict[str, str] = {
    # GRPOConfig and RLOOConfig
    "beta": "use kl_coef",
    "cache_implementation": "drop it: the engine chooses its cache",
    "cast_lm_head_to_fp32": "use lm_head_float32",
    "delta": "use dual_clip",
    "disable_dropout": "set the dropout of the model's configuration to 0",
    "entropy_coef_delta": _ENTROPY,
    "entropy_coef_max": _ENTROPY,
    "entropy_coef_min": _ENTROPY,
    "entropy_target": _ENTROPY,
    "epsilon": _CLIP,
    "epsilon_high": "use cliprange_high",
    "generation_kwargs": _SAMPLING,
    "importance_sampling_level": "use policy_loss='gspo' for ratios of whole responses",
    "log_completions": _LOG,
    "log_completions_hub_repo": "use hub_files=['completions/*']",
    "log_multimodal": _NO_IMAGES,
    "log_unique_prompts": "drop it: each kept completion has its prompt",
    "loss_type": "use policy_loss ('ppo', 'gspo', 'cispo', 'dis' or a function) and loss_aggregation",
    "mask_truncated_completions": "use missing_eos_penalty, missing_eos_score or bootstrap_truncated",
    "max_completion_length": "use response_length",
    "model_init_kwargs": _LOADED,
    "multi_objective_aggregation": "use reward_weights; rewards are summed",
    "normalize_advantages": "drop it: PPO always whitens advantages",
    "num_completions_to_print": "use num_sample_generations",
    "num_generations_eval": "drop it: an evaluation samples once from each prompt",
    "num_iterations": "use num_ppo_epochs",
    "off_policy_mask_threshold": _OTHER_LOSS,
    "pad_to_multiple_of": _PADDING,
    "ref_model_mixup_alpha": "use reference_ema, the share of the reference that stays: 1 - ref_model_mixup_alpha",
    "ref_model_sync_steps": _EMA,
    "repetition_penalty": _SAMPLING,
    "reward_clip_range": "use score_clip",
    "router_aux_loss_coef": "PPO adds no loss of a mixture's router",
    "sapo_temperature_neg": _OTHER_LOSS,
    "sapo_temperature_pos": _OTHER_LOSS,
    "scale_rewards": "use score_scaling; advantages are always whitened",
    "shuffle_dataset": "use train_sampling_strategy='sequential' to keep the order",
    "steps_per_generation": "use gradient_accumulation_steps and num_mini_batches",
    "sync_ref_model": _EMA,
    "top_entropy_quantile": "PPO learns from every token; use policy_loss with a function to choose tokens",
    "transformers_continuous_batching_config": _CONTINUOUS,
    "trust_remote_code": _LOADED,
    "use_adaptive_entropy": _ENTROPY,
    "use_bias_correction_kl": "use kl_estimator='k1', whose gradient is the KL's",
    "use_transformers_continuous_batching": _CONTINUOUS,
    "use_transformers_paged": _CONTINUOUS,
    "use_vllm": "use generation_engine='vllm'",
    "vespo_k_neg": _OTHER_LOSS,
    "vespo_k_pos": _OTHER_LOSS,
    "vespo_lambda_neg": _OTHER_LOSS,
    "vespo_lambda_pos": _OTHER_LOSS,
    "vllm_importance_sampling_cap": _CUT_WEIGHTS,
    "vllm_importance_sampling_clip_max": _CUT_WEIGHTS,
    "vllm_importance_sampling_clip_min": f"{_CUT_WEIGHTS}; there is no lower limit",
    "vllm_importance_sampling_correction": "use importance_sampling_correction",
    "vllm_importance_sampling_mode": "use importance_sampling_mode",
    "vllm_structured_outputs_regex": _SAMPLING,
    # DPOConfig
    **dict.fromkeys(("discopop_tau", "f_alpha_divergence_coef", "f_divergence_type", "label_smoothing"), _DPO),
    **dict.fromkeys(("ld_alpha", "loss_weights", "precompute_ref_batch_size", "precompute_ref_log_probs"), _DPO),
    **dict.fromkeys(("reference_free", "rpo_alpha", "use_weighting", "max_target_length"), _DPO),
    "activation_offloading": "use gradient_checkpointing",
    "max_length": _LENGTHS,
    "truncation_mode": "use max_prompt_length, which drops longer prompts",
    "padding_free": _PADDING,
    "pad_token": _TOKENIZER,
    # SFTConfig
    **dict.fromkeys(("assistant_only_loss", "completion_only_loss", "packing", "eval_packing"), _SFT),
    **dict.fromkeys(("packing_strategy", "dataset_kwargs", "num_of_sequences"), _SFT),
    "chat_template_path": _TOKENIZER,
    "dataset_text_field": "rename the column of prompts to `prompt` or `text`",
    "eos_token": "use stop_token='eos' or stop_token_id",
    "max_seq_length": _LENGTHS,
    # PPOConfig of TRL 0.11
    "adap_kl_ctrl": "use kl_target; None keeps kl_coef",
    "accelerator_kwargs": "use accelerator_config",
    "backward_batch_size": _ROWS,
    "compare_steps": "drop it: nothing reads it",
    "early_stopping": "use kl_stop",
    "forward_batch_size": "use local_rollout_forward_batch_size",
    "global_backward_batch_size": _ROWS,
    "global_batch_size": _ROWS,
    "horizon": "use kl_horizon",
    "init_kl_coef": "use kl_coef",
    "is_encoder_decoder": "PPO trains causal language models only",
    "is_peft_model": "drop it: PPOTrainer takes peft_config, or a PeftModel",
    "kl_penalty": "use kl_estimator",
    "log_with": _TRACKER,
    "model_name": "PPOTrainer takes the model: PPOTrainer(args, model=...)",
    "optimize_cuda_cache": "use torch_empty_cache_steps",
    "optimize_device_cache": "use torch_empty_cache_steps",
    "ppo_epochs": "use num_ppo_epochs",
    "project_kwargs": _TRACKER,
    "push_to_hub_if_best_kwargs": "use load_best_model_at_end and push_to_hub",
    "query_dataset": "PPOTrainer takes the prompts: PPOTrainer(args, train_dataset=...)",
    "ratio_threshold": "use on_divergence and health_checks",
    "steps": "use total_episodes",
    "target": "use kl_target",
    "target_kl": "use kl_stop, which is 1.5 times target_kl",
    "task_name": "use run_name",
    "tracker_kwargs": _TRACKER,
    "tracker_project_name": _TRACKER,
    "use_score_norm": "use score_normalization",
    "use_score_scaling": "use score_scaling",
    # RLOOConfig of TRL 0.12 to 0.20
    "normalize_advantage": "drop it: PPO always whitens advantages",
    "normalize_reward": "use score_normalization",
    "rloo_k": "use num_generations",
    "token_level_kl": "drop it: the KL penalty is paid per token",
    # names from memory
    "batch_size_per_device": "use per_device_train_batch_size",
    "clip_range": _CLIP,
    "gae_lambda": "use lam",
    "max_new_tokens": "use response_length",
    "n_epochs": "use num_ppo_epochs",
    "ent_coef": "use entropy_coef",
}
"""Argument of TRL's configurations that `PPOConfig` does not have: the option to use, or why there is none."""

TRAINER_HINTS: dict[str, str] = {
    "compute_loss_func": "use policy_loss",
    "compute_metrics": "use reward_funcs, with weight 0 in reward_weights for a figure that is only logged",
    "config": "use args",
    "dataset": "use train_dataset",
    "env": "use reward_funcs",
    "eval_packing": _SFT,
    "formatting_func": "make a column `prompt` with dataset.map(...)",
    "lr_scheduler": "use optimizers=(None, lr_scheduler)",
    "max_length": "set max_prompt_length and response_length in PPOConfig",
    "model_init": "use model, which may be a function",
    "num_shared_layers": "use share_base_model=True in PPOConfig, with LoRA",
    "optimizer": "use optimizers=(optimizer, None)",
    "optimizer_cls_and_kwargs": "use optimizers=(function of the parameters, None)",
    "policy": "use model",
    "preprocess_logits_for_metrics": "drop it: an evaluation computes no predictions",
    "quantization_config": "load the model with from_pretrained(..., quantization_config=...) and pass it as model",
    "query_dataset": "use train_dataset",
    "ref_policy": "use ref_model",
    "reward_fn": "use reward_funcs",
    "reward_func": "use reward_funcs",
    "reward_function": "use reward_funcs",
    "reward_models": "use reward_model, which may be a list",
    "tokenizer": "use processing_class",
    "training_data_collator": "use data_collator",
}
"""Argument of other trainers that `PPOTrainer` does not have: the argument to use, or why there is none."""


METHOD_HINTS: dict[str, str] = {
    "batched_forward_pass": "drop it: step() computes log-probabilities",
    "config": "use trainer.args",
    "current_device": "use trainer.args.device",
    "dataloader": "use trainer.get_train_dataloader()",
    "generate": "use trainer.policy_model.generate(...), or train() with reward_funcs, which samples itself",
    "kl_ctl": "pass kl_controller=...",
    "log_stats": "drop it: step() logs",
    "save_pretrained": "use trainer.save_model(...)",
    "tokenizer": "use trainer.processing_class",
}
"""Attribute of the trainer of TRL 0.11 that `PPOTrainer` does not have, and the line to write instead."""


_OF_TRL = "from trl import {}"
_VALUE_HEAD = "use AutoModelForCausalLM: PPOTrainer makes the value model itself, or takes value_model"

IMPORT_HINTS: dict[str, str] = {
    "AutoModelForCausalLMWithValueHead": _VALUE_HEAD,
    "AutoModelForSeq2SeqLMWithValueHead": "PPO trains causal language models only",
    "PreTrainedModelWrapper": _VALUE_HEAD,
    "create_reference_model": "drop it: PPOTrainer makes the reference itself, or takes ref_model",
    "LengthSampler": "set response_length: all responses have the same limit",
    **dict.fromkeys(("GRPOConfig", "RLOOConfig", "PPOv2Config", "OnlineDPOConfig"), "use PPOConfig"),
    **dict.fromkeys(("GRPOTrainer", "RLOOTrainer", "PPOv2Trainer", "OnlineDPOTrainer"), "use PPOTrainer"),
    **{
        name: _OF_TRL.format(name)
        for name in ("ModelConfig", "RewardConfig", "RewardTrainer", "ScriptArguments", "SFTConfig", "SFTTrainer",
                     "TrlParser", "get_peft_config")
    },
}  # fmt: skip
"""Name of TRL's that `rlhf_ppo` does not have, and the line to write instead."""


def reject_call(
    owner: str, args: Sequence[Any], kwargs: Mapping[str, Any], known: Collection[str], elsewhere: Mapping[str, str]
) -> None:
    """Raise for a trainer's arguments in the order, or with the names, of other trainers.

    Args:
        owner: Name of the trainer's class.
        args: Positional arguments.
        kwargs: Named arguments.
        known: Names of the arguments that exist.
        elsewhere: For each argument of another class, that class.

    Raises:
        TypeError: A model is first, or second as in TRL 0.11; or a name does not exist.
    """
    fix = f"write {owner}(args, model=..., ref_model=..., processing_class=...)"
    if args and "args" in kwargs:
        raise TypeError(f"the first argument of {owner} is args, got {type(args[0]).__name__}: {fix}")
    if len(args) > 1 and (isinstance(args[1], str) or hasattr(args[1], "state_dict")):
        kind = type(args[1]).__name__
        raise TypeError(f"the second argument of {owner} is processing_class, a tokenizer, got {kind}: {fix}")
    of_config = {name: f"in PPOConfig: {hint}" for name, hint in CONFIG_HINTS.items()}
    reject_unknown(owner, kwargs, known, of_config | TRAINER_HINTS, elsewhere)


def hint_for(name: str, known: Collection[str], hints: Mapping[str, str], elsewhere: Mapping[str, str]) -> str:
    """Return advice on an unknown argument: the hint for its name, its right place, or the closest known name.

    Args:
        name: The argument.
        known: Names of the arguments that exist.
        hints: Hints by name.
        elsewhere: For each argument of another class, that class.
    """
    if name in hints:
        return hints[name]
    if name in elsewhere:
        return f"it is an argument of {elsewhere[name]}"
    near = difflib.get_close_matches(name, known, n=1)
    return f"did you mean {near[0]!r}?" if near else ""


def reject_unknown(
    owner: str, names: Iterable[str], known: Collection[str], hints: Mapping[str, str], elsewhere: Mapping[str, str]
) -> None:
    """Raise for arguments that do not exist; see `hint_for`.

    Raises:
        TypeError: There is one; the message lists all, each with its hint.
    """
    advice = {name: hint_for(name, known, hints, elsewhere) for name in names if name not in known}
    if advice:
        listed = ", ".join(f"{name!r} ({hint})" if hint else repr(name) for name, hint in advice.items())
        raise TypeError(f"{owner} got an unexpected keyword argument {listed}")


def reject_removed(names: Iterable[str]) -> None:
    """Raise for names that `TrainingArguments` no longer has.

    Args:
        names: Names of arguments.

    Raises:
        TypeError: One of them is in `REMOVED`; the message names the replacement.
    """
    advice = [f"{name}: {REMOVED[name]}" for name in names if name in REMOVED]
    if advice:
        raise TypeError(f"no longer an argument of transformers.TrainingArguments: {'; '.join(advice)}")


class ExplainsUnknown:
    """Base of a dataclass whose constructor explains removed, foreign and misspelled arguments.

    As a base class, it keeps the signature of the dataclass's constructor.
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        """Check the names of the keyword arguments before `__init__` sees them."""
        known = inspect.signature(cls).parameters
        # In the last versions of transformers that have a removed argument, its default is None.
        reject_removed(name for name, value in kwargs.items() if value is not None or name not in known)
        reject_unknown(cls.__name__, kwargs, known, CONFIG_HINTS, dict.fromkeys(TRAINER_ARGUMENTS, "PPOTrainer"))
        return super().__new__(cls)


TRAINER_ARGUMENTS = (
    *("processing_class", "model", "ref_model", "reward_model", "train_dataset", "value_model", "data_collator"),
    *("eval_dataset", "optimizers", "callbacks", "peft_config", "reward_funcs", "reward_processing_classes"),
    *("value_peft_config", "kl_controller", "engine", "ptx_dataset", "tools", "rollout_func", "environment_factory"),
)
"""Arguments of `PPOTrainer` that are not fields of `PPOConfig`."""
