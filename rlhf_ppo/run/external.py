"""The rows that the caller of `PPOTrainer.step` passes: their checks and their padding."""

from __future__ import annotations

import math
from collections.abc import Sequence, Sized
from dataclasses import replace
from typing import TypeGuard

import torch
from torch import Tensor

from rlhf_ppo.data.rollout import Responses, check_lengths
from rlhf_ppo.models.capabilities import Vocabulary
from rlhf_ppo.rewards.scorer import RewardSource, Scores, ScoringBatch
from rlhf_ppo.run.datasets import PromptPreparation

MAX_ROUNDING = 1e-3
"""Largest log-probability in nats: engines that compute in 16 bits may round to a little above 0."""


class ExternalScores(RewardSource):
    """Placeholder for the rewards of a trainer that receives scores."""

    name = "score"

    def __call__(self, batch: ScoringBatch) -> Tensor:
        """Raise: there is no reward.

        Raises:
            ValueError: Always.
        """
        raise ValueError("pass reward_model or reward_funcs: without them only step() works, which is given scores")


def given_responses(
    queries: Sequence[Tensor],
    responses: Sequence[Tensor],
    scores: Sequence[float] | Sequence[Tensor] | Tensor,
    *,
    response_masks: Sequence[Tensor] | None,
    sampling_logprobs: Sequence[Tensor] | None,
    ended: Sequence[bool] | Tensor | None,
    num_rows: int,
    pad_token_id: int,
    device: torch.device,
    preparation: PromptPreparation,
) -> tuple[Responses, Scores]:
    """Check and pad the responses of `PPOTrainer.step`.

    Raises:
        ValueError: A value does not fit; see `PPOTrainer.step`.
    """
    given: dict[str, Sized | None] = {
        **{"queries": queries, "responses": responses, "scores": scores, "response_masks": response_masks},
        **{"sampling_logprobs": sampling_logprobs, "ended": ended},
    }
    for name, of_rows in given.items():
        if of_rows is not None and len(of_rows) != num_rows:
            raise ValueError(
                f"{name} has {len(of_rows)} entries, but an update takes {num_rows} responses on each process: "
                "per_device_train_batch_size x gradient_accumulation_steps"
            )
    for name, rows in {"queries": queries, "responses": responses}.items():
        _check_ids(name, rows, preparation.vocabulary)
    padded = padded_responses(queries, responses, response_masks, num_rows, pad_token_id, device)
    check_lengths(padded.context_length, padded.responses.shape[1], preparation.longest_sequence)
    if sampling_logprobs is not None:
        padded = replace(padded, sampling_logprobs=_logprobs(sampling_logprobs, padded))
    if ended is not None:
        padded = replace(padded, ended=torch.as_tensor(ended, dtype=torch.bool, device=device))
    if _are_of_tokens(scores):
        per_token = _of_tokens("scores", scores, padded)
        has_none = (per_token.isnan() | ~padded.response_mask.cpu()).all(dim=1)
        values = torch.zeros(num_rows).masked_fill(has_none, math.nan).to(device)
        per_token = per_token.masked_fill(has_none[:, None], 0.0).to(device)
        return padded, Scores(values, per_token, {ExternalScores.name: values + per_token.sum(dim=1)})
    values = torch.tensor([float(score) for score in scores], dtype=torch.float32, device=device)
    per_token = torch.zeros_like(padded.response_mask, dtype=torch.float32)
    return padded, Scores(values, per_token, {ExternalScores.name: values})


def padded_responses(
    queries: Sequence[Tensor],
    responses: Sequence[Tensor],
    response_masks: Sequence[Tensor] | None,
    num_rows: int,
    pad_token_id: int,
    device: torch.device,
) -> Responses:
    """Pad token ids: queries on the left, responses on the right.

    Args:
        queries: Token ids of each prompt, long `(C_i,)`, on any device.
        responses: Token ids of each response with its stop token, long `(T_i,)`.
        response_masks: True on the policy's tokens of each response, bool `(T_i,)`; None: all tokens.
        num_rows: Number of rows.
        pad_token_id: Id of the padding.
        device: Device of the result.
    """
    context, length = max(map(len, queries)), max(map(len, responses))
    ids = torch.full((num_rows, context + length), pad_token_id, dtype=torch.long)
    attention = torch.zeros(num_rows, context + length, dtype=torch.bool)
    written = torch.zeros(num_rows, length, dtype=torch.bool)
    for row, (query, response) in enumerate(zip(queries, responses, strict=True)):
        real = slice(context - len(query), context + len(response))
        ids[row, real], attention[row, real] = torch.cat([query.cpu(), response.cpu()]), True
        written[row, : len(response)] = True if response_masks is None else response_masks[row].bool().cpu()
    return Responses(ids.to(device), attention.to(device), written.to(device))


def _check_ids(name: str, rows: Sequence[Tensor], vocabulary: Vocabulary) -> None:
    """Raise a `ValueError` where an id is outside the vocabulary; a GPU would only say that an assertion failed."""
    for row, ids in enumerate(rows):
        is_outside = len(ids) and not 0 <= int(ids.long().min()) <= int(ids.long().max()) < vocabulary.size
        if is_outside or vocabulary.image_token in ids.tolist():
            texts = "" if is_outside else f" without {vocabulary.image_token}, an image's: step() takes texts only"
            raise ValueError(
                f"{name}[{row}] holds something other than the token ids 0 to {vocabulary.size - 1} of "
                f"{vocabulary.limited_by}{texts}: {ids!r:.80}"
            )


def _of_tokens(name: str, given: Sequence[Tensor], rows: Responses) -> Tensor:
    """Pad numbers of each response's tokens on the right, float32 `(B, T)`, on the CPU.

    Args:
        name: Name of the argument.
        given: Numbers of each response, floating point `(T_i,)`.
        rows: The padded responses.

    Returns:
        The numbers, 0 on tokens that the policy did not write.
    """
    padded = torch.zeros(rows.response_mask.shape)
    lengths = rows.episode_mask.sum(dim=1).tolist()
    for row, (numbers, length) in enumerate(zip(given, lengths, strict=True)):
        if len(numbers) != length:
            raise ValueError(f"{name}[{row}] has {len(numbers)} values for the {length} tokens of the response")
        padded[row, :length] = numbers.detach().float().cpu()
    return padded.masked_fill_(~rows.response_mask.cpu(), 0.0)


def _logprobs(given: Sequence[Tensor], rows: Responses) -> Tensor:
    """Return the sampling log-probabilities, nats, float32 `(B, T)`, 0 on tokens that the policy did not write."""
    padded = _of_tokens("sampling_logprobs", given, rows)
    wrong = (~padded.isfinite() | (padded > MAX_ROUNDING)).any(dim=1)
    if bool(wrong.any()):
        raise ValueError(
            f"sampling_logprobs[{int(wrong.int().argmax())}]: pass the natural logarithm of the probability that each "
            "token was drawn with, which is finite and at most 0"
        )
    return padded.to(rows.response_mask.device)


def _are_of_tokens(scores: object) -> TypeGuard[Sequence[Tensor]]:
    """Return whether scores are rewards of tokens: a list of tensors, of which one has several numbers."""
    if not isinstance(scores, list | tuple):
        return False
    return all(isinstance(row, Tensor) and row.dim() == 1 for row in scores) and any(len(row) > 1 for row in scores)
