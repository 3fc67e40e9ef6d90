"""What PPO makes of each argument that `PPOConfig` inherits from `transformers.TrainingArguments`.

None is silently ignored: each is in `HONOURED`, under who reads it, or in `REJECTED`, with what to use instead.
Arguments that `TrainingArguments` once had, and that the documented signature of PPO still shows, are in `REMOVED`.
"""

import difflib
import inspect
from collections.abc import Iterable, Iterator
from typing import Any, Self

from transformers import TrainingArguments
from transformers.trainer_pt_utils import AcceleratorConfig

HONOURED: dict[str, tuple[str, ...]] = {
    "TrainingArguments: devices, precision and logging levels": (
        *("use_cpu", "tf32", "ddp_backend", "ddp_timeout", "local_rank", "accelerator_config"),
        *("log_level", "log_level_replica", "log_on_each_node"),
    ),
    "PPOConfig.fill_derived: the batch and the number of updates": (
        *("per_device_train_batch_size", "gradient_accumulation_steps", "num_train_epochs", "max_steps", "run_name"),
    ),
    "Trainer: optimizer and scheduler": (
        *("learning_rate", "lr_scheduler_type", "lr_scheduler_kwargs", "warmup_steps"),
        *("optim", "optim_args", "optim_target_modules"),
        *("weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon"),
    ),
    "Trainer: accelerator and model wrapping": (
        *("bf16", "fp16", "torch_compile", "torch_compile_backend", "torch_compile_mode", "use_cache"),
        *("activation_checkpointing", "activation_checkpointing_kwargs"),
        *("gradient_checkpointing", "gradient_checkpointing_kwargs"),
        *("deepspeed", "fsdp", "fsdp_config", "ddp_find_unused_parameters", "ddp_bucket_cap_mb"),
        *("ddp_broadcast_buffers", "ddp_static_graph"),
    ),
    "Trainer: data loading": (
        *("dataloader_num_workers", "dataloader_pin_memory", "dataloader_persistent_workers"),
        *("dataloader_prefetch_factor", "dataloader_multiprocessing_context", "dataloader_in_order"),
        *("remove_unused_columns", "train_sampling_strategy", "length_column_name", "data_seed"),
    ),
    "Trainer: checkpoints, hub, seeds": (
        *("output_dir", "save_strategy", "save_steps", "save_total_limit", "save_only_model", "save_on_each_node"),
        *("load_best_model_at_end", "metric_for_best_model", "greater_is_better", "seed", "full_determinism"),
        *("restore_callback_states_from_checkpoint", "push_to_hub", "hub_model_id", "hub_strategy", "hub_token"),
        *("hub_private_repo", "hub_always_push", "hub_revision"),
    ),
    "Trainer's callbacks: when to log and evaluate, and where to": (
        *("logging_strategy", "logging_steps", "logging_first_step", "eval_strategy", "eval_steps", "eval_delay"),
        *("report_to", "project", "trackio_space_id", "trackio_bucket_id", "trackio_static_space_id"),
        *("disable_tqdm", "debug"),
    ),
    "PPOTrainer: its own loop and evaluation": (
        *("max_grad_norm", "torch_empty_cache_steps", "logging_nan_inf_filter", "include_num_input_tokens_seen"),
        *("eval_on_start", "per_device_eval_batch_size", "ignore_data_skip", "skip_memory_metrics"),
        *("resume_from_checkpoint",),
    ),
    "the script that calls PPOTrainer": ("do_train", "do_eval"),
}
"""Who reads an argument: the arguments."""

_NO_METRICS = "evaluation scores sampled responses, it computes no predictions; use reward_funcs to measure more"

REJECTED: dict[str, tuple[object, str]] = {
    "label_smoothing_factor": (0.0, "PPO's loss has no labels; leave it at 0"),
    "neftune_noise_alpha": (
        None,
        "noise in the embeddings would keep the importance ratio away from 1 at the first pass; use temperature to "
        "explore",
    ),
    "auto_find_batch_size": (
        False,
        "another batch size would change the rollout; lower per_device_train_batch_size, raise "
        "gradient_accumulation_steps and lower local_rollout_forward_batch_size instead",
    ),
    "use_liger_kernel": (
        False,
        "its fused loss needs labels; log-probabilities are already computed without holding all logits",
    ),
    "liger_kernel_config": (None, "use_liger_kernel is not available; leave it unset"),
    "bf16_full_eval": (False, "evaluation samples from the policy as training does; use bf16"),
    "fp16_full_eval": (False, "evaluation samples from the policy as training does; use fp16"),
    "parallelism_config": (None, "rows are split over all processes; use deepspeed or fsdp to shard the model"),
    "prediction_loss_only": (False, _NO_METRICS),
    "eval_do_concat_batches": (True, _NO_METRICS),
    "eval_accumulation_steps": (
        None,
        "evaluation keeps no logits on the device; lower per_device_eval_batch_size to save memory",
    ),
    "eval_use_gather_object": (False, _NO_METRICS),
    "include_for_metrics": ([], _NO_METRICS),
    "batch_eval_metrics": (False, _NO_METRICS),
    "do_predict": (False, "call evaluate(eval_dataset=...) on the test set"),
    "label_names": (None, "PPO's data has no labels; a reward function receives every column by its name"),
    "average_tokens_across_devices": (True, "the loss is always the mean over the tokens of all devices"),
    "dataloader_drop_last": (True, "a rollout is always a full batch; use dataloader_drop_last=True"),
    "enable_jit_checkpoint": (
        False,
        "it would save in the middle of an update, which cannot be resumed exactly; use a small save_steps",
    ),
}
"""Rejected argument: the only value accepted, and why or what to use instead."""

REJECTED_VALUES: dict[str, dict[str, str]] = {
    "optim": {
        **dict.fromkeys(
            ("lomo", "adalomo"), "it updates inside backward, before the mini-batch is complete; use 'adamw_torch'"
        ),
        **dict.fromkeys(
            (
                *("galore_adamw_layerwise", "galore_adamw_8bit_layerwise", "galore_adafactor_layerwise"),
                "apollo_adamw_layerwise",
            ),
            "it updates inside backward, before the mini-batch is complete; use the name without _layerwise",
        ),
        **dict.fromkeys(
            ("schedule_free_radam", "schedule_free_adamw", "schedule_free_sgd"),
            "it trains other weights than it evaluates, so rollouts would not come from the policy; use 'adamw_torch'",
        ),
    },
    "train_sampling_strategy": {
        "batch_rebalance": "it balances by a length column and drops rows; use 'random' or 'group_by_length'"
    },
}
"""Honoured argument: its values that PPO cannot serve, and why."""

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
"""Argument of the documented signature that transformers no longer has or heeds: what to use instead."""


def reject_removed(names: Iterable[str]) -> None:
    """Raise for names that `TrainingArguments` no longer has.

    Args:
        names: Names of arguments, however they came in.

    Raises:
        TypeError: If any of them is in `REMOVED`; the message names the replacement of each.
    """
    advice = [f"{name}: {REMOVED[name]}" for name in names if name in REMOVED]
    if advice:
        raise TypeError(f"no longer an argument of transformers.TrainingArguments: {'; '.join(advice)}")


class RejectsRemoved:
    """Base of a dataclass that explains arguments that are gone, which its constructor would only call unexpected.

    A base class, so that the dataclass keeps the signature of its own constructor.
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        """Check the names of the keyword arguments before `__init__` sees them."""
        known = inspect.signature(cls).parameters
        # None is what the last versions of transformers that have an argument say of one that is not given.
        reject_removed(name for name, value in kwargs.items() if value is not None or name not in known)
        for name in (name for name in kwargs if name not in known):
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise TypeError(f"{cls.__name__} got an unexpected keyword argument {name!r}{hint}")
        return super().__new__(cls)


def reject_unsupported(args: TrainingArguments) -> None:
    """Raise for inherited arguments that PPO cannot honour.

    Args:
        args: The arguments, before or after `TrainingArguments.__post_init__`.

    Raises:
        ValueError: If one has a value that `REJECTED` or `REJECTED_VALUES` excludes.
    """
    problems = [f"{name}={getattr(args, name)!r}: {advice}" for name, advice in _unsupported(args)]
    if problems:
        raise ValueError(f"PPO cannot use {'; '.join(problems)}")


def _unsupported(args: TrainingArguments) -> Iterator[tuple[str, str]]:
    for name, (accepted, advice) in REJECTED.items():
        value = getattr(args, name, accepted)
        if value != accepted or isinstance(value, bool) != isinstance(accepted, bool):
            yield name, advice
    for name, advice_by_value in REJECTED_VALUES.items():
        if getattr(args, name) in advice_by_value:  # transformers' enums are strings too
            yield name, advice_by_value[getattr(args, name)]
    config = args.accelerator_config
    if isinstance(config, AcceleratorConfig) and config.split_batches:
        yield "accelerator_config", "drop its split_batches: each process reads per_device_train_batch_size rows"
    if isinstance(config, AcceleratorConfig) and config.gradient_accumulation_kwargs:
        yield "accelerator_config", "drop its gradient_accumulation_kwargs: use gradient_accumulation_steps"
    if isinstance(config, AcceleratorConfig) and not config.use_seedable_sampler:
        yield "accelerator_config", "drop its use_seedable_sampler=False: prompts could not be resumed in their order"
    if args.metric_for_best_model in ("loss", "eval_loss"):
        yield "metric_for_best_model", "evaluation has no loss; use 'score'"
