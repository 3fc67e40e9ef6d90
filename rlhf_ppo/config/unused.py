"""Options that have no effect in a run because of other options or of the trainer's other arguments."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import MISSING, dataclass, fields
from typing import Any

from rlhf_ppo.config.arguments import EPISODE_OPTIONS
from rlhf_ppo.config.ppo_config import PPOConfig
from rlhf_ppo.terminal import redacted


@dataclass(frozen=True)
class TrainerContext:
    """Properties of a trainer that decide, beside its arguments, which options have an effect.

    Attributes:
        is_stepped: `step` receives responses and scores; there are neither prompts nor rewards.
        has_reference: There is a reference model.
        has_engine: A generation engine was passed.
        has_loss: A loss function was passed in place of `policy_loss`.
        has_controller: A KL controller was passed.
        has_evaluation: There is an evaluation dataset.
        has_frozen: There are frozen models with weights of their own.
        gathers_weights: DeepSpeed ZeRO-3 shards the policy.
        has_16_bits: Something is computed or stored in 16 bits.
        has_episodes: There are tools or environments.
        has_chats: A prompt may be a conversation.
        has_optimizer: An optimizer was passed.
        has_schedule: A learning-rate scheduler was passed.
        has_accelerator: The run computes on a GPU or another accelerator.
    """

    is_stepped: bool = False
    has_reference: bool = True
    has_engine: bool = False
    has_loss: bool = False
    has_controller: bool = False
    has_evaluation: bool = False
    has_frozen: bool = True
    gathers_weights: bool = False
    has_16_bits: bool = False
    has_episodes: bool = False
    has_chats: bool = True
    has_optimizer: bool = False
    has_schedule: bool = False
    has_accelerator: bool = True


_VLLM = tuple(name for name in PPOConfig.__dataclass_fields__ if name.startswith("vllm_"))
_VLLM_SERVER = tuple(name for name in _VLLM if "server" in name or name == "vllm_group_port")
_VLLM_COLOCATED = tuple(name for name in _VLLM if name not in (*_VLLM_SERVER, "vllm_mode"))
_ENGINE = ("generation_engine", *_VLLM)
_SAMPLING = ("top_k", "top_p", "min_p", *_ENGINE)
_PROMPTS = ("max_prompt_length", "dataset_num_proc", "reward_weights", "chat_template_kwargs")
_WEIGHTS = ("importance_sampling_clip_max",)
_CORRECTION = ("importance_sampling_correction", *_WEIGHTS)
_CLIPS = ("cliprange", "cliprange_high")
_ADAM = ("adam_beta1", "adam_beta2", "adam_epsilon")
_WARM_UP = ("warmup_ratio", "warmup_steps")
_WITHOUT_BETAS = {*("sgd", "schedule_free_sgd", "adafactor", "adagrad", "lomo"), *("rmsprop", "rmsprop_bnb")}
_WITHOUT_ARGS = ("adamw_torch", "adamw_torch_fused", "adamw_torch_xla", "adamw_torch_npu_fused", "adafactor")
_WITHOUT_WARM_UP = ("constant", "reduce_lr_on_plateau", "greedy")

_ONE_STEP = ("an update is one optimizer step, before which all ratios are 1", "raise num_ppo_epochs")


def _is_one_step(args: PPOConfig) -> bool:
    return args.num_ppo_epochs == args.num_mini_batches == 1


# fmt: off
UNUSED: tuple[tuple[tuple[str, ...], Callable[[PPOConfig, TrainerContext], bool], str, str], ...] = (
    (("kl_horizon",), lambda args, _: args.kl_target is None, "kl_target is not set", "set kl_target"),
    (_CORRECTION,
     lambda args, run: (
         args.generation_engine == "transformers" and not (run.has_engine or run.is_stepped)
     ),
     "generation_engine='transformers' gives no log-probabilities",
     "use 'continuous' or 'vllm'"),
    (_WEIGHTS, lambda args, _: not args.importance_sampling_correction,
     "importance_sampling_correction is False", "set importance_sampling_correction=True"),
    (_CLIPS, lambda args, run: _is_one_step(args) and not run.has_loss, *_ONE_STEP),
    (("cliprange_value",), lambda args, _: _is_one_step(args),
     "an update is one optimizer step, before which no value has changed", "raise num_ppo_epochs"),
    (("critic_learning_rate", "cliprange_value"), lambda args, _: args.vf_coef == args.weight_decay == 0,
     "vf_coef is 0, so nothing trains the value model", "raise vf_coef"),
    (("lam", "lam_policy", "lam_critic", "bootstrap_truncated"),
     lambda args, _: args.gamma == 0, "gamma is 0, so no later reward counts", "raise gamma"),
    (("chat_template_kwargs",), lambda _, run: not run.has_chats,
     "the prompts are texts or ids", "use prompts that are lists of messages"),
    (("learning_rate", "weight_decay", "optim", "optim_args", *_ADAM), lambda _, run: run.has_optimizer,
     "optimizers[0] is passed", "set it in that optimizer"),
    (("lr_scheduler_type", "lr_scheduler_kwargs", *_WARM_UP), lambda _, run: run.has_schedule,
     "optimizers[1] is passed", "set it in that scheduler"),
    (_ADAM, lambda args, _: args.optim in _WITHOUT_BETAS, "the optimizer has no such number", "choose another optim"),
    (_WARM_UP, lambda args, _: args.lr_scheduler_type in _WITHOUT_WARM_UP,
     "this lr_scheduler_type has no warm-up", "use 'constant_with_warmup'"),
    (("optim_args",), lambda args, _: args.optim in _WITHOUT_ARGS, "the optimizer reads none", "choose another optim"),
    (("lr_scheduler_kwargs",), lambda args, _: args.lr_scheduler_type in ("constant", "constant_with_warmup"),
     "this lr_scheduler_type reads none", "choose another lr_scheduler_type"),
    (_SAMPLING, lambda _, run: run.is_stepped, "step() is given responses", "use train()"),
    (_PROMPTS, lambda _, run: run.is_stepped, "step() is given responses and scores", "use train()"),
    (_ENGINE, lambda _, run: run.has_engine, "an engine is passed to the trainer", "pass engine=None"),
    (_VLLM, lambda args, _: args.generation_engine != "vllm",
     "only generation_engine='vllm' reads it", "set generation_engine='vllm'"),
    (_VLLM_SERVER, lambda args, _: args.vllm_mode != "server", "vllm_mode is 'colocate'", "set vllm_mode='server'"),
    (_VLLM_COLOCATED, lambda args, _: args.vllm_mode == "server",
     "vllm_mode is 'server', which has options of its own", "set vllm_mode='colocate'"),
    (("vllm_server_host", "vllm_server_port"), lambda args, _: args.vllm_server_base_url is not None,
     "vllm_server_base_url is set", "leave vllm_server_base_url None"),
    (("kl_estimator",), lambda _, run: not run.has_reference,
     "kl_coef is 0 and there is no reference", "set kl_coef"),
    (("kl_coef",), lambda _, run: run.has_controller,
     "kl_controller has the coefficient", "pass kl_controller=None, or give it this coefficient"),
    (("policy_loss",), lambda _, run: run.has_loss,
     "another policy_loss is passed to the trainer", "pass policy_loss=None to the trainer"),
    (("lam",), lambda args, _: args.lam_critic is not None and args.lam_policy is not None,
     "lam_critic and lam_policy take its place", "leave one of them None"),
    (("kl_stop",), lambda args, _: args.num_ppo_epochs == 1,
     "num_ppo_epochs is 1, so no epoch is left to end", "raise num_ppo_epochs"),
    (("lm_head_float32",), lambda _, run: not run.has_16_bits,
     "the run computes in float32", "set bf16=True or fp16=True"),
    (("ds3_gather_for_generation",), lambda _, run: not run.gathers_weights, "no DeepSpeed ZeRO-3 runs", "use ZeRO-3"),
    (("offload_frozen",), lambda _, run: not run.has_accelerator, "the run computes on the CPU", "use a GPU"),
    (("offload_frozen",), lambda _, run: not run.has_frozen,
     "no frozen model has weights of its own", "pass ref_model or reward_model"),
    (("hub_files",), lambda args, _: not args.push_to_hub,
     "push_to_hub is False, so training uploads nothing", "set push_to_hub=True, or call push_to_hub() yourself"),
    (EPISODE_OPTIONS, lambda _, run: not run.has_episodes,
     "there are no tools and no environments", "pass tools or environment_factory"),
    (("exp_name",), lambda args, _: args.user_value("run_name") is not None, "run_name is set", "leave run_name None"),
)
# fmt: on
"""Options, the condition under which they have no effect, the reason, and the remedy; the first match counts."""


def unused_options(args: PPOConfig, run: TrainerContext) -> dict[str, str]:
    """Return the options with a value other than their default that have no effect.

    Args:
        args: The resolved arguments.
        run: Properties of the trainer.

    Returns:
        For each option a text with its value, the reason and the remedy.
    """
    defaults = {field.name: field.default for field in fields(PPOConfig) if field.default is not MISSING}
    found = dict[str, str]()
    for options, holds, reason, remedy in UNUSED:
        for name in options:
            value: Any = getattr(args, name)
            value = getattr(value, "value", value)  # of an enumeration
            if name in found or value == defaults[name]:
                continue
            if holds(args, run):
                found[name] = f"{name}={redacted(value, name)!r:.60} ({reason}: {remedy}, or leave it out)"
    return found
