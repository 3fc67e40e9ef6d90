"""AITraining's interface: its data columns, `AutoTrainProject`, and `rlhf-ppo llm`."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from accelerate import PartialState
from rich.console import Console
from rich.table import Table
from transformers import Trainer, TrainingArguments

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
from rlhf_ppo.compat import params as mapping
from rlhf_ppo.compat.environments import REWARD_MODEL, json_object, make_environment
from rlhf_ppo.compat.params import LLMTrainingParams
from rlhf_ppo.config import PPOConfig
from rlhf_ppo.config.ppo_config import output_directory
from rlhf_ppo.data.sources import choose_split, load_splits
from rlhf_ppo.rewards.builtin import Custom
from rlhf_ppo.rewards.functions import function_name
from rlhf_ppo.rewards.resolve import resolve_reward
from rlhf_ppo.terminal import cell, redacted, visible_logger
from rlhf_ppo.training.checks import check_output_dir

__all__ = ["AutoTrainProject", "LLMTrainingParams"]


logger = visible_logger(__name__)


def load_rows(params: LLMTrainingParams) -> tuple[Any, Any]:
    """Load the rows to train on and those to evaluate on.

    Args:
        params: Gives the data, its splits and its columns.

    Returns:
        The two data sets; the second is None without `valid_split`.

    Raises:
        ValueError: There is no such data, split or column.
    """
    splits = load_splits(params.data_path, argument="data_path")
    names = {"train_split": params.train_split, "valid_split": params.valid_split}
    chosen = [None if name is None else choose_split(splits, name, option) for option, name in names.items()]
    train_dataset, eval_dataset = (None if rows is None else _prepared(rows, params) for rows in chosen)
    return train_dataset, eval_dataset


def fill_update(rows: Any, num_episodes: int) -> Any:
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
        For the trainer's name of each column that of the data set.

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
    unused = [column for column in dataset.column_names if column not in names.values()]
    if not names or params.trainer == "ppo":  # otherwise TRL would read a `prompt` beside the text as half of a pair
        unused = [column for column in unused if column in names]
    dataset = dataset.remove_columns(unused)
    return dataset.rename_columns({old: new for new, old in names.items() if old != new})


# ---- AutoTrainProject ----

_JUDGES = {"judge", "preference_model", "human_feedback_fn"}
"""Keys of a preference environment's judge; without one the reward model is the judge."""

_SHOWN = (*mapping.MODEL.values(), "lora_target_modules", "load_in_4bit", "load_in_8bit", "attn_implementation")
"""Arguments of TRL's `ModelConfig` that the parameters set."""


@dataclass(frozen=True)
class Rewards:
    """Sources of PPO's rewards.

    Attributes:
        model: Path of the reward model, or None.
        functions: The reward functions.
        settings: Arguments of `PPOConfig` that they set.
    """

    model: str | None
    functions: list[Callable[..., Any]]
    settings: dict[str, Any]


class AutoTrainProject:
    """A training run on this machine; the constructor checks its configuration and prints it.

    Args:
        params: The parameters.
        backend: Where to train: only "local".
        process: Accepted as in AITraining; columns always get the names that the trainer reads.
        resume_from_checkpoint: Checkpoint of the run in the project's directory to continue, True for the newest
            complete one; None or False starts a new run.

    Attributes:
        params: The parameters.
        arguments: Trainer arguments that the parameters set.
        args: All arguments of the trainer.
        model_args: Loading of the models, and the adapter.
        rewards: Sources of PPO's rewards; None for other trainers.

    Raises:
        TypeError: `params` are no `LLMTrainingParams`, or an argument has the wrong type.
        ValueError: There is no such backend, reward or environment, or an argument is out of its range.
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
        self.params, self.rewards = params, reward_sources(params) if params.trainer == "ppo" else None
        config: Any = {"ppo": PPOConfig, "reward": RewardArguments, "sft": SFTArguments}[params.trainer]
        self.arguments = mapping.arguments_of(params) | (self.rewards.settings if self.rewards else {})
        if resume_from_checkpoint is not None:
            self.arguments["resume_from_checkpoint"] = resume_from_checkpoint
        with mapping.explaining():
            self.args: Any = config(**self.arguments)
        self.model_args = mapping.model_arguments(params)
        if PartialState().is_main_process:
            self._print()

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
        params, args = self.params, self.args
        if params.token is not None:
            os.environ.setdefault("HF_TOKEN", params.token)  # for models and data that need it
        with mapping.explaining():
            check_output_dir(args.output_dir)
            self._check_start()
            train_dataset, eval_dataset = load_rows(params)
            if self.rewards is None:
                make = reward_trainer if params.trainer == "reward" else sft_trainer
                return make(args, self.model_args, train_dataset, eval_dataset)
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
                reward_model=self.rewards.model,
                ref_model=params.model_ref,
                reward_funcs=self.rewards.functions or None,
            )

    def train(self, trainer: Trainer) -> Trainer:
        """Train, save the result, and return the trainer that `build` made."""
        if self.params.padding is not None:
            tokenizer: Any = trainer.processing_class
            tokenizer.padding_side = self.params.padding
        train_and_save(trainer, self.params.data_path, merge=self.params.merge_adapter)
        return trainer

    def _check_start(self) -> None:
        """Check that a checkpoint to resume exists, or that the directory holds no other run."""
        directory = output_directory(self.args)
        resumed = parse_resume(self.args.resume_from_checkpoint)
        if resumed is not False:
            check_start(directory, resumed, overwrite=False)
        elif self.params.trainer == "ppo" and (found := finished_checkpoints(directory)):
            raise ValueError(
                f"project_name={self.params.project_name!r} holds the checkpoints of another run ({found}): continue "
                "it with --resume-from-checkpoint True, or choose another project_name"
            )

    def _print(self) -> None:
        """Print the values that the parameters set, by the names of the trainer's arguments."""
        table = Table("argument", "value", title=cell(f"{type(self.args).__name__} of {self.args.output_dir}"))
        values = {name: getattr(self.args, name) for name in self.arguments}
        values |= {name: getattr(self.model_args, name) for name in _SHOWN}
        values |= {
            name: getattr(self.params, name) for name in ("data_path", "train_split", "valid_split", "max_samples")
        }
        if self.rewards is not None:
            functions = [function_name(function) for function in self.rewards.functions]
            values |= {
                "ref_model": self.params.model_ref,
                "reward_model": self.rewards.model,
                "reward_funcs": functions,
            }
        for name, value in values.items():
            table.add_row(name, cell(redacted(getattr(value, "value", value), name)))  # enums by their value
        Console().print(table)


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
    config = json_object("rl_env_config", params.rl_env_config)
    if params.environment == "preference_comparison" and model is not None and not _JUDGES & config.keys():
        config, model = {**config, "preference_model": model}, None
    environment = make_environment(
        params.environment, config, reward_weights=params.rl_reward_weights, reward_fn=function
    )
    weights = _with_model(model, environment.reward_weights)
    return Rewards(model, environment.reward_funcs, {**environment.settings, "reward_weights": weights})


def _with_model(model: str | None, given: Mapping[str, Any] | str | None) -> dict[str, Any] | None:
    """Return the weights by name; the weight of the reward model is 1 unless they name it."""
    if given is None:
        return None
    weights = json_object("rl_reward_weights", given)
    return weights if model is None else {REWARD_MODEL: 1.0, **weights}


def _resolved(spec: str) -> Callable[..., Any]:
    """Return a reward function; AITraining's signature, one row at a time, is accepted too."""
    if spec == "custom":
        raise ValueError(
            "--rl-reward-fn custom needs the function: write package.module.function or path/file.py:function, with "
            "the arguments prompt, generated and full_text, or GRPOTrainer's"
        )
    function = resolve_reward(spec)
    return Custom(function) if "generated" in inspect.signature(function).parameters else function


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
