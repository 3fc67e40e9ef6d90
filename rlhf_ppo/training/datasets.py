"""The data sets of a trainer: prompts prepared for its models, and columns that its rewards will find."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from datasets import Dataset
from transformers import PreTrainedTokenizerBase

from rlhf_ppo.config import PPOConfig
from rlhf_ppo.config.sizes import Sizes
from rlhf_ppo.data.datasets import longest_prompt, num_rows, prepare_prompts
from rlhf_ppo.data.encoding import PROMPT_COLUMNS, prompt_column
from rlhf_ppo.data.lengths import PositionLimit, check_lengths, smallest
from rlhf_ppo.evaluation.best_metric import check_best_metric
from rlhf_ppo.generation.protocol import GenerationEngine
from rlhf_ppo.generation.vllm import longest_colocated
from rlhf_ppo.models.reference import Reference
from rlhf_ppo.models.vocabulary import Vocabulary
from rlhf_ppo.rewards.functions import check_columns, check_names_of_columns
from rlhf_ppo.rewards.preference import OPPONENT_COLUMNS
from rlhf_ppo.rewards.scorer import RewardSource, Scorer
from rlhf_ppo.training.checks import check_collator


class TrainerOfData(Protocol):
    """What is read of a trainer whose data sets are checked."""

    args: PPOConfig
    eval_dataset: Any
    reference: Reference | None
    scorer: Scorer
    sizes: Sizes
    train_dataset: Any
    _as_given: dict[str, Any]

    @property
    def _functions(self) -> Sequence[Callable[..., Any]]: ...

    def _get_collator_with_removed_columns(self, data_collator: Any, description: str | None = None) -> Any: ...


def check_all_data(
    run: TrainerOfData, data_collator: Callable[..., Any] | None, is_evaluated_otherwise: bool
) -> ColumnCheck:
    """Check that what reads the data's columns, and what compares models by a metric, will find it.

    Args:
        run: The trainer.
        data_collator: The user's collator, which may add columns, or None.
        is_evaluated_otherwise: Whether an overridden evaluation may give other metrics.

    Returns:
        The check of columns, for data sets that come later.
    """
    collate = data_collator and run._get_collator_with_removed_columns(data_collator, "checking")
    check_data(run._functions, collate, run.sizes.local_batch_size, run.train_dataset, run.eval_dataset)
    check = ColumnCheck(run.scorer.sources, is_off=data_collator is not None)
    check(eval_dataset=run.eval_dataset)
    if not is_evaluated_otherwise:
        given = (run.args, run.scorer.names, run._functions, run.eval_dataset, run.reference is not None)
        check_best_metric(*given, callbacks_may_log=bool(run._as_given["callbacks"]))
    return check


def check_data(
    functions: Sequence[Callable[..., Any]],
    collate: Callable[..., Any] | None,
    num_checked: int,
    train_dataset: Any,
    eval_dataset: Any,
) -> None:
    """Check that the names of the columns are those that reward functions take, and what a collator makes of rows.

    Args:
        functions: The reward functions.
        collate: The user's collator; None for PPO's own.
        num_checked: Rows of an update, of which one batch is made.
        train_dataset: The training set.
        eval_dataset: The evaluation set or sets, or None.

    Raises:
        TypeError: The collator returned something else than prompts.
        ValueError: A column cannot be a function's argument.
    """
    if functions:
        check_names_of_columns(train_dataset=train_dataset, eval_dataset=eval_dataset)
    if collate is not None and (length := num_rows(train_dataset)):
        check_collator(collate, [train_dataset[row] for row in range(min(length, num_checked))])


@dataclass(frozen=True)
class ColumnCheck:
    """Whether data sets have the columns that rewards read.

    Attributes:
        sources: The reward sources.
        is_off: Whether columns may come from elsewhere.
    """

    sources: Mapping[str, RewardSource]
    is_off: bool

    def __call__(self, **datasets: Any) -> None:
        """Check data sets, given by their arguments' names.

        Raises:
            ValueError: A column is missing.
        """
        if not self.is_off:
            check_columns(self.sources.values(), OPPONENT_COLUMNS.values(), **datasets)


@dataclass(frozen=True)
class PromptPreparation:
    """How data sets are tokenized and checked.

    Attributes:
        tokenizer: The policy's tokenizer.
        args: Gives `max_prompt_length`, `dataset_num_proc` and `response_length`.
        vocabulary: The ids that all models embed.
        limit: Longest sequence that the models, and an engine that has started, can place; None if there is no limit.
        columns_are_read: Whether a reward reads columns beside the prompts; they are left out where none does, so
            that they are not copied along.
    """

    tokenizer: PreTrainedTokenizerBase
    args: PPOConfig
    vocabulary: Vocabulary
    limit: PositionLimit | None
    columns_are_read: bool = True

    def both(self, train_dataset: Any, eval_dataset: Any) -> dict[str, Any]:
        """Prepare the data sets of a trainer, by their arguments' names; an evaluation set may be None."""
        train_dataset = self.prepared(train_dataset, "train_dataset")
        evaluated = None if eval_dataset is None else self.prepared(eval_dataset, "eval_dataset")
        return {"train_dataset": train_dataset, "eval_dataset": evaluated}

    def prepared(self, dataset: Any, name: str) -> Any:
        """Tokenize and check a data set, or each of a dict of them.

        Args:
            dataset: What the user passed.
            name: What error messages call it.

        Returns:
            Rows with `input_ids`.

        Raises:
            ValueError: A row is wrong, or prompt and response exceed the positions. Streams are checked as they come.
        """
        if isinstance(dataset, Mapping):
            return {key: self.prepared(value, f"{name}[{key!r}]") for key, value in dataset.items()}
        args = self.args
        if isinstance(dataset, Dataset) and args.remove_unused_columns and not self.columns_are_read:
            used = {*PROMPT_COLUMNS, "attention_mask", args.length_column_name}
            prompt_column(dataset.column_names, name)
            dataset = dataset.select_columns([column for column in dataset.column_names if column in used])
        rows: Any = prepare_prompts(
            dataset,
            self.tokenizer,
            max_prompt_length=args.max_prompt_length,
            num_proc=args.dataset_num_proc,
            name=name,
            vocab_size=self.vocabulary.size,
            vocab_of=self.vocabulary.limited_by,
        )
        self._check_lengths(rows)
        return rows

    @property
    def longest_sequence(self) -> PositionLimit | None:
        """Longest sequence that the models and the engine can place, as far as is known by now."""
        return smallest((self.limit, longest_colocated(self.args)))

    def within(self, engine: GenerationEngine, *datasets: Any) -> PromptPreparation:
        """Return the preparation for an engine that has started.

        Args:
            engine: It may say the longest sequence that it can place, as `longest_sequence`.
            *datasets: The data sets that were prepared before; None and dicts of them are allowed.

        Raises:
            ValueError: A prompt and its response exceed that limit.
        """
        preparation = replace(self, limit=smallest((self.limit, getattr(engine, "longest_sequence", None))))
        if preparation.longest_sequence != self.longest_sequence:
            for dataset in datasets:
                for rows in dataset.values() if isinstance(dataset, Mapping) else [dataset]:
                    preparation._check_lengths(rows)
        return preparation

    def _check_lengths(self, rows: Any) -> None:
        if rows is not None and num_rows(rows) is not None:
            check_lengths(longest_prompt(rows), self.args.response_length, self.longest_sequence)
