"""Prompts: data sets tokenized and checked once, and left-padded batches of them."""

from __future__ import annotations

import functools
import itertools
import json
import operator
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn, TypeGuard, cast

import datasets
import torch
from accelerate import PartialState
from transformers import PreTrainedTokenizerBase, ProcessorMixin
from transformers.trainer_utils import has_length

from rlhf_ppo.data.images import IMAGE_COLUMNS, IMAGES_COLUMN, ImageChats, RowImages, image_blocks, images_of
from rlhf_ppo.data.rollout import left_padded
from rlhf_ppo.terminal import visible_logger

logger = visible_logger(__name__)

PROMPT_COLUMNS = ("input_ids", "prompt", "text")
TRAINER_COLUMNS = ("input_ids", "attention_mask", "prompt", "tools", "chat_template_kwargs", *IMAGE_COLUMNS)
"""Columns that the trainer reads."""

MARK = "answer-5f0c2d"
"""Content of a test message: it shows whether and where a chat template writes contents."""

Messages = Sequence[Mapping[str, Any]]
"""A conversation: messages with `role`, `content`, and what else its chat template reads."""
Prompt = str | Messages


@dataclass(frozen=True)
class PromptEncoder:
    """Tokenization and checks of a row's prompt.

    Attributes:
        tokenizer: The policy's tokenizer.
        name: Name of the data set in errors.
        vocab_size: Number of ids that all models embed, or None.
        vocab_of: The model with that vocabulary, for errors.
        template_kwargs: Further arguments of the chat template, or None.
        chats: Encodes conversations with images; None in a run without images.
    """

    tokenizer: PreTrainedTokenizerBase
    name: str
    vocab_size: int | None
    vocab_of: str = "the policy"
    template_kwargs: Mapping[str, Any] | None = None
    chats: ImageChats | None = None

    def check_prompt_column(self, columns: Sequence[str]) -> None:
        """Raise a `ValueError` if no column holds prompts."""
        prompt_column(columns, self.name)

    def row(self, row: Mapping[str, object], index: int) -> dict[str, Any]:
        """Return the row with the `input_ids` of its prompt, without `attention_mask`."""
        return {key: value for key, value in row.items() if key != "attention_mask"} | self(row, index)

    def __call__(self, row: Mapping[str, object], index: int) -> dict[str, Any]:
        """Return the new columns of a row: `input_ids`, and `prompt` if the prompt is in `text`."""
        column = prompt_column(row, self.name)
        shown = self.with_images(row, index)
        if shown is not None:
            ids = [*shown[0].ids]
        else:
            ids = self._declared(row, index) if column == "input_ids" else self._tokenized(row, column, index)
        self._check(ids, index, is_text=column != "input_ids")
        return {"input_ids": ids} | ({"prompt": row["text"]} if column == "text" else {})

    def with_images(self, row: Mapping[str, object], index: int = 0) -> tuple[RowImages, list[dict[str, Any]]] | None:
        """Encode a row of a data set with images; return its ids and images, and its conversation with them.

        Returns:
            None for a text as prompt, and in a run without images.
        """
        try:
            prompt, images = row.get("prompt"), images_of(row)
        except Exception as error:  # of Pillow, where `datasets` reads the column
            self._fail(index, f"has an image that cannot be read ({error})", "restore the file, or drop the row")
        blocks = image_blocks(prompt)
        if self.chats is not None and is_conversation(prompt):
            settings = self._settings(row, index)
            self._check_blocks(prompt, index, settings)
            try:
                return self.chats.encoded(without_none([*prompt]), images, settings)
            except Exception as error:
                fix = "give each image a readable file, and as many images as placeholders"
                self._fail(index, f"cannot be encoded with its images ({error})", fix)
        if images or blocks:
            fix = "make the prompt a conversation" if self.chats else "give train_dataset images too"
            self._fail(index, "has images, which cannot be read here", fix)
        return None

    def _declared(self, row: Mapping[str, object], index: int) -> list[int]:
        try:
            ids = real_tokens(row)
        except (TypeError, ValueError) as error:
            self._fail(index, f"has no valid input_ids ({error})", "give a list of ids, and a mask of its length")
        return ids if row.get("attention_mask") is not None else self._without_padding(ids)

    def _without_padding(self, ids: list[int]) -> list[int]:
        """Drop the runs of PAD at both ends, as TRL's PPO masks them, but keep a BOS that the tokenizer adds."""
        pad = pad_id(self.tokenizer)
        real = [place for place, token in enumerate(ids) if token != pad] or [len(ids)]
        start, end = real[0], real[-1] + 1
        if start > 0 and pad == self.tokenizer.bos_token_id and self._framed[:1] == [pad]:
            start -= 1
        if len(ids[start:end]) < len(ids):
            logger.warning_once(
                f"{self.name}: input_ids without attention_mask begin or end with the pad token ({pad}), which is "
                "left out as padding; keep the attention_mask, or tokenize with padding=False, if it is text"
            )
        return ids[start:end]

    def _tokenized(self, row: Mapping[str, object], column: str, index: int) -> list[int]:
        prompt = row[column]
        if prompt is None or isinstance(prompt, str):
            # BOS, which a tokenizer adds to "", would hide that the prompt is empty.
            ids = _as_list(self.tokenizer(prompt)["input_ids"]) if prompt and prompt.strip() else []
            return ids[:-1] if self._framed[-1:] == [eos_id(self.tokenizer)] else ids
        if is_conversation(prompt):
            return self._templated(prompt, index, self._settings(row, index))
        fix = "a prompt is a text or a list of messages {'role': ..., 'content': ...}"
        self._fail(index, f"has a prompt of type {type(prompt).__name__} ({prompt!r:.60})", fix)

    def _templated(self, messages: Messages, index: int, settings: Mapping[str, Any]) -> list[int]:
        if not renders_chats(self.tokenizer):
            fix = "set tokenizer.chat_template, load the tokenizer of a chat model, or give the prompt as text"
            self._fail(index, "is a conversation, and the tokenizer has no chat template", fix)
        self._check_blocks(messages, index, settings)
        try:
            shown = as_the_template_reads(messages, self.tokenizer, settings=settings)
            prefilled = shown[-1].get("role") == "assistant"
            encoded: Any = self.tokenizer.apply_chat_template(
                shown,
                add_generation_prompt=not prefilled,
                continue_final_message=prefilled,
                return_dict=True,
                **settings,
            )
        except Exception as error:
            self._fail(index, f"is rejected by the chat template ({error})", "give the messages that it takes")
        return _as_list(encoded["input_ids"])

    def _settings(self, row: Mapping[str, object], index: int) -> dict[str, Any]:
        try:
            return template_settings(row, self.template_kwargs)
        except (TypeError, ValueError) as error:
            fix = "give JSON schemas and template arguments as lists and dicts, or their JSON texts"
            self._fail(index, f"has tools or chat_template_kwargs that are not JSON ({error})", fix)

    def _check_blocks(self, messages: Messages, index: int, settings: Mapping[str, object] | None = None) -> None:
        """Check that no message holds an image, a sound or another block that the template drops without an error."""
        reader, known = (
            (self.tokenizer, ("text",)) if self.chats is None else (self.chats.processor, ("text", "image"))
        )
        contents = [(message["role"], message["content"]) for message in messages if message.get("content")]
        for role, content in contents:
            kinds = [block.get("type") for block in content if isinstance(block, Mapping)]
            for kind in [str(kind) for kind in kinds if kind not in (None, *known)]:
                is_media = kind.startswith(("image", "audio", "video"))
                if is_media or not _reads_blocks(reader, role, settings or {}, kind):
                    fix = "write text: policies read nothing else"
                    self._fail(index, f"holds a content block of type {kind!r}", fix)

    def _check(self, ids: list[int], index: int, is_text: bool) -> None:
        if not ids:
            self._fail(index, "has an empty prompt", "drop such rows, such as by datasets' `filter`")
        if is_text and ids[-1] == self.tokenizer.eos_token_id:
            fix = "leave EOS out of the prompt; a chat template must end in the opening of the assistant's turn"
            self._fail(index, f"ends in the EOS token ({ids[-1]}), so there is nothing to answer", fix)
        self._check_vocabulary(ids, index)

    def _check_vocabulary(self, ids: list[int], index: int) -> None:
        outside = min(ids) if min(ids) < 0 else max(ids)
        if outside < 0 or (self.vocab_size is not None and outside >= self.vocab_size):
            fix = "use the policy's own tokenizer, or resize_token_embeddings to the tokenizer's length"
            self._fail(index, f"holds the token id {outside}, outside {self.vocab_of}'s {self.vocab_size} ids", fix)

    @functools.cached_property
    def _framed(self) -> list[int]:
        """The ids of a text, with the BOS and EOS that the tokenizer adds."""
        return _as_list(self.tokenizer("a")["input_ids"])

    def _fail(self, index: int, problem: str, fix: str) -> NoReturn:
        raise ValueError(f"row {index} of {self.name} {problem}: {fix}")


def prompt_column(columns: Iterable[str], name: str) -> str:
    """Return the column of the prompts: the first of `PROMPT_COLUMNS` that exists.

    Raises:
        ValueError: None exists.
    """
    names = list(columns)
    for column in PROMPT_COLUMNS:
        if column in names:
            return column
    raise ValueError(
        f"{name} has the columns {names}, but none of `prompt` (text or conversation), `text` (text) or `input_ids` "
        "(token ids): rename the column that holds the prompts, or name it with --prompt_column of `train` and `init`"
    )


def eos_id(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """Return the id of EOS, or None without one."""
    return cast("int | None", tokenizer.eos_token_id)


def pad_id(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """Return the id of PAD, or None without one."""
    return cast("int | None", tokenizer.pad_token_id)


def written_texts(tokenizer: PreTrainedTokenizerBase, rows: list[list[int]], **options: bool) -> list[str]:
    """Return the texts of rows of token ids as they were written: some tokenizers drop spaces before punctuation.

    Args:
        tokenizer: The tokenizer.
        rows: Token ids.
        options: Those of `batch_decode`.
    """
    return tokenizer.batch_decode(rows, clean_up_tokenization_spaces=False, **options)


def is_conversation(prompt: object) -> TypeGuard[Sequence[Mapping[str, Any]]]:
    """Return whether a prompt is a non-empty list of messages, dicts with a `role`."""
    return isinstance(prompt, list | tuple) and bool(prompt) and isinstance(prompt[0], Mapping) and "role" in prompt[0]


def template_settings(row: Mapping[str, Any], defaults: Mapping[str, object] | None = None) -> dict[str, Any]:
    """Return further arguments of the chat template for a row: those of the row, in TRL's columns, win.

    Args:
        row: The row, perhaps with `tools`, a list or its JSON text, and
            `chat_template_kwargs`, a dict or its JSON text.
        defaults: The arguments for all rows, or None.

    Raises:
        ValueError: One of them is a text that is not JSON.
    """
    tools, others = row.get("tools"), row.get("chat_template_kwargs")
    tools = json.loads(tools) if isinstance(tools, str) else without_none(tools)  # nulls of JSON text are the schema's
    others = json.loads(others) if isinstance(others, str) else others
    of_row = {"tools": tools, **(others or {})}
    return {**(defaults or {}), **{key: value for key, value in of_row.items() if value is not None}}


def as_the_template_reads(
    messages: Messages,
    tokenizer: PreTrainedTokenizerBase,
    chat_template: str | None = None,
    settings: Mapping[str, object] | None = None,
) -> list[dict[str, Any]]:
    """Drop keys that are None, at any depth, and join blocks of text that the chat template cannot read.

    Arrow gives every dict the keys of all rows, also a call's arguments, and templates write what is there. For a list
    of blocks some templates write nothing, and some write the list as Python prints it. The printed list of a tool's
    answer stays, as in TRL.

    Args:
        messages: The conversation.
        tokenizer: Its template is used.
        chat_template: Another template, or None.
        settings: Further arguments of the template, or None.

    Raises:
        ValueError: Such a list holds something other than text.
    """
    shown: list[dict[str, Any]] = without_none(list(messages))
    how = {"chat_template": chat_template, **(settings or {})}
    for message in shown:
        if isinstance(message.get("content"), list) and not _reads_blocks(tokenizer, message["role"], how):
            message["content"] = text_of_content(message["content"])
    return shown


def without_none(value: Any) -> Any:
    """Return nested lists and dicts without the keys of dicts whose value is None."""
    if isinstance(value, Mapping):
        return {key: without_none(inner) for key, inner in value.items() if inner is not None}  # pyright: ignore
    return [without_none(inner) for inner in value] if isinstance(value, list) else value  # pyright: ignore


def renders_chats(tokenizer: Any) -> bool:
    """Return whether a tokenizer renders conversations: with a chat template or, as mistral-common's, with code."""
    if tokenizer.chat_template is not None:
        return True
    try:
        return bool(tokenizer.apply_chat_template([{"role": "user", "content": "dummy"}]))
    except Exception:  # transformers', without a template
        return False


def is_special(tokenizer: PreTrainedTokenizerBase, token: int) -> bool:
    """Return whether the text without special tokens leaves a token out; not all tokenizers list their tokens."""
    return tokenizer.decode([token], skip_special_tokens=True) != tokenizer.decode([token])


def silent_ids(tokenizer: PreTrainedTokenizerBase, stops: Sequence[int] = ()) -> frozenset[int]:
    """Return the special tokens that a response's text leaves out: EOS, PAD and other roles, and stop tokens.

    Other special tokens, such as an added `<think>`, are the response's text.

    Args:
        tokenizer: The policy's tokenizer.
        stops: The stop tokens.
    """
    names = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")
    roles = {getattr(tokenizer, f"{name}_token_id", None) for name in names}
    return frozenset(token for token in roles | {*stops} if token is not None and is_special(tokenizer, token))


def spoken_texts(
    tokenizer: PreTrainedTokenizerBase, rows: Sequence[Sequence[int]], silent: Collection[int], **options: bool
) -> list[str]:
    """Return the texts of responses, without their `silent_ids`; `options` are those of `written_texts`."""
    return written_texts(tokenizer, [[token for token in ids if token not in silent] for ids in rows], **options)


def _reads_blocks(
    tokenizer: PreTrainedTokenizerBase | ProcessorMixin, role: str, how: Mapping[str, Any], kind: str = "text"
) -> bool:
    """Return whether the chat template writes the content of a message's blocks of a type."""
    asked: dict[str, Any] = {"role": "user", "content": "dummy"}
    call = {"type": "function", "function": {"name": "dummy", "arguments": {}}}
    calling = {"role": "assistant", "content": "", "tool_calls": [call]}
    before = {"assistant": [asked], "tool": [asked, calling]}.get(role, [])
    tested = {"role": role, "name": "dummy", "content": [{"type": kind, kind: MARK}]}
    try:
        text = str(tokenizer.apply_chat_template([*before, tested], tokenize=False, **how))
    except Exception:  # the template joins contents as texts
        return False
    is_printed = repr(MARK) in text and role != "tool"  # TRL's agents read the printed list
    return MARK in text and not is_printed


def turn_end(tokenizer: PreTrainedTokenizerBase, settings: Mapping[str, Any] | None = None) -> int | None:
    """Return the special token that the chat template writes after an answer, or None.

    Args:
        tokenizer: The policy's tokenizer, with a chat template.
        settings: Further arguments of the template, or None.
    """
    answered: list[Any] = [{"role": "user", "content": "dummy"}, {"role": "assistant", "content": MARK}]
    try:
        text = str(tokenizer.apply_chat_template(answered, tokenize=False, **(settings or {})))
    except Exception:  # the template needs other messages
        return None
    following = _as_list(tokenizer(text.partition(MARK)[2], add_special_tokens=False)["input_ids"])
    return following[0] if following and is_special(tokenizer, following[0]) else None


def text_of_content(content: Any) -> str:
    """Return the text of a message's content.

    Raises:
        ValueError: It holds something other than text.
    """
    if isinstance(content, str):
        return content
    blocks = [part for part in content if isinstance(part, Mapping) and "type" in part]
    if not blocks:
        return str(content)
    if others := [part["type"] for part in blocks if part["type"] != "text"]:
        raise ValueError(f"a message holds a content block of type {others[0]!r}: only text can be read here")
    return "".join(str(part.get("text", "")) for part in blocks)


def real_tokens(row: Mapping[str, object]) -> list[int]:
    """Return a row's `input_ids`; with an `attention_mask`, only the ids that it marks.

    Raises:
        TypeError: `input_ids` are not integers.
        ValueError: The mask has another length.
    """
    ids = [operator.index(token) for token in _as_list(row["input_ids"])]
    if row.get("attention_mask") is None:
        return ids
    mask = _as_list(row["attention_mask"])
    if len(mask) != len(ids):
        raise ValueError(f"attention_mask has {len(mask)} values for {len(ids)} input_ids")
    return list(itertools.compress(ids, mask))


def _as_list(ids: Any) -> list[int]:
    return ids.tolist() if hasattr(ids, "tolist") else list(ids)


def num_rows(dataset: Any) -> int | None:
    """Return the number of rows, or None for a stream."""
    return len(dataset) if has_length(dataset) else None


def may_hold_chats(*sets: Any) -> bool:
    """Return whether the first row of a data set, or of a dict of them, is a conversation; streams may hold some."""
    parts = [part for one in sets for part in (one.values() if isinstance(one, Mapping) else [one])]
    return any(num_rows(part) is None or is_conversation(part[0].get("prompt")) for part in parts if part is not None)


def prepare_prompts(
    dataset: Any, encode: PromptEncoder, max_prompt_length: int | None = None, num_proc: int | None = None
) -> Any:
    """Tokenize every prompt once, check every row, and drop the prompts that are too long.

    The prompt is in the first of these columns that exists: `input_ids` (token ids; with an `attention_mask`, its real
    tokens), `prompt` (text, or a conversation for the chat template), `text`. All other columns stay, for reward
    functions; `text` is copied to `prompt`.

    Args:
        dataset: A `datasets.Dataset` or `IterableDataset`, a torch data set of either kind, or a list, of dict rows.
        encode: Tokenizes a row, and names the data set.
        max_prompt_length: Longest prompt to keep, in tokens; None keeps all.
        num_proc: Number of processes for a `datasets.Dataset`.

    Returns:
        A data set of the same kind (a list for a torch map-style data set) whose rows have `input_ids: list[int]`.
        Rows of a stream are checked when read; it has no length.

    Raises:
        ValueError: No column holds prompts, no row is left, or a row (named, from 0) is invalid: neither text nor
            conversation nor ids, empty, a text that ends in EOS, with an id outside the vocabulary, or a conversation
            without a chat template. `input_ids` that end in EOS are only counted in a warning.
    """
    fits = _LengthFilter(encode.name, max_prompt_length, eos_id(encode.tokenizer))
    if isinstance(dataset, datasets.Dataset):
        return _prepare_dataset(dataset, encode, fits, num_proc)
    if isinstance(dataset, datasets.IterableDataset):
        return _prepare_stream(dataset, encode, fits)
    if isinstance(dataset, torch.utils.data.IterableDataset):
        return _PromptStream(dataset, encode, fits)
    columns_of(dataset, encode.name)
    rows = [encode.row(dataset[index], index) for index in range(len(dataset))]
    kept = [row for row in rows if fits(row["input_ids"])]
    fits.report(len(rows), len(kept), sum(fits.has_ended(row["input_ids"]) for row in kept))
    return kept


def columns_of(dataset: Any, name: str) -> list[str]:
    """Return the columns of a data set, of its first row if it has no list of them.

    Args:
        dataset: The user's data set, no stream.
        name: Its name in errors.

    Raises:
        ValueError: It is not a data set, has no rows, or its first row is not a dict.
    """
    is_readable = hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")
    if not is_readable or isinstance(dataset, Mapping | str) or hasattr(dataset, "iloc"):  # pandas
        problem = f"is of type {type(dataset).__name__}"
    elif len(dataset) == 0:
        problem = "has no rows"
    elif isinstance(dataset, datasets.Dataset):
        return list(dataset.features)
    elif isinstance(first := dataset[0], Mapping):
        return list(first)
    else:
        problem = f"has rows of type {type(first).__name__} ({first!r:.60})"
    raise ValueError(f"{name} {problem}: give a data set with rows such as {{'prompt': 'Once upon a time'}}")


@dataclass(frozen=True)
class PromptCollator:
    """Collator that pads prompts on the left, whatever the tokenizer's padding side.

    Attributes:
        pad_token_id: Id of the padding; it may equal EOS, since only the mask marks padding.
    """

    pad_token_id: int

    def __call__(self, rows: Sequence[Mapping[str, object]]) -> dict[str, Any]:
        """Collate rows.

        Args:
            rows: `B` rows with `input_ids`, and any other columns.

        Returns:
            `input_ids` and `attention_mask`, long `(B, C)`, and every other column as a list of `B` values, None for
            rows without it.
        """
        prompts = [real_tokens(row) for row in rows]
        others = dict.fromkeys(key for row in rows for key in row if key not in ("input_ids", "attention_mask"))
        return {
            "input_ids": left_padded(prompts, self.pad_token_id),
            "attention_mask": left_padded([[1] * len(ids) for ids in prompts], 0),
            **{key: [row.get(key) for row in rows] for key in others},
        }


@dataclass(frozen=True)
class ImageCollator:
    """Collator that adds each row's images, in the column `IMAGES_COLUMN` and in the conversation.

    Attributes:
        collate: Makes the rest of the batch.
        encode: Encodes the conversations.
    """

    collate: Callable[[Sequence[Mapping[str, Any]]], Mapping[str, Any]]
    encode: PromptEncoder

    def __call__(self, rows: Sequence[Mapping[str, object]]) -> dict[str, Any]:
        """Collate rows with `input_ids`."""
        chats: Any = self.encode.chats
        encoded = [self.encode.with_images(row) or (chats.of_ids(real_tokens(row)), row.get("prompt")) for row in rows]
        images, prompts = zip(*encoded, strict=True)
        return {**self.collate(rows), "prompt": [*prompts], IMAGES_COLUMN: [*images]}


class NoPrompts(torch.utils.data.IterableDataset[dict[str, Any]]):
    """Placeholder for the prompts of a trainer that receives responses."""

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return iter(())


@dataclass
class _LengthFilter:
    """Filter for long prompts; it logs how many it dropped, and how many of the others end in EOS."""

    name: str
    max_length: int | None
    eos_token_id: int | None
    dropped: int = field(default=0, init=False)
    ended: int = field(default=0, init=False)

    def __call__(self, ids: Sequence[int]) -> bool:
        return self.max_length is None or len(ids) <= self.max_length

    def streamed(self, ids: Sequence[int]) -> bool:
        """Return whether a prompt of a stream is short enough; log at 1, 2, 4, 8, ... dropped prompts."""
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
        """Return whether a prompt ends in EOS."""
        return self.eos_token_id is not None and ids[-1] == self.eos_token_id

    def _warn_of_ended(self, which: str) -> None:
        logger.warning(
            f"{self.name}: the input_ids of {which} end in the EOS token ({self.eos_token_id}), after which a model "
            "has learned to say nothing; leave EOS out of prompts"
        )

    def report(self, num_rows: int, num_kept: int, num_ended: int) -> None:
        """Log how many of `num_rows` prompts were dropped, and how many end in EOS.

        Raises:
            ValueError: No prompt is short enough.
        """
        if num_kept == 0:
            raise ValueError(
                f"all {num_rows} prompts of {self.name} are longer than max_prompt_length={self.max_length} tokens: "
                "raise it, or shorten the prompts"
            )
        if not PartialState().is_main_process:
            return
        if dropped := num_rows - num_kept:
            logger.warning(
                f"{self.name}: dropped {dropped} of {num_rows} prompts, longer than {self.max_length} tokens"
            )
        if num_ended > 0:
            self._warn_of_ended(f"{num_ended} of {num_kept} prompts")


class _PromptStream(torch.utils.data.IterableDataset[dict[str, Any]]):
    """A torch stream whose rows are encoded and checked when read."""

    def __init__(self, dataset: Iterable[Mapping[str, object]], encode: PromptEncoder, fits: _LengthFilter) -> None:
        self.dataset, self.encode, self.fits = dataset, encode, fits

    def __iter__(self) -> Iterator[dict[str, Any]]:
        rows = (self.encode.row(row, index) for index, row in enumerate(self.dataset))
        return (row for row in rows if self.fits.streamed(row["input_ids"]))

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the wrapped stream, which may shuffle by it."""
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(epoch)  # pyright: ignore[reportAttributeAccessIssue]


def _prepare_dataset(
    dataset: datasets.Dataset, encode: PromptEncoder, fits: _LengthFilter, num_proc: int | None
) -> datasets.Dataset:
    if len(dataset) > 0:
        encode.check_prompt_column(dataset.column_names)
    dropped = ["attention_mask"] if "attention_mask" in dataset.column_names else []
    with PartialState().local_main_process_first():
        prompts = dataset.map(
            encode,
            with_indices=True,
            remove_columns=dataset.column_names if encode.chats else dropped,  # `map` would compress images again
            num_proc=num_proc,
            desc=f"Tokenizing {encode.name}",
        )
        if encode.chats:
            others = dataset.remove_columns([*dropped, *({*prompts.column_names} & {*dataset.column_names})])
            prompts = datasets.concatenate_datasets([others, prompts], axis=1)
        kept = prompts
        if fits.max_length is not None:
            kept = prompts.filter(fits, input_columns="input_ids", num_proc=num_proc, desc=f"Measuring {encode.name}")
    num_ended = 0
    if "input_ids" in dataset.column_names:  # texts that end in EOS are errors
        batches: Any = kept.select_columns("input_ids").iter(1000)
        num_ended = sum(fits.has_ended(ids) for batch in batches for ids in batch["input_ids"])
    fits.report(len(prompts), len(kept), num_ended)
    return kept


def _prepare_stream(
    dataset: datasets.IterableDataset, encode: PromptEncoder, fits: _LengthFilter
) -> datasets.IterableDataset:
    columns = dataset.column_names or list(next(iter(dataset), {}))
    encode.check_prompt_column(columns)
    masks = ["attention_mask"] if "attention_mask" in columns else []
    return dataset.map(encode, with_indices=True, remove_columns=masks).filter(
        fits.streamed, input_columns="input_ids"
    )
