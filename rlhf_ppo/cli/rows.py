"""The rows that AITraining's parameters name, with the columns that the trainers read."""

from __future__ import annotations

from typing import Any

from transformers import TrainingArguments

from rlhf_ppo.cli.sources import choose_split, load_splits
from rlhf_ppo.compat.params import LLMTrainingParams
from rlhf_ppo.terminal.foreign import visible_logger

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
    """Repeat prompts, in their order, where there are fewer than one update takes; says so once.

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
    """Leave the warm-up out of a run in which it is shorter than one update, which would be trained at rate 0.

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
    """Choose the columns that the trainer reads.

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
    """Take the first rows only, where wanted, and give the columns their names."""
    if params.max_samples is not None:
        dataset = dataset.select(range(min(params.max_samples, len(dataset))))
    names = wanted_columns(dataset.column_names, params)
    others = [column for column in dataset.column_names if column not in names.values()]
    alone = bool(names) and params.trainer != "ppo"  # TRL would read a `prompt` beside the text as half of a pair
    taken = [column for column in others if column in names or alone]
    dataset = dataset.remove_columns(taken)
    return dataset.rename_columns({old: new for new, old in names.items() if old != new})
