"""Input of the losses, cut into mini-batches and micro-batches."""

from __future__ import annotations

import heapq
import itertools
import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Self, TypeVar

import torch
from torch import Tensor

from rlhf_ppo.data.rollout import Responses, Rollout, check_shape


@dataclass(frozen=True)
class Experience(Responses):
    """What the policy and value losses read.

    Attributes:
        logprobs: Old log-probabilities, the denominator of the importance ratio, nats, float32 `(B, T)`.
        values: Value estimates when sampled, float32 `(B, T)`.
        advantages: Whitened advantages, float32 `(B, T)`, 0 outside the loss mask.
        returns: Advantages before whitening plus values, float32 `(B, T)`, 0 outside the loss mask.
        loss_mask: True on the tokens that are learned from, bool `(B, T)`: the real ones of responses with a score.
            Rows without one stay in the batch, so that every rank makes the same passes.
        importance_weights: Factors of the policy's per-token losses, float32 `(B, T)`, or None: all 1.
        loss_weights: How much each token's policy loss counts in the mini-batch's, float32 `(B, T)`, or None: all 1.
        is_positive: Which responses are imitated, bool `(B,)`, or None: none.
        nll_weights: How much each token's negative log-likelihood counts, float32 `(B, T)`, or None: not at all.
        value_weights: How much each token's value loss counts, float32 `(B, T)`, or None: all 1.
    """

    logprobs: Tensor
    values: Tensor
    advantages: Tensor
    returns: Tensor
    loss_mask: Tensor
    importance_weights: Tensor | None = None
    loss_weights: Tensor | None = None
    is_positive: Tensor | None = None
    nll_weights: Tensor | None = None
    value_weights: Tensor | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("logprobs", "values", "advantages", "returns", "loss_mask"):
            check_shape(name, getattr(self, name), tuple(self.response_mask.shape))
        for name in ("importance_weights", "loss_weights", "nll_weights", "value_weights"):
            if (weights := getattr(self, name)) is not None:
                check_shape(name, weights, tuple(self.response_mask.shape))
        if self.is_positive is not None:
            check_shape("is_positive", self.is_positive, (len(self),))

    @classmethod
    def of(
        cls,
        rollout: Rollout,
        advantages: Tensor,
        returns: Tensor,
        weights: Tensor | None = None,
        is_positive: Tensor | None = None,
        old_logprobs: str = "training",
    ) -> Self:
        """Return what is learned from a rollout.

        Args:
            rollout: The rollout.
            advantages: Whitened, `(B, T)`.
            returns: `(B, T)`.
            weights: Importance weights, `(B, T)`, or None: all 1.
            is_positive: Which responses are imitated, bool `(B,)`, or None: none.
            old_logprobs: "training" or "sampling"; see `Rollout.old_logprobs`.
        """
        return cls(
            query_responses=rollout.query_responses,
            attention_mask=rollout.attention_mask,
            response_mask=rollout.response_mask,
            on_host=rollout.on_host,
            logprobs=rollout.old_logprobs(old_logprobs),
            values=rollout.values,
            advantages=advantages,
            returns=returns,
            loss_mask=rollout.loss_mask,
            importance_weights=weights,
            is_positive=is_positive,
        )

    def shuffled_minibatches(self, num_mini_batches: int, generator: torch.Generator) -> Iterator[Self]:
        """Yield `num_mini_batches` disjoint parts of equal size, drawn with `generator`, longest rows first."""
        order, lengths = torch.randperm(len(self), generator=generator), self.lengths
        for chunk in order.chunk(num_mini_batches):
            rows = chunk.numpy()
            yield self[rows[(-lengths[rows]).argsort(kind="stable")].tolist()]

    def minibatches_of_epochs(
        self, num_epochs: int, num_mini_batches: int, generator: torch.Generator
    ) -> Iterator[Self]:
        """Yield the mini-batches of `num_epochs` passes, each shuffled anew."""
        for _ in range(num_epochs):
            yield from self.shuffled_minibatches(num_mini_batches, generator)

    def micro_batches(
        self, max_rows: int, max_tokens: int | None, gather: Callable[[Tensor], Tensor], is_packed: bool
    ) -> list[Self]:
        """Cut into parts of at most `max_rows` rows, or within `max_tokens` tokens if that is given.

        Rows that follow each other stay together, so that padding them to the longest adds little; packed rows have no
        padding, and parts of about equally many tokens take the least memory.

        Args:
            max_rows: Most rows of a part.
            max_tokens: Most tokens of a part, prompts included, unless a row alone has more.
            gather: Concatenates a tensor over all ranks, each of which makes as many parts as the one that needs most.
            is_packed: Whether the models see real tokens only.
        """
        return micro_batches(self, max_rows, max_tokens, gather, is_packed)


Rows = TypeVar("Rows", bound=Responses)


def micro_batches(
    rows: Rows, max_rows: int, max_tokens: int | None, gather: Callable[[Tensor], Tensor], is_packed: bool
) -> list[Rows]:
    """Cut rows as `Experience.micro_batches` does."""
    lengths: list[int] = rows.lengths.tolist()
    if max_tokens is not None:
        sizes = sizes_within(lengths, max_tokens)
        num_parts = int(gather(torch.tensor([len(sizes)], device=rows.attention_mask.device)).max())
        return rows.parts_of(split_until(sizes, num_parts))
    if is_packed:
        return rows[dealt_evenly(lengths, max_rows)].parts(max_rows)
    return rows.parts(max_rows)


def dealt_evenly(lengths: Sequence[int], max_rows: int) -> list[int]:
    """Order rows so that parts of `max_rows` that follow each other have about equally many tokens.

    The longest row that is left goes to the part that has the fewest tokens and still room.

    Args:
        lengths: Tokens of each row.
        max_rows: Rows of each part but the last, which has those that are left.

    Returns:
        Indices of the rows, part after part.
    """
    room = [min(max_rows, len(lengths) - start) for start in range(0, len(lengths), max_rows)]
    parts: list[list[int]] = [[] for _ in room]
    with_room = [(0, part) for part in range(len(room))]  # a heap: the one with the fewest tokens comes first
    for row in sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True):
        tokens, part = heapq.heappop(with_room)
        parts[part].append(row)
        if len(parts[part]) < room[part]:
            heapq.heappush(with_room, (tokens + lengths[row], part))
    return [row for part in parts for row in part]


def sizes_within(lengths: Sequence[int], max_tokens: int) -> list[int]:
    """Count the rows of parts that follow each other and have as many rows as fit.

    Args:
        lengths: Tokens of each row.
        max_tokens: Most tokens of a part; a longer row is a part of its own.

    Returns:
        Number of rows of each part.
    """
    sizes, tokens = [0], 0
    for length in lengths:
        if sizes[-1] and tokens + length > max_tokens:
            sizes.append(0)
            tokens = 0
        sizes[-1] += 1
        tokens += length
    return sizes


def split_until(sizes: Sequence[int], num_parts: int) -> list[int]:
    """Halve the part with the most rows until there are `num_parts`, none of them empty.

    Args:
        sizes: Number of rows of each part, `num_parts` rows or more in all.
        num_parts: How many parts there must be, at least as many as there are.
    """
    starts = itertools.accumulate(sizes, initial=0)
    parts = [(-size, start) for size, start in zip(sizes, starts, strict=False)]  # a heap: the largest part first
    heapq.heapify(parts)
    while len(parts) < num_parts:
        size, start = heapq.heappop(parts)
        for half, first in ((size // 2, start), (-(-size // 2), start - size // 2)):
            heapq.heappush(parts, (half, first))
    return [-size for size, _ in sorted(parts, key=operator.itemgetter(1))]
