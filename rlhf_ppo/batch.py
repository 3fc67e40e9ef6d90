"""What one PPO update works on: prompts become a rollout, a rollout becomes experience.

Every tensor has its shape in the field's docstring and is checked when the object is made. `B` is the number of rows
on this rank, `C` the context (prompt) length after left padding, `T` the response length after right padding.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor


class _Rows:
    """Row selection shared by the batches: `batch[index]` takes the same rows of every tensor."""

    def __len__(self) -> int:
        return getattr(self, dataclasses.fields(self)[0].name).shape[0]  # pyright: ignore[reportArgumentType]

    def _take(self, index: Any) -> dict[str, Any]:
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}  # pyright: ignore
        return {name: value[index] if isinstance(value, Tensor) else value for name, value in values.items()}


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


@dataclass(frozen=True)
class Rollout(_Rows):
    """Responses of the current policy with everything that was known when they were sampled.

    Attributes:
        query_responses: Prompt and response ids, long `(B, C + T)`: left-padded prompt, right-padded response.
        attention_mask: True on real tokens of either part, bool `(B, C + T)`.
        response_mask: True on the response's real tokens, the stop token included, bool `(B, T)`.
        stopped: Whether the response holds the stop token, bool `(B,)`.
        logprobs: Log-probabilities of the response tokens under the sampling policy, nats, float32 `(B, T)`.
        ref_logprobs: The same under the reference policy.
        values: Value estimates before each response token, float32 `(B, T)`.
        final_values: Value estimate after the last real token, float32 `(B,)`; used when a cut response bootstraps.
        scores: Score of each response, before the missing-EOS penalty, float32 `(B,)`.
    """

    query_responses: Tensor
    attention_mask: Tensor
    response_mask: Tensor
    stopped: Tensor
    logprobs: Tensor
    ref_logprobs: Tensor
    values: Tensor
    final_values: Tensor
    scores: Tensor

    def __post_init__(self) -> None:
        rows, length = self.response_mask.shape
        _check_shape("attention_mask", self.attention_mask, tuple(self.query_responses.shape))
        for name in ("logprobs", "ref_logprobs", "values"):
            _check_shape(name, getattr(self, name), (rows, length))
        for name in ("stopped", "final_values", "scores"):
            _check_shape(name, getattr(self, name), (rows,))

    @property
    def context_length(self) -> int:
        """Number of prompt columns `C`."""
        return self.query_responses.shape[1] - self.response_mask.shape[1]

    @property
    def responses(self) -> Tensor:
        """Response ids, long `(B, T)`."""
        return self.query_responses[:, self.context_length :]


@dataclass(frozen=True)
class Experience(_Rows):
    """What the policy and value losses read.

    Attributes:
        query_responses: Prompt and response ids, long `(B, C + T)`.
        attention_mask: True on real tokens, bool `(B, C + T)`.
        response_mask: True on real response tokens, bool `(B, T)`.
        logprobs: Log-probabilities under the sampling policy, nats, float32 `(B, T)`.
        values: Value estimates when sampled, float32 `(B, T)`.
        advantages: Whitened advantages, float32 `(B, T)`, 0 outside the mask.
        returns: Advantages before whitening plus values, float32 `(B, T)`, 0 outside the mask.
    """

    query_responses: Tensor
    attention_mask: Tensor
    response_mask: Tensor
    logprobs: Tensor
    values: Tensor
    advantages: Tensor
    returns: Tensor

    def __post_init__(self) -> None:
        _check_shape("attention_mask", self.attention_mask, tuple(self.query_responses.shape))
        for name in ("logprobs", "values", "advantages", "returns"):
            _check_shape(name, getattr(self, name), tuple(self.response_mask.shape))

    def __getitem__(self, index: Tensor | slice) -> Self:
        return type(self)(**self._take(index))

    def shuffled_minibatches(self, num_mini_batches: int, generator: torch.Generator) -> Iterator[Self]:
        """Yield `num_mini_batches` disjoint parts of equal size, in an order drawn from `generator`."""
        order = torch.randperm(len(self), generator=generator)
        for rows in order.chunk(num_mini_batches):
            yield self[rows.to(self.query_responses.device)]

    def microbatches(self, max_rows: int) -> list[Self]:
        """Cut into parts of at most `max_rows` rows, each trimmed to its longest real prompt and response."""
        return [self[start : start + max_rows].trimmed() for start in range(0, len(self), max_rows)]

    def trimmed(self) -> Self:
        """Drop the columns that are padding in every row, left of the prompts and right of the responses."""
        context = self.query_responses.shape[1] - self.response_mask.shape[1]
        left, length = padding_columns(self.attention_mask[:, :context]), int(self.response_mask.sum(dim=1).max())
        cut = {
            name: value[:, left : context + length]
            if name in ("query_responses", "attention_mask")
            else value[:, :length]
            for name, value in self._take(slice(None)).items()
        }
        return type(self)(**cut)


def padding_columns(left_padded_mask: Tensor) -> int:
    """Count the leading columns of a bool `(B, C)` mask that are False in every row."""
    return int((~left_padded_mask.any(dim=0)).long().cumprod(dim=0).sum())


def _check_shape(name: str, tensor: Tensor, expected: tuple[int, ...]) -> None:
    if tuple(tensor.shape) != expected:
        raise ValueError(f"{name} has shape {tuple(tensor.shape)}, expected {expected}")
