"""Python reward functions with the calling convention of TRL's `GRPOTrainer`, and the rewards of environments.

The file reads from a call to its details: the function as a reward source, its arguments, the metrics and columns that
it logs, and the environments. `environments/waiting.py` has the event loop that async functions run in.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import torch
from accelerate.utils import gather_object
from torch import Tensor
from torch.nn import functional
from transformers import TrainerState

from rlhf_ppo.data.conversation import EPISODE_COLUMN
from rlhf_ppo.data.images import IMAGES_COLUMN
from rlhf_ppo.data.prompts import Messages
from rlhf_ppo.data.rollout import sent
from rlhf_ppo.environments.pool import ask_rewards
from rlhf_ppo.environments.tools import Kind
from rlhf_ppo.environments.waiting import run_on_event_loop
from rlhf_ppo.ranks.processes import any_rank
from rlhf_ppo.rewards.endpoint import RewardEndpoint
from rlhf_ppo.rewards.scorer import RewardSource, ScoringBatch, WrongRewardError, check_score, check_scores
from rlhf_ppo.terminal import escape_error

LogMetric = Callable[[str, float, float], None]
"""Takes a metric's name, its value, and the value's weight: its number of rows."""
LogExtra = Callable[[str, list[Any]], None]

# Columns that GRPO passes under other names, or not at all.
_NOT_PASSED = ("prompt", "completion", "completion_ids", "input_ids", "attention_mask", EPISODE_COLUMN, IMAGES_COLUMN)


_OTHER_ARGUMENTS = ("prompts", "completions", "trainer_state", "log_extra", "log_metric", "policy_answers")


def check_not_arguments(columns: Iterable[str], name: str = "the data set") -> None:
    """Raise a `ValueError` if a column has the name of another argument of reward functions."""
    if clashing := [column for column in columns if column in _OTHER_ARGUMENTS]:
        raise ValueError(
            f"{name} has the column {clashing[0]!r}, but reward functions get another argument of that name: rename "
            "or drop the column"
        )


class RewardFunction:
    """Scores responses with a function `f(prompts, completions, completion_ids, **columns) -> list[float | None]`.

    None means: not scored. A list in place of a number rewards the response's tokens one by one; it is as long as
    `completion_ids[row]`.

    The convention is `GRPOTrainer`'s, so the same functions work with both. If the column `prompt` holds
    conversations, `prompts` are lists of messages and `completions` are `[{"role": "assistant", "content": text}]`;
    otherwise both are texts, without special tokens. `completion_ids` are the ids of the whole response, including the
    stop token and the tokens of tools and environments; rewards of tokens that the policy did not write are not paid.
    The other columns of the data set are passed as lists, with `trainer_state`, `log_extra(column, values)` and
    `log_metric(name, value)`; a third argument is the value's weight, in place of the number of rows. With tools or
    environments `completions` are whole conversations, with the calls and the answers, and `environments` are the
    environments, one for each row. A function without `**kwargs` gets only the arguments that it names. If it names
    `policy_answers`, it gets the rows as `Answer`s, with the tokens that a reward model reads.

    Args:
        function: The function, sync or async: a function, `functools.partial` or callable object.
        trainer_state_getter: Returns the trainer's current state.
        log_metric: Receives the metrics that the function logs; None drops them.
        name: Name in metrics and errors; None takes the function's.
        log_extra: Receives the columns that the function adds to the sample table; None drops them.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        trainer_state_getter: Callable[[], TrainerState],
        log_metric: LogMetric | None = None,
        name: str | None = None,
        log_extra: LogExtra | None = None,
    ) -> None:
        self.function, self.trainer_state_getter = function, trainer_state_getter
        self.log_metric, self.log_extra = log_metric or discard, log_extra or discard
        self.name = name or function_name(function)
        inner = unwrapped(function)
        self.is_async = any(map(inspect.iscoroutinefunction, (inner, getattr(inner, "__call__", None))))  # noqa: B004

    def __call__(self, batch: ScoringBatch) -> Tensor:
        """Score every response and wait for the result.

        Args:
            batch: `B` prompts and truncated responses.

        Returns:
            Scores, float32 `(B,)`, or rewards per token, float32 `(B, T)`; NaN where the function returned None.

        Raises:
            WrongRewardError: The function returned another number of scores, or a score that is not finite. Errors of
                the function itself are raised as they are, with a note that names it.
        """
        if self.is_async:
            return self.submit(batch).result()
        with self._naming(), torch.no_grad():
            return self._checked(finished(self.function(**self.arguments(batch))), batch)

    def submit(self, batch: ScoringBatch) -> Future[Tensor]:
        """Start an async function on the event loop, and return its future.

        Args:
            batch: `B` prompts and truncated responses.
        """
        return run_on_event_loop(self._score_async(batch, self.arguments(batch)))

    async def _score_async(self, batch: ScoringBatch, arguments: Mapping[str, object]) -> Tensor:
        with self._naming():
            return self._checked(await self.function(**arguments), batch)

    def _naming(self) -> contextlib.AbstractContextManager[None]:
        updates = self.trainer_state_getter().global_step
        return naming(self.name, f" after update {updates}" if updates else " in the first update")

    def _checked(self, returned: object, batch: ScoringBatch) -> Tensor:
        mask, written = batch.responses.response_mask, batch.written
        scores = check_scores(returned, described(self.function, self.name), list(map(len, written)), written)
        if scores.dim() == 2:
            scores = functional.pad(scores, (0, mask.shape[1] - scores.shape[1]))
        return sent(scores, mask.device)

    def arguments(self, batch: ScoringBatch) -> dict[str, Any]:
        """Return the keyword arguments for the function.

        Raises:
            ValueError: A column of the data set has the name of another argument.
        """
        check_not_arguments(batch.prompts.columns)
        answers = batch.answers
        num_rows = len(batch)
        prompts = batch.prompts.columns.get("prompt", [None] * num_rows)
        if None in prompts:  # rows with `input_ids`
            texts = batch.prompt_texts
            prompts = [text if prompt is None else prompt for prompt, text in zip(prompts, texts, strict=True)]
        offered: dict[str, Any] = dict(
            **{key: list(values) for key, values in batch.prompts.columns.items() if key not in _NOT_PASSED},
            prompts=[prompt if isinstance(prompt, str) else [dict(part) for part in prompt] for prompt in prompts],
            completions=[
                [{"role": "assistant", "content": one.completion}] if not isinstance(prompt, str) else one.completion
                for prompt, one in zip(prompts, answers, strict=True)
            ],
            completion_ids=batch.response_ids(),
            trainer_state=self.trainer_state_getter(),
            log_extra=functools.partial(self._log_extra, num_rows),
            log_metric=lambda name, value, weight=num_rows: self.log_metric(name, float(value), float(weight)),
        )
        if records := batch.prompts.columns.get(EPISODE_COLUMN):
            offered |= _of_episodes(records, offered["completions"])
        if "policy_answers" in named_parameters(self.function):
            offered["policy_answers"] = answers
        return accepted_arguments(self.function, offered)

    def _log_extra(self, num_rows: int, column: str, values: Sequence[object]) -> None:
        listed = list(values)
        if len(listed) != num_rows:
            raise ValueError(
                f"log_extra({column!r}, ...) has {len(listed)} values for {num_rows} completions: pass one for each, "
                "None where there is none"
            )
        self.log_extra(column, listed)


def _of_episodes(records: Sequence[Any], completions: Sequence[str | Messages]) -> dict[str, Any]:
    """Return the arguments that episodes of several turns add: whole conversations, and the environments."""
    whole = [
        completion if isinstance(completion, str) else [dict(message) for message in record.messages]
        for record, completion in zip(records, completions, strict=True)
    ]
    environments = [record.episode.environment for record in records]
    has_any = any(environment is not None for environment in environments)
    return {"completions": whole} | ({"environments": environments} if has_any else {})


def finished(returned: object) -> Any:
    """Return a function's result; wait for it if it is a coroutine."""
    return run_on_event_loop(returned).result() if inspect.iscoroutine(returned) else returned


@contextlib.contextmanager
def naming(name: str, when: str = "") -> Iterator[None]:
    """Add a note with the reward function's name to its errors; `WrongRewardError` names it."""
    try:
        yield
    except WrongRewardError:
        raise
    except Exception as error:
        escape_error(error)
        error.add_note(f"raised by the reward function {name!r}{when}")
        raise


# Arguments


def accepted_arguments(function: Callable[..., object], offered: Mapping[str, object]) -> dict[str, object]:
    """Return those of the offered arguments that a function accepts.

    Raises:
        WrongRewardError: It requires another argument.
    """
    named = named_parameters(function)
    if missing := [name for name, p in named.items() if p.default is p.empty and name not in offered]:
        raise WrongRewardError(
            f"the reward function {function_name(function)!r} requires the argument {missing[0]!r}, but no column "
            f"has this name; there are {[*offered]}: rename it or a column, or give it a default"
        )
    takes_all = takes_any_argument(function)
    return {key: value for key, value in offered.items() if takes_all or key in named}


def named_parameters(function: Callable[..., object]) -> dict[str, inspect.Parameter]:
    """Return the parameters that can be passed by name."""
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    parameters = inspect.signature(function).parameters
    return {name: parameter for name, parameter in parameters.items() if parameter.kind in kinds}


def takes_any_argument(function: Callable[..., object]) -> bool:
    """Return whether a function has `**kwargs`."""
    return any(p.kind is p.VAR_KEYWORD for p in inspect.signature(function).parameters.values())


def function_name(function: Callable[..., object]) -> str:
    """Return a function's name for display: an object's class, or `lambda` for lambdas."""
    while isinstance(function, functools.partial) and not hasattr(function, "__name__"):
        function = function.func
    return getattr(function, "__name__", type(function).__name__).strip("<>")


def described(function: object, name: str) -> str:
    """Return a reward function's name for errors, with the address of an endpoint."""
    address = f" at {function.display_url}" if isinstance(function, RewardEndpoint) else ""
    return f"the reward function {name!r}{address}"


def unwrapped(function: Callable[..., object]) -> Callable[..., Any]:
    """Return the function inside `functools.partial`."""
    while isinstance(function, functools.partial):
        function = function.func
    return function


# Metrics and columns that functions log


@dataclass
class LoggedByFunctions:
    """Collects the `log_metric(name, value)` and `log_extra(column, values)` calls between two reports.

    Attributes:
        values: This rank's metrics by name, each value with its weight.
        columns: Columns for the sample table, one value per row of the last batch.
    """

    values: dict[str, list[tuple[float, float]]] = field(default_factory=dict)
    columns: dict[str, list[Any]] = field(default_factory=dict)

    def log_extra(self, column: str, values: Sequence[object]) -> None:
        """Store a column of the current batch."""
        self.columns[column] = list(values)

    def log_metric(self, name: str, value: float, weight: float = 1.0) -> None:
        """Store one value of a metric."""
        self.values.setdefault(name, []).append((float(value), float(weight)))

    def drain_columns(self) -> dict[str, list[Any]]:
        """Return and clear this rank's columns of the last batch."""
        columns, self.columns = self.columns, {}
        return columns

    def drain(self) -> dict[str, float]:
        """Return the metrics' means over calls and ranks, and clear everything; all ranks must call this together.

        Calls are weighted, by default by their rows: the last batch of an evaluation may be smaller than the others.
        """
        of_this_rank = self.values
        self.forget()
        if not any_rank(bool(of_this_rank)):
            return {}
        merged: dict[str, list[tuple[float, float]]] = {}
        for of_one_rank in gather_object([of_this_rank]):
            for name, numbers in of_one_rank.items():
                merged.setdefault(name, []).extend(numbers)
        return {name: _weighted_mean(numbers) for name, numbers in merged.items()}

    def forget(self) -> None:
        """Clear metrics and columns."""
        self.values, self.columns = {}, {}


def _weighted_mean(numbers: Sequence[tuple[float, float]]) -> float:
    largest = max(weight for _, weight in numbers) or 1.0
    # Equal weights are 1: the plain mean, bit for bit.
    parts = [(value, weight / largest) for value, weight in numbers]
    return sum(value * part for value, part in parts if part) / (sum(part for _, part in parts) or 1.0)


def discard(*_: object) -> None:
    """Accept and ignore a metric or a column."""


# Rewards of environments


class EnvironmentReward(RewardSource):
    """Scores an episode with its environment's `get_reward`, called once, after the episode.

    Args:
        kind: The environment. Episodes of other classes get no score.
    """

    is_of_environment = True

    def __init__(self, kind: Kind) -> None:
        self.cls, self.name = kind.cls, getattr(kind.cls, "__name__", "")

    def __call__(self, batch: ScoringBatch) -> Tensor:
        """Return the scores, float32 `(B,)`, NaN where `get_reward` returned None or the class is another one.

        Raises:
            WrongRewardError: `get_reward` returned something else than a finite number or None.
        """
        episodes = [record.episode for record in batch.prompts.columns[EPISODE_COLUMN]]
        rows = [row for row, episode in enumerate(episodes) if episode.kind.cls is self.cls]
        scores = torch.full((len(batch),), math.nan)
        for row, value in zip(rows, ask_rewards([episodes[row] for row in rows]), strict=True):
            if value is not None:
                scores[row] = check_score(value, f"get_reward of {self.name}", f"row {row}")
        return scores


class TurnRewards(RewardSource):
    """Pays the amounts in an environment's `turn_rewards`, each at the last token of the turn that caused it."""

    name = "turns"
    is_of_environment = True

    def __call__(self, batch: ScoringBatch) -> Tensor:
        """Return the rewards, float32 `(B, T)`; NaN in rows whose environment has no `turn_rewards`."""
        rewards = torch.zeros(batch.responses.response_mask.shape)
        for row, record in enumerate(batch.prompts.columns[EPISODE_COLUMN]):
            if not record.episode.kind.has_turn_rewards:
                rewards[row] = math.nan
                continue
            for end, reward in zip(record.turn_ends, record.turn_rewards, strict=True):
                rewards[row, end - 1] += reward
        return rewards


def rewards_of(kinds: Iterable[Kind]) -> list[RewardSource]:
    """Return the rewards of environments: one for each class with `get_reward`, and one for the rewards of turns."""
    kinds = list(kinds)
    by_class = {kind.cls: kind for kind in kinds if kind.has_reward}
    sources: list[RewardSource] = [EnvironmentReward(kind) for kind in by_class.values()]
    if any(kind.has_turn_rewards for kind in kinds):
        sources.append(TurnRewards())
    return sources
