"""Python reward functions with the calling convention of TRL's `GRPOTrainer`, and the rewards of environments.

The file reads from a call to its details: the function as a reward source, its arguments, its errors, the metrics and
columns that it logs, and the environments. `processes/waiting.py` has the threads and the event loop that it runs in.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import itertools
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from accelerate.utils import gather_object
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedTokenizerBase, TrainerState

from rlhf_ppo.data.conversation import EPISODE_COLUMN
from rlhf_ppo.data.prompts import is_conversation
from rlhf_ppo.data.rollout import sent
from rlhf_ppo.environments.pool import ask_rewards
from rlhf_ppo.environments.tools import Kind
from rlhf_ppo.processes.distributed import any_rank
from rlhf_ppo.processes.waiting import abandon_event_loop, in_daemon_thread, run_on_event_loop, with_timeout
from rlhf_ppo.rewards.endpoint import RewardEndpoint
from rlhf_ppo.rewards.reward_model import answers_of
from rlhf_ppo.rewards.scorer import (
    Refuse,
    RewardSource,
    ScoringBatch,
    WrongRewardError,
    check_scores,
    refuse_by_raising,
    short_repr,
)
from rlhf_ppo.terminal import visible

LogMetric = Callable[[str, float, float], None]
"""Takes a metric's name, its value, and the weight of the value: the number of rows that it is about."""
LogExtra = Callable[[str, list[Any]], None]

# Arguments that the trainer passes. A column of the same name would be hidden.
RESERVED_ARGUMENTS = (
    "prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric", "policy_answers"
)  # fmt: skip
_SHOWN_OF_ROW = ("prompts", "completions")
SECONDS_TO_FIND_ROW = 5.0
"""Time to find the row on which a reward function fails."""
# Columns that GRPO passes under other names, or not at all.
_NOT_PASSED = ("prompt", "completion", "completion_ids", "input_ids", "attention_mask", EPISODE_COLUMN)


class RewardTimeoutError(TimeoutError):
    """A reward function did not return within `reward_timeout`."""


class RewardFunction:
    """Scores responses with a function `f(prompts, completions, completion_ids, **columns) -> list[float | None]`.

    None means: not scored. A list in place of a number rewards the response's tokens one by one; it is as long as
    `completion_ids[row]`.

    The convention is `GRPOTrainer`'s, so the same functions work with both. If the column `prompt` holds
    conversations, `prompts` are lists of messages and `completions` are `[{"role": "assistant", "content": text}]`;
    otherwise both are texts, without special tokens. `completion_ids` are the ids of the whole response, including the
    stop token and the tokens of tools and environments; rewards of tokens that the policy did not write are not paid.
    The other columns of the data set are passed as lists, with `trainer_state`, `log_extra(column, values)` and
    `log_metric(name, value)`. With tools or environments `completions` are whole conversations, with the calls and the
    answers, and `environments` are the environments, one for each row. A function without `**kwargs` gets only the
    arguments that it names. If it names `policy_answers`, it gets the rows as `Answer`s, with the tokens that a reward
    model reads.

    Args:
        function: The function, sync or async: a function, `functools.partial` or callable object.
        tokenizer: The policy's tokenizer, which decodes.
        trainer_state_getter: Returns the trainer's current state.
        log_metric: Receives the metrics that the function logs; None drops them.
        name: Name in metrics and errors; None takes the function's.
        log_extra: Receives the columns that the function adds to the sample table; None drops them.
        refuse: Called with the reason if a score is not finite, or beyond `MAX_SCORE`.
        timeout: Seconds that a call may take; the function then runs in its own thread. None: no limit.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        tokenizer: PreTrainedTokenizerBase,
        trainer_state_getter: Callable[[], TrainerState],
        log_metric: LogMetric | None = None,
        name: str | None = None,
        log_extra: LogExtra | None = None,
        refuse: Refuse = refuse_by_raising,
        timeout: float | None = None,
    ) -> None:
        self.function, self.tokenizer, self.trainer_state_getter = function, tokenizer, trainer_state_getter
        self.log_metric, self.log_extra = log_metric or discard, log_extra or discard
        self.refuse, self.timeout = refuse, timeout
        self.name = visible(name, one_line=True) if name else function_name(function)
        inner = unwrapped(function)
        self.is_async = any(map(inspect.iscoroutinefunction, (inner, getattr(inner, "__call__", None))))  # noqa: B004

    def __call__(self, batch: ScoringBatch) -> Tensor:
        """Score every response and wait for the result.

        Args:
            batch: `B` prompts and truncated responses.

        Returns:
            Scores, float32 `(B,)`, or rewards per token, float32 `(B, T)`; NaN where the function returned None.

        Raises:
            WrongRewardError: The function returned a string, one number or nothing, or another number of scores.
            ValueError: It returned a score that is not finite, or requires a column that the data set does not have.
                Errors of the function itself are raised as they are, with a note that names it.
            RewardTimeoutError: The function took longer than `timeout`.
        """
        if self.is_async:
            return self.submit(batch).result()
        return self._score(batch, self.arguments(batch))

    def _score(self, batch: ScoringBatch, arguments: Mapping[str, Any]) -> Tensor:
        with self._naming(len(batch), arguments), torch.no_grad():
            if self.timeout is None:
                returned = _call(self.function, arguments, len(batch))
            else:
                running = in_daemon_thread(_call, self.function, arguments, len(batch))
                returned = with_timeout(running, self.timeout, self._timeout_error(batch)).result()
        return self._checked(returned, batch)

    def submit(self, batch: ScoringBatch) -> Future[Tensor]:
        """Start an async function on the event loop and return its future.

        Args:
            batch: `B` prompts and truncated responses.
        """
        try:
            arguments = self.arguments(batch)
        except Exception as error:  # raised when the scores are collected, like all other errors
            failed: Future[Tensor] = Future()
            failed.set_exception(error)
            return failed
        scores = run_on_event_loop(self._score_async(batch, arguments))
        # The late function may block the loop, so the next one gets another loop.
        return with_timeout(scores, self.timeout, self._timeout_error(batch), on_timeout=abandon_event_loop)

    async def _score_async(self, batch: ScoringBatch, arguments: Mapping[str, Any]) -> Tensor:
        with self._naming(len(batch)):
            try:
                returned = await self.function(**arguments)
            except asyncio.CancelledError:
                task = asyncio.current_task()
                if task is None or task.cancelling():
                    raise
                raise RuntimeError("it raised CancelledError itself") from None
        return self._checked(returned, batch)

    def _naming(self, num_rows: int, arguments: Mapping[str, Any] | None = None) -> AbstractContextManager[None]:
        """Add a note to the function's errors: its name, the update, and the row if one alone fails with it."""

        def details(error: Exception) -> str:
            updates = self.trainer_state_getter().global_step
            after = f" after update {updates}" if updates else " in the first update"
            if arguments is None or isinstance(error, ConnectionError | TimeoutError):  # another call takes as long
                return after
            if (row := failing_row(self.function, arguments, num_rows, type(error))) is None:
                return after
            shown = [f"{name}={arguments[name][row]!r:.200}" for name in _SHOWN_OF_ROW if name in arguments]
            return f"{after}; row {row} alone fails too: {', '.join(shown)}"

        return naming(self.name, num_rows, details)

    def _checked(self, returned: Any, batch: ScoringBatch) -> Tensor:
        mask, written = batch.response_mask, batch.written
        lengths = list(map(len, written))
        scores = check_scores(returned, described(self.function, self.name), lengths, self.refuse, written)
        if scores.dim() == 2:
            scores = functional.pad(scores, (0, mask.shape[1] - scores.shape[1]))
        return sent(scores, mask.device)

    def _timeout_error(self, batch: ScoringBatch) -> RewardTimeoutError:
        return RewardTimeoutError(
            f"the reward function {self.name!r}, given the rows 0 to {len(batch) - 1}, has not returned within "
            f"reward_timeout={self.timeout} seconds. Nothing can stop a thread: what it does goes on until the "
            "program ends, which does not wait for it. Fix the function or raise reward_timeout, then continue with "
            "resume_from_checkpoint=True"
        )

    def arguments(self, batch: ScoringBatch) -> dict[str, Any]:
        """Return the keyword arguments for the function.

        Raises:
            ValueError: The function requires an argument that is not a column of the data set.
        """
        texts = batch.response_texts(self.tokenizer)
        prompts = batch.columns.get("prompt")
        if prompts is None:
            prompts = batch.prompt_texts(self.tokenizer)
        log = CheckedLog(self.name, len(batch), self.log_metric, self.log_extra)
        offered: dict[str, Any] = {
            **{key: list(values) for key, values in batch.columns.items() if key not in _NOT_PASSED},
            "prompts": [[dict(part) for part in prompt] if is_conversation(prompt) else prompt for prompt in prompts],
            "completions": [
                [{"role": "assistant", "content": text}] if is_conversation(prompt) else text
                for prompt, text in zip(prompts, texts, strict=True)
            ],
            "completion_ids": batch.response_ids(),
            "trainer_state": self.trainer_state_getter(),
            "log_extra": log.log_extra,
            "log_metric": log.log_metric,
        }
        if records := batch.columns.get(EPISODE_COLUMN):
            offered |= _of_episodes(records, offered["completions"])
        if "policy_answers" in named_parameters(self.function):
            offered.setdefault("policy_answers", answers_of(batch, self.tokenizer))
        return accepted_arguments(self.function, offered, self.name)

    def check_columns(self, columns: Iterable[str], dataset: str) -> None:
        """Raise a `ValueError` if a data set lacks a column that the function requires.

        Args:
            columns: The data set's columns, and those that the trainer adds.
            dataset: Name of the data set in the error.
        """
        offered = dict.fromkeys([*RESERVED_ARGUMENTS, *(column for column in columns if column not in _NOT_PASSED)])
        try:
            accepted_arguments(self.function, offered, self.name)
        except ValueError as error:
            raise ValueError(f"{dataset}: {error}") from error


def _of_episodes(records: Sequence[Any], completions: Sequence[Any]) -> dict[str, Any]:
    """Return the arguments that episodes of several turns add: whole conversations, and the environments."""
    whole = [
        completion if isinstance(completion, str) else [dict(message) for message in record.messages]
        for record, completion in zip(records, completions, strict=True)
    ]
    environments = [record.episode.environment for record in records]
    given = any(environment is not None for environment in environments)
    return {"completions": whole} | ({"environments": environments} if given else {})


def _call(function: Callable[..., Any], arguments: Mapping[str, Any], num_rows: int) -> Any:
    """Call a function; wait for a coroutine, and run an iterator, which may be endless, for one row too many."""
    returned = finished(function(**arguments))
    return list(itertools.islice(returned, num_rows + 1)) if isinstance(returned, Iterator) else returned


def finished(returned: Any) -> Any:
    """Return a function's result; wait for it if it is a coroutine."""
    return run_on_event_loop(_without_exits(returned)).result() if inspect.iscoroutine(returned) else returned


async def _without_exits(coroutine: Any) -> Any:
    with naming_exits("an async function"):
        return await coroutine


# Arguments


def accepted_arguments(function: Callable[..., Any], offered: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return those of the offered arguments that a function accepts.

    Args:
        function: The function.
        offered: All arguments by name.
        name: The function's name, for the error message.

    Raises:
        TypeError: It has positional-only parameters.
        ValueError: It requires an argument that is not offered.
    """
    parameters = _parameters(function) or ()
    required = [parameter for parameter in parameters if parameter.default is parameter.empty]
    if unnamed := [parameter.name for parameter in required if parameter.kind is parameter.POSITIONAL_ONLY]:
        raise TypeError(
            f"the reward function {name!r} takes {unnamed} only by position, but rewards are called by name; pass a "
            "function of completions, prompts, ..., **kwargs"
        )
    named = named_parameters(function)
    if missing := sorted({parameter.name for parameter in required} & named.keys() - offered.keys()):
        raise ValueError(
            f"the reward function {name!r} requires the arguments {missing}, but is offered only "
            f"{sorted(offered)}: add them as columns of the data set, or give them defaults"
        )
    return {key: value for key, value in offered.items() if takes_any_argument(function) or key in named}


def named_parameters(function: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    """Return the parameters that can be passed by name."""
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return {parameter.name: parameter for parameter in _parameters(function) or () if parameter.kind in kinds}


def takes_any_argument(function: Callable[..., Any]) -> bool:
    """Return whether a function has `**kwargs`, or no readable signature."""
    parameters = _parameters(function)
    return parameters is None or any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)


def _parameters(function: Callable[..., Any]) -> list[inspect.Parameter] | None:
    try:
        return list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):  # some functions written in C
        return None


def function_name(function: Callable[..., Any]) -> str:
    """Return a function's name for display; for objects that of their class, for lambdas `lambda`."""
    while isinstance(function, functools.partial) and not hasattr(function, "__name__"):
        function = function.func
    return visible(getattr(function, "__name__", type(function).__name__).strip("<>"), one_line=True)


def unwrapped(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function inside `functools.partial`."""
    while isinstance(function, functools.partial):
        function = function.func
    return function


def check_columns(sources: Iterable[Any], added: Iterable[str], **datasets: Any) -> None:
    """Raise a `ValueError` if a data set lacks a column that a reward function requires.

    Args:
        sources: Reward sources; only reward functions are checked.
        added: Columns that the trainer adds.
        **datasets: Data sets by name: rows with `input_ids`, a dict of data sets, or None. A stream whose columns are
            not known yet is checked with each batch instead.
    """
    functions = [source for source in sources if isinstance(source, RewardFunction)]
    for name, columns in _columns_by_name(datasets):
        for function in functions:
            function.check_columns([*columns, *added], name)


def check_names_of_columns(**datasets: Any) -> None:
    """Raise a `ValueError` if a column has the name of an argument that the trainer passes.

    Args:
        **datasets: As for `check_columns`.
    """
    for name, columns in _columns_by_name(datasets):
        if hidden := sorted({*columns} & {*RESERVED_ARGUMENTS}):
            raise ValueError(
                f"{name} has the columns {hidden}, which reward functions would not get: they are given arguments "
                "of these names; rename the columns"
            )


def _columns_by_name(datasets: Mapping[str, Any]) -> Iterator[tuple[str, list[str]]]:
    for name, dataset in datasets.items():
        if isinstance(dataset, Mapping):
            yield from _columns_by_name({f"{name}[{key!r}]": value for key, value in dataset.items()})
        elif isinstance(dataset, list):
            yield name, list(dict.fromkeys(key for row in dataset for key in row))
        elif (columns := getattr(dataset, "column_names", None)) is not None:
            yield name, columns


# Errors


def described(function: Any, name: str) -> str:
    """Return a reward function's name for errors, with the address of an endpoint."""
    address = f" at {function.display_url}" if isinstance(function, RewardEndpoint) else ""
    return f"the reward function {name!r}{address}"


@contextlib.contextmanager
def naming(name: str, num_rows: int, details: Callable[[Exception], str] = lambda _: "") -> Iterator[None]:
    """Add a note with the reward function's name, its rows and details to its errors."""
    try:
        with naming_exits(f"the reward function {name!r}"):
            yield
    except Exception as error:
        error.add_note(f"raised by the reward function {name!r}, given the rows 0 to {num_rows - 1}{details(error)}")
        raise


def failing_row(function: Callable[..., Any], arguments: Mapping[str, Any], num_rows: int, kind: type) -> int | None:
    """Return the first row that raises the same error if the function gets it alone; None after a few seconds.

    Args:
        function: A function that has failed on all rows.
        arguments: Its arguments; lists have a value for each row.
        num_rows: Number of rows.
        kind: The type of the error.
    """
    end = time.monotonic() + SECONDS_TO_FIND_ROW
    for row in range(num_rows):
        if time.monotonic() > end:
            return None
        alone = {name: value[row : row + 1] if isinstance(value, list) else value for name, value in arguments.items()}
        try:
            with naming_exits("it"):
                _call(function, alone, 1)
        except Exception as error:
            if type(error) is kind:
                return row
    return None


@contextlib.contextmanager
def naming_exits(name: str) -> Iterator[None]:
    """Raise a `RuntimeError` in place of `sys.exit()` and the like, which would end the program or the event loop."""
    try:
        yield
    except BaseException as error:
        if isinstance(error, Exception | GeneratorExit | KeyboardInterrupt | asyncio.CancelledError):
            raise
        raise RuntimeError(
            f"{name} raised {error!r}, which would end the program: raise an Exception, or return None for what it "
            "cannot score"
        ) from error


# Metrics and columns that functions log


@dataclass
class LoggedByFunctions:
    """Collects the `log_metric(name, value)` and `log_extra(column, values)` calls between two reports.

    Attributes:
        is_used: Whether there are reward functions, on all ranks alike.
        values: This rank's metrics by name, each value with its weight.
        columns: Columns for the sample table, one value per row of the last batch.
    """

    is_used: bool = True
    values: dict[str, list[tuple[float, float]]] = field(default_factory=dict)
    columns: dict[str, list[Any]] = field(default_factory=dict)

    def log_extra(self, column: str, values: Sequence[Any]) -> None:
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

        A call counts by its rows: the last batch of an evaluation may be smaller than the others.
        """
        own = self.values
        self.forget()
        if not self.is_used or not any_rank(bool(own)):
            return {}
        merged: dict[str, list[tuple[float, float]]] = {}
        for of_one_rank in gather_object([own]):
            for name, numbers in of_one_rank.items():
                merged.setdefault(name, []).extend(numbers)
        return {name: _weighted_mean(numbers) for name, numbers in merged.items()}

    def forget(self) -> None:
        """Clear metrics and columns."""
        self.values, self.columns = {}, {}


def _weighted_mean(numbers: Sequence[tuple[float, float]]) -> float:
    largest = max(weight for _, weight in numbers) or 1.0
    parts = [
        (value, weight / largest) for value, weight in numbers
    ]  # equal weights are 1: the plain mean, bit for bit
    return sum(value * part for value, part in parts if part) / (sum(part for _, part in parts) or 1.0)


@dataclass(frozen=True)
class CheckedLog:
    """The `log_metric` and `log_extra` that a reward function gets; they check their arguments.

    Attributes:
        function: The reward function's name.
        num_rows: Number of rows in the batch.
        metric: Receives the metrics.
        extra: Receives the columns.
    """

    function: str
    num_rows: int
    metric: LogMetric
    extra: LogExtra

    def log_metric(self, name: str, value: float) -> None:
        """Log one number.

        Raises:
            WrongRewardError: The name is not a text, or the value is not a number that a float holds.
        """
        name = self._name("log_metric", name)
        self.metric(name, self._float("log_metric", name, value), self.num_rows)

    def log_extra(self, column: str, values: Sequence[Any]) -> None:
        """Log a column of the sample table.

        Raises:
            WrongRewardError: The name is not a text, there is not one value per row, or a value cannot be written.
        """
        column = self._name("log_extra", column)
        if isinstance(values, str | bytes) or not hasattr(values, "__iter__"):
            fix = f"pass a list of {self.num_rows} values, one per completion"
            raise self._wrong("log_extra", column, values, fix)
        listed = list(values)
        if len(listed) != self.num_rows:
            fix = f"pass one value per completion, None where there is none; there are {self.num_rows} completions"
            raise self._wrong("log_extra", column, values, f"it has {len(listed)} values: {fix}")
        for value in listed:
            if isinstance(value, int):
                self._float("log_extra", column, value)
            elif value is not None and not isinstance(value, float):
                self._check_encodable("log_extra", column, str(value))
        self.extra(column, listed)

    def _name(self, argument: str, name: Any) -> str:
        if not isinstance(name, str) or not name:
            raise self._wrong(argument, name, None, "pass a text as the name")
        self._check_encodable(argument, name, name)
        return visible(name, one_line=True)

    def _float(self, argument: str, name: str, value: Any) -> float:
        try:
            return float(value)
        except (TypeError, ValueError):
            raise self._wrong(argument, name, value, "pass one number") from None
        except OverflowError:
            raise self._wrong(argument, name, value, "pass numbers below 1e308, which a float holds") from None

    def _check_encodable(self, argument: str, name: str, text: str) -> None:
        try:
            text.encode()
        except UnicodeEncodeError:
            fix = "it holds half of a surrogate pair, which no file takes: pass text.encode(errors='replace').decode()"
            raise self._wrong(argument, name, text, fix) from None

    def _wrong(self, argument: str, name: Any, value: Any, fix: str) -> WrongRewardError:
        call = f"{argument}({short_repr(name)}, {short_repr(value)})"
        return WrongRewardError(f"the reward function {self.function!r} called {call}: {fix}")


def discard(*_: Any) -> None:
    """Accept and ignore a metric or a column."""


# Rewards of environments


class EnvironmentReward(RewardSource):
    """Scores an episode with its environment's `get_reward`, asked once, after the episode.

    Args:
        kind: The environment. Episodes of other classes get no score.
    """

    reads_columns = is_of_environment = True

    def __init__(self, kind: Kind) -> None:
        self.cls, self.name = kind.cls, getattr(kind.cls, "__name__", "")

    def __call__(self, batch: ScoringBatch) -> Tensor:
        """Return the scores, float32 `(B,)`, NaN where `get_reward` returned None or the class is another one.

        Raises:
            WrongRewardError: `get_reward` returned something other than a number or None.
        """
        episodes = [record.episode for record in batch.columns[EPISODE_COLUMN]]
        own = [row for row, episode in enumerate(episodes) if episode.kind.cls is self.cls]
        scores = torch.full((len(batch),), math.nan)
        for row, value in zip(own, ask_rewards([episodes[row] for row in own]), strict=True):
            scores[row] = math.nan if value is None else self._number(value, row)
        return scores

    def _number(self, value: float, row: int) -> float:
        if not math.isfinite(value):
            raise WrongRewardError(
                f"get_reward of {self.name} returned {value} for row {row}: return a number or None"
            )
        return float(value)


class TurnRewards(RewardSource):
    """Pays what an environment appended to `turn_rewards` in a round at the last token of the turn that caused it."""

    name = "turns"
    reads_columns = is_of_environment = True

    def __call__(self, batch: ScoringBatch) -> Tensor:
        """Return the rewards, float32 `(B, T)`; NaN in rows whose environment has no `turn_rewards`."""
        rewards = torch.zeros(batch.response_mask.shape)
        for row, record in enumerate(batch.columns[EPISODE_COLUMN]):
            if not record.episode.kind.has_turn_rewards:
                rewards[row] = math.nan
                continue
            for end, reward in zip(record.turn_ends, record.turn_rewards, strict=True):
                rewards[row, end - 1] += reward
        return rewards


def rewards_of(kinds: Iterable[Kind]) -> list[RewardSource]:
    """Return the rewards of environments: one for each class with `get_reward`, and one for the rewards of turns."""
    kinds = list(kinds)
    own = {kind.cls: kind for kind in kinds if kind.has_reward}
    sources: list[RewardSource] = [EnvironmentReward(kind) for kind in own.values()]
    return sources + [TurnRewards()] * any(kind.has_turn_rewards for kind in kinds)
