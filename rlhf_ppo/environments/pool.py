"""Environments of a run and the calls of a round: one environment for each episode, made once and reset often.

A round answers the calls of all running episodes side by side, those of one episode in order. Answers come in TRL's
order: sync calls, and calls that failed before they ran, then async calls. Whatever a tool raises is an error answer.
A signal ends the wait at once.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

from rlhf_ppo.environments.isolation import ForkServer, ProcessDiedError, ProcessSeat, Seat, ThreadSeat, TimeUpError
from rlhf_ppo.environments.tools import Answered, Reply, describe_class, describe_tool, error_answer, timeout_text
from rlhf_ppo.processes.signals import interruptible
from rlhf_ppo.processes.waiting import in_daemon_thread

_METHODS = {"reset": "reset", "reward": "get_reward", "act": "step"}
"""The environment's method that a request calls."""


@dataclass(frozen=True)
class Tool:
    """A tool that the policy can call.

    Attributes:
        name: Its name.
        schema: JSON schema for the chat template.
        is_async: Whether it is a coroutine function.
        of_environment: Whether it is a method of the environment.
    """

    name: str
    schema: dict[str, Any]
    is_async: bool
    of_environment: bool


@dataclass(frozen=True)
class Kind:
    """An environment class, as found on its first instance; without environments, the tools alone.

    Attributes:
        name: Key in the dict of factories; None for the only one.
        class_name: Name of the class, which names the column of its `get_reward`; empty without an environment.
        class_key: Module and qualified name of the class.
        tools: Tools by name: standalone ones first.
        has_reward: Whether it defines `get_reward`.
        has_turn_rewards: Whether it may have rewards of turns.
        is_text: Whether it takes whole messages in place of calls.
        reset: Parameters of `reset`; None without an environment.
    """

    name: str | None
    class_name: str = ""
    class_key: str = ""
    tools: dict[str, Tool] = field(default_factory=dict)
    has_reward: bool = False
    has_turn_rewards: bool = False
    is_text: bool = False
    reset: inspect.Signature | None = None

    @property
    def takes_seed(self) -> bool:
        """Whether `reset` names `seed`."""
        return self.reset is not None and "seed" in self.reset.parameters

    def misfit(self, row: Mapping[str, Any]) -> str:
        """Say why `reset` cannot take the columns of a row; empty if it can."""
        columns = {name for name in row if self.name is None or name != "environment"}
        try:
            if self.reset is not None:
                self.reset.bind(**dict.fromkeys(columns | ({"seed"} if self.takes_seed else set())))
        except TypeError as error:
            return f"`reset{self.reset}` of {self.description} ({error})"
        return ""

    @property
    def schemas(self) -> list[dict[str, Any]] | None:
        """JSON schemas of the tools; None without tools, because some templates write a heading for an empty list."""
        return [tool.schema for tool in self.tools.values()] or None

    @property
    def description(self) -> str:
        """Name for errors, such as `environment 'maze' (Maze)`."""
        return (
            f"environment {self.class_name}" if self.name is None else f"environment {self.name!r} ({self.class_name})"
        )


@dataclass(eq=False)
class Episode:
    """One row's environment and tools.

    Attributes:
        pool: The environments of the run.
        kind: The kind of its environment.
        row: Index of the row in the batch.
        seat: Where the environment runs; None without an environment.
        observation: Text or content blocks from `reset`; None without.
        lost: `time` if a call of the environment ran into its limit, `killed` if its process ended, otherwise empty.
        report: Rewards of turns, `done` and `truncated`, as read in this round; empty before.
        tool_seats: Seats in which its standalone calls run.
    """

    pool: Environments
    kind: Kind
    row: int
    seat: Seat | None
    observation: Any = None
    lost: str = ""
    report: Reply = field(default_factory=dict)
    tool_seats: list[Seat] = field(default_factory=list)

    @property
    def environment(self) -> Any:
        """The environment; a stand-in if it runs in another process; None without an environment."""
        return None if self.seat is None else self.seat.environment

    @property
    def description(self) -> str:
        """Name for errors."""
        return f"row {self.row} of the batch, {self.kind.description}"

    def ask(self, request: str, *arguments: Any) -> Any:
        """Ask the environment and keep its report.

        Raises:
            EpisodeError: The request raised, or `turn_rewards`, `done` or `truncated` are wrong; `reset` or
                `get_reward` took too long or ended its process.
            TimeUpError: Another request reached the time limit; the episode is lost.
            ProcessDiedError: It ended the process; the episode is lost.
        """
        assert self.seat is not None
        seconds, method = self.pool.timeout, _METHODS.get(request, "reading turn_rewards, done and truncated")
        if request == "call_async" and seconds is not None:
            seconds += SECONDS_TO_CANCEL
        try:
            reply = self.seat.ask(seconds, request, *arguments)
        except (TimeUpError, ProcessDiedError) as error:
            self.lost = "time" if isinstance(error, TimeUpError) else "killed"
            if request not in ("reset", "reward"):
                raise
            reason = f"its process ended in {method}"
            if self.lost == "time":
                reason = f"{method} did not return within tool_timeout={seconds} seconds"
            raise EpisodeError(f"{self.description}: {reason}") from None
        if "raised" in reply:
            error = EpisodeError(f"{self.description}: {method} failed: {reply['raised']}")
            if reply.get("trace"):
                error.add_note(f"Traceback of the environment:\n{reply['trace']}")
            raise error
        if "report" in reply:
            new = reply["report"]
            self.report = new | {"rewards": [*self.report.get("rewards", []), *new["rewards"]]}
        return reply["value"]

    def give_up(self) -> None:
        """Give up the calls that run; the environment is replaced."""
        for seat in (*self.tool_seats, *([] if self.seat is None else [self.seat])):
            seat.give_up()


class Environments:
    """All environments and tools of a run.

    One instance of each environment is made at once: it shows the tools. Later instances are made when a batch needs
    them, and used again.

    Args:
        factory: Makes an environment; a dict of factories, from which the column `environment` chooses; or None.
        tools: Standalone tools: functions with type hints and Google docstrings.
        timeout: Seconds for one call, `reset` or `get_reward`; None: any.
        isolation: `thread`, or `process` for a process of each environment and each running standalone call.
        memory_limit: Megabytes that a process may take on top of what it has at its start; None: any.
        max_response_length: Characters that an answer keeps; None keeps all.

    Attributes:
        kinds: Kinds of environments by name; the only one has the name None.
        is_mixed: Whether the column `environment` chooses.

    Raises:
        TypeError: An environment has no `reset`, or a tool cannot be described.
        ValueError: Two tools have the same name, or another process cannot import them.
    """

    def __init__(
        self,
        factory: Callable[[], Any] | Mapping[str, Callable[[], Any]] | None,
        tools: Sequence[Callable[..., Any]] = (),
        *,
        timeout: float | None = 60.0,
        isolation: Literal["thread", "process"] = "thread",
        memory_limit: float | None = None,
        max_response_length: int | None = None,
    ) -> None:
        if isolation == "process" and not hasattr(socket, "send_fds"):
            raise ValueError("tool_isolation='process' needs Linux or macOS; set tool_isolation='thread'")
        if memory_limit is not None and sys.platform != "linux":
            raise ValueError(f"tool_memory_limit={memory_limit} needs Linux; leave it None")
        self.is_mixed = isinstance(factory, Mapping)
        self.factories: dict[str | None, Callable[[], Any]] = {}
        if factory is not None:
            self.factories.update(factory if isinstance(factory, Mapping) else {None: factory})
        _check(self.factories, tools)
        self.tools, self.timeout, self.longest = list(tools), timeout, max_response_length
        self._server: ForkServer | None = None
        if isolation == "process":
            hosted = list(self.factories.values())
            self._server = ForkServer(hosted, self.tools, max_response_length, memory_limit, timeout)
        self._seats: dict[str | None, list[Seat]] = {name: [] for name in self.factories}
        self._used: dict[str | None, int] = {}
        self._free_tool_seats: list[Seat] = []
        try:
            self.kinds = self._find_kinds()
        except BaseException:
            self.close()
            raise

    def _find_kinds(self) -> dict[str | None, Kind]:
        standalone = [Tool(**describe_tool(tool.__name__, tool), of_environment=False) for tool in self.tools]
        _check_names([tool.name for tool in standalone], "tools")
        if not self.factories:
            return {None: Kind(None, tools={tool.name: tool for tool in standalone})}
        kinds: dict[str | None, Kind] = {}
        for name in self.factories:
            seat = self._new_seat(name)
            self._seats[name].append(seat)
            found = self._described(seat, "environment_factory" if name is None else f"environment_factory[{name!r}]")
            own = [Tool(**tool, of_environment=True) for tool in found.pop("tools")]
            kind = Kind(name, **found, tools={tool.name: tool for tool in (*standalone, *own)})
            _check_names([tool.name for tool in (*standalone, *own)], f"tools and {kind.description}")
            kinds[name] = kind
        return kinds

    def _described(self, seat: Seat, argument: str) -> Reply:
        try:
            reply = seat.ask(self.timeout, "describe")
        except TimeUpError:
            raise ValueError(
                f"{argument}: it made no environment within tool_timeout={self.timeout} seconds"
            ) from None
        except ProcessDiedError:
            raise ValueError(f"{argument}: its process ended while the environment was made") from None
        if "raised" in reply:
            error = ValueError(f"{argument} made no environment: {reply['raised']}")
            error.add_note(f"Traceback:\n{reply['trace']}")
            raise error
        value = reply["value"]
        try:
            found = describe_class(seat.class_of(value))
        except (TypeError, ValueError) as error:
            raise type(error)(f"{argument}: {error}") from error
        return {"class_name": value["class_name"], "class_key": value["class_key"], **found}

    def kind_of(self, row: Mapping[str, Any]) -> Kind:
        """Return the kind of environment that a row names.

        Raises:
            ValueError: There is no environment of this name.
        """
        name = row.get("environment") if self.is_mixed else None
        if name not in self.kinds:
            raise ValueError(
                f"a row has environment={name!r}, but environment_factory has {sorted(map(str, self.kinds))}; correct "
                "the column or add the factory"
            )
        return self.kinds[name]

    def start(self, rows: Sequence[Mapping[str, Any]], seeds: Sequence[int] | None = None) -> list[Episode]:
        """Give each row a free environment and reset all of them side by side.

        Args:
            rows: Columns of the data set, which `reset` gets by name.
            seeds: Used where `reset` names `seed` and the row has none.

        Raises:
            EpisodeError: A `reset` raised, took too long, ended its process or returned no text.
        """
        episodes = [self._episode(number, row) for number, row in enumerate(rows)]

        def reset(episode: Episode) -> None:
            row = {
                key: value for key, value in rows[episode.row].items() if not (self.is_mixed and key == "environment")
            }
            if episode.kind.takes_seed and seeds is not None and row.get("seed") is None:
                row["seed"] = seeds[episode.row]
            episode.observation = episode.ask("reset", copy.deepcopy(row))
            episode.report = {}

        side_by_side(reset, [episode for episode in episodes if episode.seat is not None])
        return episodes

    def _episode(self, number: int, row: Mapping[str, Any]) -> Episode:
        kind = self.kind_of(row)
        if not self.factories:
            return Episode(self, kind, number, None)
        seats, index = self._seats[kind.name], self._used.get(kind.name, 0)
        if index == len(seats):
            seats.append(self._new_seat(kind.name))
        self._used[kind.name] = index + 1
        return Episode(self, kind, number, seats[index])

    def release(self) -> None:
        """Free all environments: their episodes are over. Environments that a call left running are replaced."""
        self._used.clear()
        for seats in (*self._seats.values(), self._free_tool_seats):
            seats[:] = [seat for seat in seats if not _closed_if_lost(seat)]

    def tool_seat(self) -> Seat:
        """Return a free seat for one call of a standalone tool."""
        try:
            return self._free_tool_seats.pop()
        except IndexError:
            return self._seat(None, None)

    def return_tool_seat(self, seat: Seat) -> None:
        """Free a seat of standalone tools; close it if its call was left running."""
        if not _closed_if_lost(seat):
            self._free_tool_seats.append(seat)

    def _new_seat(self, name: str | None) -> Seat:
        return self._seat(self.factories[name], list(self.factories).index(name))

    def _seat(self, factory: Callable[[], Any] | None, index: int | None) -> Seat:
        if self._server is not None:
            return ProcessSeat(self._server, index)
        return ThreadSeat(factory, [] if factory else self.tools, self.longest)

    def close(self) -> None:
        """Give up running calls and end all processes."""
        for seats in (*self._seats.values(), self._free_tool_seats):
            for seat in seats:
                seat.close()
            seats.clear()
        if self._server is not None:
            self._server.close()


def _closed_if_lost(seat: Seat) -> bool:
    if seat.lost:
        seat.close()
    return seat.lost


def _check(factories: Mapping[str | None, Any], tools: Sequence[Any]) -> None:
    for name, factory in factories.items():
        argument = "environment_factory" if name is None else f"environment_factory[{name!r}]"
        if not callable(factory):
            raise TypeError(f"{argument} is {factory!r:.60}; pass a class or a function that makes an environment")
        try:
            parameters = inspect.signature(factory)
        except ValueError:  # of a class in C
            continue
        try:
            parameters.bind()
        except TypeError as error:
            raise TypeError(
                f"{argument} is called without arguments, but has the parameters {parameters} ({error}); give them "
                "defaults, or pass a function without parameters that makes an environment"
            ) from None
    if not isinstance(tools, Sequence):
        raise TypeError(f"tools={tools!r:.60} must be a list of functions")
    for tool in tools:
        is_function = inspect.isroutine(tool) or all(hasattr(tool, name) for name in ("__name__", "__annotations__"))
        if not callable(tool) or not is_function:
            kind = f"an object of {type(tool).__name__} with `__call__`" if callable(tool) else f"{tool!r:.60}"
            raise TypeError(
                f"tools holds {kind}; pass functions with type hints and docstrings, or such methods of an object"
            )


def _check_names(names: Sequence[str], where: str) -> None:
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"{where} have several tools of the names {twice}; rename all but one of each")


# ---- The calls of a round ----

T = TypeVar("T")

SECONDS_TO_CANCEL = 1.0
"""Added to the time limit of async calls, which are first cancelled; beyond it they block their event loop."""


class EpisodeError(RuntimeError):
    """`reset`, `get_reward`, `turn_rewards` or `done` of an environment failed; the message names it and the row."""


@dataclass(frozen=True)
class Answer:
    """The answer to one call.

    Attributes:
        name: The name that the policy called.
        content: Text, or content blocks.
        failed: Whether it is an error answer.
        timed_out: Whether the call ran into the time limit.
        killed: Whether the tool's process ended.
        seconds: Duration of the call.
        early: Whether an async call failed before it ran.
    """

    name: str
    content: Any
    failed: bool = False
    timed_out: bool = False
    killed: bool = False
    seconds: float = 0.0
    early: bool = False

    @property
    def message(self) -> dict[str, Any]:
        """The message of the conversation."""
        return {"role": "tool", "name": self.name, "content": self.content}


@dataclass(frozen=True)
class Round:
    """One episode's answers, and how its environment stands after them.

    Attributes:
        answers: Answers in TRL's order. Of a text environment one: its observation.
        turn_reward: Sum of the rewards that the environment added in this round.
        rewarded: Whether it added any.
        done: Whether the episode ended.
        truncated: Whether the environment cut it, or was lost.
        lost: As `Episode.lost`.
    """

    answers: list[Answer]
    turn_reward: float
    rewarded: bool
    done: bool
    truncated: bool
    lost: str

    @property
    def observation(self) -> Any:
        """A text environment's observation."""
        return self.answers[0].content if self.answers else None


def answer_calls(episodes: Sequence[Episode], calls: Sequence[Sequence[Mapping[str, Any]]]) -> list[Round]:
    """Answer the calls of a round.

    Args:
        episodes: The running episodes.
        calls: `tool_calls` of each episode's parsed message.

    Raises:
        EpisodeError: `turn_rewards`, `done` or `truncated` of an environment are wrong.
    """
    return side_by_side(lambda episode, given: _round(episode, _answers(episode, given)), episodes, calls)


def answer_texts(episodes: Sequence[Episode], texts: Sequence[str]) -> list[Round]:
    """Pass whole messages to text environments.

    Args:
        episodes: The running episodes.
        texts: The message of each.

    Raises:
        EpisodeError: As for `answer_calls`.
    """

    def act(episode: Episode, text: str) -> Round:
        return _round(episode, _in_environment(episode, "step", lambda: [episode.ask("act", text)]))

    return side_by_side(act, episodes, texts)


def ask_rewards(episodes: Sequence[Episode]) -> list[float | None]:
    """Return the `get_reward` of each episode; None where it returned None, does not exist or the episode is lost.

    Raises:
        EpisodeError: A `get_reward` raised, took too long, ended its process or returned no finite number.
    """

    def ask(episode: Episode) -> float | None:
        return episode.ask("reward") if episode.kind.has_reward and not episode.lost else None

    return side_by_side(ask, episodes)


def side_by_side(function: Callable[..., T], episodes: Sequence[Episode], *arguments: Sequence[Any]) -> list[T]:
    """Call a function for each episode in threads; an error or a signal gives up the calls that still run.

    Args:
        function: Takes an episode, and its element of each of `arguments`.
        episodes: The episodes.
        *arguments: As long as the episodes.

    Raises:
        The error of the first episode, in order, that has one.
    """
    given = zip(episodes, *arguments, strict=True)
    running: list[Future[T]] = [in_daemon_thread(function, *of_episode) for of_episode in given]
    try:
        with interruptible():
            wait(running, return_when=FIRST_EXCEPTION)
            for future in running:
                if future.done() and (error := future.exception()) is not None:
                    raise error
            return [future.result() for future in running]
    except BaseException:
        for episode, future in zip(episodes, running, strict=True):
            if not future.done():
                episode.give_up()
        raise


def _round(episode: Episode, answers: list[Answer]) -> Round:
    if episode.seat is not None and not episode.lost and not episode.report:
        with contextlib.suppress(TimeUpError, ProcessDiedError):
            episode.ask("read")
    report, episode.report = episode.report, {}
    rewards = report.get("rewards", [])
    return Round(
        answers=answers,
        turn_reward=sum(rewards),
        rewarded=bool(rewards),
        done=report.get("done", False),
        truncated=report.get("truncated", False) or bool(episode.lost),
        lost=episode.lost,
    )


def _answers(episode: Episode, calls: Sequence[Mapping[str, Any]]) -> list[Answer]:
    """Answer one episode's calls: sync ones in order, then async ones side by side."""
    answers: dict[int, Answer] = {}
    later: dict[int, tuple[str, Any]] = {}
    for number, call in enumerate(calls):
        kind, function = call.get("type"), call.get("function")
        if kind != "function" or not isinstance(function, Mapping):
            answers[number] = _refused(call.get("name", "unknown"), f"Unsupported tool call type: {kind}")
            continue
        name, arguments = function.get("name"), function.get("arguments")
        tool = episode.kind.tools.get(name) if isinstance(name, str) else None
        if tool is None:
            answers[number] = _refused(name, f"Tool {name} not found.")
        elif tool.is_async:
            later[number] = (tool.name, arguments)
        else:
            answers[number] = _called(episode, tool, arguments)
    answers.update(_called_async(episode, later))
    ran_later = {number for number in later if not answers[number].early}
    return [answers[number] for number in sorted(answers, key=lambda number: (number in ran_later, number))]


def _called(episode: Episode, tool: Tool, arguments: Any) -> Answer:
    if tool.of_environment:
        return _in_environment(episode, tool.name, lambda: [episode.ask("call", tool.name, arguments)])[0]
    return _standalone(episode, tool.name, lambda seat: seat.ask(episode.pool.timeout, "call", tool.name, arguments))


def _called_async(episode: Episode, calls: Mapping[int, tuple[str, Any]]) -> dict[int, Answer]:
    """Call async tools side by side: those of the environment in one request, each standalone one in its own seat."""
    own = {number: call for number, call in calls.items() if episode.kind.tools[call[0]].of_environment}
    running = {
        number: in_daemon_thread(_standalone_async, episode, *call)
        for number, call in calls.items()
        if number not in own
    }
    answers: dict[int, Answer] = {}
    if own:
        names, seconds = [name for name, _ in own.values()], episode.pool.timeout
        mine = _in_environment(episode, names, lambda: episode.ask("call_async", list(own.values()), seconds))
        answers.update(zip(own, mine, strict=True))
    return answers | {number: future.result() for number, future in running.items()}


def _standalone_async(episode: Episode, name: str, arguments: Any) -> Answer:
    seconds = episode.pool.timeout
    limit = None if seconds is None else seconds + SECONDS_TO_CANCEL
    return _standalone(episode, name, lambda seat: seat.ask(limit, "call_async", [(name, arguments)], seconds))


def _in_environment(episode: Episode, names: str | Sequence[str], ask: Callable[[], list[Answered]]) -> list[Answer]:
    """Call tools of an environment; a call that cannot be ended, or that ends the process, loses the episode."""
    names = [names] if isinstance(names, str) else names
    if episode.lost:
        return [_refused(name, "The environment did not survive an earlier call.") for name in names]
    start = time.perf_counter()
    try:
        return [Answer(name, **reply) for name, reply in zip(names, ask(), strict=True)]
    except (TimeUpError, ProcessDiedError) as error:
        seconds = time.perf_counter() - start
        return [_lost(name, error, episode.pool.timeout, seconds) for name in names]


def _standalone(episode: Episode, name: str, ask: Callable[[Seat], Reply]) -> Answer:
    """Call a standalone tool in a free seat."""
    start = time.perf_counter()
    seat = episode.pool.tool_seat()
    episode.tool_seats.append(seat)
    try:
        reply = ask(seat)
        if "raised" in reply:  # its arguments cannot be sent
            return _refused(name, reply["raised"])
        value = reply["value"]
        return Answer(name, **(value[0] if isinstance(value, list) else value))
    except (TimeUpError, ProcessDiedError) as error:
        return _lost(name, error, episode.pool.timeout, time.perf_counter() - start)
    finally:
        episode.tool_seats.remove(seat)
        episode.pool.return_tool_seat(seat)


def _refused(name: Any, text: str) -> Answer:
    return Answer(name if isinstance(name, str) else str(name), error_answer(text), failed=True, early=True)


def _lost(name: str, error: TimeUpError | ProcessDiedError, limit: float | None, seconds: float) -> Answer:
    if isinstance(error, TimeUpError):
        return Answer(name, timeout_text(name, limit), failed=True, timed_out=True, seconds=seconds)
    return Answer(name, error_answer(f"The process of {name} ended."), failed=True, killed=True, seconds=seconds)
