"""Each argument of TrainingArguments is honoured, or rejected with advice; the removed ones are explained."""

import dataclasses
from typing import Any

import pytest
from transformers import TrainingArguments

from rlhf_ppo.config import PPOConfig
from rlhf_ppo.config.checks import REJECTED, REJECTED_VALUES, REMOVED
from tests.config.test_ppo_config import make

HONOURED = """
use_cpu tf32 ddp_backend ddp_timeout local_rank accelerator_config log_level log_level_replica log_on_each_node
per_device_train_batch_size gradient_accumulation_steps num_train_epochs max_steps run_name learning_rate
lr_scheduler_type lr_scheduler_kwargs warmup_steps optim optim_args optim_target_modules weight_decay adam_beta1
adam_beta2 adam_epsilon bf16 fp16 torch_compile torch_compile_backend torch_compile_mode use_cache
activation_checkpointing activation_checkpointing_kwargs gradient_checkpointing gradient_checkpointing_kwargs
deepspeed fsdp fsdp_config ddp_find_unused_parameters ddp_bucket_cap_mb ddp_broadcast_buffers ddp_static_graph
dataloader_num_workers dataloader_pin_memory dataloader_persistent_workers dataloader_prefetch_factor
dataloader_multiprocessing_context dataloader_in_order remove_unused_columns train_sampling_strategy
length_column_name data_seed output_dir save_strategy save_steps save_total_limit save_only_model save_on_each_node
load_best_model_at_end metric_for_best_model greater_is_better seed full_determinism
restore_callback_states_from_checkpoint push_to_hub hub_model_id hub_strategy hub_token hub_private_repo
hub_always_push hub_revision logging_strategy logging_steps logging_first_step eval_strategy eval_steps eval_delay
report_to project trackio_space_id trackio_bucket_id trackio_static_space_id disable_tqdm debug max_grad_norm
torch_empty_cache_steps logging_nan_inf_filter include_num_input_tokens_seen eval_on_start
per_device_eval_batch_size ignore_data_skip skip_memory_metrics resume_from_checkpoint do_train do_eval
""".split()
FIELDS = {field.name: field for field in dataclasses.fields(TrainingArguments)}
NEW_NAMES = {  # not in the oldest transformers
    *("activation_checkpointing", "activation_checkpointing_kwargs"),
    *("dataloader_in_order", "dataloader_multiprocessing_context"),
}
OLD_NAMES = {"logging_dir", "warmup_ratio"}  # only in the oldest: one changes nothing there, one is ours too


def other_than(accepted: Any) -> Any:
    """A value that is not the accepted one."""
    return not accepted if isinstance(accepted, bool) else {float: 0.1, list: ["inputs"]}.get(type(accepted), 5)


def test_every_argument_is_in_exactly_one_table():
    assert len(HONOURED) == len(set(HONOURED))
    assert not set(HONOURED) & set(REJECTED)
    assert set(FIELDS) - set(HONOURED) - set(REJECTED) - OLD_NAMES == set(), "new in transformers: honour or reject it"
    assert (set(HONOURED) | set(REJECTED)) - set(FIELDS) - NEW_NAMES == set(), "no longer in transformers"
    assert set(REJECTED_VALUES) <= set(HONOURED)


@pytest.mark.parametrize("name", sorted(REJECTED))
def test_rejected_arguments_are_named_with_advice(name: str):
    accepted, advice = REJECTED[name]
    with pytest.raises(ValueError) as error:
        make(**{name: other_than(accepted)})
    assert f"{name}={other_than(accepted)!r}: {advice}" in str(error.value)
    assert getattr(make(**{name: accepted}), name) == accepted


@pytest.mark.parametrize(
    ("part", "value"),
    [
        ("split_batches", True),
        ("dispatch_batches", True),
        ("even_batches", False),
        ("use_seedable_sampler", False),
        ("gradient_accumulation_kwargs", {"num_steps": 2}),
    ],
)
def test_rejected_parts_of_accelerator_config_are_named(part: str, value: Any):
    with pytest.raises(ValueError, match=f"PPO cannot use accelerator_config=.*: drop its {part}"):
        make(accelerator_config={part: value})


# ---- What TrainingArguments once had ----

# The documented signature of TRL's PPOConfig held the fields of transformers 4.46 to 4.57; these are gone from 5.
GONE = """
    adafactor dispatch_batches evaluation_strategy fp16_backend fp16_opt_level fsdp_min_num_params
    fsdp_transformer_layer_cls_to_wrap group_by_length half_precision_backend include_inputs_for_metrics
    include_tokens_per_second jit_mode_eval logging_dir mp_parameters no_cuda past_index
    per_gpu_eval_batch_size per_gpu_train_batch_size push_to_hub_model_id push_to_hub_organization push_to_hub_token
    ray_scope save_safetensors split_batches torchdynamo tpu_metrics_debug tpu_num_cores use_ipex
    use_legacy_prediction_loop use_mps_device
""".split()


def test_all_that_is_gone_is_explained_and_nothing_that_exists():
    assert set(GONE) <= set(REMOVED)
    assert not set(REMOVED) & {field.name for field in dataclasses.fields(PPOConfig)} - OLD_NAMES
