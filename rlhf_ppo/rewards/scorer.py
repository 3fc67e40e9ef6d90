"""What responses are worth: the weighted sum of what every reward source gives them."""

from __future__ import annotations

import difflib
import inspect
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from inspect import Parameter
from typing import TYPE_CHECKING, Any, Protocol, TypeGuard, TypeVar

import torch
from torch import Tensor

from rlhf_ppo.data.prompts import Prompts
from rlhf_ppo.data.rollout import Responses
from rlhf_ppo.processes.signals import may_be_given_up
from rlhf_ppo.terminal.foreign import visible

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

T = TypeVar("T")

MAX_SCORE = 1e12
"""The largest absolute value of a score: its squares, summed over a batch, are still finite in float32."""

Refuse = Callable[[str], None]
"""Takes the reason why a response's score cannot be used: raises, or returns, and the response counts as unscored."""


def refuse_by_raising(reason: str) -> None:
    """Raise a ValueError with the reason."""
    raise ValueError(reason)


@dataclass(frozen=True)
class ScoringBatch:
    """What a reward source reads: prompts and responses, already truncated after the stop token.

    Which tokens are real is told by the masks, never by the ids. What is read is the whole response, with what tools
    and environments wrote in it; rewards of single tokens are paid for those that the policy wrote.

    Attributes:
        query_responses: Prompt and response ids, long `(B, C + T)`: left-padded prompt, right-padded response.
        attention_mask: True on real tokens of either part, bool `(B, C + T)`.
        response_mask: True on the response's tokens that the policy wrote, the stop token included, bool `(B, T)`.
        columns: The data set's other columns, each a list of `B` values.
        ended: Whether the response ended by itself, with a stop token or a stop string, bool `(B,)`; the one notion of
            it, from `rlhf_ppo.generation.sequences.ended`.
    """

    query_responses: Tensor
    attention_mask: Tensor
    response_mask: Tensor
    columns: Mapping[str, list[Any]]
    ended: Tensor

    def __post_init__(self) -> None:
        rows, width = self.query_responses.shape
        if tuple(self.attention_mask.shape) != (rows, width):
            raise ValueError(f"attention_mask has shape {tuple(self.attention_mask.shape)}, expected {(rows, width)}")
        if len(self.response_mask) != rows or self.response_mask.shape[1] > width:
            raise ValueError(
                f"response_mask has shape {tuple(self.response_mask.shape)}, expected ({rows}, at most {width})"
            )
        if tuple(self.ended.shape) != (rows,):
            raise ValueError(f"ended has shape {tuple(self.ended.shape)}, expected {(rows,)}")
        for name, values in self.columns.items():
            if len(values) != rows:
                raise ValueError(f"column {name!r} has {len(values)} values for {rows} rows")

    @classmethod
    def of(cls, responses: Responses, prompts: Prompts, ended: Tensor) -> ScoringBatch:
        """Put responses, their prompts' columns and whether they ended together."""
        return cls(*responses.batch, prompts.columns, ended)

    def __len__(self) -> int:
        return len(self.query_responses)

    def prompt_ids(self) -> list[list[int]]:
        """Return the real token ids of each prompt, in lists of the caller's own."""
        return [list(ids) for ids in self._prompt_ids]

    def response_ids(self) -> list[list[int]]:
        """Return the real token ids of each response, whoever wrote them, in lists of the caller's own."""
        return [list(ids) for ids in self._response_ids]

    def prompt_texts(self, tokenizer: PreTrainedTokenizerBase) -> list[str]:
        """Return each prompt's text, without special tokens; it is decoded once for all sources."""
        return self._texts("prompt", tokenizer, self._prompt_ids)

    def response_texts(self, tokenizer: PreTrainedTokenizerBase) -> list[str]:
        """Return each response's text, without special tokens; it is decoded once for all sources."""
        return self._texts("response", tokenizer, self._response_ids)

    @cached_property
    def _prompt_ids(self) -> list[list[int]]:
        ids, real, _ = self._on_host
        context = ids.shape[1] - self.response_mask.shape[1]
        return selected(ids[:, :context], real[:, :context])

    @cached_property
    def _on_host(self) -> tuple[Tensor, Tensor, Tensor]:
        """Ids and both masks, copied from their device in one piece for all sources."""
        width = self.query_responses.shape[1]
        together = torch.cat([self.query_responses, self.attention_mask.long(), self.response_mask.long()], dim=1)
        ids, real, written = together.cpu().split([width, width, self.response_mask.shape[1]], dim=1)
        return ids, real.bool(), written.bool()

    @cached_property
    def written(self) -> list[list[bool]]:
        """Which of each response's real tokens the policy wrote."""
        _, real, written = self._on_host
        return selected(written, real[:, real.shape[1] - written.shape[1] :])

    @property
    def episode_mask(self) -> Tensor:
        """True on the response's real tokens, whoever wrote them, bool `(B, T)`."""
        return self.attention_mask[:, self.query_responses.shape[1] - self.response_mask.shape[1] :]

    @cached_property
    def _response_ids(self) -> list[list[int]]:
        ids, real, _ = self._on_host
        context = ids.shape[1] - self.response_mask.shape[1]
        return selected(ids[:, context:], real[:, context:])

    def _texts(self, part: str, tokenizer: PreTrainedTokenizerBase, ids: list[list[int]]) -> list[str]:
        def decoded() -> list[str]:
            return tokenizer.batch_decode(ids, skip_special_tokens=True)

        return list(self.once(f"text of the {part}", tokenizer, decoded))

    def once(self, what: str, tokenizer: PreTrainedTokenizerBase, make: Callable[[], list[T]]) -> list[T]:
        """Make something of the rows when it is first asked for, and return the same to all others.

        Args:
            what: What it is.
            tokenizer: The tokenizer that it depends on.
            make: Makes it.
        """
        made: dict[tuple[str, int], list[Any]] = self.__dict__.setdefault("_made", {})
        key = (what, id(tokenizer))
        if key not in made:
            made[key] = make()
        return made[key]


class RewardSource(Protocol):
    """Anything that scores responses by their token ids, many at once.

    An object in `reward_funcs` is one if its class derives from this, or if it has a `name` and is called with one
    argument by position, the batch; reward functions take theirs by name.

    A slow source has `is_async = True` and a method `submit(batch) -> Future`; it then runs beside everything else.

    Attributes:
        name: What the source is called in metrics, tables and errors.
    """

    name: str

    def __call__(self, batch: ScoringBatch) -> Tensor:
        """Score every response.

        Returns:
            Float32 `(B,)`, one score per response; or `(B, T)`, one reward per response token. NaN for a response that
            the source does not score, at the first token that the policy wrote at least. What stands at tokens that
            it did not write is not paid.
        """
        ...


def is_reward_source(candidate: object) -> TypeGuard[RewardSource]:
    """Tell whether an object is a `RewardSource` rather than a reward function."""
    if isinstance(candidate, type):
        return False
    if RewardSource in type(candidate).__mro__:
        return True
    if not callable(candidate) or not isinstance(getattr(candidate, "name", None), str):
        return False
    parameters = list(inspect.signature(candidate).parameters.values())
    return len(parameters) == 1 and parameters[0].kind in (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)


@dataclass(frozen=True)
class Scores:
    """What a batch of responses is worth.

    Attributes:
        final: Weighted sum over the sources that gave the response one number, float32 `(B,)`: 0 where only rewards of
            tokens were given, NaN where no source scored the response.
        per_token: Weighted sum over the sources that reward tokens, float32 `(B, T)`, 0 outside the response mask.
        by_source: Each source's own scores before weighting, float32 `(B,)`, NaN where it gave none; of a source that
            rewards tokens, their sum.
    """

    final: Tensor
    per_token: Tensor
    by_source: dict[str, Tensor]

    @property
    def total(self) -> Tensor:
        """What each response is worth in all, float32 `(B,)`; NaN where no source scored it."""
        return self.final + self.per_token.sum(dim=1)


class Scorer:
    """Adds up several reward sources, over the sources `i` that scored response `b`.

        final_b = sum_i w_i s_ib        per_token_bt = sum_i w_i r_ibt

    Args:
        sources: The reward sources; sources of one name are called `name`, `name_2`, ...
        weights: One weight per source, in their order or by name; None weighs each 1.
        refuse: What becomes of a weighted sum beyond `MAX_SCORE`.

    Raises:
        ValueError: There is no source, or `weights` does not name each source once, or holds a number that is not
            finite.
    """

    def __init__(
        self,
        sources: Sequence[RewardSource],
        weights: Sequence[float] | Mapping[str, float] | None = None,
        refuse: Refuse = refuse_by_raising,
    ) -> None:
        if not sources:
            raise ValueError("no reward: pass a reward_model, reward_funcs, or both")
        self.names = _unique([visible(source.name, one_line=True) for source in sources])
        self.sources = dict(zip(self.names, sources, strict=True))
        self.weights = weights_by_name(self.names, weights)
        self.refuse = refuse
        self._started: tuple[ScoringBatch, dict[str, Future[Tensor]]] | None = None

    @property
    def reads_columns(self) -> bool:
        """Whether any source reads columns of the data set."""
        return any(getattr(source, "reads_columns", True) for source in self.sources.values())

    def start(self, batch: ScoringBatch) -> None:
        """Start the slow sources on a batch, so that they run while the caller goes on.

        Args:
            batch: What the next call will score.
        """
        self.stop()
        self._started = (batch, self._submitted(batch))

    def stop(self) -> None:
        """Give up what `start` began and no call has collected; nothing that it would still log arrives."""
        started, self._started = self._started, None
        _cancel({} if started is None else started[1])

    @torch.no_grad()
    def __call__(self, batch: ScoringBatch) -> Scores:
        """Score a batch.

        The slow sources are started first, unless `start` did so, and collected last. When one source fails, the
        slow ones that still run are given up.

        Args:
            batch: `B` prompts and truncated responses.

        Returns:
            The weighted sums and each source's scores, on the batch's device.

        Raises:
            ValueError: A source returned another shape.
        """
        batch, running = self._taken(batch)
        try:
            with _surroundings_kept():
                given = {name: source(batch) for name, source in self.sources.items() if name not in running}
                with may_be_given_up():
                    given |= {name: future.result() for name, future in running.items()}
        finally:
            _cancel(running)
        return self._added_up({name: given[name] for name in self.names}, batch)

    def _taken(self, batch: ScoringBatch) -> tuple[ScoringBatch, dict[str, Future[Tensor]]]:
        """Return what `start` was given and began, if these are its responses; else give up what it began."""
        if self._started is None or self._started[0].query_responses is not batch.query_responses:
            self.stop()
            return batch, self._submitted(batch)
        taken, self._started = self._started, None
        return taken

    def _submitted(self, batch: ScoringBatch) -> dict[str, Future[Tensor]]:
        return {
            name: source.submit(batch)  # pyright: ignore[reportAttributeAccessIssue]
            for name, source in self.sources.items()
            if getattr(source, "is_async", False)
        }

    def _added_up(self, given: Mapping[str, Tensor], batch: ScoringBatch) -> Scores:
        mask = batch.response_mask.bool()
        final, per_token = torch.zeros(len(batch), device=mask.device), torch.zeros(mask.shape, device=mask.device)
        by_source: dict[str, Tensor] = {}
        first = mask.to(torch.uint8).argmax(dim=1, keepdim=True)
        for name, scores in given.items():
            if not isinstance(scores, Tensor):
                raise TypeError(f"reward {name!r} returned {scores!r:.60}, expected a tensor ({len(batch)},)")
            scores = scores.to(mask.device, torch.float32)
            if tuple(scores.shape) == (len(batch),):
                by_source[name] = scores
                final = final + self.weights[name] * torch.where(scores.isnan(), 0.0, scores)
            elif scores.shape == mask.shape:
                unscored = scores.gather(1, first).squeeze(1).isnan()
                scores = torch.where(mask & ~unscored[:, None], scores, 0.0)
                by_source[name] = scores.sum(dim=1).masked_fill(unscored, math.nan)
                per_token = per_token + self.weights[name] * scores
            else:
                raise ValueError(
                    f"reward {name!r} has shape {tuple(scores.shape)}, expected ({len(batch)},), or "
                    f"{tuple(mask.shape)} for rewards per token"
                )
        unscored = torch.stack([scores.isnan() for scores in by_source.values()]).all(dim=0)
        usable = (final.abs() <= MAX_SCORE) & (per_token.abs() <= MAX_SCORE).all(dim=1)
        for row in (~usable & ~unscored).nonzero().flatten().tolist():
            self.refuse(
                f"the weighted sum of the rewards of row {row} is beyond {MAX_SCORE:g}: return smaller rewards, or "
                f"lower reward_weights={self.weights}"
            )
        per_token, unscored = per_token.masked_fill(~usable[:, None], 0.0), unscored | ~usable
        return Scores(final.masked_fill(unscored, math.nan), per_token, by_source)


@contextmanager
def _surroundings_kept() -> Iterator[None]:
    """Restore the working directory and PyTorch's default dtype, which a user's function may change."""
    dtype = torch.get_default_dtype()
    try:
        directory = os.getcwd()
    except FileNotFoundError:  # somebody has deleted it
        directory = None
    try:
        yield
    finally:
        torch.set_default_dtype(dtype)
        if directory is not None:
            os.chdir(directory)


def weights_by_name(names: Sequence[str], weights: Sequence[float] | Mapping[str, float] | None) -> dict[str, float]:
    """Give each reward source its weight.

    Args:
        names: The sources' names.
        weights: As many numbers as there are names, or a number by each name, or None: all 1.

    Raises:
        ValueError: There are too few or too many, one names no source, or one is not finite.
    """
    if weights is None:
        return dict.fromkeys(names, 1.0)
    if not isinstance(weights, Mapping):
        if len(weights) != len(names):
            raise ValueError(
                f"reward_weights has {len(weights)} numbers ({list(weights)}) for {len(names)} rewards "
                f"({list(names)}): give one per reward, the reward models' first"
            )
        weights = dict(zip(names, weights, strict=True))
    unknown = [name for name in weights if name not in names]
    missing = [name for name in names if name not in weights]
    if unknown or missing:
        problems = [f"names {unknown}"] * bool(unknown) + [f"has no weight for {missing}"] * bool(missing)
        near = [match for name in unknown for match in difflib.get_close_matches(name, missing, n=1)]
        hint = f" (did you mean {near[0]!r}?)" if near else ""
        raise ValueError(
            f"reward_weights={dict(weights)} {' and '.join(problems)}: the rewards are {list(names)}"
            f"{hint}; give each a weight, 0 for one that is only to be logged"
        )
    if not all(math.isfinite(weight) for weight in weights.values()):
        raise ValueError(f"reward_weights={dict(weights)}: every weight must be finite")
    return {name: float(weights[name]) for name in names}


def _cancel(running: Mapping[str, Future[Tensor]]) -> None:
    for future in running.values():
        future.cancel()  # of one that is done, without effect


def selected(values: Tensor, mask: Tensor) -> list[list[Any]]:
    """Return those values of each row of `(B, T)` where a mask is True."""
    return [row[real].tolist() for row, real in zip(values.cpu(), mask.bool().cpu(), strict=True)]


def _unique(names: Sequence[str]) -> list[str]:
    taken: list[str] = []
    for name in names:
        number, candidate = 1, name
        while candidate in taken:
            number += 1
            candidate = f"{name}_{number}"
        taken.append(candidate)
    return taken
