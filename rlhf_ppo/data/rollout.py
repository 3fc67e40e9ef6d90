"""Prompts; responses with their masks; rollouts; the experience that losses read, and its mini- and micro-batches."""

from __future__ import annotations

import functools
import heapq
import itertools
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from rlhf_ppo.algorithm.advantages import kl_estimate
from rlhf_ppo.algorithm.losses import importance_weights
from rlhf_ppo.data import prefix_tree as prefixes
from rlhf_ppo.data.images import RowImages

BoolArray = NDArray[np.bool_]

RowIndices = Sequence[int] | slice
"""Some rows of a batch, by their indices."""


class HostMasks(NamedTuple):
    """A batch's masks on the host, bool NumPy arrays.

    Attributes:
        attention: True on real tokens, `(B, L)`.
        response: True on the response tokens that the policy wrote, in the last `T` columns, `(B, T)`.
        source: The tensors that were copied.
    """

    attention: BoolArray
    response: BoolArray
    source: tuple[Tensor, Tensor]

    @classmethod
    def of(cls, attention_mask: Tensor, response_mask: Tensor) -> Self:
        """Copy both masks from their device with one transfer."""
        width = attention_mask.shape[1]
        both = torch.cat([attention_mask.bool(), response_mask.bool()], dim=1).cpu().numpy()
        return cls(both[:, :width], both[:, width:], (attention_mask, response_mask))

    def are_of(self, attention_mask: Tensor, response_mask: Tensor) -> bool:
        """Return whether this copy was made from these tensors."""
        return self.source[0] is attention_mask and self.source[1] is response_mask


@dataclass(frozen=True)
class PackedIndices:
    """Indices of the `N` real tokens of `B` rows, and of the `M` response tokens among them.

    Attributes:
        tokens: Indices into the flattened `(B, L)`, long `(N,)`.
        positions: Position of each token in its row, from 0, long `(N,)`.
        squeezed: Indices into the flattened `(B, longest)`, where each row begins at the left, long `(N,)`.
        lengths: Real tokens of each row, long `(B,)`.
        starts: Index of each row's first token among the real tokens, then `N`, int32 `(B + 1,)`.
        longest: Tokens of the longest row.
        response_tokens: Indices of the response tokens in the rows, the flattened `(B, L)`, long `(M,)`; empty without
            a response mask.
        responses: The same tokens in the responses, the flattened `(B, T)`, long `(M,)`.
        images: The images of each row; None in a run without images.
        ids: Token ids `(B, L)`.
    """

    tokens: Tensor
    positions: Tensor
    squeezed: Tensor
    lengths: Tensor
    starts: Tensor
    longest: int
    response_tokens: Tensor
    responses: Tensor
    images: Sequence[RowImages] | None
    ids: Tensor

    @classmethod
    def of(cls, ids: Tensor, attention_mask: Tensor, response_mask: Tensor | None = None) -> Self:
        """Compute the indices from masks on a device."""
        response_mask = attention_mask[:, :0] if response_mask is None else response_mask
        return cls.from_host(HostMasks.of(attention_mask, response_mask), ids)

    @classmethod
    def from_host(cls, masks: HostMasks, ids: Tensor, images: Sequence[RowImages] | None = None) -> Self:
        """Compute the indices from masks on the host, and copy them to the device of the ids with one transfer."""
        width, length, lengths = masks.attention.shape[1], masks.response.shape[1], masks.attention.sum(axis=1)
        rows, columns = masks.attention.nonzero()
        ends = lengths.cumsum()
        positions = np.arange(len(rows)) - (ends - lengths)[rows]
        longest = int(lengths.max(initial=0))
        response_rows, response_columns = masks.response.nonzero()
        parts = (
            rows * width + columns,
            positions,
            rows * longest + positions,
            lengths,
            np.concatenate([[0], ends]),
            response_rows * width + response_columns + (width - length),
            response_rows * length + response_columns,
        )
        places = sent(torch.as_tensor(np.concatenate(parts).astype(np.int64)), ids.device)
        pieces = torch.split(places, [len(part) for part in parts])
        tokens, positions, squeezed, lengths, starts, response_tokens, responses = pieces
        starts = starts.to(torch.int32)
        return cls(tokens, positions, squeezed, lengths, starts, longest, response_tokens, responses, images, ids)

    @functools.cached_property
    def tree(self) -> prefixes.PrefixTree | None:
        """The prefix tree of the rows, built on the host by the first pass that reads it; None: not worth it."""
        tree = prefixes.prefix_tree(self.squeezed_rows)
        if not tree.is_worth_it:
            return None
        device = self.ids.device
        return replace(tree, tokens=sent(tree.tokens, device), expand=sent(tree.expand, device))

    @property
    def squeezed_rows(self) -> NDArray[np.int64]:
        """The rows' ids on the host, a NumPy array `(B, longest)` padded with -1 on the right."""
        return self.squeeze(self.ids).masked_fill(~self.squeezed_mask, -1).cpu().numpy()

    def squeeze(self, values: Tensor) -> Tensor:
        """Move the real tokens of `(B, L)` to the left, `(B, longest)`, padded with 0."""
        num_rows = len(self.lengths)
        squeezed = values.new_zeros(num_rows * self.longest)
        return squeezed.index_copy_(0, self.squeezed, values.flatten()[self.tokens]).view(num_rows, self.longest)

    @property
    def squeezed_mask(self) -> Tensor:
        """True on the real tokens of a squeezed batch, bool `(B, longest)`."""
        return torch.arange(self.longest, device=self.lengths.device) < self.lengths[:, None]


def sent(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a tensor from the host to a device; for CUDA from pinned memory, without waiting."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


def selected(values: Tensor, mask: Tensor) -> list[list[Any]]:
    """Return the values of each row of `(B, T)` where a mask is True."""
    rows: Any = zip(values.cpu(), mask.bool().cpu(), strict=True)
    return [row[real].tolist() for row, real in rows]


def on_device(rows: RowIndices, device: torch.device) -> Tensor | slice:
    """Return the index of some rows for tensors on a device."""
    return rows if isinstance(rows, slice) else sent(torch.tensor(rows, dtype=torch.long), device)


def check_masks(masks: HostMasks) -> None:
    """Check that each row is a left-padded prompt and a right-padded response with a token of the policy.

    Args:
        masks: Attention `(B, C + T)` and response `(B, T)`.

    Raises:
        ValueError: A row has another form; the message names the first one.
    """
    attention, written = masks.attention, masks.response
    context = attention.shape[1] - written.shape[1]
    prompt, response = attention[:, :context], attention[:, context:]
    wrong = {
        f"attention_mask is False at the end of the prompt, column {context - 1}: prompts are padded on the left, and "
        "none is empty": ~prompt[:, -1],
        "attention_mask has a hole in the prompt: move its padding to the left": _falls(prompt),
        "attention_mask has a hole in the response: mark tokens of tools and environments too, which are False in "
        "response_mask alone, and move padding to the right": _falls(~response),
        "response_mask is True where attention_mask is False: the policy cannot have written padding": (
            written & ~response
        ).any(axis=1),
        "response_mask has no real token: every response needs at least one that the policy wrote, the stop token if "
        "nothing else": ~written.any(axis=1),
    }
    for what, rows in wrong.items():
        if rows.any():
            raise ValueError(f"row {int(rows.argmax())}: {what}")


def _falls(mask: BoolArray) -> Any:
    """Return in which rows True is followed by False."""
    return (mask[:, :-1] & ~mask[:, 1:]).any(axis=1)


class PositionLimit(NamedTuple):
    """A longest sequence.

    Attributes:
        tokens: Number of tokens.
        reason: What sets the limit, for error messages.
        remedy: How to raise it, for error messages.
        is_of_prompts: Whether the prompt alone is too long: a shorter response does not help.
    """

    tokens: int
    reason: str
    remedy: str = "use a model with more positions"
    is_of_prompts: bool = False


def smallest(limits: Iterable[PositionLimit | None]) -> PositionLimit | None:
    """Return the limit with the fewest tokens, or None if there is none."""
    return min((limit for limit in limits if limit is not None), key=lambda limit: limit.tokens, default=None)


def check_lengths(
    longest_prompt: int,
    response_length: int,
    limit: PositionLimit | None,
    option: str = "response_length",
    fix: str | None = None,
) -> None:
    """Check that a prompt and its response fit the models: `longest_prompt + response_length <= limit.tokens`.

    Args:
        longest_prompt: Tokens of the longest prompt.
        response_length: Tokens generated for each prompt.
        limit: The longest sequence; None without a limit.
        option: Name of the option that sets `response_length`, for the message.
        fix: What to change, for the message; None: options of a training run.

    Raises:
        ValueError: They do not fit.
    """
    total = longest_prompt + response_length
    if limit is not None and total > limit.tokens:
        of_response = 0 if limit.is_of_prompts else limit.tokens - longest_prompt
        of_prompt = limit.tokens - response_length
        ways = [f"lower response_length to {of_response}"] if of_response > 0 else []
        ways += [f"set max_prompt_length={of_prompt}"] if of_prompt > 0 else []
        fix = fix or f"{', '.join(ways or ['lower response_length'])}, or {limit.remedy}"
        raise ValueError(
            f"the longest prompt ({longest_prompt} tokens) and {option}={response_length} take {total} positions, but "
            f"{limit.reason}: {fix}"
        )


@dataclass(frozen=True)
class Prompts:
    """Left-padded prompts and the data set's other columns.

    Attributes:
        input_ids: Token ids, long `(B, C)`, padded on the left.
        attention_mask: True on real tokens, bool `(B, C)`.
        columns: The data set's other columns, each a list of `B` values; reward functions receive them.
        on_host: A copy of the mask on the host, and the mask that was copied; None if there is no copy.

    Raises:
        ValueError: A prompt is empty, or mask and ids differ in shape.
    """

    input_ids: Tensor
    attention_mask: Tensor
    columns: Mapping[str, list[Any]]
    on_host: tuple[BoolArray, Tensor] | None = field(default=None, kw_only=True, repr=False)

    def __post_init__(self) -> None:
        check_shapes(self.input_ids.shape, attention_mask=self.attention_mask)
        has_tokens = self.mask.any(axis=1)
        if not has_tokens.all():
            row = int(has_tokens.argmin())
            raise ValueError(f"prompt {row} of the batch is empty (its attention_mask is all zeros); drop such rows")

    @functools.cached_property
    def mask(self) -> BoolArray:
        """The mask on the host, `(B, C)`: `on_host` if it is a copy of this mask, or copied from the device once."""
        if self.on_host is not None and self.on_host[1] is self.attention_mask:
            return self.on_host[0]
        return self.attention_mask.bool().cpu().numpy()

    def __len__(self) -> int:
        return self.input_ids.shape[0]

    @classmethod
    def of_rows(
        cls,
        rows: Sequence[Sequence[int]],
        pad: int,
        device: torch.device,
        columns: Mapping[str, list[Any]] | None = None,
    ) -> Prompts:
        """Stack each row's token ids, padded on the left."""
        mask = left_padded([[1] * len(row) for row in rows], 0).bool()
        return cls(left_padded(rows, pad).to(device), mask.to(device), columns or {})

    @classmethod
    def of_responses(cls, responses: Responses) -> Prompts:
        """Return the prompts of responses, without columns."""
        context = slice(None, responses.context_length)
        return cls(responses.query_responses[:, context], responses.attention_mask[:, context], {})

    @classmethod
    def from_collated(cls, batch: Mapping[str, Any], device: torch.device) -> Prompts:
        """Make prompts of a collator's output, padded on either side; move the padding to the left.

        Args:
            batch: `input_ids` and `attention_mask`, both `(B, C)`, and other columns.
            device: Device of the prompts.

        Returns:
            The prompts, without columns that are padding in every row.

        Raises:
            ValueError: The shapes differ, or a prompt is empty.
        """
        ids, mask = collated_tensors(batch)
        ids, mask = ids.to(device, torch.long), mask.to(device).bool()
        lengths, width = mask.cpu().numpy().sum(axis=1), mask.shape[1]
        order = mask.to(torch.int8).argsort(dim=1, stable=True)  # padding (0) first, real tokens in their own order
        longest = int(lengths.max())
        ids, mask = ids.gather(1, order)[:, -longest:], mask.gather(1, order)[:, -longest:]
        columns = {name: list(values) for name, values in batch.items() if name not in ("input_ids", "attention_mask")}
        on_host = (np.arange(width) >= width - lengths[:, None])[:, -longest:]
        return cls(ids, mask, columns, on_host=(on_host, mask))

    def repeated(self, times: int) -> Prompts:
        """Repeat every prompt `times` times in adjacent rows: 0, 0, ..., 1, 1, ..."""
        if times == 1:
            return self
        columns = {name: [value for value in values for _ in range(times)] for name, values in self.columns.items()}
        ids, mask = (rows.repeat_interleave(times, dim=0) for rows in (self.input_ids, self.attention_mask))
        return Prompts(ids, mask, columns, on_host=(self.mask.repeat(times, axis=0), mask))

    def take(self, rows: Sequence[int]) -> Prompts:
        """Return some rows, in this order."""
        columns = {name: [values[row] for row in rows] for name, values in self.columns.items()}
        mask = self.attention_mask[list(rows)]
        return Prompts(self.input_ids[list(rows)], mask, columns, on_host=(self.mask[list(rows)], mask))


def collated_tensors(batch: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    """Return the ids and the mask of a collator's output; raise a `ValueError` if their shapes differ."""
    ids, mask = batch["input_ids"], batch["attention_mask"]
    if ids.ndim != 2 or ids.shape != mask.shape:
        raise ValueError(
            f"the data_collator returned input_ids and attention_mask of the shapes {tuple(ids.shape)} and "
            f"{tuple(mask.shape)}; both must be `(B, C)`"
        )
    return ids, mask


def left_padded(rows: Sequence[Sequence[int]], value: int) -> Tensor:
    """Stack `B` lists of at most `C` integers into a long `(B, C)` tensor, padded with `value` on the left."""
    length = max(len(row) for row in rows)
    return torch.tensor([[value] * (length - len(row)) + list(row) for row in rows], dtype=torch.long)


@dataclass(frozen=True)
class Responses:
    """Prompts and responses, with the two masks that all later steps read.

    `attention_mask` marks all real tokens: prompt and response, whoever wrote them. `response_mask` marks the response
    tokens that the policy wrote. It may have holes between turns: tokens of tools and environments. Models read those
    tokens; losses, rewards, KL, advantages, statistics and lengths ignore them. All other positions are padding.

    Attributes:
        query_responses: Prompt and response ids, long `(B, C + T)`: left-padded prompt, right-padded response.
        attention_mask: True on real tokens of either part, bool `(B, C + T)`, without holes.
        response_mask: True on the response tokens that the policy wrote, including the stop token, bool `(B, T)`.
        sampling_logprobs: Log-probabilities with which the generation engine drew the response tokens, nats, float32
            `(B, T)`, 0 outside the mask; None if the engine does not return them.
        ended: Whether the response ended by itself, bool `(B,)`; None: by its last turn.
        images: The images of each row's prompt; None in a run without images.
        on_host: Copies of both masks on the host, which are checked already; None if there are none.

    Raises:
        ValueError: A shape does not fit, or a row fails `check_masks`.
    """

    query_responses: Tensor
    attention_mask: Tensor
    response_mask: Tensor
    sampling_logprobs: Tensor | None = field(default=None, kw_only=True)
    ended: Tensor | None = field(default=None, kw_only=True)
    images: Sequence[RowImages] | None = field(default=None, kw_only=True, repr=False)
    on_host: HostMasks | None = field(default=None, kw_only=True, repr=False)

    def __post_init__(self) -> None:
        check_shapes(self.query_responses.shape, attention_mask=self.attention_mask)
        check_shapes(self.response_mask.shape, sampling_logprobs=self.sampling_logprobs)
        check_shapes((len(self),), ended=self.ended)
        if self.masks is not self.on_host:
            check_masks(self.masks)

    def __len__(self) -> int:
        return self.query_responses.shape[0]

    @property
    def context_length(self) -> int:
        """Number of prompt columns `C`."""
        return self.query_responses.shape[1] - self.response_mask.shape[1]

    @property
    def batch(self) -> tuple[Tensor, Tensor, Tensor]:
        """Inputs of the models: token ids and attention mask, `(B, C + T)`, and response mask, `(B, T)`."""
        return self.query_responses, self.attention_mask, self.response_mask

    @property
    def response_ids(self) -> Tensor:
        """Response ids, long `(B, T)`."""
        return self.query_responses[:, self.context_length :]

    @functools.cached_property
    def masks(self) -> HostMasks:
        """Both masks on the host: `on_host` if they are copies of these masks, or copied from the device once."""
        masks = self.attention_mask, self.response_mask
        return self.on_host if self.on_host is not None and self.on_host.are_of(*masks) else HostMasks.of(*masks)

    @property
    def episode_mask(self) -> Tensor:
        """True on the response's real tokens, whoever wrote them, bool `(B, T)`."""
        return self.attention_mask[:, self.context_length :]

    @functools.cached_property
    def places(self) -> PackedIndices:
        """Indices of the real tokens."""
        return PackedIndices.from_host(self.masks, self.query_responses, self.images)

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Real tokens of each row, `(B,)`."""
        return self.masks.attention.sum(axis=1)

    def __getitem__(self, rows: RowIndices) -> Responses:
        index = on_device(rows, self.attention_mask.device)
        numbers = range(len(self))[rows] if isinstance(rows, slice) else rows
        attention, response = self.attention_mask[index], self.response_mask[index]
        return Responses(
            query_responses=self.query_responses[index],
            attention_mask=attention,
            response_mask=response,
            sampling_logprobs=None if self.sampling_logprobs is None else self.sampling_logprobs[index],
            ended=None if self.ended is None else self.ended[index],
            images=None if self.images is None else [self.images[row] for row in numbers],
            on_host=HostMasks(self.masks.attention[rows], self.masks.response[rows], (attention, response)),
        )

    def longest_first(self) -> list[int]:
        """Return the rows' indices, longest row first; a stable sort."""
        return (-self.lengths).argsort(kind="stable").tolist()

    def parts(self, max_rows: int) -> list[Responses]:
        """Split into parts of at most `max_rows` rows, each trimmed."""
        return [self[start : start + max_rows].trimmed() for start in range(0, len(self), max_rows)]

    def trimmed(self) -> Responses:
        """Drop the outer columns that are padding in every row."""
        masks, context = self.masks, self.context_length
        first = padding_columns(masks.attention[:, :context])
        length = int(masks.attention[:, context:].any(axis=0).sum())
        of_row, of_response = slice(first, context + length), slice(length)
        attention, response = self.attention_mask[:, of_row], self.response_mask[:, of_response]
        return replace(
            self,
            query_responses=self.query_responses[:, of_row],
            attention_mask=attention,
            response_mask=response,
            sampling_logprobs=None if self.sampling_logprobs is None else self.sampling_logprobs[:, of_response],
            on_host=HostMasks(masks.attention[:, of_row], masks.response[:, of_response], (attention, response)),
        )


@dataclass(frozen=True, kw_only=True)
class Rollout:
    """Responses of the current policy with their log-probabilities, values and scores.

    Attributes:
        responses: `B` prompts with their responses.
        ended: Whether the response ended by itself: with a stop token, a stop string or as the caller set it, bool
            `(B,)`.
        logprobs: Log-probabilities of the response tokens under the sampling policy, nats, float32 `(B, T)`.
        ref_logprobs: The same under the reference policy; None if there is none.
        values: Value estimate before each response token, float32 `(B, T)`.
        final_values: Value estimate after the last token of the row, whoever wrote it, float32 `(B,)`;
            `bootstrap_truncated` uses it.
        scores: Weighted score of each response, paid at its last token, before scaling, clipping and the missing-EOS
            penalty, float32 `(B,)`; NaN if no source scored the response.
        token_scores: Weighted rewards of single tokens, float32 `(B, T)`, 0 outside the mask.
        scores_by_source: Unweighted scores of each reward source, float32 `(B,)`; NaN without a score.
    """

    responses: Responses
    ended: Tensor
    logprobs: Tensor
    ref_logprobs: Tensor | None
    values: Tensor
    final_values: Tensor
    scores: Tensor
    token_scores: Tensor
    scores_by_source: Mapping[str, Tensor]

    def __post_init__(self) -> None:
        check_shapes(
            self.response_mask.shape,
            logprobs=self.logprobs,
            ref_logprobs=self.ref_logprobs,
            values=self.values,
            token_scores=self.token_scores,
        )
        check_shapes((len(self),), ended=self.ended, final_values=self.final_values, scores=self.scores)

    def __len__(self) -> int:
        return len(self.responses)

    @property
    def response_mask(self) -> Tensor:
        """True on the response tokens that the policy wrote, bool `(B, T)`."""
        return self.responses.response_mask

    @property
    def loss_mask(self) -> Tensor:
        """True on the policy's tokens of the responses that have a score, bool `(B, T)`."""
        return self.response_mask & ~self.scores.isnan()[:, None]

    def kl(self, estimator: str) -> Tensor | None:
        """Return the KL estimate of each token, nats, float32 `(B, T)`, 0 outside the mask; None without a reference.

        Args:
            estimator: As for `kl_estimate`.
        """
        if self.ref_logprobs is None:
            return None
        return kl_estimate(self.logprobs, self.ref_logprobs, estimator).masked_fill(~self.response_mask, 0.0)

    def importance_weights(self, clip_max: float) -> Tensor | None:
        """Return importance weights of the policy over the engine, `(B, T)`; None without sampling log-probabilities.

        Args:
            clip_max: Largest weight.
        """
        sampling_logprobs = self.responses.sampling_logprobs
        return None if sampling_logprobs is None else importance_weights(self.logprobs, sampling_logprobs, clip_max)


def padding_columns(left_padded_mask: BoolArray) -> int:
    """Count the leading columns of a mask `(B, C)` that are False in every row."""
    return int((~left_padded_mask.any(axis=0)).cumprod().sum())


def pad_right(parts: list[Tensor], width: int | None = None, padding_value: float = 0) -> Tensor:
    """Stack `(b_i, T_i)` tensors into `(sum b_i, T)`, padded on the right.

    Args:
        parts: Tensors with equal dtype.
        width: `T`; the longest part's when None.
        padding_value: Value of the padding.
    """
    width = max(part.shape[1] for part in parts) if width is None else width
    return torch.cat([functional.pad(part, (0, width - part.shape[1]), value=padding_value) for part in parts])


def check_shapes(expected: Sequence[int], **tensors: Tensor | None) -> None:
    """Raise a `ValueError` if a tensor, by name, has another shape; None passes."""
    for name, tensor in tensors.items():
        if tensor is not None and tensor.shape != tuple(expected):
            raise ValueError(f"{name} has shape {tuple(tensor.shape)}, expected {tuple(expected)}")


def forward_in_batches(
    responses: Responses, evaluate: Callable[[Responses], Sequence[Tensor]], max_rows: int, is_packed: bool
) -> tuple[Tensor, ...]:
    """Evaluate `max_rows` trimmed rows at a time, and concatenate the results, padded on the right to `T`.

    Padded rows are batched with rows of similar length. Packed rows have no padding, and keep their order.

    Args:
        responses: `B` prompts with their responses.
        evaluate: Returns tensors `(b, T')` or `(b,)` for `b` rows whose longest response has `T'` tokens.
        max_rows: Maximum rows of a forward pass.
        is_packed: Whether the models pack rows.

    Returns:
        Tensors `(B, T)` or `(B,)`.
    """
    is_sorted, length = not is_packed and len(responses) > max_rows, responses.response_mask.shape[1]
    order = responses.longest_first() if is_sorted else []
    outputs = [evaluate(part) for part in (responses[order] if is_sorted else responses).parts(max_rows)]
    whole = tuple(
        pad_right(list(results), length) if results[0].dim() == 2 else torch.cat(results)
        for results in zip(*outputs, strict=True)
    )
    if not is_sorted:
        return whole
    rows = torch.tensor(order, device=whole[0].device)  # the row that each result belongs to
    return tuple(torch.empty_like(values).index_copy_(0, rows, values) for values in whole)


@dataclass(frozen=True, kw_only=True)
class Experience:
    """Inputs of the policy and value losses.

    Attributes:
        responses: `B` prompts with their responses.
        ended: Whether the response ended by itself, bool `(B,)`.
        logprobs: Old log-probabilities, the denominator of the importance ratio, nats, float32 `(B, T)`.
        values: Value estimates when sampled, float32 `(B, T)`.
        rewards: Reward of each token before whitening, float32 `(B, T)`.
        advantages: Whitened advantages, float32 `(B, T)`, 0 outside the loss mask.
        returns: Targets of the value loss, float32 `(B, T)`, 0 outside the loss mask: advantages before whitening plus
            values, with the value model's lambda.
        loss_mask: True on the learned tokens, bool `(B, T)`: the policy's tokens in responses with a score. Rows
            without a score stay in the batch: every rank runs the same number of passes.
        importance_weights: Factors of the policy loss, float32 `(B, T)`; None: all 1.
        policy_weights: Weights of the policy loss in the mini-batch, float32 `(B, T)`; None: all 1.
        value_weights: Weights of the value loss, float32 `(B, T)`; None: all 1. Learning sets both.
    """

    responses: Responses
    ended: Tensor
    logprobs: Tensor
    values: Tensor
    rewards: Tensor
    advantages: Tensor
    returns: Tensor
    loss_mask: Tensor
    importance_weights: Tensor | None = None
    policy_weights: Tensor | None = None
    value_weights: Tensor | None = None

    def __post_init__(self) -> None:
        per_token = self._tensors()
        check_shapes((len(self),), ended=per_token.pop("ended"))
        check_shapes(self.responses.response_mask.shape, **per_token)

    def __len__(self) -> int:
        return len(self.responses)

    def __getitem__(self, rows: RowIndices) -> Self:
        index = on_device(rows, self.logprobs.device)
        tensors = {name: values[index] for name, values in self._tensors().items()}
        return replace(self, responses=self.responses[rows], **tensors)

    def trimmed(self) -> Self:
        """Drop the outer columns that are padding in every row."""
        responses = self.responses.trimmed()
        columns = slice(responses.response_mask.shape[1])
        per_token = {name: values[:, columns] for name, values in self._tensors().items() if name != "ended"}
        return replace(self, responses=responses, **per_token)

    def _tensors(self) -> dict[str, Tensor]:
        """Return the tensors by name: `ended`, and those of tokens."""
        return {name: value for name, value in vars(self).items() if isinstance(value, Tensor)}

    def shuffled_minibatches(self, num_mini_batches: int, generator: torch.Generator) -> Iterator[Self]:
        """Yield `num_mini_batches` random, disjoint parts of equal size, each with its longest rows first."""
        order, lengths = torch.randperm(len(self), generator=generator), self.responses.lengths
        for chunk in order.chunk(num_mini_batches):
            rows = chunk.numpy()
            yield self[rows[(-lengths[rows]).argsort(kind="stable")].tolist()]


def micro_batch_rows(
    responses: Responses,
    max_rows: int,
    max_tokens: int | None,
    gather: Callable[[Tensor], Tensor],
    is_packed: bool,
    shares_prefixes: bool = False,
) -> list[RowIndices]:
    """Divide rows into micro-batches of at most `max_rows` rows, or of at most `max_tokens` tokens.

    Consecutive rows have similar lengths and stay together, which needs little padding. Packed rows have no padding:
    parts with similar numbers of tokens take the least memory. Rows that begin alike share a part if fewer tokens are
    then computed.

    Args:
        responses: The responses of the mini-batch.
        max_rows: Maximum rows of a part.
        max_tokens: Maximum tokens of a part, prompts included; a longer row is a separate part. None: `max_rows`.
        gather: Concatenates a tensor over all ranks. Every rank makes as many parts as the rank that needs most.
        is_packed: Whether the models pack rows.
        shares_prefixes: Whether they compute a common beginning of rows once; `max_tokens` then counts it once.

    Returns:
        The rows of each micro-batch.
    """
    lengths: list[int] = responses.lengths.tolist()
    if max_tokens is None:
        sizes = [min(max_rows, len(lengths) - start) for start in range(0, len(lengths), max_rows)]
        order = dealt_evenly(lengths, max_rows) if is_packed else None
    else:
        sizes, order = sizes_within(lengths, max_tokens), None
    if shares_prefixes and len(sizes) > 1:
        ids = responses.places.squeezed_rows
        alike = prefixes.sorted_like_a_dictionary(ids)
        of_alike = sizes if max_tokens is None else prefixes.sizes_within_shared(ids[alike], max_tokens)
        before = ids if order is None else ids[order]
        if prefixes.num_computed_in_parts(ids[alike], of_alike) < prefixes.num_computed_in_parts(before, sizes):
            order, sizes = alike.tolist(), of_alike
    if max_tokens is not None:
        num_parts = int(gather(torch.tensor([len(sizes)], device=responses.attention_mask.device)).max())
        sizes = split_until(sizes, num_parts)
    parts = [slice(end - size, end) for size, end in zip(sizes, itertools.accumulate(sizes), strict=True)]
    return [part if order is None else order[part] for part in parts]


def dealt_evenly(lengths: Sequence[int], max_rows: int) -> list[int]:
    """Order rows so that consecutive parts of `max_rows` rows have similar numbers of tokens.

    The longest remaining row goes to the part with the fewest tokens that is not full.

    Args:
        lengths: Tokens of each row.
        max_rows: Rows of each part; the last may have fewer.

    Returns:
        Indices of the rows, part after part.
    """
    room = [min(max_rows, len(lengths) - start) for start in range(0, len(lengths), max_rows)]
    parts: list[list[int]] = [[] for _ in room]
    with_room = [(0, part) for part in range(len(room))]  # a heap: the part with the fewest tokens first
    for row in sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True):
        tokens, part = heapq.heappop(with_room)
        parts[part].append(row)
        if len(parts[part]) < room[part]:
            heapq.heappush(with_room, (tokens + lengths[row], part))
    return [row for part in parts for row in part]


def sizes_within(lengths: Sequence[int], max_tokens: int) -> list[int]:
    """Fill consecutive parts with as many rows as fit.

    Args:
        lengths: Tokens of each row.
        max_tokens: Maximum tokens of a part; a longer row is a separate part.

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
        sizes: Number of rows of each part; their sum is at least `num_parts`.
        num_parts: Number of parts, at least `len(sizes)`.
    """
    starts = itertools.accumulate(sizes, initial=0)
    parts = [(-size, start) for size, start in zip(sizes, starts, strict=False)]  # a heap: the largest part first
    heapq.heapify(parts)
    while len(parts) < num_parts:
        size, start = heapq.heappop(parts)
        for half, first in ((size // 2, start), (-(-size // 2), start - size // 2)):
            heapq.heappush(parts, (half, first))
    return [-size for size, _ in sorted(parts, key=operator.itemgetter(1))]
