"""Stop strings: texts that end a response, looked for in the response alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import StoppingCriteria

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_CONTEXT = 4
"""Tokens read before a stop string's own: a decoder may strip or garble what it decodes first, a UTF-8 character."""


@dataclass(frozen=True)
class StopStrings:
    """Tells with which token a response comes to hold a stop string.

    Texts are decoded with their special tokens, so that these may be part of a stop string, and from the response's
    first token on: a stop string in the prompt, or one that begins in it, ends nothing.

    Attributes:
        tokenizer: The policy's tokenizer.
        strings: The stop strings, none of them empty.
    """

    tokenizer: PreTrainedTokenizerBase
    strings: tuple[str, ...]

    @property
    def num_tail_tokens(self) -> int:
        """Number of last tokens in which a stop string that was just completed must lie: a token holds a byte."""
        return max(len(text.encode()) for text in self.strings) + _CONTEXT

    def end(self, ids: Sequence[int]) -> int | None:
        """Find the first token that completes a stop string.

        Args:
            ids: A response's token ids.

        Returns:
            Number of tokens up to and including that one, or None if there is none.
        """
        # Token by token: a text may lose what it held, where bytes that follow make a character invalid.
        return next((n for n in range(1, len(ids) + 1) if self.is_completed(ids[:n])), None)

    def is_completed(self, ids: Sequence[int]) -> bool:
        """Tell whether a response's last token completes a stop string."""
        # Only the whole response decides: the first token of a tail may decode to another text than it has inside.
        return self.is_in(ids[-self.num_tail_tokens :]) and self.is_in(ids)

    def is_in(self, ids: Sequence[int]) -> bool:
        """Tell whether a response's text holds a stop string."""
        text = self.tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return any(string in str(text) for string in self.strings)

    def mask(self, responses: Tensor) -> Tensor:
        """Mark each response's tokens up to and including the first that completes a stop string.

        Args:
            responses: Sampled ids, long `(B, T)`.

        Returns:
            Bool `(B, T)`.
        """
        width = responses.shape[1]
        ends = [self.end(ids) for ids in responses.tolist()]
        lengths = torch.tensor([width if end is None else end for end in ends], device=responses.device)
        return torch.arange(width, device=responses.device) < lengths[:, None]


class StopsAtStrings(StoppingCriteria):
    """Ends each row of `generate` with the token at which `StopStrings.end` cuts it.

    transformers' own `StopStringCriteria` also ends rows at strings that begin in the prompt.

    Args:
        stop_strings: What to look for.
        prompt_length: Number of columns of the prompts, which are not read.
    """

    def __init__(self, stop_strings: StopStrings, prompt_length: int) -> None:
        self.stop_strings, self.prompt_length = stop_strings, prompt_length

    def __call__(self, input_ids: Any, scores: Any = None, **kwargs: Any) -> Any:
        """Tell which rows' last tokens complete a stop string, bool `(B,)`."""
        responses = input_ids[:, self.prompt_length :].tolist()
        found = [self.stop_strings.is_completed(ids) for ids in responses]
        return torch.tensor(found, dtype=torch.bool, device=input_ids.device)
