"""Environments of a run and the calls of a round: one environment for each episode, made once and reset often.

A round answers the calls of all running episodes side by side, those of one episode in order. Answers come in TRL's
order: sync calls, and calls that failed before they ran, then async calls. An exception in a tool is an error answer.
"""

from __future__ import annotations

import asyncio
import copy
import inspect
import math
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from typing import Any, TypeVar

from rlhf_ppo.environments.tools import Kind, Tool, content_of, error_answer, kind_of_class, standalone
from rlhf_ppo.environments.waiting import abandon_blocked_event_loop, in_daemon_thread, run_on_event_loop, without_exit
from rlhf_ppo.terminal import escape_error, visible_logger

logger = visible_logger(__name__)

T = TypeVar("T")

SECONDS_TO_CANCEL = 1.0
"""Time for a late coroutine to be cancelled; an event loop that runs nothing for so long is blocked."""


class EpisodeError(RuntimeError):
    """`reset`, `get_reward` or `turn_rewards` of an environment failed; the message names it and the row."""


class TimeUpError(Exception):
    """A call did not return within its time limit; its thread is left running."""


@dataclass(eq=False)
class Episode:
    """One row's environment and tools.

    Attributes:
        pool: The environments of the run.
        kind: The kind of its environment.
        row: Index of the row in the batch.
        environment: The environment, or None.
        observation: Text or content blocks from `reset`; None without.
        lost: Whether a call of the environment did not return in time; the environment is then replaced.
        num_paid: Number of `turn_rewards` that earlier rounds paid.
    """

    pool: Environments
    kind: Kind
    row: int
    environment: Any = None
    observation: Any = None
    lost: bool = False
    num_paid: int = 0

    @property
    def description(self) -> str:
        """Name for errors."""
        return f"row {self.row} of the batch, environment {getattr(self.kind.cls, '__name__', None)}"

    def ask(self, method: str, /, **arguments: object) -> Any:
        """Call `reset` or `get_reward`; a column may have any name.

        Raises:
            EpisodeError: It raised an error or took too long.
        """
        try:
            return self.pool.call(getattr(self.environment, method), arguments)
        except BaseException as error:
            escape_error(error)
            raise EpisodeError(f"{self.description}: {method} failed: {type(error).__name__}: {error}") from error


@dataclass(frozen=True)
class ToolAnswer:
    """The answer to one call.

    Attributes:
        name: The name that the policy called.
        content: Text, or content blocks.
        failed: Whether it is an error answer.
        seconds: Duration of the call.
    """

    name: str
    content: Any
    failed: bool = False
    seconds: float = 0.0

    @property
    def message(self) -> dict[str, Any]:
        """The message of the conversation."""
        return {"role": "tool", "name": self.name, "content": self.content}


@dataclass(frozen=True)
class Round:
    """One episode's answers, and how its environment stands after them.

    Attributes:
        answers: Answers in TRL's order; one if the environment takes whole messages.
        turn_reward: Sum of the rewards that the environment added in this round.
        done: Whether the episode ended.
        truncated: Whether the environment cut it.
        lost: As `Episode.lost`.
    """

    answers: list[ToolAnswer]
    turn_reward: float = 0.0
    done: bool = False
    truncated: bool = False
    lost: bool = False


class Environments:
    """All environments and tools of a run.

    One instance of each environment is made at once: it shows the tools. Later instances are made when a batch needs
    them, and reused.

    Args:
        factory: Makes an environment; a dict of factories, from which the column `environment` chooses; or None.
        tools: Standalone tools: functions with type hints and Google docstrings.
        timeout: Seconds for one call, `reset` or `get_reward`; None: no limit.

    Raises:
        ValueError: An environment cannot be made or has no `reset`, or a tool has no hints or docstring.

    Attributes:
        kinds: Kinds of environments by name; the only one has the name None.
        is_mixed: Whether the column `environment` chooses.
    """

    def __init__(
        self,
        factory: Callable[[], object] | Mapping[str, Callable[[], object]] | None,
        tools: Sequence[Callable[..., object]] = (),
        timeout: float | None = 60.0,
    ) -> None:
        self.timeout, self.is_mixed = timeout, isinstance(factory, Mapping)
        self._factories: dict[str | None, Callable[[], object]] = {}
        if factory is not None:
            self._factories.update(factory if isinstance(factory, Mapping) else {None: factory})
        self._episodes: list[Episode] = []
        try:
            self._pools = {name: [make()] for name, make in self._factories.items()}
            alone = standalone(tools)
            self.kinds: dict[str | None, Kind] = {
                name: kind_of_class(type(pool[0]), alone) for name, pool in self._pools.items()
            } or {None: Kind(tools=alone)}
        except Exception as error:
            raise ValueError(
                f"an environment (a class with `reset`) or a tool cannot be used: {type(error).__name__}: {error}"
            ) from error
        if alone and not any(kind.tools for kind in self.kinds.values()):
            raise ValueError(
                f"tools={[*alone]} can never be called: an environment with takes_messages reads whole messages"
            )

    def start(self, rows: Sequence[Mapping[str, object]], seeds: Sequence[int] | None = None) -> list[Episode]:
        """Give each row an environment and reset all of them side by side; earlier episodes are over.

        Args:
            rows: Columns of the data set, which `reset` gets by name.
            seeds: Used where `reset` names `seed` and the row has none.

        Raises:
            EpisodeError: A `reset` raised an error or took too long, or two rows share an environment.
        """
        lost = [episode.environment for episode in self._episodes if episode.lost]
        for name, pool in self._pools.items():
            self._pools[name] = [one for one in pool if all(one is not other for other in lost)]
        used: Counter[str | None] = Counter()
        self._episodes = [self._episode(number, row, used) for number, row in enumerate(rows)]

        def reset(episode: Episode) -> None:
            row = {
                key: value for key, value in rows[episode.row].items() if not (self.is_mixed and key == "environment")
            }
            if episode.kind.takes_seed and seeds is not None and row.get("seed") is None:
                row["seed"] = seeds[episode.row]
            observation = episode.ask("reset", **copy.deepcopy(row))
            episode.observation = None if observation is None else content_of(observation)
            episode.num_paid = len(getattr(episode.environment, "turn_rewards", None) or ())

        played = [episode for episode in self._episodes if episode.environment is not None]
        side_by_side(reset, played)
        _check_apart(played)
        return self._episodes

    def _episode(self, number: int, row: Mapping[str, Any], used: Counter[str | None]) -> Episode:
        name = row["environment"] if self.is_mixed else None
        if not self._pools:
            return Episode(self, self.kinds[name], number)
        pool = self._pools[name]
        if used[name] == len(pool):
            pool.append(self._factories[name]())
        used[name] += 1
        return Episode(self, self.kinds[name], number, pool[used[name] - 1])

    def call(self, function: Callable[..., object], arguments: Mapping[str, object]) -> Any:
        """Call a function in its own thread; await what it returns.

        Raises:
            TimeUpError: It did not return in time. A coroutine is cancelled.
        """
        running: Future[Any] = in_daemon_thread(lambda: function(**arguments))
        is_done = bool(wait([running], self.timeout).done)
        if is_done and inspect.iscoroutine(coroutine := running.result()):
            running = run_on_event_loop(coroutine)
            is_done = _in_time(running, self.timeout)
        if not is_done:
            raise TimeUpError(self.time_up(getattr(function, "__name__", "the call")))
        return running.result()

    def time_up(self, name: str) -> str:
        """Return the answer of a call that took too long."""
        return f"{name} did not return within {self.timeout} seconds."


def _check_apart(episodes: Sequence[Episode]) -> None:
    """Raise an `EpisodeError` if two episodes have the same environment or the same list `turn_rewards`."""
    environments = [episode.environment for episode in episodes]
    paid = [getattr(environment, "turn_rewards", None) for environment in environments]
    lists = [rewards for rewards in paid if isinstance(rewards, list)]
    if len({*map(id, environments)}) < len(environments):
        raise EpisodeError("environment_factory returned an environment twice: make a new one at each call")
    if len({*map(id, lists)}) < len(lists):
        raise EpisodeError("two environments have the same list turn_rewards: make a new one in reset")


def _in_time(running: Future[Any], seconds: float | None) -> bool:
    """Return whether a coroutine is done in time; if not, cancel it, and leave the event loop if it is blocked."""
    if wait([running], seconds).done:
        return True
    running.cancel()
    abandon_blocked_event_loop(SECONDS_TO_CANCEL)
    return False


# ---- The calls of a round ----


def answer_turns(episodes: Sequence[Episode], turns: Sequence[str | Sequence[Mapping[str, object]]]) -> list[Round]:
    """Answer a turn of each episode.

    Args:
        episodes: The running episodes.
        turns: `tool_calls` of each episode's parsed message, or the whole message for `respond`.

    Raises:
        EpisodeError: `turn_rewards` of an environment are wrong, or its class does not name them.
    """
    return side_by_side(_round, episodes, turns)


def ask_rewards(episodes: Sequence[Episode]) -> list[float | None]:
    """Return the `get_reward` of each episode; None where it returned None or the episode is lost.

    Raises:
        EpisodeError: A `get_reward` raised an error or took too long.
    """
    return side_by_side(lambda episode: None if episode.lost else episode.ask("get_reward"), episodes)


def side_by_side(function: Callable[..., T], episodes: Sequence[Episode], *arguments: Sequence[object]) -> list[T]:
    """Call a function in threads, for each episode with its element of each of `arguments`."""
    calls = zip(episodes, *arguments, strict=True)
    running: list[Future[T]] = [in_daemon_thread(function, *call) for call in calls]
    return [future.result() for future in running]


def _round(episode: Episode, turn: str | Sequence[Mapping[str, object]]) -> Round:
    if isinstance(turn, str):
        answer = _called(episode, "respond", episode.environment.respond, {"text": turn}, of_environment=True)
        if answer.failed:  # no metric of tools counts it
            kind = type(episode.environment).__name__
            logger.warning_once(f"{kind}.respond failed, and the policy reads this as its answer: {answer.content}")
        answers = [answer]
    else:
        answers = _answers(episode, turn)
    environment = episode.environment
    if environment is None or episode.lost:
        return Round(answers, lost=episode.lost)
    appended = getattr(environment, "turn_rewards", None)
    try:
        paid = [] if appended is None else list(appended)
        new = paid[episode.num_paid :]
        is_right = len(paid) >= episode.num_paid and all(reward is None or math.isfinite(reward) for reward in new)
    except (TypeError, ValueError):
        paid, new, is_right = [], [], False
    if not is_right:
        raise EpisodeError(
            f"{episode.description}: turn_rewards must be a list of finite numbers, appended until the next reset; "
            f"there were {episode.num_paid}, then {appended!r:.200}"
        )
    if new and not episode.kind.has_turn_rewards:
        raise EpisodeError(
            f"{episode.description}: turn_rewards has amounts, but the class does not name it: define turn_rewards on "
            "the class, as a property or as an attribute that reset replaces"
        )
    episode.num_paid = len(paid)
    reward = sum(0.0 if reward is None else float(reward) for reward in new)
    return Round(answers, reward, _flag(environment, "done"), _flag(environment, "truncated"))


def _flag(environment: object, name: str) -> bool:
    value = getattr(environment, name, False)
    return not callable(value) and bool(value)  # a tool may have this name


def _answers(episode: Episode, calls: Sequence[Mapping[str, Any]]) -> list[ToolAnswer]:
    """Answer one episode's calls: sync ones in order, then async ones side by side."""
    answers: list[ToolAnswer] = []
    later: list[tuple[Tool, Coroutine[Any, Any, Any]]] = []
    for call in calls:
        function = call.get("function")
        if call.get("type") != "function" or not isinstance(function, Mapping):
            text = f"Unsupported tool call type: {call.get('type')}"
            answers.append(ToolAnswer(call.get("name", "unknown"), error_answer(text), failed=True))
            continue
        name = str(function.get("name"))
        arguments: Any = function.get("arguments")
        tool = episode.kind.tools.get(name)
        if tool is None:
            answers.append(ToolAnswer(name, error_answer(f"Tool {name} not found."), failed=True))
            continue
        bound = tool.function or getattr(episode.environment, name)
        if not tool.is_async:
            answers.append(_called(episode, name, bound, arguments, of_environment=tool.function is None))
            continue
        try:
            later.append((tool, bound(**arguments)))
        except Exception as error:
            answers.append(ToolAnswer(name, error_answer(error), failed=True))
    return answers + (_called_async(episode, later) if later else [])


def _called(
    episode: Episode, name: str, function: Callable[..., object], arguments: Mapping[str, object], of_environment: bool
) -> ToolAnswer:
    """Call a sync tool; a call of an environment that cannot be ended loses the episode."""
    if of_environment and episode.lost:
        return ToolAnswer(name, error_answer("The environment did not survive an earlier call."), failed=True)
    start = time.perf_counter()
    try:
        content, failed = content_of(episode.pool.call(function, arguments)), False
    except BaseException as error:
        content, failed = error_answer(error), True
        episode.lost = episode.lost or (of_environment and isinstance(error, TimeUpError))
    return ToolAnswer(name, content, failed, time.perf_counter() - start)


def _called_async(
    episode: Episode, calls: Sequence[tuple[Tool, Coroutine[object, object, object]]]
) -> list[ToolAnswer]:
    """Await async tools side by side; those that do not return in time are cancelled."""
    seconds = episode.pool.timeout

    async def awaited(tool: Tool, coroutine: Coroutine[object, object, object]) -> ToolAnswer:
        start = time.perf_counter()
        try:
            content, failed = content_of(await asyncio.wait_for(without_exit(coroutine), seconds)), False
        except (Exception, asyncio.CancelledError) as error:
            is_late = isinstance(error, TimeoutError) and not str(error)
            content, failed = error_answer(episode.pool.time_up(tool.name) if is_late else error), True
        return ToolAnswer(tool.name, content, failed, time.perf_counter() - start)

    async def gathered() -> list[ToolAnswer]:
        return await asyncio.gather(*(awaited(*call) for call in calls))

    running = run_on_event_loop(gathered())
    if _in_time(running, None if seconds is None else seconds + SECONDS_TO_CANCEL):
        return running.result()
    episode.lost = episode.lost or any(tool.function is None for tool, _ in calls)
    late = seconds or 0.0
    return [ToolAnswer(tool.name, error_answer(episode.pool.time_up(tool.name)), True, late) for tool, _ in calls]
