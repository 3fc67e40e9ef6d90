"""Texts that a policy goes on learning from as a language model, in the forms that TRL's `SFTTrainer` takes."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from transformers import PreTrainedTokenizerBase
from transformers.trainer_utils import has_length

from rlhf_ppo.processes.logs import get_logger

logger = get_logger(__name__)

MAX_LENGTH = 1024
"""Tokens of a text that are read, as by `SFTTrainer`; the rest is left out."""

_FORMS = "'text', 'prompt' and 'completion', 'messages', or 'input_ids'"


class Text(NamedTuple):
    """A text in token ids.

    Attributes:
        context: What is only read: the prompt, or the first token.
        learned: The rest.
    """

    context: list[int]
    learned: list[int]


def prepare_texts(
    dataset: Any, tokenizer: PreTrainedTokenizerBase, max_length: int | None, vocab_size: int, name: str
) -> list[Text]:
    """Tokenize every row; EOS ends what is no conversation, as with `SFTTrainer`.

    Args:
        dataset: Rows with `text`, `prompt` and `completion`, `messages`, or `input_ids` (and `completion_mask`).
        tokenizer: The policy's tokenizer.
        max_length: Longest sequence that the models can place, in tokens; None if there is no limit.
        vocab_size: Number of ids that the models embed.
        name: What error messages call the data set.

    Returns:
        The rows of which something is learned; those that are too short for that are left out, and said.

    Raises:
        TypeError: It is no data set of dicts whose length is known.
        ValueError: A row has none of these forms, or an id that the models lack; or no row is left.
    """
    if not has_length(dataset) or not hasattr(dataset, "__getitem__") or isinstance(dataset, str | bytes | Mapping):
        raise TypeError(
            f"{name} is a {type(dataset).__name__}: pass a datasets.Dataset or a list of rows, which can be shuffled"
        )
    longest = MAX_LENGTH if max_length is None else min(MAX_LENGTH, max_length)
    rows: Any = dataset
    texts, num_cut = [], 0
    for index in range(len(rows)):
        ids, num_context = _encoded(rows[index], tokenizer, index, name)
        if ids and not 0 <= min(ids) <= max(ids) < vocab_size:
            raise ValueError(f"row {index} of {name} has token ids outside 0 to {vocab_size - 1}, which models embed")
        num_cut += len(ids) > longest
        num_context = max(1, num_context)
        if num_context < min(len(ids), longest):
            texts.append(Text(ids[:num_context], ids[num_context:longest]))
    if not texts:
        raise ValueError(f"{name} has no row of which anything could be learned: each needs two tokens or more")
    num_left_out = len(dataset) - len(texts)
    if num_cut or num_left_out:
        logger.warning(
            f"{name}: of {len(dataset)} rows {num_cut} are cut after {longest} tokens, and {num_left_out} left out, "
            "as nothing of them would be learned"
        )
    return texts


def _encoded(row: Any, tokenizer: PreTrainedTokenizerBase, index: int, name: str) -> tuple[list[int], int]:
    """Return a row's token ids, and how many of them are context."""
    from trl.data_utils import is_conversational, maybe_apply_chat_template

    if not isinstance(row, Mapping):
        raise TypeError(f"row {index} of {name} is a {type(row).__name__}, not a dict with {_FORMS}")
    if row.get("input_ids") is not None:
        mask = row.get("completion_mask")
        return list(row["input_ids"]), 0 if mask is None else list(mask).index(1) if 1 in mask else len(mask)
    form = next((form for form in _forms() if all(row.get(column) is not None for column in form)), None)
    if form is None:
        raise ValueError(f"row {index} of {name} has the columns {sorted(row)}; it needs {_FORMS}")
    example: Any = {column: row[column] for column in (*form, "tools") if row.get(column) is not None}
    is_chat = is_conversational(example)
    if is_chat:
        example = maybe_apply_chat_template(example, tokenizer)
    last = "completion" if form == ("prompt", "completion") else "text"
    if not isinstance(example.get(last), str):
        raise ValueError(f"row {index} of {name} holds {form[-1]}={row[form[-1]]!r:.60}, neither text nor messages")
    if not is_chat and tokenizer.eos_token and not example[last].endswith(str(tokenizer.eos_token)):
        example[last] += tokenizer.eos_token

    def ids_of(text: str) -> list[int]:
        return tokenizer(text, add_special_tokens=not is_chat)["input_ids"]  # pyright: ignore[reportReturnType]

    whole = ids_of(example.get("prompt", "") + example[last])
    return whole, _common_length(ids_of(example["prompt"]), whole) if last == "completion" else 0


def _forms() -> Sequence[tuple[str, ...]]:
    return ("prompt", "completion"), ("messages",), ("text",)


def _common_length(prompt: Sequence[int], whole: Sequence[int]) -> int:
    """Count the tokens that a prompt alone and the whole begin with: tokens may merge across its end."""
    pairs = zip(prompt, whole, strict=False)
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
