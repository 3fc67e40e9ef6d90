"""The data sets of a trainer: prompts prepared for its models, and columns that its rewards will find."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from datasets import Dataset
from transformers import PreTrainedTokenizerBase

from rlhf_ppo.config import PPOConfig
from rlhf_ppo.data.datasets import longest_prompt, num_rows, prepare_prompts
from rlhf_ppo.data.encoding import PROMPT_COLUMNS, prompt_column
from rlhf_ppo.data.lengths import PositionLimit, check_lengths
from rlhf_ppo.models.vocabulary import Vocabulary


@dataclass(frozen=True)
class PromptPreparation:
    """How data sets are tokenized and checked.

    Attributes:
        tokenizer: The policy's tokenizer.
        args: Gives `max_prompt_length`, `dataset_num_proc` and `response_length`.
        vocabulary: The ids that all models embed.
        limit: Longest sequence that the models can place; None if there is no limit.
        columns_are_read: Whether a reward reads columns beside the prompts; they are left out where none does, so
            that they are not copied along.
    """

    tokenizer: PreTrainedTokenizerBase
    args: PPOConfig
    vocabulary: Vocabulary
    limit: PositionLimit | None
    columns_are_read: bool = True

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
        if num_rows(rows) is not None:
            check_lengths(longest_prompt(rows), args.response_length, self.limit)
        return rows
