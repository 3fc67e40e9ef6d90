"""Data sets of prompts, tokenized and checked once, and the batches made of them, padded on the left."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import datasets
import torch
from accelerate import PartialState
from torch import Tensor
from transformers import PreTrainedTokenizerBase
from transformers.trainer_utils import has_length

from rlhf_ppo.data.encoding import PromptEncoder, eos_id, no_row, prompt_column, real_tokens
from rlhf_ppo.terminal.foreign import visible_logger
from rlhf_ppo.terminal.quiet import bars_of_long_data

logger = visible_logger(__name__)


def num_rows(dataset: Any) -> int | None:
    """Return the number of rows, or None for a stream."""
    return len(dataset) if has_length(dataset) else None


def prepare_prompts(
    dataset: Any,
    tokenizer: PreTrainedTokenizerBase,
    *,
    max_prompt_length: int | None,
    num_proc: int | None,
    name: str,
    vocab_size: int | None = None,
    vocab_of: str = "the policy",
) -> Any:
    """Tokenize every prompt once, check every row, and drop the prompts that are too long.

    The prompt is taken from the first of these columns that exists: `input_ids` (token ids; where an `attention_mask`
    stands beside them only its real tokens count), `prompt` (text, or a conversation for the chat template), `text`.
    All other columns stay, for reward functions; a data set with `text` also gets it as `prompt`.

    Args:
        dataset: A `datasets.Dataset` or `IterableDataset`, a torch data set of either kind, or a list, of dict rows.
        tokenizer: The policy's tokenizer; its padding side and pad token are not used.
        max_prompt_length: Longest prompt to keep, in tokens; None keeps all.
        num_proc: Number of processes for a `datasets.Dataset`.
        name: What error messages call the data set, for example `train_dataset`.
        vocab_size: Number of ids that all models embed; None leaves the upper bound of ids unchecked.
        vocab_of: The model that embeds no more, for error messages.

    Returns:
        A data set of the same kind (a list for a torch map-style data set) whose rows have `input_ids: list[int]`.
        A stream is checked as its rows come, and has no length.

    Raises:
        TypeError: `dataset` is none of these kinds.
        ValueError: No column holds prompts, no row is left, or a row is neither text nor conversation nor ids, is
            empty, is a text that ends in EOS, holds an id that a model does not have, or is a conversation for
            which there is no chat template; names the row, counted from 0. `input_ids` that end in EOS are one warning
            with their number.
    """
    encode = PromptEncoder(tokenizer, name, vocab_size, vocab_of)
    fits = _LengthFilter(name, max_prompt_length, eos_id(tokenizer))
    if isinstance(dataset, datasets.Dataset):
        return _prepare_dataset(dataset, encode, fits, num_proc)
    if isinstance(dataset, datasets.IterableDataset):
        return _prepare_stream(dataset, encode, fits)
    if isinstance(dataset, torch.utils.data.IterableDataset):
        return _PromptStream(dataset, encode, fits)
    check_rows(dataset, name)
    rows = [encode.row(dataset[index], index) for index in range(len(dataset))]
    kept = [row for row in rows if fits(row["input_ids"])]
    fits.report(len(rows), len(kept))
    fits.report_ended(sum(fits.has_ended(row["input_ids"]) for row in kept), len(kept))
    return kept


def check_rows(dataset: Any, name: str) -> None:
    """Check that something is a data set of rows, by its type and its first row; a stream's is not read.

    Args:
        dataset: What the user passed.
        name: What error messages call it.

    Raises:
        TypeError: It is no data set, or its first row is no dict.
        ValueError: It has no rows, or a `datasets.Dataset` has no column with prompts.
    """
    if isinstance(dataset, datasets.IterableDataset | torch.utils.data.IterableDataset):
        return
    is_text = isinstance(dataset, str | bytes | Mapping)
    if is_text or not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
        fix = f"one of its entries {list(dataset)}" if isinstance(dataset, Mapping) else "a datasets.Dataset or a list"
        raise TypeError(f"{name} is a {type(dataset).__name__}: pass {fix}")
    if len(dataset) == 0:
        raise ValueError(f"{name} has no rows")
    if isinstance(dataset, datasets.Dataset):
        prompt_column(dataset.column_names, name)
    else:
        try:
            first = dataset[0]
        except Exception as error:  # a table of pandas has columns under its keys
            raise TypeError(
                f"{name} is a {type(dataset).__name__}, whose row 0 cannot be read ({error!r}): pass a list of dicts, "
                "or datasets.Dataset.from_pandas(table)"
            ) from error
        if not isinstance(first, Mapping):
            raise TypeError(no_row(first, 0, name))


def longest_prompt(dataset: Iterable[Mapping[str, Any]]) -> int:
    """Count the tokens of the longest prompt in a data set that `prepare_prompts` returned.

    Raises:
        TypeError: `dataset` is a stream; call `check_lengths` for each of its batches instead.
    """
    if isinstance(dataset, torch.utils.data.IterableDataset | datasets.IterableDataset):
        raise TypeError("the longest prompt of a stream is not known before its end; check each batch instead")
    rows = dataset.select_columns("input_ids") if isinstance(dataset, datasets.Dataset) else dataset
    return max(len(row["input_ids"]) for row in rows)  # pyright: ignore[reportCallIssue, reportArgumentType]


@dataclass(frozen=True)
class PromptCollator:
    """Puts prompts into one batch, padded on the left whatever the tokenizer's padding side.

    Attributes:
        pad_token_id: The id to fill with; it may equal EOS, as padding is told by the mask alone.
    """

    pad_token_id: int

    def __call__(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Collate rows.

        Args:
            rows: `B` rows with `input_ids`, and any other columns.

        Returns:
            `input_ids` and `attention_mask`, long `(B, C)`, and every other column as a list of `B` values (None where
            a row has no such column).
        """
        prompts = [real_tokens(row) for row in rows]
        others = dict.fromkeys(key for row in rows for key in row if key not in ("input_ids", "attention_mask"))
        return {
            "input_ids": left_padded(prompts, self.pad_token_id),
            "attention_mask": left_padded([[1] * len(ids) for ids in prompts], 0),
            **{key: [row.get(key) for row in rows] for key in others},
        }


def left_padded(rows: Sequence[Sequence[int]], value: int) -> Tensor:
    """Stack `B` lists of at most `C` integers into a long `(B, C)` tensor, filled with `value` on the left."""
    length = max(len(row) for row in rows)
    return torch.tensor([[value] * (length - len(row)) + list(row) for row in rows], dtype=torch.long)


class NoPrompts(torch.utils.data.IterableDataset[dict[str, Any]]):
    """Stands where the prompts of a trainer are that samples none."""

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return iter(())


@dataclass
class _LengthFilter:
    """Tells which prompts are short enough, and logs how many were not; and how many of those kept end in EOS."""

    name: str
    max_length: int | None
    eos_token_id: int | None
    dropped: int = field(default=0, init=False)
    ended: int = field(default=0, init=False)

    def __call__(self, ids: Sequence[int]) -> bool:
        return self.max_length is None or len(ids) <= self.max_length

    def streamed(self, ids: Sequence[int]) -> bool:
        """Tell the same in a stream, whose end never comes: log at 1, 2, 4, 8, ... dropped prompts."""
        fits = self(ids)
        self.dropped += not fits
        if not fits and self.dropped & (self.dropped - 1) == 0:
            logger.warning(f"{self.name}: dropped {self.dropped} prompts longer than {self.max_length} tokens so far")
        if fits and self.has_ended(ids):
            self.ended += 1
            if self.ended == 1:
                self._warn_of_ended("at least one prompt of the stream")
        return fits

    def has_ended(self, ids: Sequence[int]) -> bool:
        """Tell whether a prompt ends in EOS."""
        return self.eos_token_id is not None and ids[-1] == self.eos_token_id

    def report_ended(self, num_ended: int, num_rows: int) -> None:
        """Warn once if prompts end in EOS."""
        if num_ended > 0 and PartialState().is_main_process:
            self._warn_of_ended(f"{num_ended} of {num_rows} prompts")

    def _warn_of_ended(self, which: str) -> None:
        logger.warning(
            f"{self.name}: the input_ids of {which} end in the EOS token ({self.eos_token_id}), after which a model "
            "has learned to say nothing; leave EOS out of prompts"
        )

    def report(self, num_rows: int, num_kept: int) -> None:
        """Log how many of `num_rows` prompts were dropped; raise a ValueError if none is left."""
        if num_rows == 0:
            raise ValueError(f"{self.name} has no rows")
        if num_kept == 0:
            raise ValueError(
                f"all {num_rows} prompts of {self.name} are longer than max_prompt_length={self.max_length}: raise it"
            )
        if num_kept < num_rows and PartialState().is_main_process:
            dropped = num_rows - num_kept
            logger.warning(
                f"{self.name}: dropped {dropped} of {num_rows} prompts, longer than {self.max_length} tokens"
            )


class _PromptStream(torch.utils.data.IterableDataset[dict[str, Any]]):
    """A torch stream whose rows are encoded and checked as they come."""

    def __init__(self, dataset: Iterable[Mapping[str, Any]], encode: PromptEncoder, fits: _LengthFilter) -> None:
        self.dataset, self.encode, self.fits = dataset, encode, fits

    def __iter__(self) -> Iterator[dict[str, Any]]:
        rows = (self.encode.row(row, index) for index, row in enumerate(self.dataset))
        return (row for row in rows if self.fits.streamed(row["input_ids"]))

    def set_epoch(self, epoch: int) -> None:
        """Pass the epoch on, so that a stream that shuffles itself does so anew."""
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(epoch)  # pyright: ignore[reportAttributeAccessIssue]


def _prepare_dataset(
    dataset: datasets.Dataset, encode: PromptEncoder, fits: _LengthFilter, num_proc: int | None
) -> datasets.Dataset:
    if len(dataset) > 0:
        prompt_column(dataset.column_names, encode.name)
    with PartialState().local_main_process_first(), bars_of_long_data(len(dataset)):
        prompts = dataset.map(
            encode,
            with_indices=True,
            remove_columns=[column for column in dataset.column_names if column == "attention_mask"],
            num_proc=num_proc,
            desc=f"Tokenizing {encode.name}",
        )
        kept = prompts
        if fits.max_length is not None:
            kept = prompts.filter(fits, input_columns="input_ids", num_proc=num_proc, desc=f"Measuring {encode.name}")
    fits.report(len(prompts), len(kept))
    if "input_ids" in dataset.column_names:  # texts were refused
        batches = kept.select_columns("input_ids").iter(1000)
        num_ended = sum(fits.has_ended(ids) for batch in batches for ids in cast(Any, batch)["input_ids"])
        fits.report_ended(num_ended, len(kept))
    return kept


def _prepare_stream(
    dataset: datasets.IterableDataset, encode: PromptEncoder, fits: _LengthFilter
) -> datasets.IterableDataset:
    columns = dataset.column_names or list(next(iter(dataset), {}))
    prompt_column(columns, encode.name)
    masks = [column for column in columns if column == "attention_mask"]
    return dataset.map(encode, with_indices=True, remove_columns=masks).filter(
        fits.streamed, input_columns="input_ids"
    )
