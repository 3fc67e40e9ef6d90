"""AITraining's interface: its data columns, `AutoTrainProject`, and `rlhf-ppo llm`."""

from __future__ import annotations

import inspect
import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from accelerate import PartialState
from datasets import Dataset
from transformers import Trainer, TrainingArguments

from rlhf_ppo.cli.arguments import PPOScriptArguments, RewardArguments, SFTArguments, parse
from rlhf_ppo.cli.errors import USER_ERRORS, user_errors
from rlhf_ppo.cli.trainers import (
    ppo_trainer,
    reward_trainer,
    running,
    sft_trainer,
    train_and_save,
)
from rlhf_ppo.compat.environments import JUDGES, REWARD_MODEL, json_object, make_environment
from rlhf_ppo.compat.params import MODEL, PPO, TRAINING, LLMTrainingParams, arguments_of, model_arguments
from rlhf_ppo.config import PPOConfig
from rlhf_ppo.config.checks import option
from rlhf_ppo.data.prompts import is_conversation
from rlhf_ppo.data.sources import choose_split, load_splits
from rlhf_ppo.rewards.builtin import Custom
from rlhf_ppo.rewards.functions import function_name
from rlhf_ppo.rewards.resolve import resolve_reward
from rlhf_ppo.run.checkpoints import find_start
from rlhf_ppo.terminal import visible_logger

__all__ = ["AutoTrainProject", "LLMTrainingParams"]

logger = visible_logger(__name__)


def load_rows(params: LLMTrainingParams) -> tuple[Any, Any]:
    """Load the rows to train on and those to evaluate on.

    Args:
        params: Gives the data, its splits and its columns.

    Returns:
        The two data sets; the second is None without `valid_split`.

    Raises:
        ValueError: There is no such data, split or column, or `chat_template="none"` and there are conversations.
    """
    splits = load_splits(params.data_path, argument="data_path")
    train_dataset = _prepared(choose_split(splits, params.train_split, "train_split"), params)
    if params.valid_split is None:
        return train_dataset, None
    return train_dataset, _prepared(choose_split(splits, params.valid_split, "valid_split"), params)


def fill_update(rows: Dataset, num_episodes: int) -> Dataset:
    """Repeat prompts in order if one update needs more; warn once.

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


def remove_short_warmup(args: TrainingArguments, num_rows: int, num_episodes: int) -> None:
    """Remove a warm-up that is shorter than one update, because the first update would have learning rate 0.

    Args:
        args: Gives the number of epochs, and `warmup_steps`, below 1 a share of the updates.
        num_rows: Number of prompts.
        num_episodes: Episodes of one update, over all processes.
    """
    num_updates = args.num_train_epochs * num_rows / num_episodes
    if 0 < args.warmup_steps < 1 and args.warmup_steps * num_updates < 1:
        logger.warning_once(
            f"--warmup-ratio {args.warmup_steps} of {num_updates:g} updates is less than one update: no warm-up."
        )
        args.warmup_steps = 0


def wanted_columns(columns: list[str], params: LLMTrainingParams) -> dict[str, str]:
    """Map the trainer's column names to those of the data set.

    Args:
        columns: Columns of the data set.
        params: Names them; instead of a default, the trainer's own name is accepted too.

    Returns:
        The data set's name of each column that the trainer reads.

    Raises:
        ValueError: A column is missing.
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


_USUAL_NAMES = {
    ("ppo", "text_column"): "prompt",
    ("reward", "text_column"): "chosen",
    ("reward", "rejected_text_column"): "rejected",
    ("reward", "prompt_text_column"): "prompt",
}


def _column(columns: list[str], option: str, params: LLMTrainingParams) -> str:
    name = getattr(params, option)
    if name in columns:
        return name
    usual = _USUAL_NAMES.get((params.trainer, option))
    if usual in columns and name == getattr(LLMTrainingParams, option):
        return str(usual)
    wanted = usual if name is None else name
    raise ValueError(
        f"{option}={name!r}: the data set has no column {wanted!r}, but {columns}; name one of them with "
        f"--{option.replace('_', '-')}"
    )


def _prepared(dataset: Dataset, params: LLMTrainingParams) -> Dataset:
    """Limit the number of rows and rename the columns."""
    if params.max_samples is not None:
        dataset = dataset.select(range(min(params.max_samples, len(dataset))))
    names = wanted_columns(dataset.column_names, params)
    first: Any = next(iter(dataset), {}) if params.chat_template == "none" else {}
    for column in names.values() or dataset.column_names:
        if is_conversation(first.get(column)):
            raise ValueError(
                f"chat_template='none', but the column {column!r} holds conversations, which a template renders: "
                "leave --chat-template out, or write the conversations as texts"
            )
    unused = [column for column in dataset.column_names if column not in names.values()]
    if not names or params.trainer == "ppo":  # otherwise TRL would read a `prompt` beside the text as half of a pair
        unused = [column for column in unused if column in names]
    dataset = dataset.remove_columns(unused)
    return dataset.rename_columns({old: new for new, old in names.items() if old != new})


# ---- AutoTrainProject ----

_NAMES = {name: ours for names in (TRAINING, PPO, MODEL) for ours, name in names.items()}
_NAMES |= {"sft_model_path": "model", "reward_model_path": "rl_reward_model_path"}
_NAME = re.compile(rf"(?<![\w/.])({'|'.join(_NAMES)})(?![\w/])")


@contextmanager
def _naming_parameters() -> Iterator[None]:
    """Let errors name the parameters of `LLMTrainingParams` instead of the trainer's arguments."""
    try:
        yield
    except USER_ERRORS as error:
        doubled = re.sub(r"\bmax_prompt_length=(\d+)", lambda match: f"block_size={2 * int(match[1])}", str(error))
        error.args = (_NAME.sub(lambda match: _NAMES[match[0]], doubled),)
        raise


class AutoTrainProject:
    """A training run on this machine; the constructor checks its configuration.

    Args:
        params: The parameters.
        backend: Where to train: only "local".
        process: Accepted as in AITraining; columns always get the names that the trainer reads.
        resume_from_checkpoint: Checkpoint of the run in the project's directory to continue, True for the newest
            complete one; None or False starts a new run.

    Attributes:
        params: The parameters.
        args: All arguments of the trainer.
        model_args: Loading of the models, and the adapter.
        reward_model: Path of PPO's reward model, or None.
        reward_funcs: PPO's reward functions.

    Raises:
        ValueError: There is no such backend, reward or environment, or an argument is out of its range.
    """

    @_naming_parameters()
    def __init__(
        self,
        params: LLMTrainingParams,
        backend: str = "local",
        process: bool = False,
        resume_from_checkpoint: str | bool | None = None,
    ) -> None:
        if backend != "local":
            raise ValueError(f"backend={backend!r} is not available here: train on this machine with backend='local'")
        self.params, self.reward_model, self.reward_funcs = params, None, []
        arguments = arguments_of(params) | {"resume_from_checkpoint": resume_from_checkpoint}
        if params.trainer == "ppo":
            self.reward_model, self.reward_funcs, settings = reward_sources(params)
            arguments |= settings
        config: Any = {"ppo": PPOConfig, "reward": RewardArguments, "sft": SFTArguments}[params.trainer]
        self.args: Any = config(**arguments)
        self.model_args = model_arguments(params)

    def create(self) -> Trainer:
        """Train, and save the result in `./<project_name>`.

        Returns:
            The trainer, after training.

        Raises:
            ValueError: There is no such data, column or model, or they do not match.
        """
        return self.train(self.build())

    @_naming_parameters()
    def build(self) -> Trainer:
        """Load data and models and make the trainer.

        Raises:
            ValueError: There is no such data, column or model, or they do not match.
        """
        params, args = self.params, self.args
        if params.token is not None:
            os.environ.setdefault("HF_TOKEN", params.token)  # for models and data that need it
        train_dataset, eval_dataset = load_rows(params)
        if params.trainer != "ppo":
            make = reward_trainer if params.trainer == "reward" else sft_trainer
            return make(args, self.model_args, train_dataset, eval_dataset)
        find_start(args.output_dir, args.resume_from_checkpoint, overwrite=None)
        episodes = args.per_device_train_batch_size * args.gradient_accumulation_steps
        num_episodes = episodes * PartialState().num_processes
        train_dataset = fill_update(train_dataset, num_episodes)
        remove_short_warmup(args, len(train_dataset), num_episodes)
        return ppo_trainer(
            PPOScriptArguments(),
            args,
            self.model_args,
            train_dataset,
            eval_dataset,
            reward_model=self.reward_model,
            ref_model=params.model_ref,
            reward_funcs=self.reward_funcs or None,
        )

    @_naming_parameters()
    def train(self, trainer: Trainer) -> Trainer:
        """Train, save the result, and return the trainer that `build` made."""
        if self.params.padding is not None:
            tokenizer: Any = trainer.processing_class
            tokenizer.padding_side = self.params.padding
        train_and_save(trainer, self.params.data_path, merge=self.params.merge_adapter)
        return trainer


def reward_sources(params: LLMTrainingParams) -> tuple[str | None, list[Callable[..., Any]], dict[str, Any]]:
    """Return the path of PPO's reward model, its reward functions, and the `PPOConfig` settings of the environment.

    The weights of the reward model and of `rl_reward_fn` are 1 unless the weights name them.

    Raises:
        ValueError: There is no such reward, or the environment does not know a setting.
    """
    model, weights = params.rl_reward_model_path, params.rl_reward_weights
    function = None if params.rl_reward_fn is None else _resolved(params.rl_reward_fn)
    settings: dict[str, Any] = {}
    functions = [function] if function else []
    if params.environment is not None:
        config = json_object("rl_env_config", params.rl_env_config)
        if params.environment == "preference_comparison" and model is not None and config.keys().isdisjoint(JUDGES):
            config, model = {**config, "preference_model": model}, None
        environment = make_environment(params.environment, config, reward_weights=weights, reward_fn=function)
        functions, settings, weights = environment.reward_funcs, environment.settings, environment.reward_weights
    if not functions and model is None:
        functions = [resolve_reward("default")]
    if weights is not None:
        ones = ({} if model is None else {REWARD_MODEL: 1.0}) | ({function_name(function): 1.0} if function else {})
        settings = {**settings, "reward_weights": ones | json_object("rl_reward_weights", weights)}
    return model, functions, settings


def _resolved(spec: str) -> Callable[..., Any]:
    """Return a reward function; AITraining's signature, one row at a time, is accepted too."""
    function = resolve_reward(spec)
    return Custom(function) if "generated" in inspect.signature(function).parameters else function


# ---- rlhf-ppo llm ----


@dataclass
class LLMCommand:
    """Options of `rlhf-ppo llm` in addition to the parameters."""

    train: bool = option(True, "Train; the command does nothing else.")
    resume_from_checkpoint: str | None = option(
        None, "Continue the run in project_name: True for its newest checkpoint, or the path of a checkpoint."
    )
    backend: str = option("local", "Where to train; only local is supported.")


def llm(argv: Sequence[str] | None = None) -> Trainer:
    """Train as `aitraining llm --train --trainer ppo|reward|sft` does, with the same options.

    Args:
        argv: The options of `LLMCommand` and `LLMTrainingParams`, with dashes or underscores. None takes the program's
            own.

    Returns:
        The trainer, after training and saving.

    Raises:
        SystemExit: An option is unknown or wrong; the message names it.
    """
    program = "rlhf-ppo llm"
    command, params = parse((LLMCommand, LLMTrainingParams), program, argv)
    with user_errors(program):
        if not command.train:
            raise ValueError(f"train=False: {program} only trains; leave the option out")
        resumed = command.resume_from_checkpoint
        project = AutoTrainProject(params, backend=command.backend, resume_from_checkpoint=resumed)
        trainer = project.build()
    with running(program, trainer):
        return project.train(trainer)
