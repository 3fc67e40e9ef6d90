"""Where a response ends: truncation at the stop token or string, and the mask that everything later reads."""

from __future__ import annotations

import torch
from torch import Tensor

from rlhf_ppo.data.prompts import Prompts
from rlhf_ppo.data.rollout import Responses
from rlhf_ppo.generation.stopping import StopStrings


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
    """Replace what follows the first stop token by PAD; the stop token itself stays.

    Args:
        stop_token_id: The token after which a response is cut.
        pad_token_id: What fills the rest; may equal the stop token.
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
    """Truncate sampled responses, put them behind their prompts and make the masks.

    Args:
        prompts: `B` left-padded prompts.
        sampled: Sampled ids, long `(B, T)`.
        stop_token_id: The stop token, or None.
        pad_token_id: What follows a response's end.
        stop_strings: Texts that end a response too, whichever comes first, or None.
        logprobs: Log-probabilities that the engine sampled with, float32 `(B, T)`, or None.

    Returns:
        The truncated responses, without columns that no response reaches.
    """
    mask = response_mask(sampled, stop_token_id)
    if stop_strings is not None:
        mask &= stop_strings.mask(sampled)
    mask = mask[:, : int(mask.sum(dim=1).max())]
    responses = sampled[:, : mask.shape[1]].masked_fill(~mask, pad_token_id)
    return Responses(
        torch.cat((prompts.input_ids, responses), dim=1),
        torch.cat((prompts.attention_mask, mask), dim=1),
        mask,
        sampling_logprobs=None if logprobs is None else logprobs[:, : mask.shape[1]].masked_fill(~mask, 0.0),
    )


def last_turn(response_mask: Tensor) -> Tensor:
    """Mark what the policy wrote last: the tokens behind a response's last gap, or all of them.

    Args:
        response_mask: True on the tokens that the policy wrote, bool `(B, T)`.

    Returns:
        Bool `(B, T)`.
    """
    from_right = response_mask.flip(1)
    begins_gap = torch.zeros_like(from_right)
    begins_gap[:, 1:] = from_right[:, :-1] & ~from_right[:, 1:]
    return (from_right & (begins_gap.cumsum(dim=1) == 0)).flip(1)


def contains_token(responses: Responses, token_id: int | None) -> Tensor:
    """Tell which responses hold a token in the policy's last turn: the stop token may end other turns too.

    Args:
        responses: `B` responses.
        token_id: The token, or None: no response holds it.

    Returns:
        Bool `(B,)`.
    """
    if token_id is None:
        return torch.zeros(len(responses), dtype=torch.bool, device=responses.response_mask.device)
    return ((responses.responses == token_id) & last_turn(responses.response_mask)).any(dim=1)


def ended(responses: Responses, end_token_id: int | None, stop_strings: StopStrings | None) -> Tensor:
    """Tell which responses ended by themselves: with a token, or with a stop string, in the policy's last turn.

    Args:
        responses: `B` truncated responses.
        end_token_id: The token, or None.
        stop_strings: The stop strings, or None.

    Returns:
        Bool `(B,)`.
    """
    has_ended = contains_token(responses, end_token_id)
    if stop_strings is None:
        return has_ended
    turns = last_turn(responses.response_mask)
    rows = [ids[real].tolist() for ids, real in zip(responses.responses, turns, strict=True)]
    return has_ended | torch.tensor([stop_strings.is_completed(ids) for ids in rows], device=has_ended.device)
