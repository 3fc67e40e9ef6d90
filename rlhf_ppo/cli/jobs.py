"""AITraining's three jobs: what a run is made of, resolved from its parameters before anything is loaded."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from accelerate import PartialState
from rich.console import Console
from rich.table import Table
from transformers import Trainer, TrainingArguments
from trl.trainer.model_config import ModelConfig

from rlhf_ppo.checkpoints.run import check_start, finished_in, wanted_checkpoint
from rlhf_ppo.cli.rows import fill_update, load_rows, settle_warmup
from rlhf_ppo.cli.sources import PPOScriptArguments
from rlhf_ppo.cli.training import ppo_trainer, reward_trainer, sft_trainer, train_and_save
from rlhf_ppo.cli.trl_arguments import RewardArguments, SFTArguments
from rlhf_ppo.compat import mapping
from rlhf_ppo.compat.environments import REWARD_MODEL, make_environment
from rlhf_ppo.compat.params import LLMTrainingParams
from rlhf_ppo.config import PPOConfig
from rlhf_ppo.config.redaction import shown
from rlhf_ppo.config.settled import output_directory
from rlhf_ppo.rewards.builtin import Custom
from rlhf_ppo.rewards.functions import function_name
from rlhf_ppo.rewards.resolve import resolve_reward
from rlhf_ppo.terminal.foreign import cell
from rlhf_ppo.training.checks import check_output_dir

JUDGES = {"judge", "preference_model", "human_feedback_fn"}
"""Where a preference environment's config names its judge; without one it is the reward model."""


@dataclass(frozen=True)
class Rewards:
    """What scores PPO's responses.

    Attributes:
        model: Path of the reward model, or None.
        functions: The reward functions that score beside it, or alone.
        settings: What they set in `PPOConfig`.
    """

    model: str | None
    functions: list[Callable[..., Any]]
    settings: dict[str, Any]


@dataclass(frozen=True)
class Job:
    """One run, ready to be built.

    Attributes:
        params: What the user gave.
        arguments: What the parameters set of the trainer's arguments, by its names.
        args: All of the trainer's arguments, checked.
        model_args: How models are loaded, and the adapter.
        rewards: What scores PPO's responses.
    """

    params: LLMTrainingParams
    arguments: dict[str, Any]
    args: TrainingArguments
    model_args: ModelConfig
    rewards: Rewards | None = None


def make_job(params: LLMTrainingParams, resume_from_checkpoint: str | bool | None = None) -> Job:
    """Resolve the parameters: nothing is loaded, everything that can be checked is.

    Args:
        params: The parameters.
        resume_from_checkpoint: Where the run goes on; see `AutoTrainProject`.

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: An argument is out of its range, or names no reward or environment.
    """
    rewards = None
    if params.trainer == "ppo":
        rewards = reward_sources(params)
        config, arguments = PPOConfig, {**mapping.ppo_arguments(params), **rewards.settings}
    elif params.trainer == "reward":
        config, arguments = RewardArguments, mapping.reward_arguments(params)
    else:
        config, arguments = SFTArguments, mapping.sft_arguments(params)
    if resume_from_checkpoint is not None:
        arguments["resume_from_checkpoint"] = resume_from_checkpoint
    with mapping.explaining():
        args: Any = config(**arguments)
    return Job(params, arguments, args, mapping.model_arguments(params), rewards)


def build_trainer(job: Job) -> Trainer:
    """Load data and models and make the trainer.

    Raises:
        ValueError: There is no such data, column or model, or they do not fit each other.
    """
    if job.params.token is not None:
        os.environ.setdefault("HF_TOKEN", job.params.token)  # for models and data that need it
    check_output_dir(job.args.output_dir)
    args: Any = job.args
    _check_start(job)
    train_dataset, eval_dataset = load_rows(job.params)
    if job.rewards is None:
        make = reward_trainer if job.params.trainer == "reward" else sft_trainer
        return make(args, job.model_args, train_dataset, eval_dataset)
    num_episodes = args.per_device_train_batch_size * args.gradient_accumulation_steps * PartialState().num_processes
    train_dataset = fill_update(train_dataset, num_episodes)
    settle_warmup(args, len(train_dataset), num_episodes)
    return ppo_trainer(
        PPOScriptArguments(),
        args,
        job.model_args,
        train_dataset,
        eval_dataset,
        reward_model=job.rewards.model,
        ref_model=job.params.model_ref,
        reward_funcs=job.rewards.functions or None,
    )


def _check_start(job: Job) -> None:
    """Check that there is a run to go on with, or no checkpoint of another in the project's directory."""
    directory = output_directory(job.args)
    resumed = wanted_checkpoint(job.args.resume_from_checkpoint)
    if resumed is not False:
        check_start(directory, resumed, overwrite=False)
    elif isinstance(job.args, PPOConfig) and (found := finished_in(directory)):
        raise ValueError(
            f"project_name={job.params.project_name!r} holds the checkpoints of another run ({found}): go on with it "
            "by --resume-from-checkpoint True, or choose another project_name"
        )


def run_job(job: Job, trainer: Trainer) -> Trainer:
    """Train, and save the result in the project's directory.

    Args:
        job: What the trainer was built of.
        trainer: What `build_trainer` returned.

    Returns:
        The trainer.
    """
    if job.params.padding is not None:
        tokenizer: Any = trainer.processing_class
        tokenizer.padding_side = job.params.padding
    train_and_save(trainer, job.params.data_path, merge=job.params.merge_adapter)
    return trainer


def reward_sources(params: LLMTrainingParams) -> Rewards:
    """Choose what scores PPO's responses, and what their environment changes in `PPOConfig`.

    Raises:
        ValueError: There is no such reward, or the environment does not know a setting.
    """
    model = params.rl_reward_model_path
    function = None if params.rl_reward_fn is None else _resolved(params.rl_reward_fn)
    if params.environment is None:
        functions = [function] if function else [] if model else [resolve_reward("default")]
        return Rewards(model, functions, {"reward_weights": _with_model(model, params.rl_reward_weights)})
    config = mapping.json_object("rl_env_config", params.rl_env_config or {})
    if params.environment == "preference_comparison" and model is not None and not JUDGES & config.keys():
        config, model = {**config, "preference_model": model}, None
    environment = make_environment(
        params.environment, config, reward_weights=params.rl_reward_weights, reward_fn=function
    )
    weights = _with_model(model, environment.reward_weights)
    return Rewards(model, environment.reward_funcs, {**environment.settings, "reward_weights": weights})


def print_job(job: Job) -> None:
    """Print every effective value once: those that the parameters set, by the names of the trainer's arguments."""
    table = Table("argument", "value", title=cell(f"{type(job.args).__name__} of {job.args.output_dir}"))
    for name, value in effective_values(job):
        table.add_row(name, cell(value))
    Console().print(table)


def effective_values(job: Job) -> Iterator[tuple[str, Any]]:
    """Yield name and value of every argument that the parameters set."""
    params = job.params
    for name in job.arguments:
        value = getattr(job.args, name)
        yield name, shown(getattr(value, "value", value), name)  # enums as they are given
    for name in (*mapping.MODEL.values(), *_LOADING):
        yield name, getattr(job.model_args, name)
    for name in ("data_path", "train_split", "valid_split", "max_samples"):
        yield name, shown(getattr(params, name), name)
    if job.rewards is not None:
        yield "ref_model", params.model_ref
        yield "reward_model", job.rewards.model
        yield "reward_funcs", [function_name(function) for function in job.rewards.functions]


_LOADING = ("lora_target_modules", "load_in_4bit", "load_in_8bit", "attn_implementation")


def _with_model(model: str | None, given: Mapping[str, Any] | str | None) -> dict[str, Any] | None:
    """Return the weights by name; the reward model counts 1 where they do not name it."""
    if given is None:
        return None
    weights = mapping.json_object("rl_reward_weights", given)
    return weights if model is None else {REWARD_MODEL: 1.0, **weights}


def _resolved(spec: str) -> Callable[..., Any]:
    """Return the reward function; AITraining's signature, one row at a time, is accepted too."""
    if spec == "custom":
        raise ValueError(
            "--rl-reward-fn custom does not say which: write package.module.function or path/file.py:function, with "
            "the arguments prompt, generated and full_text, or GRPOTrainer's"
        )
    function = resolve_reward(spec)
    return Custom(function) if "generated" in inspect.signature(function).parameters else function
