"""Preference pairs in all of TRL's formats: explicit and implicit prompts, conversations, and hh-rlhf's raw texts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlhf_ppo.data.prompts import PROMPT_COLUMNS, is_conversation
from rlhf_ppo.terminal.console import hide_data_bars

HH_TURN = "\n\nAssistant:"
"""The opening of the assistant's turn in the raw texts of Anthropic's hh-rlhf."""


def with_explicit_prompt(row: Mapping[str, Any]) -> dict[str, Any]:
    r"""Return a preference pair with its prompt apart from both responses.

    | given | prompt |
    |---|---|
    | `prompt`, and responses that do not repeat it | as it is |
    | no prompt; texts of hh-rlhf, "\n\nHuman: ... \n\nAssistant: ..." | up to the last common "\n\nAssistant:" |
    | no prompt; other texts, or conversations | the common beginning, by TRL's `extract_prompt` |
    | a text as prompt beside whole conversations | the conversations' common beginning |

    Args:
        row: A row with `chosen` and `rejected`, each a text or a list of messages, and perhaps `prompt`.

    Returns:
        The row with `prompt`, `chosen` and `rejected`; responses to a conversation are lists of messages.

    Raises:
        ValueError: The row lacks `chosen` or `rejected`, or one is a text and the other a conversation.
    """
    if missing := sorted({"chosen", "rejected"} - row.keys()):
        raise ValueError(f"a preference pair needs chosen and rejected; the row lacks {missing}: it has {[*row]}")
    prompt, chosen, rejected = row.get("prompt"), row["chosen"], row["rejected"]
    if is_conversation(chosen) != is_conversation(rejected):
        raise ValueError("chosen is a text and rejected a conversation, or the reverse: give both in one format")
    pair = {"chosen": chosen, "rejected": rejected} | ({} if prompt is None else {"prompt": prompt})
    if is_conversation(prompt) and not is_conversation(chosen):
        answers = {key: [{"role": "assistant", "content": pair[key]}] for key in ("chosen", "rejected")}
        return {**row, **answers}
    if prompt is None and isinstance(chosen, str):
        different = (index for index, pair in enumerate(zip(chosen, rejected, strict=False)) if pair[0] != pair[1])
        turn = chosen.rfind(HH_TURN, 0, next(different, min(len(chosen), len(rejected))))
        if turn >= 0:
            end = turn + len(HH_TURN)
            return {**row, "prompt": chosen[:end], "chosen": chosen[end:], "rejected": rejected[end:]}
    from trl.data_utils import maybe_extract_prompt

    return {**row, **maybe_extract_prompt(pair)}


def separate_prompts(dataset: Any, where_missing: bool = False) -> Any:
    """Return a data set of preference pairs with explicit prompts; other data pass unchanged. The first row decides.

    Args:
        dataset: A data set or a stream.
        where_missing: Whether to leave pairs with a `prompt` as they are.
    """
    first = next(iter(dataset.take(1)), {})
    if not {"chosen", "rejected"} <= first.keys() or ("prompt" in first and where_missing):
        return dataset
    if "prompt" not in first and not first.keys().isdisjoint(PROMPT_COLUMNS):  # the prompt is in another column
        return dataset
    responses = (first["chosen"], first["rejected"])
    if not all(isinstance(each, str) for each in responses) and not all(map(is_conversation, responses)):
        return dataset  # later checks name the column
    if with_explicit_prompt(first) == first:
        return dataset
    with hide_data_bars():
        return dataset.map(with_explicit_prompt)
