"""How long a sequence may be."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple


class PositionLimit(NamedTuple):
    """A longest sequence.

    Attributes:
        tokens: Number of tokens.
        reason: What sets the limit, for error messages.
        remedy: How to raise it, for error messages.
    """

    tokens: int
    reason: str
    remedy: str = "use a model with more positions"


def smallest(limits: Iterable[PositionLimit | None]) -> PositionLimit | None:
    """Return the limit with the fewest tokens, or None if there is none."""
    return min((limit for limit in limits if limit is not None), key=lambda limit: limit.tokens, default=None)


def check_lengths(longest_prompt: int, response_length: int, limit: PositionLimit | None) -> None:
    """Check that a prompt and its response fit the models: `longest_prompt + response_length <= limit.tokens`.

    Args:
        longest_prompt: Tokens of the longest prompt.
        response_length: Tokens generated for each prompt.
        limit: The longest sequence, and why; None where nothing sets a bound.

    Raises:
        ValueError: They do not fit.
    """
    total = longest_prompt + response_length
    if limit is not None and total > limit.tokens:
        room = limit.tokens - response_length
        fix = f"set max_prompt_length={room}" if room > 0 else "lower response_length"
        raise ValueError(
            f"the longest prompt ({longest_prompt} tokens) and response_length={response_length} take {total} "
            f"positions, but {limit.reason}: {fix}, or {limit.remedy}"
        )
