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
        total: Weighted sum over the sources that scored the response, float32 `(B,)`; NaN where none did.
        by_source: Each source's own scores before weighting, float32 `(B,)`, NaN where it gave none.
    """

    total: Tensor
    by_source: dict[str, Tensor]


class Scorer:
    """Adds up several reward sources: `total_b = sum_i w_i s_ib`, over the sources `i` that scored response `b`.

    Asynchronous reward functions are started first and run side by side while the others are computed.

    Args:
        sources: The reward sources, in the order of `weights`; sources of one name are called `name`, `name_2`, ...
        weights: One weight per source, in their order or by their names; None weighs each 1.

    Raises:
        ValueError: There is no source, or `weights` has another length, other names or a number that is not finite.
    """

    def __init__(self, sources: Sequence[RewardSource], weights: Sequence[float] | Mapping[str, float] | None) -> None:
        if not sources:
            raise ValueError("no reward: pass a reward_model, reward_funcs, or both")
        self.names = _unique([source.name for source in sources])
        self.sources = dict(zip(self.names, sources, strict=True))
        self.weights = _weights_by_name(self.names, weights)

    @torch.no_grad()
    def __call__(self, batch: ScoringBatch) -> Scores:
        """Score a batch.

        Args:
            batch: `B` prompts and truncated responses.

        Returns:
            The totals and each source's scores, on the batch's device.

        Raises:
            ValueError: A source returned another shape.
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
        total = torch.stack([self.weights[name] * scores for name, scores in by_source.items()]).nansum(dim=0)
        return Scores(total.masked_fill(unscored, math.nan), by_source)


def _weights_by_name(names: Sequence[str], weights: Sequence[float] | Mapping[str, float] | None) -> dict[str, float]:
    if weights is None:
        return dict.fromkeys(names, 1.0)
    if isinstance(weights, Mapping):
        unknown, missing = (
            [name for name in weights if name not in names],
            [name for name in names if name not in weights],
        )
        if unknown or missing:
            problems = [f"names {unknown}"] * bool(unknown) + [f"has no weight for {missing}"] * bool(missing)
            raise ValueError(
                f"reward_weights={dict(weights)} {' and '.join(problems)}: the rewards are {list(names)}; give each a "
                "weight, 0 for one that is only to be logged"
            )
        by_name = {name: weights[name] for name in names}
    elif len(weights) != len(names):
        raise ValueError(
            f"reward_weights has {len(weights)} numbers ({weights}) for {len(names)} rewards ({names}): "
            "give one per reward, the reward model's first"
        )
    else:
        by_name = dict(zip(names, weights, strict=True))
    if not all(map(math.isfinite, by_name.values())):
        raise ValueError(f"reward_weights={weights} for the rewards {names}: every weight must be finite")
    return by_name


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
