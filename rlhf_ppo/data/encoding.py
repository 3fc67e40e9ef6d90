"""One prompt: from a row with text, a conversation or token ids to checked token ids."""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, TypeGuard

from transformers import PreTrainedTokenizerBase

PROMPT_COLUMNS = ("input_ids", "prompt", "text")


@dataclass(frozen=True)
class PromptEncoder:
    """Turns one row of a data set into a checked prompt.

    Attributes:
        tokenizer: The policy's tokenizer.
        name: What error messages call the data set.
        vocab_size: Number of ids that all models embed, or None.
        vocab_of: The model that embeds no more, for error messages.
    """

    tokenizer: PreTrainedTokenizerBase
    name: str
    vocab_size: int | None
    vocab_of: str = "the policy"

    def row(self, row: Mapping[str, Any], index: int) -> dict[str, Any]:
        """Return the whole row with its prompt's `input_ids`, without `attention_mask`."""
        if not isinstance(row, Mapping):
            raise TypeError(no_row(row, index, self.name))
        return {key: value for key, value in row.items() if key != "attention_mask"} | self(row, index)

    def __call__(self, row: Mapping[str, Any], index: int) -> dict[str, Any]:
        """Return the new columns of a row: `input_ids`, and `prompt` where the prompt is in `text`."""
        column = prompt_column(row, self.name)
        ids = self._declared(row, index) if column == "input_ids" else self._tokenized(row[column], index)
        self._check(ids, index, is_text=column != "input_ids")
        return {"input_ids": ids} | ({"prompt": row["text"]} if column == "text" else {})

    def _declared(self, row: Mapping[str, Any], index: int) -> list[int]:
        try:
            ids = real_tokens(row)
        except (TypeError, ValueError) as error:
            self._fail(index, f"has no valid input_ids ({error})", "give a list of ids, and a mask of its length")
        tokenizer, pad = self.tokenizer, self.tokenizer.pad_token_id
        other_use = pad in (None, tokenizer.eos_token_id, tokenizer.bos_token_id, tokenizer.unk_token_id)
        if not other_use and pad in ids[:1] + ids[-1:] and row.get("attention_mask") is None:
            fix = "tokenize with padding=False, or keep the attention_mask"
            self._fail(index, f"begins or ends with the pad token ({pad}) and has no attention_mask", fix)
        return ids

    def _tokenized(self, prompt: Any, index: int) -> list[int]:
        if isinstance(prompt, str):
            # What a tokenizer adds to "" (BOS) would hide that nothing was asked.
            ids = self._of_text(prompt, index) if prompt.strip() else []
            return ids[:-1] if self._appends_eos else ids
        if is_conversation(prompt):
            return self._templated(prompt, index)
        fix = "a prompt is a text or a list of messages {'role': ..., 'content': ...}"
        self._fail(index, f"has a prompt of type {type(prompt).__name__} ({prompt!r:.60})", fix)

    def _of_text(self, prompt: str, index: int) -> list[int]:
        try:
            return _as_list(self.tokenizer(prompt)["input_ids"])
        except (TypeError, UnicodeError) as error:  # tokenizers takes what is no UTF-8 for another type
            fix = "it may hold half of a surrogate pair; read the data with errors='replace'"
            self._fail(index, f"has a prompt that the tokenizer cannot read ({prompt!r:.60}; {error})", fix)

    def _templated(self, messages: Sequence[Mapping[str, Any]], index: int) -> list[int]:
        if self.tokenizer.chat_template is None:
            fix = "set tokenizer.chat_template, load the tokenizer of a chat model, or give the prompt as text"
            self._fail(index, "is a conversation, and the tokenizer has no chat template", fix)
        # Arrow gives every message the union of all messages' keys, and templates ask whether a key is defined; the
        # oldest supported transformers passes a None on.
        given = [{key: value for key, value in message.items() if value is not None} for message in messages]
        prefilled = given[-1].get("role") == "assistant"
        try:
            encoded = self.tokenizer.apply_chat_template(
                given, add_generation_prompt=not prefilled, continue_final_message=prefilled, return_dict=True
            )
        except Exception as error:
            raise ValueError(f"row {index} of {self.name}: the chat template rejects it: {error}") from error
        return _as_list(ids_of(encoded))

    def _check(self, ids: list[int], index: int, is_text: bool) -> None:
        if not ids:
            self._fail(index, "is empty", "drop such rows")
        if {*ids} <= self._says_nothing:
            self._fail(index, f"holds nothing but BOS and PAD ({ids[:4]})", "drop such rows, or ask for something")
        if is_text and ids[-1] == self.tokenizer.eos_token_id:
            fix = "leave EOS out of the prompt; a chat template must end in the opening of the assistant's turn"
            self._fail(index, f"ends in the EOS token ({ids[-1]}), after which nothing is to be said", fix)
        outside = min(ids) if min(ids) < 0 else max(ids)
        if outside < 0 or (self.vocab_size is not None and outside >= self.vocab_size):
            fix = "use the policy's own tokenizer, or resize_token_embeddings to the tokenizer's length"
            self._fail(index, f"holds the token id {outside}, outside {self.vocab_of}'s {self.vocab_size} ids", fix)

    @functools.cached_property
    def _says_nothing(self) -> set[int | None]:
        tokenizer = self.tokenizer
        is_word = str(tokenizer.pad_token).isalnum()  # some take a word that texts have for padding
        pad = set() if is_word else {pad_id(tokenizer)}
        bos = _one_id("bos_token_id", tokenizer.bos_token_id)
        return (pad | {bos}) - {_one_id("unk_token_id", tokenizer.unk_token_id)}

    @functools.cached_property
    def _appends_eos(self) -> bool:
        eos = self.tokenizer.eos_token_id
        return eos is not None and _as_list(self.tokenizer("a")["input_ids"])[-1:] == [eos]

    def _fail(self, index: int, problem: str, fix: str) -> NoReturn:
        raise ValueError(f"row {index} of {self.name} {problem}: {fix}")


def no_row(row: Any, index: int, name: str) -> str:
    """Say that a row is none."""
    return f"row {index} of {name} is {row!r:.60} ({type(row).__name__}): a row is a dict such as {{'prompt': ...}}"


def prompt_column(columns: Iterable[str], name: str) -> str:
    """Return the column that holds the prompts: the first of `input_ids`, `prompt`, `text` that exists.

    Raises:
        ValueError: None of them exists.
    """
    found = list(columns)
    for column in PROMPT_COLUMNS:
        if column in found:
            return column
    raise ValueError(
        f"{name} has the columns {found}, but none of `prompt` (text or conversation), `text` (text) or `input_ids` "
        "(token ids): rename the column that holds the prompts"
    )


def eos_id(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """Return the id of the token that ends a text, if the tokenizer has one."""
    return _one_id("eos_token_id", tokenizer.eos_token_id)


def pad_id(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """Return the id of the token that fills rows, if the tokenizer has one."""
    return _one_id("pad_token_id", tokenizer.pad_token_id)


def ids_of(encoded: object) -> Any:
    """Return the `input_ids` of what a tokenizer returned; a `TypeError` where it returned no mapping."""
    if not isinstance(encoded, Mapping):
        raise TypeError(f"the tokenizer returned a {type(encoded).__name__}, not a mapping with input_ids")
    return encoded["input_ids"]


def _one_id(name: str, value: object) -> int | None:
    if value is None or isinstance(value, int):
        return value
    raise TypeError(f"the tokenizer's {name} must be one token, got {value!r}")


def is_conversation(prompt: object) -> TypeGuard[Sequence[Mapping[str, Any]]]:
    """Tell whether a prompt is a non-empty list of messages, dicts with a `role`."""
    return isinstance(prompt, list | tuple) and bool(prompt) and isinstance(prompt[0], Mapping) and "role" in prompt[0]


def real_tokens(row: Mapping[str, Any]) -> list[int]:
    """Return a row's `input_ids`, only those that `attention_mask` marks where the row has one.

    Raises:
        TypeError: `input_ids` are not integers.
        ValueError: The mask has another length.
    """
    given = _as_list(row["input_ids"])
    if any(isinstance(token, bool) for token in given):
        raise TypeError("booleans are no token ids")
    ids = [operator.index(token) for token in given]
    if row.get("attention_mask") is None:
        return ids
    mask = _as_list(row["attention_mask"])
    if len(mask) != len(ids):
        raise ValueError(f"attention_mask has {len(mask)} values for {len(ids)} input_ids")
    return list(itertools.compress(ids, mask))


def _as_list(ids: Any) -> list[int]:
    return ids.tolist() if hasattr(ids, "tolist") else list(ids)
