"""Python functions as reward sources, with the calling convention of TRL's `GRPOTrainer`."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import itertools
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedTokenizerBase, TrainerState

from rlhf_ppo.data.encoding import is_conversation
from rlhf_ppo.data.places import sent
from rlhf_ppo.processes.signals import Stopped, is_main_thread_interruptible, may_be_given_up
from rlhf_ppo.rewards.logged import CheckedLog
from rlhf_ppo.rewards.reading import answers_of
from rlhf_ppo.rewards.returned import check_scores, described
from rlhf_ppo.rewards.scorer import Refuse, ScoringBatch, refuse_by_raising
from rlhf_ppo.rewards.waiting import (
    expiring,
    in_daemon_thread,
    leave_event_loop,
    on_event_loop,
)
from rlhf_ppo.terminal.foreign import visible

# The trainer's own arguments, which would take the place of columns of their names.
GIVEN = ("prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric", "policy_answers")

# GRPO hands these over under other names, or not at all.
_NOT_PASSED = ("prompt", "completion", "completion_ids", "input_ids", "attention_mask")


class RewardFunction:
    """Scores responses with a function `f(prompts, completions, completion_ids, **columns) -> list[float | None]`.

    A list in place of each number rewards the response's tokens one by one; it is as long as `completion_ids[row]`.

    The convention is `GRPOTrainer`'s, so that the same functions serve both. Where the column `prompt` holds
    conversations, `prompts` are lists of messages and `completions` are `[{"role": "assistant", "content": text}]`;
    else both are texts, without special tokens. `completion_ids` are the responses' ids, the stop token and the tokens
    of tools and environments included; rewards of tokens that the policy did not write are not paid. The data set's
    other columns come as lists, besides `trainer_state`, `log_extra(column, values)` and `log_metric(name, value)`. A
    function without `**kwargs` gets only what it names. None means: not scored. One that names `policy_answers` gets
    the rows as `Answer`s, with the tokens that a reward model reads.

    Args:
        function: The function, sync or async: a function, `functools.partial` or callable object.
        tokenizer: The policy's tokenizer, which decodes.
        trainer_state_getter: Returns the trainer's current state.
        log_metric: Takes the metrics that the function logs; None drops them.
        name: Name in metrics and errors; None takes the function's.
        log_extra: Takes the columns that the function adds to the sample table; None drops them.
        refuse: What becomes of a score that is not finite, or beyond `MAX_SCORE`.
        timeout: Seconds that a call may take; the function then runs in a thread of its own. None: any number.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        tokenizer: PreTrainedTokenizerBase,
        trainer_state_getter: Callable[[], TrainerState],
        log_metric: Callable[[str, float], None] | None = None,
        name: str | None = None,
        log_extra: Callable[[str, list[Any]], None] | None = None,
        refuse: Refuse = refuse_by_raising,
        timeout: float | None = None,
    ) -> None:
        if not callable(function):
            raise TypeError(f"reward_funcs holds {function!r}, which cannot be called; pass a function")
        self.function, self.tokenizer, self.trainer_state_getter = function, tokenizer, trainer_state_getter
        self.log_metric, self.log_extra = log_metric or _drop, log_extra or _drop
        self.refuse, self.timeout = refuse, timeout
        self.name = visible(name, one_line=True) if name else function_name(function)
        self.is_async = _is_async(function)

    def __call__(self, batch: ScoringBatch) -> Tensor:
        """Score every response and wait for the result.

        Args:
            batch: `B` prompts and truncated responses.

        Returns:
            Scores, float32 `(B,)`, or rewards per token, float32 `(B, T)`; NaN where the function returned None.

        Raises:
            WrongRewardError: The function returned a string, one number or nothing, or another number of scores.
            ValueError: It returned a score that is not finite, or it asks for a column that the data set does not
                have. What the function itself raises comes through, with a note that names it.
            RewardTimeoutError: The function took longer than `timeout`.
        """
        if self.is_async:
            with may_be_given_up():
                return self.submit(batch).result()
        arguments = self.arguments(batch)
        with may_be_given_up(), naming(self.name, len(batch)), torch.no_grad():
            returned = self._called(arguments, len(batch))
        return self._checked(returned, batch)

    def _called(self, arguments: Mapping[str, Any], num_rows: int) -> Any:
        """Call the function in this thread, or, where its time is limited, in one that can be left behind."""
        if self.timeout is None:
            return _listed(self.function, arguments, num_rows)
        running = in_daemon_thread(_listed, self.function, arguments, num_rows)
        return expiring(running, self.timeout, self._overdue(num_rows)).result()

    def _overdue(self, num_rows: int) -> str:
        return (
            f"the reward function {self.name!r}, given the rows 0 to {num_rows - 1}, has not returned within "
            f"reward_timeout={self.timeout} seconds. Nothing can stop a thread: what it does goes on until the "
            "program ends, which does not wait for it. Mend the function or raise reward_timeout, and go on with "
            "resume_from_checkpoint=True"
        )

    def submit(self, batch: ScoringBatch) -> Future[Tensor]:
        """Start an async function and return its future, so that several can run side by side."""
        try:
            arguments = self.arguments(batch)
        except Exception as error:  # raised where the scores are collected, like every other error
            failed: Future[Tensor] = Future()
            failed.set_exception(error)
            return failed
        scores = on_event_loop(self._score_async(batch, arguments))
        # The function may be blocking the loop: who hears that it is late finds another one.
        return expiring(scores, self.timeout, self._overdue(len(batch)), before_error=leave_event_loop)

    async def _score_async(self, batch: ScoringBatch, arguments: Mapping[str, Any]) -> Tensor:
        with naming(self.name, len(batch)):
            try:
                returned = await self.function(**arguments)
            except asyncio.CancelledError:
                task = asyncio.current_task()
                if task is None or task.cancelling():
                    raise
                raise RuntimeError("it raised CancelledError itself") from None
        return self._checked(returned, batch)

    def _checked(self, returned: Any, batch: ScoringBatch) -> Tensor:
        mask, written = batch.response_mask, batch.written
        scores = check_scores(
            returned, described(self.function, self.name), list(map(len, written)), self.refuse, written
        )
        if scores.dim() == 2:
            scores = functional.pad(scores, (0, mask.shape[1] - scores.shape[1]))
        return sent(scores, mask.device)

    def arguments(self, batch: ScoringBatch) -> dict[str, Any]:
        """Return the keyword arguments for the function.

        Raises:
            ValueError: The function requires an argument that is no column of the data set.
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
        if "policy_answers" in named_parameters(self.function):
            offered.setdefault("policy_answers", answers_of(batch, self.tokenizer))
        return accepted_arguments(self.function, offered, self.name)

    def check_columns(self, columns: Iterable[str], dataset: str) -> None:
        """Check that a data set has the columns that the function requires, before anything is generated.

        Args:
            columns: The data set's columns, and those that the trainer adds.
            dataset: What the error calls the data set.

        Raises:
            ValueError: It lacks one.
        """
        offered = dict.fromkeys([*GIVEN, *(column for column in columns if column not in _NOT_PASSED)])
        try:
            accepted_arguments(self.function, offered, self.name)
        except ValueError as error:
            raise ValueError(f"{dataset}: {error}") from error


def check_columns(sources: Iterable[Any], added: Iterable[str], **datasets: Any) -> None:
    """Check that each data set has the columns that reward functions require.

    Args:
        sources: Reward sources; those that are no functions read what they find.
        added: Columns that the trainer adds.
        **datasets: Data sets by name: rows with `input_ids`, a dict of data sets, or None. What a stream has may only
            be known when it comes; it is then checked with each batch.

    Raises:
        ValueError: One lacks a column.
    """
    functions = [source for source in sources if isinstance(source, RewardFunction)]
    for name, columns in _columns_by_name(datasets):
        for function in functions:
            function.check_columns([*columns, *added], name)


def check_names_of_columns(**datasets: Any) -> None:
    """Check that no column has the name of an argument that reward functions are given, which would hide it.

    Args:
        **datasets: As for `check_columns`.

    Raises:
        ValueError: One has.
    """
    for name, columns in _columns_by_name(datasets):
        if hidden := sorted({*columns} & {*GIVEN}):
            raise ValueError(
                f"{name} has the columns {hidden}, which reward functions would not get: they are given arguments "
                "of these names; rename the columns"
            )


def _columns_by_name(datasets: Mapping[str, Any]) -> Iterator[tuple[str, list[str]]]:
    for name, dataset in datasets.items():
        if isinstance(dataset, Mapping):
            yield from _columns_by_name({f"{name}[{key!r}]": value for key, value in dataset.items()})
        elif (columns := _columns_of(dataset)) is not None:
            yield name, columns


def _columns_of(dataset: Any) -> list[str] | None:
    if isinstance(dataset, list):
        return list(dict.fromkeys(key for row in dataset for key in row))
    return getattr(dataset, "column_names", None)


def accepted_arguments(function: Callable[..., Any], offered: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Choose what a reward function is given.

    Args:
        function: The function.
        offered: All that there is, by name.
        name: The function's name, for the error message.

    Raises:
        ValueError: It requires something else.
    """
    if unnamed := _only_by_position(function):
        raise TypeError(
            f"the reward function {name!r} takes {unnamed} only by position, but rewards are called by name; pass a "
            "function of completions, prompts, ..., **kwargs"
        )
    named = named_parameters(function)
    required = {key for key, parameter in named.items() if parameter.default is parameter.empty}
    missing = sorted(required - offered.keys())
    if missing:
        raise ValueError(
            f"the reward function {name!r} requires the arguments {missing}, but is offered only "
            f"{sorted(offered)}: add them as columns of the data set, or give them defaults"
        )
    return {key: value for key, value in offered.items() if takes_any_argument(function) or key in named}


def function_name(function: Callable[..., Any]) -> str:
    """Return a function's visible name: of the one in a partial without a name, of an object's class, or `lambda`."""
    while isinstance(function, functools.partial) and not hasattr(function, "__name__"):
        function = function.func
    return visible(getattr(function, "__name__", type(function).__name__).strip("<>"), one_line=True)


def _listed(function: Callable[..., Any], arguments: Mapping[str, Any], num_rows: int) -> Any:
    """Call a function, and run the code of a generator that it returns, which need not end."""
    returned = function(**arguments)
    return list(itertools.islice(returned, num_rows + 1)) if isinstance(returned, Iterator) else returned


@contextlib.contextmanager
def naming(name: str, num_rows: int) -> Iterator[None]:
    """Note at an error of a reward function which function it was."""
    try:
        with naming_exits(f"the reward function {name!r}"):
            yield
    except Exception as error:
        error.add_note(f"raised by the reward function {name!r}, given the rows 0 to {num_rows - 1}")
        raise


@contextlib.contextmanager
def naming_exits(name: str) -> Iterator[None]:
    """Make an error of what would end the program, or the thread of all async functions: `sys.exit()`, for example.

    Raises:
        RuntimeError: The block raised something that is no `Exception`.
    """
    try:
        yield
    except BaseException as error:
        is_ours = isinstance(error, Exception | Stopped | GeneratorExit | asyncio.CancelledError)
        if is_ours or (isinstance(error, KeyboardInterrupt) and is_main_thread_interruptible()):
            raise
        raise RuntimeError(
            f"{name} raised {error!r}, which would end the program: raise an Exception, or return None for what it "
            "cannot score"
        ) from error


def _inner(function: Callable[..., Any]) -> Callable[..., Any]:
    while isinstance(function, functools.partial):
        function = function.func
    return function


def _is_async(function: Callable[..., Any]) -> bool:
    function = _inner(function)
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, "__call__", None))  # noqa: B004


def named_parameters(function: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    """Return the parameters that may be passed by name."""
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return {parameter.name: parameter for parameter in _parameters(function) or () if parameter.kind in kinds}


def _only_by_position(function: Callable[..., Any]) -> list[str]:
    """Name the parameters that a call must give, and cannot by their names."""
    return [
        parameter.name
        for parameter in _parameters(function) or ()
        if parameter.kind is parameter.POSITIONAL_ONLY and parameter.default is parameter.empty
    ]


def called_code(function: Callable[..., Any]) -> types.CodeType | None:
    """Return the code that a call runs, or None where it is not Python's."""
    function = _inner(function)
    own = getattr(function, "__code__", None)
    return own if own is not None else getattr(getattr(type(function), "__call__", None), "__code__", None)  # noqa: B004


def takes_any_argument(function: Callable[..., Any]) -> bool:
    """Tell whether a function has `**kwargs`, or does not say what it takes."""
    parameters = _parameters(function)
    return parameters is None or any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)


def _parameters(function: Callable[..., Any]) -> list[inspect.Parameter] | None:
    try:
        return list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):  # some functions written in C
        return None


def finished(returned: Any) -> Any:
    """Return what a function returned, or, where that is a coroutine, its result."""
    if not inspect.iscoroutine(returned):
        return returned
    return on_event_loop(_without_exits(returned)).result()


async def _without_exits(coroutine: Any) -> Any:
    with naming_exits("an async function"):
        return await coroutine


def _drop(*_: Any) -> None:
    """Take what nobody asked for."""
