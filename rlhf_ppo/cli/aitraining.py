"""AITraining's interface: its data columns, its three jobs, `AutoTrainProject`, and `rlhf-ppo llm`."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from accelerate import PartialState
from rich.console import Console
from rich.table import Table
from transformers import Trainer, TrainingArguments
from trl.trainer.model_config import ModelConfig

from rlhf_ppo.checkpoints.run import check_start, finished_checkpoints, parse_resume
from rlhf_ppo.cli.arguments import PPOArgumentParser, PPOScriptArguments
from rlhf_ppo.cli.errors import user_errors
from rlhf_ppo.cli.options import LLMCommand
from rlhf_ppo.cli.training import (
    RewardArguments,
    SFTArguments,
    ppo_trainer,
    reward_trainer,
    running,
    sft_trainer,
    train_and_save,
)
from rlhf_ppo.compat import mapping
from rlhf_ppo.compat.environments import REWARD_MODEL, make_environment
from rlhf_ppo.compat.params import LLMTrainingParams
from rlhf_ppo.config import PPOConfig
from rlhf_ppo.config.ppo_config import output_directory
from rlhf_ppo.config.redaction import redacted
from rlhf_ppo.data.sources import choose_split, load_splits
from rlhf_ppo.rewards.builtin import Custom
from rlhf_ppo.rewards.functions import function_name
from rlhf_ppo.rewards.resolve import resolve_reward
from rlhf_ppo.terminal.text import cell, visible_logger
from rlhf_ppo.training.checks import check_output_dir

__all__ = ["AutoTrainProject", "LLMTrainingParams"]


logger = visible_logger(__name__)


def load_rows(params: LLMTrainingParams) -> tuple[Any, Any]:
    """Load the rows to train on and those to evaluate on.

    Args:
        params: Gives the data's place, its splits and its columns.

    Returns:
        The two data sets; the second is None without `valid_split`.

    Raises:
        ValueError: There is no such data, split or column.
    """
    splits = load_splits(params.data_path, argument="data_path")
    train_dataset = choose_split(splits, params.train_split, "train_split")
    eval_dataset = None if params.valid_split is None else choose_split(splits, params.valid_split, "valid_split")
    return _prepared(train_dataset, params), None if eval_dataset is None else _prepared(eval_dataset, params)


def fill_update(rows: Any, num_episodes: int) -> Any:
    """Repeat prompts in order if one update needs more than there are; warns once.

    Args:
        rows: The prompts.
        num_episodes: Episodes of one update, over all processes.
    """
    if len(rows) >= num_episodes:
        return rows
    logger.warning_once(
        f"There are {len(rows)} prompts, but {num_episodes} episodes in an update (--batch-size x "
        "--gradient-accumulation x processes): the prompts are repeated. Lower either option, or give more prompts."
    )
    return rows.select([index % len(rows) for index in range(num_episodes)])


def settle_warmup(args: TrainingArguments, num_rows: int, num_episodes: int) -> None:
    """Remove a warm-up that is shorter than one update, because the first update would have learning rate 0.

    Args:
        args: Gives the number of epochs, and `warmup_steps`, below 1 a share of the updates.
        num_rows: Number of prompts.
        num_episodes: Episodes of one update, over all processes.
    """
    num_updates = args.num_train_epochs * num_rows / num_episodes
    if 0 < args.warmup_steps < 1 and args.warmup_steps * num_updates < 1:
        logger.warning_once(
            f"--warmup-ratio {args.warmup_steps} of {num_updates:g} updates is less than one: there is no warm-up."
        )
        args.warmup_steps = 0


def wanted_columns(columns: list[str], params: LLMTrainingParams) -> dict[str, str]:
    """Map the trainer's column names to those of the data set.

    Args:
        columns: Those of the data set.
        params: Names them; where it leaves a default, the trainer's own name serves too.

    Returns:
        The trainer's name of each column: the data set's.

    Raises:
        ValueError: A column is not there.
    """
    if params.trainer == "ppo":
        option = "text_column" if params.prompt_text_column is None else "prompt_text_column"
        return {"prompt": _column(columns, option, params)}
    if params.trainer == "sft":
        if params.text_column == "text" and {"messages", "prompt"} & set(columns):
            return {}
        return {"text": _column(columns, "text_column", params)}
    pair = {
        "chosen": _column(columns, "text_column", params),
        "rejected": _column(columns, "rejected_text_column", params),
    }
    if params.prompt_text_column is not None or "prompt" in columns:
        pair["prompt"] = _column(columns, "prompt_text_column", params)
    return pair


_OWN_NAMES = {
    ("ppo", "text_column"): "prompt",
    ("reward", "text_column"): "chosen",
    ("reward", "rejected_text_column"): "rejected",
    ("reward", "prompt_text_column"): "prompt",
}


def _column(columns: list[str], option: str, params: LLMTrainingParams) -> str:
    name = getattr(params, option)
    if name in columns:
        return name
    own = _OWN_NAMES.get((params.trainer, option))
    if own in columns and name == getattr(LLMTrainingParams, option):
        return str(own)
    wanted = own if name is None else name
    raise ValueError(
        f"{option}={name!r}: the data set has no column {wanted!r}, but {columns}; name one of them with "
        f"--{option.replace('_', '-')}"
    )


def _prepared(dataset: Any, params: LLMTrainingParams) -> Any:
    """Limit the number of rows and rename the columns."""
    if params.max_samples is not None:
        dataset = dataset.select(range(min(params.max_samples, len(dataset))))
    names = wanted_columns(dataset.column_names, params)
    others = [column for column in dataset.column_names if column not in names.values()]
    alone = bool(names) and params.trainer != "ppo"  # TRL would read a `prompt` beside the text as half of a pair
    taken = [column for column in others if column in names or alone]
    dataset = dataset.remove_columns(taken)
    return dataset.rename_columns({old: new for new, old in names.items() if old != new})


# ---- Jobs ----

JUDGES = {"judge", "preference_model", "human_feedback_fn"}
"""Where a preference environment's config names its judge; without one it is the reward model."""


@dataclass(frozen=True)
class Rewards:
    """Sources of PPO's rewards.

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
        params: The user's parameters.
        arguments: Trainer arguments that the parameters set.
        args: All of the trainer's arguments, checked.
        model_args: Loading of the models, and the adapter.
        rewards: Sources of PPO's rewards.
    """

    params: LLMTrainingParams
    arguments: dict[str, Any]
    args: TrainingArguments
    model_args: ModelConfig
    rewards: Rewards | None = None


def make_job(params: LLMTrainingParams, resume_from_checkpoint: str | bool | None = None) -> Job:
    """Resolve and check the parameters without loading anything.

    Args:
        params: The parameters.
        resume_from_checkpoint: Checkpoint to resume; see `AutoTrainProject`.

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
    """Check that a checkpoint to resume exists, or that the directory holds no other run."""
    directory = output_directory(job.args)
    resumed = parse_resume(job.args.resume_from_checkpoint)
    if resumed is not False:
        check_start(directory, resumed, overwrite=False)
    elif isinstance(job.args, PPOConfig) and (found := finished_checkpoints(directory)):
        raise ValueError(
            f"project_name={job.params.project_name!r} holds the checkpoints of another run ({found}): go on with it "
            "by --resume-from-checkpoint True, or choose another project_name"
        )


def run_job(job: Job, trainer: Trainer) -> Trainer:
    """Train, and save the result in the project's directory.

    Args:
        job: The job of the trainer.
        trainer: The result of `build_trainer`.

    Returns:
        The trainer.
    """
    if job.params.padding is not None:
        tokenizer: Any = trainer.processing_class
        tokenizer.padding_side = job.params.padding
    train_and_save(trainer, job.params.data_path, merge=job.params.merge_adapter)
    return trainer


def reward_sources(params: LLMTrainingParams) -> Rewards:
    """Resolve PPO's reward sources and the `PPOConfig` settings of their environment.

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
    """Print the values that the parameters set, by the names of the trainer's arguments."""
    table = Table("argument", "value", title=cell(f"{type(job.args).__name__} of {job.args.output_dir}"))
    for name, value in effective_values(job):
        table.add_row(name, cell(value))
    Console().print(table)


def effective_values(job: Job) -> Iterator[tuple[str, Any]]:
    """Yield name and value of every argument that the parameters set."""
    params = job.params
    for name in job.arguments:
        value = getattr(job.args, name)
        yield name, redacted(getattr(value, "value", value), name)  # enums as they are given
    for name in (*mapping.MODEL.values(), *_LOADING):
        yield name, getattr(job.model_args, name)
    for name in ("data_path", "train_split", "valid_split", "max_samples"):
        yield name, redacted(getattr(params, name), name)
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


# ---- AutoTrainProject ----


class AutoTrainProject:
    """A training run on this machine; its configuration is checked and printed when it is made.

    Args:
        params: The parameters.
        backend: Where to train: only "local".
        process: Accepted as in AITraining; columns always get the names that the trainer reads.
        resume_from_checkpoint: A checkpoint of the run in the project's directory from which it goes on, True for its
            newest complete one; None or False starts a new run.

    Raises:
        TypeError: `params` are no `LLMTrainingParams`, or an argument has the wrong type.
        ValueError: There is no such backend, or an argument is out of its range.
    """

    def __init__(
        self,
        params: LLMTrainingParams,
        backend: str = "local",
        process: bool = False,
        resume_from_checkpoint: str | bool | None = None,
    ) -> None:
        if not isinstance(params, LLMTrainingParams):
            raise TypeError(f"params must be LLMTrainingParams, got {type(params).__name__}")
        if backend != "local":
            raise ValueError(f"backend={backend!r} is not available here: train on this machine with backend='local'")
        self.job = make_job(params, resume_from_checkpoint)
        if PartialState().is_main_process:
            print_job(self.job)

    def create(self) -> Trainer:
        """Train, and save the result in `./<project_name>`.

        Returns:
            The trainer, after training.

        Raises:
            ValueError: There is no such data, column or model, or they do not fit each other.
        """
        return self.train(self.build())

    def build(self) -> Trainer:
        """Load data and models and make the trainer.

        Raises:
            ValueError: There is no such data, column or model, or they do not fit each other.
        """
        with mapping.explaining():
            return build_trainer(self.job)

    def train(self, trainer: Trainer) -> Trainer:
        """Train, save the result, and return the trainer that `build` made."""
        return run_job(self.job, trainer)


# ---- rlhf-ppo llm ----


def llm(argv: Sequence[str] | None = None) -> Trainer | None:
    """Train as `aitraining llm --train --trainer ppo|reward|sft` does, with the same options.

    Args:
        argv: The options of `LLMCommand` and `LLMTrainingParams`, with dashes or underscores. None takes the program's
            own.

    Returns:
        The trainer, after training and saving; None with `--dry-run`.

    Raises:
        SystemExit: An option is unknown, wrong or not available; the message names an alternative.
    """
    parser: Any = PPOArgumentParser((LLMCommand, LLMTrainingParams), prog="rlhf-ppo llm")  # pyright: ignore[reportArgumentType]
    with user_errors(parser.prog):
        command, params = parser.parse_args_into_dataclasses(argv)
        resumed = command.resume_from_checkpoint
        project = AutoTrainProject(params, backend=command.backend, process=True, resume_from_checkpoint=resumed)
        if command.dry_run:
            return None
        trainer = project.build()
    with running(parser.prog, trainer):
        return project.train(trainer)
