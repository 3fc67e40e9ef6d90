"""A round's calls: those of all running episodes side by side, those of one episode in order.

Answers come in TRL's order: sync calls, and calls that failed before they ran, then async calls. Whatever a tool
raises is an error answer. A signal ends the wait at once.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from rlhf_ppo.environments.isolation import ProcessDiedError, TimeUpError
from rlhf_ppo.environments.tools import Answered, Reply, error_answer, timeout_text
from rlhf_ppo.processes.signals import interruptible
from rlhf_ppo.processes.waiting import in_daemon_thread

if TYPE_CHECKING:
    from rlhf_ppo.environments.isolation import Seat
    from rlhf_ppo.environments.pool import Episode, Tool

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
    by_episode = dict(zip(episodes, calls, strict=True))
    return side_by_side(lambda episode: _round(episode, _answers(episode, by_episode[episode])), episodes)


def answer_texts(episodes: Sequence[Episode], texts: Sequence[str]) -> list[Round]:
    """Pass whole messages to text environments.

    Args:
        episodes: The running episodes.
        texts: The message of each.

    Raises:
        EpisodeError: As for `answer_calls`.
    """
    by_episode = dict(zip(episodes, texts, strict=True))
    return side_by_side(lambda episode: _round(episode, [_acted(episode, by_episode[episode])]), episodes)


def ask_rewards(episodes: Sequence[Episode]) -> list[float | None]:
    """Return the `get_reward` of each episode; None where it returned None, does not exist or the episode is lost.

    Raises:
        EpisodeError: A `get_reward` raised, took too long, ended its process or returned no finite number.
    """

    def ask(episode: Episode) -> float | None:
        if not episode.kind.has_reward or episode.lost:
            return None
        try:
            return episode.ask("reward")
        except TimeUpError:
            seconds = episode.pool.timeout
            raise EpisodeError(
                f"{episode.description}: get_reward did not return within tool_timeout={seconds} seconds"
            ) from None
        except ProcessDiedError:
            raise EpisodeError(f"{episode.description}: its process ended in get_reward") from None

    return side_by_side(ask, episodes)


def side_by_side(function: Callable[[Episode], T], episodes: Sequence[Episode]) -> list[T]:
    """Call a function for each episode in threads; an error or a signal gives up the calls that still run.

    Raises:
        The error of the first episode, in order, that has one.
    """
    running: list[Future[T]] = [in_daemon_thread(function, episode) for episode in episodes]
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


def _acted(episode: Episode, text: str) -> Answer:
    return _in_environment(episode, "step", lambda: [episode.ask("act", text)])[0]


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
        return [_answer(name, reply) for name, reply in zip(names, ask(), strict=True)]
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
        return _answer(name, value[0] if isinstance(value, list) else value)
    except (TimeUpError, ProcessDiedError) as error:
        return _lost(name, error, episode.pool.timeout, time.perf_counter() - start)
    finally:
        episode.tool_seats.remove(seat)
        episode.pool.return_tool_seat(seat)


def _answer(name: str, reply: Answered) -> Answer:
    return Answer(name, **reply)


def _refused(name: Any, text: str) -> Answer:
    return Answer(name if isinstance(name, str) else str(name), error_answer(text), failed=True, early=True)


def _lost(name: str, error: TimeUpError | ProcessDiedError, limit: float | None, seconds: float) -> Answer:
    if isinstance(error, TimeUpError):
        return Answer(name, timeout_text(name, limit), failed=True, timed_out=True, seconds=seconds)
    return Answer(name, error_answer(f"The process of {name} ended."), failed=True, killed=True, seconds=seconds)
