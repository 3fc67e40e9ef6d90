"""Stop tokens and stop strings, truncation after them, and joining responses to their prompts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase, StoppingCriteria

from rlhf_ppo.data.prompts import Prompts
from rlhf_ppo.data.rollout import HostMasks, Responses, check_masks, sent

_CONTEXT = 4
"""Tokens decoded before those of a stop string: a decoder may strip or garble its first tokens, a UTF-8 character."""


@dataclass(frozen=True)
class StopStrings:
    """Finds the token that completes a stop string in a response.

    Texts are decoded with special tokens, which may be part of a stop string, and from the response's first token on:
    a stop string in the prompt, or one that begins in the prompt, ends nothing.

    Attributes:
        tokenizer: The policy's tokenizer.
        strings: The stop strings, none of them empty.
    """

    tokenizer: PreTrainedTokenizerBase
    strings: tuple[str, ...]

    @property
    def num_tail_tokens(self) -> int:
        """Number of last tokens that hold a stop string which the last token completes: a token is at least a byte."""
        return max(len(text.encode()) for text in self.strings) + _CONTEXT

    def end(self, ids: Sequence[int]) -> int | None:
        """Find the first token that completes a stop string.

        Args:
            ids: A response's token ids.

        Returns:
            Number of tokens up to and including it, or None.
        """
        # Token by token: later bytes may make a character invalid, and the text then loses the stop string.
        return next((n for n in range(1, len(ids) + 1) if self.is_completed(ids[:n])), None)

    def is_completed(self, ids: Sequence[int]) -> bool:
        """Tell whether a response's last token completes a stop string."""
        # Only the whole response decides: a tail's first token may decode to another text than inside the response.
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
        lengths = sent(torch.tensor([width if end is None else end for end in ends]), responses.device)
        return torch.arange(width, device=responses.device) < lengths[:, None]


class StopsAtStrings(StoppingCriteria):
    """Ends each row of `generate` with the token at which `StopStrings.end` cuts it.

    transformers' own `StopStringCriteria` also ends rows at strings that begin in the prompt.

    Args:
        stop_strings: The stop strings.
        prompt_length: Number of columns of the prompts, which are ignored.
    """

    def __init__(self, stop_strings: StopStrings, prompt_length: int) -> None:
        self.stop_strings, self.prompt_length = stop_strings, prompt_length

    def __call__(self, input_ids: Any, scores: Any = None, **kwargs: Any) -> Any:
        """Tell which rows' last tokens complete a stop string, bool `(B,)`."""
        responses = input_ids[:, self.prompt_length :].tolist()
        found = [self.stop_strings.is_completed(ids) for ids in responses]
        return sent(torch.tensor(found, dtype=torch.bool), input_ids.device)


# ---- Truncation and joining ----


def response_mask(responses: Tensor, stop_token_id: int | None) -> Tensor:
    """Mark each response's tokens up to and including its first stop token.

    Args:
        responses: Sampled ids, long `(B, T)`.
        stop_token_id: The stop token, or None: every token is real.

    Returns:
        Bool `(B, T)`.
    """
    if stop_token_id is None:
        return torch.ones_like(responses, dtype=torch.bool)
    stops = (responses == stop_token_id).long()
    return stops.cumsum(dim=1) - stops == 0


def truncate_response(stop_token_id: int, pad_token_id: int, responses: Tensor) -> Tensor:
    """Replace all tokens behind the first stop token by PAD; the stop token stays.

    Args:
        stop_token_id: The token that ends a response.
        pad_token_id: Fills the rest; may equal the stop token.
        responses: Sampled ids, long `(B, T)`.

    Returns:
        Long `(B, T)`.
    """
    return responses.masked_fill(~response_mask(responses, stop_token_id), pad_token_id)


def join_responses(
    prompts: Prompts,
    sampled: Tensor,
    stop_token_id: int | None,
    pad_token_id: int,
    stop_strings: StopStrings | None = None,
    logprobs: Tensor | None = None,
) -> Responses:
    """Truncate sampled responses, append them to their prompts and make the masks.

    Args:
        prompts: `B` left-padded prompts.
        sampled: Sampled ids, long `(B, T)`.
        stop_token_id: The stop token, or None.
        pad_token_id: Fills the columns behind a response's end.
        stop_strings: Texts that end a response too, or None.
        logprobs: The engine's log-probabilities, float32 `(B, T)`, or None.

    Returns:
        The truncated responses, as wide as the longest.
    """
    mask = response_mask(sampled, stop_token_id)
    if stop_strings is not None:
        mask &= stop_strings.mask(sampled)
    written = mask.cpu().numpy()
    width = int(written.sum(axis=1).max())
    mask, written = mask[:, :width], written[:, :width]
    attention = torch.cat((prompts.attention_mask, mask), dim=1)
    on_host = HostMasks(np.concatenate((prompts.mask, written), axis=1), written, (attention, mask))
    check_masks(on_host)
    return Responses(
        torch.cat((prompts.input_ids, sampled[:, :width].masked_fill(~mask, pad_token_id)), dim=1),
        attention,
        mask,
        sampling_logprobs=None if logprobs is None else logprobs[:, :width].masked_fill(~mask, 0.0),
        on_host=on_host,
    )


def last_turn(response_mask: Tensor) -> Tensor:
    """Mark the policy's last turn: the tokens behind a response's last gap, or all of them.

    Args:
        response_mask: True on the tokens that the policy wrote, bool `(B, T)`.

    Returns:
        Bool `(B, T)`.
    """
    from_right = response_mask.flip(1)
    begins_gap = torch.zeros_like(from_right)
    begins_gap[:, 1:] = from_right[:, :-1] & ~from_right[:, 1:]
    return (from_right & (begins_gap.cumsum(dim=1) == 0)).flip(1)


def ended(responses: Responses, end_token_id: int | None, stop_strings: StopStrings | None = None) -> Tensor:
    """Tell which responses ended by themselves: with a token, or with a stop string, in the policy's last turn.

    The stop token may end other turns too.

    Args:
        responses: `B` truncated responses.
        end_token_id: The token, or None.
        stop_strings: The stop strings, or None.

    Returns:
        Bool `(B,)`.
    """
    turns = last_turn(responses.response_mask)
    is_end = torch.zeros_like(turns) if end_token_id is None else (responses.responses == end_token_id) & turns
    has_ended = is_end.any(dim=1)
    if stop_strings is None:
        return has_ended
    rows = [ids[real].tolist() for ids, real in zip(responses.responses, turns, strict=True)]
    return has_ended | torch.tensor([stop_strings.is_completed(ids) for ids in rows], device=has_ended.device)
