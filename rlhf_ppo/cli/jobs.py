"""AITraining's three jobs: what a run is made of, resolved from its parameters before anything is loaded."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console
from rich.table import Table
from transformers import Trainer, TrainingArguments
from trl.trainer.model_config import ModelConfig
from trl.trainer.reward_config import RewardConfig
from trl.trainer.sft_config import SFTConfig

from rlhf_ppo.cli import mapping
from rlhf_ppo.cli.params import LLMTrainingParams
from rlhf_ppo.cli.rows import load_rows
from rlhf_ppo.cli.sources import PPOScriptArguments
from rlhf_ppo.cli.training import ppo_trainer, reward_trainer, sft_trainer, train_and_save
from rlhf_ppo.config import PPOConfig
from rlhf_ppo.rewards.builtin import Custom
from rlhf_ppo.rewards.resolve import resolve_reward


@dataclass(frozen=True)
class Job:
    """One run, ready to be built.

    Attributes:
        params: What the user gave.
        script_args: Where the data is.
        arguments: What the parameters set of the trainer's arguments, by its names.
        args: All of the trainer's arguments, checked.
        model_args: How models are loaded, and the adapter.
        reward_funcs: PPO's reward functions.
    """

    params: LLMTrainingParams
    script_args: PPOScriptArguments
    arguments: dict[str, Any]
    args: TrainingArguments
    model_args: ModelConfig
    reward_funcs: list[Callable[..., Any]] = field(default_factory=list)


def make_job(params: LLMTrainingParams) -> Job:
    """Resolve the parameters: nothing is loaded, everything that can be checked is.

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: An argument is out of its range, or names no reward or environment.
    """
    functions: list[Callable[..., Any]] = []
    if params.trainer == "ppo":
        functions, settings = reward_sources(params)
        config, arguments = PPOConfig, {**mapping.ppo_arguments(params), **settings}
    elif params.trainer == "reward":
        config, arguments = RewardConfig, mapping.reward_arguments(params)
    else:
        config, arguments = SFTConfig, mapping.sft_arguments(params)
    return Job(
        params,
        mapping.script_arguments(params),
        arguments,
        mapping.explained(config, arguments),
        mapping.model_arguments(params),
        functions,
    )


def build_trainer(job: Job) -> Trainer:
    """Load data and models and make the trainer.

    Raises:
        ValueError: There is no such data, column or model, or they do not fit each other.
    """
    given: Any = (job.script_args, job.args, job.model_args, *load_rows(job.params))
    if job.params.trainer == "reward":
        return reward_trainer(*given)
    if job.params.trainer == "sft":
        return sft_trainer(*given)
    return ppo_trainer(
        *given,
        reward_model=job.params.rl_reward_model_path,
        ref_model=job.params.model_ref,
        reward_funcs=job.reward_funcs or None,
    )


def run_job(job: Job) -> Trainer:
    """Build the trainer, train, and save the result in the project's directory.

    Returns:
        The trainer.
    """
    if job.params.token is not None:
        os.environ.setdefault("HF_TOKEN", job.params.token)  # for models and data that need it
    trainer = build_trainer(job)
    if job.params.padding is not None:
        tokenizer: Any = trainer.processing_class
        tokenizer.padding_side = job.params.padding
    train_and_save(trainer, job.params.data_path, merge=job.params.merge_adapter)
    return trainer


def reward_sources(params: LLMTrainingParams) -> tuple[list[Callable[..., Any]], dict[str, Any]]:
    """Choose PPO's reward functions, and what their environment changes in `PPOConfig`.

    Returns:
        The functions that score beside the reward model, and arguments of `PPOConfig`.

    Raises:
        ValueError: There is no such reward, or the environment does not know a setting.
    """
    function = None if params.rl_reward_fn is None else _resolved(params.rl_reward_fn)
    if params.environment is not None:
        from rlhf_ppo.rewards.environments import make_environment

        environment = make_environment(
            params.environment,
            params.rl_env_config,
            reward_weights=params.rl_reward_weights,
            reward_fn=params.rl_reward_fn,
        )
        weights = environment.reward_weights
        if weights is not None and params.rl_reward_model_path is not None:
            weights = {"reward_model": 1.0, **weights}
        return list(environment.reward_funcs), {**environment.settings, "reward_weights": weights}
    if function is not None:
        return [function], {}
    return ([] if params.rl_reward_model_path is not None else [resolve_reward("default")]), {}


def print_job(job: Job) -> None:
    """Print every effective value once: those that the parameters set, by the names of the trainer's arguments."""
    table = Table("argument", "value", title=f"{type(job.args).__name__} of {job.args.output_dir}")
    for name, value in effective_values(job):
        table.add_row(name, str(value))
    Console().print(table)


def effective_values(job: Job) -> Iterator[tuple[str, Any]]:
    """Yield name and value of every argument that the parameters set."""
    params = job.params
    for name in job.arguments:
        value = getattr(job.args, name)
        yield (
            name,
            "***" if name == "hub_token" and value else getattr(value, "value", value),
        )  # enums as they are given
    for name in (*mapping.MODEL.values(), *_LOADING):
        yield name, getattr(job.model_args, name)
    for name in ("data_path", "train_split", "valid_split", "max_samples"):
        yield name, getattr(params, name)
    if params.trainer == "ppo":
        yield "ref_model", params.model_ref
        yield "reward_model", params.rl_reward_model_path
        yield "reward_funcs", [getattr(f, "__name__", repr(f)) for f in job.reward_funcs]


_LOADING = ("lora_target_modules", "load_in_4bit", "load_in_8bit", "attn_implementation")


def _resolved(spec: str) -> Callable[..., Any]:
    """Return the reward function; AITraining's signature, one row at a time, is accepted too."""
    if spec == "custom":
        raise ValueError(
            "--rl-reward-fn custom does not say which: write package.module.function or path/file.py:function, with "
            "the arguments prompt, generated and full_text, or GRPOTrainer's"
        )
    function = resolve_reward(spec)
    return Custom(function) if "generated" in inspect.signature(function).parameters else function
