"""Responses behind their prompts, and all that was known when they were sampled.

Every tensor has its shape in the field's docstring and is checked when the object is made. `B` is the number of rows
on this rank, `C` the context (prompt) length after left padding, `T` the response length after right padding.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self, cast

import torch
from torch import Tensor
from torch.nn import functional

from rlhf_ppo.algorithm.losses import importance_weights
from rlhf_ppo.data.masks import check_bool, check_masks
from rlhf_ppo.data.places import HostMasks, Places, sent


@dataclass(frozen=True)
class Responses:
    """Responses behind their prompts, with the two masks that everything later reads.

    What `attention_mask` marks is context: prompt and response, whoever wrote it. What `response_mask` marks is what
    the policy wrote, and is learned from. It may have holes: tokens of tools and environments between the policy's
    turns, which the models see, and which no loss, reward, KL, advantage, statistic or length knows of. What neither
    marks is padding.

    Attributes:
        query_responses: Prompt and response ids, long `(B, C + T)`: left-padded prompt, right-padded response.
        attention_mask: True on real tokens of either part, bool `(B, C + T)`, without holes.
        response_mask: True on the response's tokens that the policy wrote, the stop token included, bool `(B, T)`.
        sampling_logprobs: Log-probabilities that the generation engine drew the response tokens with, nats, float32
            `(B, T)`, 0 outside the mask; None if it does not say them.
        on_host: Copies of both masks on the host, where batches are cut; made and checked where they are not given,
            or are copies of other masks.

    Raises:
        TypeError: A mask is not bool.
        ValueError: A shape does not fit, or a row's masks are not as said here.
    """

    query_responses: Tensor
    attention_mask: Tensor
    response_mask: Tensor
    sampling_logprobs: Tensor | None = field(default=None, kw_only=True)
    on_host: HostMasks | None = field(default=None, kw_only=True, repr=False)

    def __post_init__(self) -> None:
        check_shape("attention_mask", self.attention_mask, tuple(self.query_responses.shape))
        if self.response_mask.shape[0] != len(self) or self.context_length < 1:
            raise ValueError(
                f"response_mask {tuple(self.response_mask.shape)} does not fit query_responses "
                f"{tuple(self.query_responses.shape)}"
            )
        if self.sampling_logprobs is not None:
            check_shape("sampling_logprobs", self.sampling_logprobs, tuple(self.response_mask.shape))
        self._copy_masks()

    def _copy_masks(self) -> None:
        masks = self.attention_mask, self.response_mask
        check_bool(attention_mask=self.attention_mask, response_mask=self.response_mask)
        if self.on_host is None or not self.on_host.are_of(*masks):
            object.__setattr__(self, "on_host", HostMasks.of(*masks))
            check_masks(self.masks)

    def __len__(self) -> int:
        return self.query_responses.shape[0]

    @property
    def context_length(self) -> int:
        """Number of prompt columns `C`."""
        return self.query_responses.shape[1] - self.response_mask.shape[1]

    @property
    def batch(self) -> tuple[Tensor, Tensor, Tensor]:
        """What models read: token ids and attention mask, `(B, C + T)`, and response mask, `(B, T)`."""
        return self.query_responses, self.attention_mask, self.response_mask

    @property
    def responses(self) -> Tensor:
        """Response ids, long `(B, T)`."""
        return self.query_responses[:, self.context_length :]

    @property
    def masks(self) -> HostMasks:
        """Both masks on the host, read from the device once."""
        return cast(HostMasks, self.on_host)

    @property
    def episode_mask(self) -> Tensor:
        """True on the response's real tokens, whoever wrote them, bool `(B, T)`."""
        return self.attention_mask[:, self.context_length :]

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
        chosen = self.masks.attention[rows], self.masks.response[rows]
        if not isinstance(rows, slice):
            rows = sent(torch.tensor(rows, dtype=torch.long), self.attention_mask.device)
        return self._with(chosen, {name: value[rows] for name, value in self._tensors().items()})

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
        length = int(masks.attention[:, context:].any(axis=0).sum())
        left = int((~masks.attention[:, :context].any(axis=0)).cumprod().sum())
        columns = {
            self.query_responses.shape[1]: slice(left, context + length),
            self.responses.shape[1]: slice(length),
        }
        cut = {name: value[:, columns[value.shape[1]]] for name, value in self._tensors().items() if value.dim() == 2}
        return self._with((masks.attention[:, left : context + length], masks.response[:, :length]), cut)

    def _with(self, masks: tuple[Any, Any], tensors: dict[str, Tensor]) -> Self:
        """Replace tensors, of which `masks` are the two masks on the host."""
        on_host = HostMasks(*masks, (tensors["attention_mask"], tensors["response_mask"]))
        return dataclasses.replace(self, on_host=on_host, **tensors)

    def _tensors(self) -> dict[str, Tensor]:
        values = {each.name: getattr(self, each.name) for each in dataclasses.fields(self)}
        return {name: value for name, value in values.items() if isinstance(value, Tensor)}


@dataclass(frozen=True)
class Rollout(Responses):
    """Responses of the current policy with everything that was known when they were sampled.

    Attributes:
        stopped: Whether the response holds the stop token, bool `(B,)`.
        logprobs: Log-probabilities of the response tokens under the sampling policy, nats, float32 `(B, T)`.
        ref_logprobs: The same under the reference policy; None if there is none.
        values: Value estimate before each response token, float32 `(B, T)`.
        final_values: Value estimate after the last token of the row, whoever wrote it, float32 `(B,)`; used when a cut
            response bootstraps.
        scores: Weighted score of each response, paid at its last token, before scaling, clipping and the missing-EOS
            penalty, float32 `(B,)`; NaN where no source scored the response.
        token_scores: Weighted rewards of single tokens, float32 `(B, T)`, 0 outside the mask.
        scores_by_source: What each reward source gave, unweighted, float32 `(B,)` each; NaN where it gave none.
    """

    stopped: Tensor
    logprobs: Tensor
    ref_logprobs: Tensor | None
    values: Tensor
    final_values: Tensor
    scores: Tensor
    token_scores: Tensor
    scores_by_source: Mapping[str, Tensor]

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("logprobs", "ref_logprobs", "values", "token_scores"):
            if (values := getattr(self, name)) is not None:
                check_shape(name, values, tuple(self.response_mask.shape))
        for name in ("stopped", "final_values", "scores"):
            check_shape(name, getattr(self, name), (len(self),))

    @property
    def loss_mask(self) -> Tensor:
        """True on the policy's tokens of the responses that have a score, bool `(B, T)`."""
        return self.response_mask & ~self.scores.isnan()[:, None]

    def importance_weights(self, clip_max: float) -> Tensor | None:
        """Return the weights that correct for the engine's arithmetic, `(B, T)`; None if it says no log-probabilities.

        Args:
            clip_max: The largest weight.
        """
        if self.sampling_logprobs is None:
            return None
        return importance_weights(self.logprobs, self.sampling_logprobs, clip_max)


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


def check_shape(name: str, tensor: Tensor, expected: tuple[int, ...]) -> None:
    """Raise ValueError where a tensor has another shape than its field says."""
    if tuple(tensor.shape) != expected:
        raise ValueError(f"{name} has shape {tuple(tensor.shape)}, expected {expected}")
