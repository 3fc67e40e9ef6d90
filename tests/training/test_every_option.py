"""Every option of `PPOConfig`: it changes the run, or the trainer says at construction that it does not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import Any

import pytest

from rlhf_ppo import PPOConfig
from rlhf_ppo.algorithm.advantages import AdaptiveKLController
from rlhf_ppo.config.unused import UNUSED, TrainerContext, unused_options
from rlhf_ppo.data.prompts import may_hold_chats
from tests.conftest import tiny_policy
from tests.runs import QUICK, assert_identical, history, parameters

MakeTrainer = Callable[..., Any]

OWN = {
    name
    for part in PPOConfig.__mro__
    if part.__module__.startswith("rlhf_ppo")
    for name, field in vars(part).get("__dataclass_fields__", {}).items()
    if name in vars(part).get("__annotations__", {})
}

RUN: dict[str, Any] = QUICK | {
    **{"gradient_accumulation_steps": 2, "total_episodes": 8, "num_ppo_epochs": 2, "num_mini_batches": 2},
    **{"learning_rate": 0.01, "response_length": 6, "kl_coef": 0.3, "missing_eos_penalty": None, "logging_steps": 1},
}

CHANGES: dict[str, Any] = {
    "learning_rate": 0.02,
    "warmup_ratio": 0.5,
    "num_generations": 2,
    "kl_target": 1.0,
    "kl_coef": 0.1,
    "kl_estimator": "k3",
    "kl_stop": 1e-6,
    "score_scaling": True,
    "critic_learning_rate": 0.1,
    "critic_warmup_steps": 1,
    "lam_policy": 0.5,
    "lam_critic": 0.5,
    "gae_level": "turn",
    "policy_loss": "examples/policy_losses.py:cispo",
    "cliprange": 0.01,
    "cliprange_value": 0.001,
    "cliprange_high": 0.01,
    "entropy_coef": 0.5,
    "loss_aggregation": "sequence",
    "total_episodes": 12,
    "response_length": 3,
    "temperature": 1.5,
    "top_k": 2,
    "top_p": 0.3,
    "min_p": 0.5,
    "stop_token_id": 5,
    "stop_strings": ["w5"],
    "reward_weights": [2.0],
    "score_clip": 0.1,
    "missing_eos_penalty": 2.0,
    "missing_eos_score": -2.0,
    "bootstrap_truncated": True,
    "whiten_rewards": True,
    "num_ppo_epochs": 1,
    "num_mini_batches": 1,
    "gamma": 0.5,
    "lam": 0.3,
    "vf_coef": 1.0,
    "max_prompt_length": 2,
    "health_checks": False,
}
"""Values that change the weights or what is logged."""

IDLE_ALONE: dict[str, Any] = {
    "kl_horizon": 500.0,
    "importance_sampling_correction": False,
    "importance_sampling_clip_max": 3.0,
    "offload_frozen": True,
    "lm_head_float32": True,
    "ds3_gather_for_generation": False,
    "hub_files": ["completions/*"],
    "chat_template_kwargs": {"enable_thinking": False},
    "max_tool_calling_iterations": 2,
    "tool_timeout": 5.0,
    "vllm_mode": "server",
    "vllm_server_base_url": "http://localhost:1",
    "vllm_server_host": "here",
    "vllm_server_port": 1,
    "vllm_server_timeout": 1.0,
    "vllm_group_port": 1,
    "vllm_gpu_memory_utilization": 0.5,
    "vllm_max_model_length": 10,
    "vllm_tensor_parallel_size": 2,
    "vllm_enable_sleep_mode": True,
    "vllm_model_impl": "auto",
}
"""Values that change nothing in the run above, and are said to."""

ELSEWHERE: dict[str, str] = {
    **dict.fromkeys(("sft_model_path", "reward_model_path"), "the commands read them; a trainer is given models"),
    **dict.fromkeys(("model_adapter_name", "ref_adapter_name", "share_base_model"), "errors without an adapter"),
    **dict.fromkeys(
        ("world_size", "local_batch_size", "micro_batch_size", "batch_size", "local_mini_batch_size"), "derived"
    ),
    **dict.fromkeys(("mini_batch_size", "num_total_batches"), "derived"),
    **dict.fromkeys(
        ("gradient_checkpointing", "local_rollout_forward_batch_size", "dataset_num_proc"),
        "how much is computed at once, not what",
    ),
    **dict.fromkeys(("max_tokens_per_micro_batch", "bf16"), "where and how, not what"),
    **dict.fromkeys(("log_console", "exp_name"), "files and lines"),
    "num_sample_generations": "tables, of training prompts without eval_dataset",
    "logging_steps": "a run of two updates logs the first and the last",
    "overwrite_output_dir": "of directories with checkpoints",
    "dataloader_drop_last": "False is an error",
    "save_critic": "it adds files",
    "ptx_coef": "an error without ptx_dataset",
    "generation_engine": "other engines have tests of their own",
    "stop_token": "the run above has it",
}
"""Options whose effect is not in the weights or the log of the run above, and why."""


def made(make_trainer: MakeTrainer, **options: Any) -> Any:
    given = {"ref_model": tiny_policy(seed=5), "value_model": None}
    if "stop_token_id" in options:
        options["stop_token"] = None
    return make_trainer(**{**given, **RUN, **options})


def outcome(trainer: Any) -> dict[str, Any]:
    trainer.train()
    return {"weights": parameters(trainer), "log": history(trainer)}


def said(caplog: pytest.LogCaptureFixture) -> str:
    lines = [record.getMessage() for record in caplog.records if "change nothing in this run" in record.getMessage()]
    assert len(lines) <= 1
    return "".join(lines)


def test_the_tables_hold_every_option_once() -> None:
    tables = [{*CHANGES}, {*IDLE_ALONE}, {*ELSEWHERE}]
    assert sum(map(len, tables)) == len(set.union(*tables)) and set.union(*tables) == OWN


@pytest.mark.slow
@pytest.mark.usefixtures("plain_runs")
def test_each_option_changes_the_run_or_is_said_to_change_nothing(
    make_trainer: MakeTrainer, caplog: pytest.LogCaptureFixture, tmp_path: Any
) -> None:
    plain = outcome(made(make_trainer, output_dir=str(tmp_path / "plain")))
    assert not said(caplog)
    silent: list[str] = []
    for name, value in CHANGES.items():
        changed = outcome(made(make_trainer, output_dir=str(tmp_path / name), **{name: value}))
        assert f"{name}=" not in said(caplog), name
        try:
            assert_identical(changed, plain)
            silent.append(name)
        except AssertionError:
            pass
    assert silent == []

    idle = made(make_trainer, output_dir=str(tmp_path / "idle"), **IDLE_ALONE)
    line = said(caplog)
    assert [name for name in IDLE_ALONE if f"{name}={IDLE_ALONE[name]!r} (" not in line] == []
    assert_identical(outcome(idle), plain)


CASES: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({"kl_estimator": "k3", "kl_coef": 0.0}, {"has_reference": False}, "kl_coef is 0 and there is no reference"),
    ({"kl_coef": 0.2}, {"has_controller": True}, "kl_controller has the coefficient"),
    ({"lam": 0.9, "lam_policy": 0.8, "lam_critic": 1.0}, {}, "lam_critic and lam_policy take its place"),
    ({"kl_stop": 0.1, "num_ppo_epochs": 1}, {}, "num_ppo_epochs is 1"),
    ({"generation_engine": "vllm"}, {"has_engine": True}, "an engine is passed"),
    ({"top_k": 5}, {"is_stepped": True}, r"step() is given responses: use train()"),
    ({"reward_weights": [2.0]}, {"is_stepped": True}, "responses and scores"),
    ({"offload_frozen": True}, {"has_frozen": False}, "no frozen model"),
    ({"exp_name": "mine", "run_name": "other"}, {}, "run_name is set"),
    (
        {"importance_sampling_clip_max": 3.0, "importance_sampling_correction": False},
        {"has_engine": True},
        "importance_sampling_correction is False",
    ),
    ({"cliprange_value": 0.1, "num_ppo_epochs": 1}, {}, "before which no value has changed"),
    ({"lam": 0.5, "gamma": 0.0}, {}, "gamma is 0"),
    ({"critic_learning_rate": 0.5, "vf_coef": 0.0}, {}, "nothing trains the value model"),
    ({"chat_template_kwargs": {"a": 1}}, {"has_chats": False}, "the prompts are texts or ids"),
    ({"learning_rate": 1e-4}, {"has_optimizer": True}, "optimizers[0] is passed"),
    ({"lr_scheduler_type": "cosine"}, {"has_schedule": True}, "optimizers[1] is passed"),
    ({"adam_beta1": 0.8, "optim": "sgd"}, {}, "the optimizer has no such number"),
    ({"warmup_steps": 3, "lr_scheduler_type": "constant"}, {}, "this lr_scheduler_type has no warm-up"),
    ({"optim_args": "momentum=0.9"}, {}, "the optimizer reads none"),
    ({"optim_args": "momentum=0.9"}, {"has_optimizer": True}, "optimizers[0] is passed: set"),
    ({"lr_scheduler_kwargs": {"power": 2}, "lr_scheduler_type": "constant"}, {}, "this lr_scheduler_type reads none"),
    ({"lr_scheduler_kwargs": {"num_cycles": 2}}, {"has_schedule": True}, "optimizers[1] is passed: set"),
]


@pytest.mark.parametrize(("options", "beside", "reason"), CASES, ids=[case[2] for case in CASES])
def test_an_option_without_its_partner_is_named_with_its_value_and_the_reason(
    options: dict[str, Any], beside: dict[str, Any], reason: str
) -> None:
    args = PPOConfig("out", use_cpu=True, report_to="none", **options)
    (found,) = unused_options(args, TrainerContext(**beside)).values()
    assert reason in found and any(found.startswith(f"{name}={value!r} (") for name, value in options.items())


def test_conversations_are_found_in_any_data_set() -> None:
    texts, chats = [{"prompt": "x"}], [{"prompt": [{"role": "user", "content": "x"}]}]
    assert not may_hold_chats(texts, None) and not may_hold_chats([{"input_ids": [1]}], {"a": texts})
    assert may_hold_chats(chats) and may_hold_chats(texts, {"a": texts, "b": chats}) and may_hold_chats(iter(texts))


def test_every_name_of_the_table_is_an_option() -> None:
    assert {name for options, *_ in UNUSED for name in options} <= {field.name for field in fields(PPOConfig)}


def test_a_controller_takes_the_place_of_the_coefficient(
    make_trainer: MakeTrainer, caplog: pytest.LogCaptureFixture
) -> None:
    made(make_trainer, kl_controller=AdaptiveKLController(0.1, 3.0, 100))
    assert "kl_coef=0.3 (kl_controller has the coefficient" in said(caplog)
