"""What one PPO update works on: prompts become a rollout, a rollout becomes experience.

Every tensor has its shape in the field's docstring and is checked when the object is made. `B` is the number of rows
on this rank, `C` the context (prompt) length after left padding, `T` the response length after right padding.
"""

from __future__ import annotations

import dataclasses
import functools
import heapq
import itertools
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self, cast

import torch
from torch import Tensor
from torch.nn import functional

from rlhf_ppo.algorithm.losses import importance_weights
from rlhf_ppo.places import HostMasks, Places


@dataclass(frozen=True)
class Prompts:
    """Left-padded prompts and the data set's other columns.

    Attributes:
        input_ids: Token ids, long `(B, C)`, padded on the left.
        attention_mask: True on real tokens, bool `(B, C)`.
        columns: The data set's other columns, each a list of `B` values; reward functions receive them.
    """

    input_ids: Tensor
    attention_mask: Tensor
    columns: Mapping[str, list[Any]]

    def __post_init__(self) -> None:
        _check_shape("attention_mask", self.attention_mask, tuple(self.input_ids.shape))
        if not self.attention_mask.any(dim=1).all():
            row = int((~self.attention_mask.any(dim=1)).nonzero()[0])
            raise ValueError(f"prompt {row} of the batch is empty (its attention_mask is all zeros); drop such rows")

    def __len__(self) -> int:
        return self.input_ids.shape[0]

    @classmethod
    def from_collated(cls, batch: Mapping[str, Any], device: torch.device) -> Prompts:
        """Take a collator's output, whatever side it padded on, and move the padding to the left.

        Args:
            batch: `input_ids` and `attention_mask`, both `(B, C)`, and any other columns.
            device: Where the tensors go.

        Returns:
            The prompts, without columns that are padding in every row.
        """
        missing = {"input_ids", "attention_mask"} - batch.keys()
        if missing:
            raise ValueError(f"the data_collator returned no {sorted(missing)}; it must return both `(B, C)` tensors")
        ids, mask = batch["input_ids"].to(device), batch["attention_mask"].to(device).bool()
        order = mask.to(torch.int8).argsort(dim=1, stable=True)  # padding (0) first, real tokens in their own order
        ids, mask = ids.gather(1, order), mask.gather(1, order)
        longest = int(mask.sum(dim=1).max())
        columns = {name: list(values) for name, values in batch.items() if name not in ("input_ids", "attention_mask")}
        return cls(ids[:, -longest:], mask[:, -longest:], columns)

    def first(self, num_rows: int) -> Prompts:
        """Return the first rows."""
        columns = {name: values[:num_rows] for name, values in self.columns.items()}
        return Prompts(self.input_ids[:num_rows], self.attention_mask[:num_rows], columns)


@dataclass(frozen=True)
class Responses:
    """Responses behind their prompts, with the one mask that everything later reads.

    Attributes:
        query_responses: Prompt and response ids, long `(B, C + T)`: left-padded prompt, right-padded response.
        attention_mask: True on real tokens of either part, bool `(B, C + T)`.
        response_mask: True on the response's real tokens, the stop token included, bool `(B, T)`.
        sampling_logprobs: Log-probabilities that the generation engine drew the response tokens with, nats, float32
            `(B, T)`, 0 outside the mask; None if it does not say them.
        on_host: Copies of both masks on the host, where batches are cut; None until `masks` is asked for.
    """

    query_responses: Tensor
    attention_mask: Tensor
    response_mask: Tensor
    sampling_logprobs: Tensor | None = field(default=None, kw_only=True)
    on_host: HostMasks | None = field(default=None, kw_only=True, repr=False)

    def __post_init__(self) -> None:
        _check_shape("attention_mask", self.attention_mask, tuple(self.query_responses.shape))
        if self.response_mask.shape[0] != len(self) or self.context_length < 1:
            raise ValueError(
                f"response_mask {tuple(self.response_mask.shape)} does not fit query_responses "
                f"{tuple(self.query_responses.shape)}"
            )
        if self.sampling_logprobs is not None:
            _check_shape("sampling_logprobs", self.sampling_logprobs, tuple(self.response_mask.shape))

    def __len__(self) -> int:
        return self.query_responses.shape[0]

    @property
    def context_length(self) -> int:
        """Number of prompt columns `C`."""
        return self.query_responses.shape[1] - self.response_mask.shape[1]

    @property
    def responses(self) -> Tensor:
        """Response ids, long `(B, T)`."""
        return self.query_responses[:, self.context_length :]

    @property
    def masks(self) -> HostMasks:
        """Both masks on the host, read from the device once."""
        if self.on_host is None:
            object.__setattr__(self, "on_host", HostMasks.of(self.attention_mask, self.response_mask))
        return cast(HostMasks, self.on_host)

    @functools.cached_property
    def places(self) -> Places:
        """Where the real tokens are."""
        return Places.from_host(self.masks, self.attention_mask.device)

    @property
    def lengths(self) -> Any:
        """Real tokens of each row, a NumPy array `(B,)`."""
        return self.masks.attention.sum(axis=1)

    def __getitem__(self, rows: Sequence[int] | Tensor | slice) -> Self:
        rows = cast(Any, rows).tolist() if isinstance(rows, Tensor) else rows
        masks = HostMasks(self.masks.attention[rows], self.masks.response[rows])
        if not isinstance(rows, slice):
            rows = torch.tensor(rows, dtype=torch.long, device=self.attention_mask.device)
        tensors = {name: value[rows] for name, value in self._tensors().items()}
        return dataclasses.replace(self, on_host=masks, **tensors)

    def longest_first(self) -> list[int]:
        """Return the rows' indices in falling order of their lengths, equal ones in their own order."""
        return (-self.lengths).argsort(kind="stable").tolist()

    def parts(self, max_rows: int) -> list[Self]:
        """Cut into parts of at most `max_rows` rows."""
        return self.parts_of([min(max_rows, len(self) - start) for start in range(0, len(self), max_rows)])

    def parts_of(self, sizes: Sequence[int]) -> list[Self]:
        """Cut into parts of these numbers of rows, in order, each trimmed to its longest real prompt and response."""
        ends = itertools.accumulate(sizes)
        return [self[end - size : end].trimmed() for size, end in zip(sizes, ends, strict=True)]

    def trimmed(self) -> Self:
        """Drop the columns that are padding in every row, left of the prompts and right of the responses."""
        masks, context = self.masks, self.context_length
        length = int(masks.response.sum(axis=1).max())
        left = int((~masks.attention[:, :context].any(axis=0)).cumprod().sum())
        columns = {
            self.query_responses.shape[1]: slice(left, context + length),
            self.responses.shape[1]: slice(length),
        }
        cut = {name: value[:, columns[value.shape[1]]] for name, value in self._tensors().items() if value.dim() == 2}
        masks = HostMasks(masks.attention[:, left : context + length], masks.response[:, :length])
        return dataclasses.replace(self, on_host=masks, **cut)

    def _tensors(self) -> dict[str, Tensor]:
        values = {each.name: getattr(self, each.name) for each in dataclasses.fields(self)}
        return {name: value for name, value in values.items() if isinstance(value, Tensor)}


@dataclass(frozen=True)
class Rollout(Responses):
    """Responses of the current policy with everything that was known when they were sampled.

    Attributes:
        stopped: Whether the response holds the stop token, bool `(B,)`.
        logprobs: Log-probabilities of the response tokens under the sampling policy, nats, float32 `(B, T)`.
        ref_logprobs: The same under the reference policy.
        values: Value estimate before each response token, float32 `(B, T)`.
        final_values: Value estimate after the last real token, float32 `(B,)`; used when a cut response bootstraps.
        scores: Weighted score of each response, paid at its last token, before scaling, clipping and the missing-EOS
            penalty, float32 `(B,)`; NaN where no source scored the response.
        token_scores: Weighted rewards of single tokens, float32 `(B, T)`, 0 outside the mask.
        scores_by_source: What each reward source gave, unweighted, float32 `(B,)` each; NaN where it gave none.
    """

    stopped: Tensor
    logprobs: Tensor
    ref_logprobs: Tensor
    values: Tensor
    final_values: Tensor
    scores: Tensor
    token_scores: Tensor
    scores_by_source: Mapping[str, Tensor]

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("logprobs", "ref_logprobs", "values", "token_scores"):
            _check_shape(name, getattr(self, name), tuple(self.response_mask.shape))
        for name in ("stopped", "final_values", "scores"):
            _check_shape(name, getattr(self, name), (len(self),))

    @property
    def loss_mask(self) -> Tensor:
        """True on the real tokens of the responses that have a score, bool `(B, T)`."""
        return self.response_mask & ~self.scores.isnan()[:, None]

    def importance_weights(self, clip_max: float) -> Tensor | None:
        """Return the weights that correct for the engine's arithmetic, `(B, T)`; None if it says no log-probabilities.

        Args:
            clip_max: The largest weight.
        """
        if self.sampling_logprobs is None:
            return None
        return importance_weights(self.logprobs, self.sampling_logprobs, clip_max)


@dataclass(frozen=True)
class Experience(Responses):
    """What the policy and value losses read.

    Attributes:
        logprobs: Log-probabilities under the sampling policy, nats, float32 `(B, T)`.
        values: Value estimates when sampled, float32 `(B, T)`.
        advantages: Whitened advantages, float32 `(B, T)`, 0 outside the loss mask.
        returns: Advantages before whitening plus values, float32 `(B, T)`, 0 outside the loss mask.
        loss_mask: True on the tokens that are learned from, bool `(B, T)`: the real ones of responses with a score.
            Rows without one stay in the batch, so that every rank makes the same passes.
        importance_weights: Factors of the policy's per-token losses, float32 `(B, T)`, or None: all 1.
    """

    logprobs: Tensor
    values: Tensor
    advantages: Tensor
    returns: Tensor
    loss_mask: Tensor
    importance_weights: Tensor | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("logprobs", "values", "advantages", "returns", "loss_mask"):
            _check_shape(name, getattr(self, name), tuple(self.response_mask.shape))
        if self.importance_weights is not None:
            _check_shape("importance_weights", self.importance_weights, tuple(self.response_mask.shape))

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
        device = self.attention_mask.device
        lengths: list[int] = self.lengths.tolist()
        if max_tokens is not None:
            sizes = sizes_within(lengths, max_tokens)
            num_parts = int(gather(torch.tensor([len(sizes)], device=device)).max())
            return self.parts_of(split_until(sizes, num_parts))
        if is_packed:
            return self[dealt_evenly(lengths, max_rows)].parts(max_rows)
        return self.parts(max_rows)


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


def padding_columns(left_padded_mask: Tensor) -> int:
    """Count the leading columns of a bool `(B, C)` mask that are False in every row."""
    return int((~left_padded_mask.any(dim=0)).long().cumprod(dim=0).sum())


def pad_right(parts: list[Tensor], width: int | None = None, padding_value: float = 0) -> Tensor:
    """Stack `(b_i, T_i)` tensors into `(sum b_i, T)`, padded on the right.

    Args:
        parts: Tensors with equal dtype.
        width: `T`; the longest part's when None.
        padding_value: What fills the shorter ones.
    """
    width = max(part.shape[1] for part in parts) if width is None else width
    return torch.cat([functional.pad(part, (0, width - part.shape[1]), value=padding_value) for part in parts])


def _check_shape(name: str, tensor: Tensor, expected: tuple[int, ...]) -> None:
    if tuple(tensor.shape) != expected:
        raise ValueError(f"{name} has shape {tuple(tensor.shape)}, expected {expected}")
