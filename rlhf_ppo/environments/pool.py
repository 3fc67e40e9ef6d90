"""Environments of a run: one for each episode, made once and reset often, with the tools of each kind."""

from __future__ import annotations

import copy
import inspect
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rlhf_ppo.environments.calls import SECONDS_TO_CANCEL, EpisodeError, side_by_side
from rlhf_ppo.environments.isolation import ForkServer, ProcessDiedError, ProcessSeat, Seat, ThreadSeat, TimeUpError
from rlhf_ppo.environments.tools import Reply, describe_class, describe_tool

ISOLATIONS = ("thread", "process")


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
            EpisodeError: The request raised, or `turn_rewards`, `done` or `truncated` are wrong.
            TimeUpError: The time limit was reached; the episode is lost.
            ProcessDiedError: The process ended; the episode is lost.
        """
        assert self.seat is not None
        seconds = self.pool.timeout
        if request == "call_async" and seconds is not None:
            seconds += SECONDS_TO_CANCEL
        try:
            reply = self.seat.ask(seconds, request, *arguments)
        except (TimeUpError, ProcessDiedError) as error:
            self.lost = "time" if isinstance(error, TimeUpError) else "killed"
            raise
        if "raised" in reply:
            failed = {"reset": "reset", "reward": "get_reward", "act": "step"}.get(
                request, "reading turn_rewards, done and truncated"
            )
            error = EpisodeError(f"{self.description}: {failed} failed: {reply['raised']}")
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
        isolation: str = "thread",
        memory_limit: float | None = None,
        max_response_length: int | None = None,
    ) -> None:
        if isolation not in ISOLATIONS:
            raise ValueError(f"tool_isolation={isolation!r}: choose one of {ISOLATIONS}")
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
            try:
                episode.observation = episode.ask("reset", copy.deepcopy(row))
            except TimeUpError:
                raise EpisodeError(
                    f"{episode.description}: reset did not return within tool_timeout={self.timeout} seconds"
                ) from None
            except ProcessDiedError:
                raise EpisodeError(f"{episode.description}: its process ended in reset") from None
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
    for tool in tools:
        if not callable(tool) or not hasattr(tool, "__name__"):
            raise TypeError(f"tools holds {tool!r:.60}; pass functions with type hints and docstrings")


def _check_names(names: Sequence[str], where: str) -> None:
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"{where} have several tools of the names {twice}; rename all but one of each")
