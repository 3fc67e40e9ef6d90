"""Checks of the constructor's arguments, before any weight is loaded."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import datasets
import torch
from torch import nn
from transformers.trainer_utils import IntervalStrategy

from rlhf_ppo.algorithm.advantages import check_coefficient
from rlhf_ppo.config import PPOConfig
from rlhf_ppo.data.prompts import NoPrompts, columns_of, prompt_column
from rlhf_ppo.run.distributed import get_logger, num_processes
from rlhf_ppo.run.optimization import check_pair

logger = get_logger(__name__)


def check_arguments(args: Any) -> None:
    """Check that the arguments are a `PPOConfig`, that `output_dir` is writable.

    Raises:
        TypeError: `args` is no `PPOConfig`.
        ValueError: `output_dir` is not writable.
    """
    if not isinstance(args, PPOConfig):
        raise TypeError(f"args must be a PPOConfig, got {type(args).__name__}")
    check_output_dir(args.output_dir)


def check_output_dir(path: str | None) -> None:
    """Check that a run can write into a directory, or create it; create nothing.

    Args:
        path: The directory.

    Raises:
        ValueError: It cannot.
    """
    check_writable(path, "output_dir")


def check_writable(path: str | None, argument: str) -> Path:
    """Check that a directory is writable, or can be created; create nothing.

    Args:
        path: The directory; None or "" is the working directory.
        argument: The option that gave it, for the error message.

    Returns:
        Its absolute path.

    Raises:
        ValueError: It is not.
    """
    try:
        place = Path(os.path.expanduser(path or ".")).absolute()
        if b"\0" in str(place).encode():
            raise ValueError("no name holds a null character")
        missing = list(itertools.takewhile(lambda part: not part.exists(), (place, *place.parents)))
    except (OSError, ValueError) as error:
        raise ValueError(f"{argument}={path!r:.80} cannot be written: {getattr(error, 'strerror', error)}") from error
    found = missing[-1].parent if missing else place
    if not found.is_dir() or not os.access(found, os.W_OK):
        reason = "is not writable" if found.is_dir() else "is a file"
        raise ValueError(f"{argument}={path!r} cannot be written: {str(found)!r} {reason}; name another")
    return place


def check_has_reward(reward_model: Any, has_functions: bool) -> None:
    """Raise a `ValueError` if there is neither a reward model nor a reward function."""
    if not has_functions and (reward_model is None or reward_model == []):
        raise ValueError("reward_model and reward_funcs are both None: pass one of them, or both")


def check_rows(dataset: Any, name: str, check_columns: Callable[[Sequence[str]], object] | None = None) -> None:
    """Check the type of a data set and its first row; streams are not read.

    Args:
        dataset: The user's data set.
        name: Its name in errors.
        check_columns: Checks the columns of a `datasets.Dataset`; None: one of them holds prompts.

    Raises:
        TypeError: It is no data set, or its first row is not a dict.
        ValueError: It has no rows, or a `datasets.Dataset` has no column with prompts.
    """
    if isinstance(dataset, datasets.IterableDataset | torch.utils.data.IterableDataset):
        return
    columns = columns_of(dataset, name)
    if isinstance(dataset, datasets.Dataset):
        (check_columns or partial(prompt_column, name=name))(columns)
    for column in ("image", "images"):  # TRL's names
        if column in columns:
            logger.warning(f"{name} has the column {column!r}: the policy reads text only, and never sees it.")


def check_datasets(args: PPOConfig, train_dataset: Any, eval_dataset: Any, needs_prompts: bool = True) -> None:
    """Check the types of the data sets, their first rows, and that evaluation has prompts.

    Args:
        args: The arguments.
        train_dataset: The training set.
        eval_dataset: The evaluation set, several by name, or None.
        needs_prompts: Whether a column holds prompts; environments need none.

    Raises:
        TypeError: A value is not a data set, or its rows are no dicts.
        ValueError: Prompts are missing.
    """
    if train_dataset is None:
        raise ValueError("train_dataset=None: pass the prompts to train on")
    if isinstance(train_dataset, NoPrompts) and args.num_generations > 1:
        raise ValueError(
            f"num_generations={args.num_generations} repeats the prompts of train_dataset, but there is none; leave "
            "it 1, and pass a query to step() as often as it has responses"
        )
    columns: Any = None if needs_prompts else list
    check_rows(train_dataset, "train_dataset", columns)
    if eval_dataset is None:
        evaluating = {
            f"eval_strategy={IntervalStrategy(args.eval_strategy).value!r}": args.eval_strategy != "no",
            "eval_on_start=True": args.eval_on_start,
        }
        if option := next((option for option, is_set in evaluating.items() if is_set), None):
            raise ValueError(f"{option} evaluates, but eval_dataset=None: pass the prompts to evaluate on")
    elif isinstance(eval_dataset, Mapping):
        for name, dataset in eval_dataset.items():
            check_rows(dataset, f"eval_dataset[{name!r}]", columns)
    else:
        check_rows(eval_dataset, "eval_dataset", columns)


def check_others(args: PPOConfig, optimizers: Any, kl_controller: Any, ptx_dataset: Any) -> None:
    """Check the remaining arguments.

    Args:
        args: The arguments.
        optimizers: See `rlhf_ppo.run.optimization.Optimizers`.
        kl_controller: A `KLController`, or None.
        ptx_dataset: Texts, if `args.ptx_coef` is above 0.

    Raises:
        ValueError: The scheduler belongs to another optimizer, the KL coefficient is negative or not finite, or texts
            are given without their coefficient, or the reverse.
    """
    check_pair(optimizers)
    if kl_controller is not None:
        check_coefficient(kl_controller)
    if (args.ptx_coef > 0) != (ptx_dataset is not None):
        raise ValueError(f"ptx_coef={args.ptx_coef} weighs a loss on ptx_dataset: set both, or neither")


def check_optimization(args: PPOConfig, optimizers: Sequence[Any], num_rows: int | None) -> None:
    """Check the sizes of the run, and that a given optimizer has its own rates.

    Args:
        args: The arguments.
        optimizers: Given optimizer and scheduler, or None.
        num_rows: Rows of the training set; None for a stream.

    Raises:
        ValueError: The sizes do not fit, or `critic_learning_rate` is given with an optimizer.
    """
    args.count_sizes(num_processes(args), num_rows)
    if optimizers[0] is not None and args.critic_learning_rate is not None:
        raise ValueError(
            f"critic_learning_rate={args.critic_learning_rate} is for the trainer's own optimizer, but optimizers[0] "
            "is given: set the rates of its groups"
        )


def check_critic_alone(args: PPOConfig, policy: nn.Module, value_model: nn.Module) -> None:
    """Check that the value model can learn alone, during critic warm-up.

    Raises:
        ValueError: It cannot.
    """
    if args.critic_warmup_steps == 0:
        return
    given = f"critic_warmup_steps={args.critic_warmup_steps} trains the value model alone"
    for rate in ("vf_coef", "critic_learning_rate"):
        if getattr(args, rate) == 0:
            raise ValueError(f"{given}, but with {rate}=0 it learns nothing; raise {rate}")
    own = {id(each) for each in value_model.parameters() if each.requires_grad}
    if not own - {id(each) for each in policy.parameters()}:
        raise ValueError(
            f"{given}, but it has no trainable parameters of its own; give it some (value_peft_config, or "
            f"requires_grad_ on its head), or set critic_warmup_steps=0"
        )
