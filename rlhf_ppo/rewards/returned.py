"""What a reward function returned: one number per response, or one per token, checked and named where it is wrong."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence, Set
from typing import Any

import torch
from torch import Tensor

from rlhf_ppo.rewards.endpoint import RewardEndpoint
from rlhf_ppo.rewards.scorer import MAX_SCORE, Refuse, refuse_by_raising


class WrongRewardError(TypeError, ValueError):
    """A reward function returned no reward, or logged what cannot be logged; the message says what to do instead."""


def described(function: Any, name: str) -> str:
    """Return what errors call a reward function: its name, and the address of one behind a server.

    Args:
        function: The function.
        name: Its name.
    """
    return f"the reward function {name!r}" + (f" at {function.place}" if isinstance(function, RewardEndpoint) else "")


def check_scores(
    returned: Any,
    who: str,
    lengths: Sequence[int],
    refuse: Refuse = refuse_by_raising,
    written: Sequence[Sequence[bool]] | None = None,
) -> Tensor:
    """Check what a reward function returned.

    Args:
        returned: A list, a tensor, an array, or any other iterable, of one entry per row: numbers and None; or lists
            of numbers, one per response token, and None.
        who: What error messages call the function, see `described`.
        lengths: Number of tokens of each of the `B` responses.
        refuse: What becomes of a number that is not finite, or beyond `MAX_SCORE`: NaN, if it does not raise.
        written: Of each response, which tokens the policy wrote; None: all. What is returned for the others, of a
            tool for example, is not paid and not read: it may be None or NaN.

    Returns:
        Scores, float32 `(B,)`, NaN for None; or rewards per token, float32 `(B, max(lengths))`, a row of NaN for None
        and 0 behind the last token.

    Raises:
        WrongRewardError: It is a text, one number or nothing, holds something that is not a number, or has another
            length. It is both a TypeError and a ValueError.
        ValueError: What `refuse` raises.
    """
    values = _plain(returned)
    if isinstance(values, str | bytes | bytearray | Mapping | Set) or not isinstance(values, Iterable):
        raise WrongRewardError(
            f"{who} returned {returned!r:.60} ({type(returned).__name__}): "
            f"return a list of {len(lengths)} numbers, one per completion"
        )
    values = list(values)
    if len(values) != len(lengths):
        raise WrongRewardError(
            f"{who} returned {len(values)} rewards for {len(lengths)} completions: "
            "return one per completion, None where it has none to give"
        )
    first = next((value for value in values if value is not None), None)
    if isinstance(_plain(first), list | tuple):
        rows = [_plain(value) for value in values]
        if written is not None:
            rows = [_of_policy(row, own) for row, own in zip(rows, written, strict=True)]
        return _per_token(rows, who, lengths, refuse)
    return torch.tensor([_as_float(value, who, f"row {row}", refuse) for row, value in enumerate(values)])


def _of_policy(row: Any, written: Sequence[bool]) -> Any:
    """Return rewards of tokens with 0 where the policy did not write; what is no row of that length stays."""
    if not isinstance(row, list | tuple) or len(row) != len(written):
        return row
    return [reward if own else 0.0 for reward, own in zip(row, written, strict=True)]


def _per_token(values: Sequence[Any], who: str, lengths: Sequence[int], refuse: Refuse) -> Tensor:
    rewards = torch.zeros(len(lengths), max(lengths))
    for row, (value, length) in enumerate(zip(values, lengths, strict=True)):
        if value is None:
            rewards[row] = math.nan
            continue
        if not isinstance(value, list | tuple):
            raise WrongRewardError(
                f"{who} returned {value!r:.60} ({type(value).__name__}) for row {row}, and a "
                "list for another: return a list for every row, of one reward per token, or a number for every row"
            )
        if len(value) != length:
            raise WrongRewardError(
                f"{who} returned {len(value)} rewards for the {length} tokens of row {row}: "
                "return one for each of completion_ids[row]"
            )
        if None in value:
            raise WrongRewardError(
                f"{who} returned None for row {row}, token {list(value).index(None)}: "
                "return 0.0 for a token without a reward, or None for the whole row"
            )
        numbers = [_as_float(number, who, f"row {row}, token {token}", refuse) for token, number in enumerate(value)]
        rewards[row, :length] = torch.tensor(numbers)
        rewards[row].masked_fill_(rewards[row].isnan().any(), math.nan)
    return rewards


def _plain(value: Any) -> Any:
    """Return Python's own numbers and lists for a tensor or NumPy value."""
    return value.tolist() if hasattr(value, "tolist") else value


def _as_float(value: Any, who: str, place: str, refuse: Refuse) -> float:
    if value is None:
        return math.nan
    number = _plain(value)
    if not isinstance(number, int | float):
        raise WrongRewardError(
            f"{who} returned {value!r:.60} ({type(value).__name__}) for {place}: "
            "return a number, or None for a completion that it does not score"
        )
    if not abs(number) <= MAX_SCORE:  # NaN too
        refuse(
            f"{who} returned {_shown(number)} for {place}: return a finite number of at most "
            f"{MAX_SCORE:g}, or None for a completion that it does not score"
        )
        return math.nan
    return float(number)


def _shown(number: float) -> str:
    try:
        return f"{number!r:.60}"
    except ValueError:  # Python writes no integer of more than 4300 digits
        return "an integer of thousands of digits"
