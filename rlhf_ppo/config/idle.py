"""Options that change nothing beside the other options and what the trainer is given: which, why, and what would."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import MISSING, dataclass, fields
from typing import Any, NamedTuple

from rlhf_ppo.config.ppo_config import PPOConfig
from rlhf_ppo.config.presets import PRESETS
from rlhf_ppo.config.redaction import shown


@dataclass(frozen=True)
class Beside:
    """What a trainer has beside its arguments.

    Attributes:
        is_stepped: It has neither prompts nor rewards: `step` is given responses and scores.
        has_reference: There is a reference, for whatever reason.
        has_engine: An engine was passed.
        has_loss: A loss was passed in place of the one that `policy_loss` names.
        has_controller: A KL controller was passed.
        has_evaluation: There are prompts to evaluate on.
        has_functions: There are reward functions.
        has_frozen: There are frozen models with weights of their own.
        gathers_weights: DeepSpeed ZeRO-3 has taken the policy apart.
        has_16_bits: Something is computed or stored in 16 bits.
    """

    is_stepped: bool = False
    has_reference: bool = True
    has_engine: bool = False
    has_loss: bool = False
    has_controller: bool = False
    has_evaluation: bool = False
    has_functions: bool = True
    has_frozen: bool = True
    gathers_weights: bool = False
    has_16_bits: bool = False


class Idle(NamedTuple):
    """When options change nothing.

    Attributes:
        options: Their names.
        holds: Takes the arguments and what is beside them.
        reason: Why they change nothing.
        remedy: What would make them count.
    """

    options: tuple[str, ...]
    holds: Callable[[PPOConfig, Beside], bool]
    reason: str
    remedy: str


_OF_VLLM = tuple(name for name in PPOConfig.__dataclass_fields__ if name.startswith("vllm_"))
_OF_SERVER = tuple(name for name in _OF_VLLM if "server" in name or name == "vllm_group_port")
_OF_COLOCATED = tuple(name for name in _OF_VLLM if name not in (*_OF_SERVER, "vllm_mode"))
_OF_SAMPLING = ("top_k", "top_p", "min_p", "generation_engine", "generation_batch_size", *_OF_VLLM)
_OF_PROMPTS = ("max_prompt_length", "dataset_num_proc", "reward_weights", "reward_timeout")


def _says_no_logprobs(args: PPOConfig, beside: Beside) -> bool:
    return args.generation_engine == "transformers" and not (beside.has_engine or beside.is_stepped)


IDLE: tuple[Idle, ...] = (
    Idle(("kl_horizon",), lambda args, _: args.kl_target is None, "kl_target is not set", "set kl_target"),
    Idle(
        ("positive_nll_threshold",),
        lambda args, _: args.positive_nll_coef == 0,
        "positive_nll_coef is 0",
        "set positive_nll_coef, such as to 0.1",
    ),
    Idle(
        ("importance_sampling_correction", "importance_sampling_clip_max"),
        _says_no_logprobs,
        "generation_engine='transformers' gives no log-probabilities",
        "use 'continuous' or 'vllm'",
    ),
    Idle(_OF_SAMPLING, lambda _, beside: beside.is_stepped, "step() is given responses", "use train()"),
    Idle(_OF_PROMPTS, lambda _, beside: beside.is_stepped, "step() is given responses and scores", "use train()"),
    Idle(
        ("generation_engine", "generation_batch_size", *_OF_VLLM),
        lambda _, beside: beside.has_engine,
        "an engine is passed to the trainer",
        "pass engine=None",
    ),
    Idle(
        _OF_VLLM,
        lambda args, _: args.generation_engine != "vllm",
        "only generation_engine='vllm' reads it",
        "set generation_engine='vllm'",
    ),
    Idle(
        _OF_SERVER,
        lambda args, _: args.vllm_mode != "server",
        "vllm_mode is 'colocate'",
        "set vllm_mode='server'",
    ),
    Idle(
        _OF_COLOCATED,
        lambda args, _: args.vllm_mode == "server",
        "vllm_mode is 'server', which has options of its own",
        "set vllm_mode='colocate'",
    ),
    Idle(
        ("vllm_server_host", "vllm_server_port"),
        lambda args, _: args.vllm_server_base_url is not None,
        "vllm_server_base_url is set",
        "leave vllm_server_base_url None",
    ),
    Idle(
        ("kl_estimator",),
        lambda _, beside: not beside.has_reference,
        "kl_coef is 0 and there is no reference",
        "set kl_coef, or log_kl=True",
    ),
    Idle(
        ("log_kl",),
        lambda args, _: args.kl_coef > 0,
        "kl_coef is above 0, so the KL is logged anyway",
        "set kl_coef=0",
    ),
    Idle(
        ("kl_coef",),
        lambda _, beside: beside.has_controller,
        "kl_controller has the coefficient",
        "pass kl_controller=None, or give it this coefficient",
    ),
    Idle(
        ("policy_loss",),
        lambda _, beside: beside.has_loss,
        "another policy_loss is passed to the trainer",
        "pass policy_loss=None to the trainer",
    ),
    Idle(
        ("cliprange",),
        lambda args, beside: not beside.has_loss and args.policy_loss == "cispo" and args.cliprange_high is not None,
        "policy_loss='cispo' has no lower limit and cliprange_high is set",
        "set cliprange_high alone",
    ),
    Idle(
        ("lam",),
        lambda args, _: args.lam_critic is not None and (args.lam_policy, args.length_adaptive_alpha) != (None, None),
        "lam_critic and lam_policy or length_adaptive_alpha take its place",
        "leave one of them None",
    ),
    Idle(
        ("kl_stop",),
        lambda args, _: args.num_ppo_epochs == 1,
        "num_ppo_epochs is 1, so no epoch is left to end",
        "raise num_ppo_epochs",
    ),
    Idle(
        ("lm_head_float32",),
        lambda _, beside: not beside.has_16_bits,
        "the run computes in float32",
        "set bf16=True or fp16=True",
    ),
    Idle(
        ("ds3_gather_for_generation",),
        lambda _, beside: not beside.gathers_weights,
        "no DeepSpeed ZeRO-3 runs",
        "use ZeRO-3",
    ),
    Idle(
        ("offload_frozen",),
        lambda _, beside: not beside.has_frozen,
        "no frozen model has weights of its own",
        "pass ref_model or reward_model",
    ),
    Idle(
        ("reward_timeout",),
        lambda _, beside: not beside.has_functions,
        "there are no reward functions",
        "pass reward_funcs",
    ),
    Idle(
        ("num_sample_generations",),
        lambda args, beside: not beside.has_evaluation and args.num_sample_generations > 0,
        "there is no eval_dataset to sample from",
        "pass eval_dataset",
    ),
    Idle(
        ("health_thresholds", "health_judge"),
        lambda args, _: not args.health_checks,
        "health_checks is False",
        "set health_checks=True",
    ),
    Idle(
        ("health_judge",),
        lambda _, beside: not beside.has_evaluation,
        "there is no eval_dataset to judge",
        "pass eval_dataset",
    ),
    Idle(
        ("hub_files",),
        lambda args, _: not args.push_to_hub,
        "push_to_hub is False, so training uploads nothing",
        "set push_to_hub=True, or call push_to_hub() yourself",
    ),
    Idle(("exp_name",), lambda args, _: args._given("run_name") is not None, "run_name is set", "leave run_name None"),
)
"""All cases, in the order in which they are tried: an option is said once."""


def idle_options(args: PPOConfig, beside: Beside) -> dict[str, str]:
    """Say which options with other values than their default's change nothing.

    Options that a preset sets are left out: the user did not give them.

    Args:
        args: The arguments, settled.
        beside: What the trainer has beside them.

    Returns:
        For each option its value, the reason and the remedy, in words.
    """
    of_preset = PRESETS.get(args.preset or "", {})
    defaults = {field.name: field.default for field in fields(PPOConfig) if field.default is not MISSING}
    found = dict[str, str]()
    for case in IDLE:
        for name in case.options:
            value: Any = getattr(args, name)
            if value in (defaults[name], of_preset.get(name, defaults[name])) or name in found:
                continue
            if case.holds(args, beside):
                found[name] = f"{name}={shown(value, name)!r:.60} ({case.reason}: {case.remedy}, or leave it out)"
    return found
