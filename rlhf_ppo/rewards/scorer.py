"""One score per response: the weighted sum of what every reward source gives it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor


@dataclass(frozen=True)
class ScoringBatch:
    """What a reward source reads: prompts and responses, already truncated after the stop token.

    Which tokens are real is told by the masks, never by the ids.

    Attributes:
        query_responses: Prompt and response ids, long `(B, C + T)`: left-padded prompt, right-padded response.
        attention_mask: True on real tokens of either part, bool `(B, C + T)`.
        response_mask: True on the response's real tokens, the stop token included, bool `(B, T)`.
        columns: The data set's other columns, each a list of `B` values.
    """

    query_responses: Tensor
    attention_mask: Tensor
    response_mask: Tensor
    columns: Mapping[str, list[Any]]

    def __post_init__(self) -> None:
        rows, width = self.query_responses.shape
        if tuple(self.attention_mask.shape) != (rows, width):
            raise ValueError(f"attention_mask has shape {tuple(self.attention_mask.shape)}, expected {(rows, width)}")
        if len(self.response_mask) != rows or self.response_mask.shape[1] > width:
            raise ValueError(
                f"response_mask has shape {tuple(self.response_mask.shape)}, expected ({rows}, at most {width})"
            )
        for name, values in self.columns.items():
            if len(values) != rows:
                raise ValueError(f"column {name!r} has {len(values)} values for {rows} rows")

    def __len__(self) -> int:
        return len(self.query_responses)

    def prompt_ids(self) -> list[list[int]]:
        """Return the real token ids of each prompt."""
        context = self.query_responses.shape[1] - self.response_mask.shape[1]
        return _selected(self.query_responses[:, :context], self.attention_mask[:, :context])

    def response_ids(self) -> list[list[int]]:
        """Return the real token ids of each response, the stop token included."""
        context = self.query_responses.shape[1] - self.response_mask.shape[1]
        return _selected(self.query_responses[:, context:], self.response_mask)


class RewardSource(Protocol):
    """Anything that scores responses.

    Attributes:
        name: What the source is called in metrics, tables and errors.
    """

    name: str

    def __call__(self, batch: ScoringBatch) -> Tensor:
        """Score every response, float32 `(B,)`; NaN for a response that the source does not score."""
        ...


@dataclass(frozen=True)
class Scores:
    """What a batch of responses is worth.

    Attributes:
        total: Weighted sum over the sources that scored the response, float32 `(B,)`.
        by_source: Each source's own scores before weighting, float32 `(B,)`, NaN where it gave none.
    """

    total: Tensor
    by_source: dict[str, Tensor]


class Scorer:
    """Adds up several reward sources: `total_b = sum_i w_i s_ib`, over the sources `i` that scored response `b`.

    Asynchronous reward functions are started first and run side by side while the others are computed.

    Args:
        sources: The reward sources, in the order of `weights`; sources of one name are called `name`, `name_2`, ...
        weights: One weight per source; None weighs each 1.

    Raises:
        ValueError: There is no source, or `weights` has another length or a number that is not finite.
    """

    def __init__(self, sources: Sequence[RewardSource], weights: Sequence[float] | None) -> None:
        if not sources:
            raise ValueError("no reward: pass a reward_model, reward_funcs, or both")
        self.names = _unique([source.name for source in sources])
        self.sources = dict(zip(self.names, sources, strict=True))
        weights = [1.0] * len(sources) if weights is None else list(weights)
        if len(weights) != len(sources):
            raise ValueError(
                f"reward_weights has {len(weights)} numbers ({weights}) for {len(sources)} rewards ({self.names}): "
                "give one per reward, the reward model's first"
            )
        if not all(math.isfinite(weight) for weight in weights):
            raise ValueError(f"reward_weights={weights} for the rewards {self.names}: every weight must be finite")
        self.weights = dict(zip(self.names, weights, strict=True))

    @torch.no_grad()
    def __call__(self, batch: ScoringBatch) -> Scores:
        """Score a batch.

        Args:
            batch: `B` prompts and truncated responses.

        Returns:
            The totals and each source's scores, on the batch's device.

        Raises:
            ValueError: A source returned another shape, or no source scored a row.
        """
        running = {
            name: source.submit(batch)  # pyright: ignore[reportAttributeAccessIssue]
            for name, source in self.sources.items()
            if getattr(source, "is_async", False)
        }
        by_source = {
            name: running[name].result() if name in running else source(batch) for name, source in self.sources.items()
        }
        for name, scores in by_source.items():
            if tuple(scores.shape) != (len(batch),):
                raise ValueError(f"reward {name!r} has shape {tuple(scores.shape)}, expected ({len(batch)},)")
        device = batch.query_responses.device
        by_source = {name: scores.to(device, torch.float32) for name, scores in by_source.items()}
        unscored = torch.stack([scores.isnan() for scores in by_source.values()]).all(dim=0)
        if unscored.any():
            row = int(unscored.nonzero()[0])
            columns = {name: values[row] for name, values in batch.columns.items()}
            raise ValueError(
                f"no reward scored row {row} of the batch: {self.names} all returned None for {columns!r:.500}; "
                "let one of them return a number"
            )
        total = torch.stack([self.weights[name] * scores for name, scores in by_source.items()]).nansum(dim=0)
        return Scores(total, by_source)


def _selected(ids: Tensor, mask: Tensor) -> list[list[int]]:
    return [row[real].tolist() for row, real in zip(ids, mask.bool(), strict=True)]


def _unique(names: Sequence[str]) -> list[str]:
    taken: list[str] = []
    for name in names:
        number, candidate = 1, name
        while candidate in taken:
            number += 1
            candidate = f"{name}_{number}"
        taken.append(candidate)
    return taken
