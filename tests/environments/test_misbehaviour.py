"""Tools and environments that misbehave, in threads and in processes: the run continues and nothing is left behind."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rlhf_ppo.environments.pool import Answer, Environments, EpisodeError, answer_calls, ask_rewards
from tests.environments.hostile import Hostile, HostileAsync, Meeting, do, do_async

LIMIT = 0.5
HANGS = ("object whose text hangs", "sleep", "spin")
DIES = ("exits", "kills itself", "segfault", "closes the pipe")
NEVER_IN_A_THREAD = (*DIES, "takes 4 GB", "power", "regex", "forks")

FAILS = {
    "SystemExit": "{'error': 'SystemExit: 3'}",
    "KeyboardInterrupt": "{'error': 'KeyboardInterrupt'}",
    "CancelledError": "{'error': 'CancelledError'}",
    "GeneratorExit": "{'error': 'GeneratorExit'}",
    "TimeoutError": "{'error': 'mine'}",
    "Unreadable": "{'error': 'Unreadable, whose message cannot be read'}",
    "object without text": "{'error': 'no text'}",
    "image": "{'error': 'the tool returned an image, which the policy cannot read; return text'}",
}
SUCCEEDS = {
    "1 MB": "x" * 2**20,
    "100 MB": "x" * 100 * 2**20,
    "NUL": "a\0b",
    "surrogate": "a?b",
    "bytes": r"b'\xff'",
    "prints": "None",
    "closes stdout": "None",
    "fine": "fine",
}


def call(name: str, what: Any = None) -> dict[str, Any]:
    arguments = {} if what is None else {"what": what}
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


def where(*deeds: str) -> list[tuple[str, str]]:
    """Each deed in processes, and in threads if a thread can survive it."""
    places = [(what, place) for what in deeds for place in ("thread", "process")]
    return [(what, place) for what, place in places if place == "process" or what not in NEVER_IN_A_THREAD]


Make = Callable[..., Environments]


@pytest.fixture(params=["thread", "process"])
def isolation(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def make(isolation: str) -> Iterator[Make]:
    made: list[Environments] = []

    def environments(factory: Any = Hostile, tools: Any = (do, do_async), **options: Any) -> Environments:
        options = {"timeout": LIMIT, "isolation": isolation} | options
        made.append(Environments(factory, tools, **options))
        return made[-1]

    yield environments
    for pool in made:
        pool.close()
    assert_nothing_is_left()


_earlier: set[int] = set()
"""Child processes of other tests, such as the server that forks the processes of distributed runs."""


@pytest.fixture(autouse=True)
def note_children() -> None:
    _earlier.clear()
    _earlier.update(process.pid for process in psutil.Process().children())


def children() -> list[psutil.Process]:
    """The child processes that this test has started."""
    return [process for process in psutil.Process().children() if process.pid not in _earlier]


def assert_nothing_is_left() -> None:
    """No child process, and no thread that runs Python code of a tool."""
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline and (children() or _spinning()):
        time.sleep(0.02)
    assert children() == []
    assert not _spinning()


def _spinning() -> bool:
    return any(frame.f_code.co_name == "spin" for frame in sys._current_frames().values())


def assert_ended(processes: list[psutil.Process]) -> None:
    """They have ended, though their new parent may not have waited for them."""
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline and any(map(_runs, processes)):
        time.sleep(0.02)
    assert [process for process in processes if _runs(process)] == []


def _runs(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def answers(pool: Environments, *calls: dict[str, Any], row: dict[str, Any] | None = None) -> list[Answer]:
    (episode,) = pool.start([row or {}])
    return answer_calls([episode], [list(calls)])[0].answers


@pytest.mark.parametrize("tool", ["do", "do_async", "act", "act_async"])
def test_whatever_a_tool_raises_or_returns_is_an_answer(tool: str, make: Make) -> None:
    pool = make(timeout=60.0)
    (episode,) = pool.start([{}])

    for what, text in FAILS.items():
        (answer,) = answer_calls([episode], [[call(tool, what)]])[0].answers
        assert (answer.content, answer.failed, answer.timed_out, answer.killed) == (text, True, False, False), what
    for what, text in SUCCEEDS.items():
        (answer,) = answer_calls([episode], [[call(tool, what)]])[0].answers
        assert (answer.content == text, answer.failed) == (True, False), what
    (again,) = answer_calls([episode], [[call(tool, "closes stdout")]])[0].answers
    assert (again.content, again.failed) == ("None", False)
    assert answer_calls([episode], [[call(tool, "recursion")]])[0].answers[0].failed
    assert answer_calls([episode], [[call(tool, "StopIteration")]])[0].answers[0].failed
    os.fstat(1)  # stdout is open again
    assert ask_rewards([episode]) == [1.0]


@pytest.mark.parametrize("what", HANGS)
def test_a_standalone_tool_that_hangs_is_an_error_answer_and_the_episode_continues(what: str, make: Make) -> None:
    pool = make()
    (episode,) = pool.start([{}])

    (played,) = answer_calls([episode], [[call("do", what), call("do", "fine"), call("act", "fine")]])

    hung, *rest = played.answers
    assert (hung.content, hung.failed, hung.timed_out) == (
        "{'error': 'do did not return within 0.5 seconds.'}",
        True,
        True,
    )
    assert hung.seconds >= LIMIT
    assert [answer.content for answer in rest] == ["fine", "fine"]
    assert (played.lost, played.truncated, played.turn_reward) == ("", False, 0.5)
    assert ask_rewards([episode]) == [1.0]


@pytest.mark.parametrize("what", HANGS)
def test_an_environment_that_hangs_is_cut_and_replaced(what: str, make: Make) -> None:
    pool = make()
    bad, good = pool.start([{}, {}])
    calls = [call("act", "fine"), call("act", what), call("act", "fine")]

    cut, fine = answer_calls([bad, good], [calls, [call("act", "fine")]])

    assert [answer.timed_out for answer in cut.answers] == [False, True, False]
    assert [answer.failed for answer in cut.answers] == [False, True, True]
    assert (cut.lost, cut.truncated, cut.done, cut.turn_reward) == ("time", True, False, 0.5)
    assert (fine.lost, fine.truncated, fine.answers[0].content) == ("", False, "fine")
    assert ask_rewards([bad, good]) == [None, 1.0]
    old = bad.seat
    pool.release()
    again, other = pool.start([{}, {}])
    assert old not in (again.seat, other.seat)
    assert [one.answers[0].content for one in answer_calls([again, other], [[call("act", "fine")]] * 2)] == [
        "fine"
    ] * 2


@pytest.mark.parametrize("tool", ["do_async", "act_async"])
def test_an_async_tool_that_waits_is_cancelled_and_the_episode_continues(tool: str, make: Make) -> None:
    pool = make()
    (episode,) = pool.start([{}])

    (played,) = answer_calls([episode], [[call(tool, "wait"), call(tool, "fine")]])

    assert [(answer.timed_out, answer.content == "fine") for answer in played.answers] == [
        (True, False),
        (False, True),
    ]
    assert not played.truncated and ask_rewards([episode]) == [1.0]


@pytest.mark.parametrize("what", ["sleep", "spin"])
@pytest.mark.parametrize("tool", ["do_async", "act_async"])
def test_an_async_tool_that_blocks_its_loop(tool: str, what: str, make: Make) -> None:
    pool = make()
    (episode,) = pool.start([{}])

    (played,) = answer_calls([episode], [[call(tool, what)]])

    assert played.answers[0].timed_out and played.truncated == (tool == "act_async")
    pool.release()
    (episode,) = pool.start([{}])
    assert answer_calls([episode], [[call(tool, "fine")]])[0].answers[0].content == "fine"  # on another loop


@pytest.mark.parametrize("what", [*DIES, "power", "regex"])
@pytest.mark.parametrize("isolation", ["process"], indirect=True)
def test_what_a_thread_cannot_survive_costs_a_process_its_episode(what: str, make: Make) -> None:
    pool = make()
    bad, good = pool.start([{}, {}])

    cut, fine = answer_calls([bad, good], [[call("act", what)], [call("do", what), call("act", "fine")]])

    lost, killed = ("killed", True) if what in DIES else ("time", False)
    assert (cut.answers[0].killed, cut.answers[0].timed_out, cut.lost, cut.truncated) == (
        killed,
        not killed,
        lost,
        True,
    )
    assert (fine.answers[0].killed, fine.answers[0].timed_out, fine.lost) == (killed, not killed, "")
    assert (fine.answers[1].content, fine.truncated) == ("fine", False)
    if killed:
        assert cut.answers[0].content == "{'error': 'The process of act ended.'}"


@pytest.mark.parametrize("isolation", ["process"], indirect=True)
def test_the_memory_limit_is_an_error_answer(make: Make) -> None:
    pool = make(memory_limit=300, timeout=60.0)

    (answer, fine) = answers(pool, call("act", "takes 4 GB"), call("act", "1 MB"))

    assert (answer.failed, answer.content, fine.failed) == (True, "{'error': ''}", False)


@pytest.mark.parametrize("isolation", ["process"], indirect=True)
def test_what_a_tool_forks_ends_with_its_process(make: Make) -> None:
    pool = make(timeout=60.0)
    own, standalone = answers(pool, call("act", "forks"), call("do", "forks"))
    left = [psutil.Process(int(answer.content)) for answer in (own, standalone)]
    assert all(process.is_running() for process in left)

    pool.close()

    assert_ended(left)


@pytest.mark.parametrize("tool", ["do", "do_async", "act", "act_async"])
def test_a_copy_of_the_process_ends_and_does_not_continue_the_run(tool: str, make: Make, isolation: str) -> None:
    pool = make(timeout=60.0)

    first, second = answers(pool, call(tool, "forks and returns"), call(tool, "fine"))

    assert second.content == "fine"
    if isolation == "thread":
        assert psutil.Process(int(first.content)).wait(20) == 0
    else:  # its parent is the environment's process, which does not wait for it
        assert_ended([psutil.Process(int(first.content))])


RAISES = ("StopIteration", "recursion", "object whose text hangs", *FAILS)
"""What `reset` and `get_reward` cannot do either; some deeds are errors in one of them alone."""

FINE = {
    "reset": ("1 MB", "100 MB", "NUL", "surrogate", "prints", "closes stdout", "fine"),
    "get_reward": ("prints", "closes stdout"),
}
"""What `reset` may return or do, and `get_reward`: None is no reward."""


@pytest.mark.parametrize("at", ["reset", "get_reward"])
@pytest.mark.parametrize("is_async", [False, True])
def test_whatever_reset_and_get_reward_raise_or_return_is_an_error_or_a_text_or_number(
    at: str, is_async: bool, make: Make
) -> None:
    pool = make({"nice": Hostile, "bad": HostileAsync if is_async else Hostile}, timeout=60.0)

    def begin(what: str) -> list[float | None]:
        pool.release()
        return ask_rewards(pool.start([{"environment": "nice"}, {"environment": "bad", "at": at, "what": what}]))

    for what in {*RAISES, *SUCCEEDS} - {*FINE[at]}:
        with pytest.raises(EpisodeError, match=r"^row 1 of the batch, environment 'bad' \(\w+\): ") as caught:
            begin(what)
        assert at in str(caught.value), what
    for what in FINE[at]:
        assert begin(what) == [1.0, 1.0 if at == "reset" else None], what
    os.fstat(1)  # stdout is open again


@pytest.mark.parametrize("at", ["reset", "get_reward"])
@pytest.mark.parametrize(("what", "isolation"), where("forks and returns", "forks"), indirect=["isolation"])
def test_what_reset_and_get_reward_fork_ends(at: str, what: str, make: Make, isolation: str) -> None:
    """The number of the child is no observation, but a reward; the child of a thread ends when it returns."""
    pool, child = make(timeout=60.0), None
    if at == "reset":
        with pytest.raises(EpisodeError, match="reset returned int"):
            pool.start([{"at": at, "what": what}])
    else:
        (child,) = ask_rewards(pool.start([{"at": at, "what": what}]))
        assert child is not None and child > 1
    if isolation == "thread":
        assert os.waitpid(-1, 0)[1] == 0
    elif child is not None and psutil.pid_exists(int(child)):
        forked = psutil.Process(int(child))
        pool.close()
        assert_ended([forked])


@pytest.mark.parametrize("at", ["reset", "get_reward"])
@pytest.mark.parametrize(
    ("what", "isolation"), where("sleep", "spin", *DIES, "power", "regex", "takes 4 GB"), indirect=["isolation"]
)
def test_reset_and_get_reward_that_hang_or_die_name_environment_and_row(
    at: str, what: str, make: Make, isolation: str
) -> None:
    limits = {"memory_limit": 300, "timeout": 60.0} if what == "takes 4 GB" else {}
    pool = make({"nice": Hostile, "bad": Hostile}, **limits)
    rows = [{"environment": "nice"}, {"environment": "bad", "at": at, "what": what}]
    how = "process ended" if what in DIES else "MemoryError" if what == "takes 4 GB" else "did not return"

    with pytest.raises(EpisodeError, match=rf"row 1 of the batch, environment 'bad' \(Hostile\).*{how}") as caught:
        ask_rewards(pool.start(rows))

    assert at in str(caught.value)


SECONDS_TO_END = 5.0
"""Of a wait that a signal should end at once: about one second beside six other jobs."""


@pytest.mark.parametrize(
    ("what", "isolation", "at"),
    [
        (*case, at)
        for at in ("tool", "reset", "get_reward")
        for case in where("sleep", "spin", "wait", "power", "regex")
    ]
    + [(*case, "tool") for case in where("object whose text hangs")],
    indirect=["isolation"],
)
def test_a_signal_ends_the_wait_at_once(at: str, what: str, make: Make) -> None:
    pool = make(HostileAsync if what == "wait" else Hostile, timeout=None)
    tool, own = ("do_async", "act_async") if what == "wait" else ("do", "act")
    calls = [[call(own, what)], [call(tool, what)], [call("act", "fine")]] if at == "tool" else [[]] * 3
    start = time.monotonic()
    threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()

    with pytest.raises(KeyboardInterrupt):
        episodes = pool.start([{"at": at, "what": what}, {}, {}])
        answer_calls(episodes, calls)
        ask_rewards(episodes)

    assert time.monotonic() - start < SECONDS_TO_END
    pool.release()
    again = pool.start([{}] * 3)
    assert [one.answers[0].content for one in answer_calls(again, [[call("act", "fine")]] * 3)] == ["fine"] * 3


@pytest.mark.parametrize("tool", ["meet", "meet_async"])
def test_the_calls_of_a_round_run_side_by_side(tool: str, make: Make, tmp_path: Path) -> None:
    pool = make(Meeting, (), timeout=60.0)
    episodes = pool.start([{"folder": str(tmp_path), "name": str(row), "number": 32} for row in range(32)])

    rounds = answer_calls(episodes, [[call(tool)]] * 32)  # none returns before all have begun

    assert [played.answers[0].content for played in rounds] == ["met"] * 32


def test_a_process_takes_little_memory() -> None:
    """Less than the 30 MB that 64 environments may take each; the estimate says 3."""
    with contextlib.closing(Environments(Hostile, (), isolation="process", timeout=60.0)) as pool:
        rounds = answer_calls(pool.start([{}] * 16), [[call("act", "fine")]] * 16)
        taken = [process.memory_full_info().uss / 2**20 for process in psutil.Process().children(recursive=True)]
    assert [played.answers[0].content for played in rounds] == ["fine"] * 16
    assert len(taken) >= 17 and sorted(taken)[15] < 10  # the largest forks the others


KILLED = """
import threading, time
from rlhf_ppo.environments.pool import answer_calls
from rlhf_ppo.environments.pool import Environments
from tests.environments.hostile import Hostile, do

if __name__ == "__main__":
    pool = Environments(Hostile, [do], isolation="process", timeout=None)
    episodes = pool.start([{}] * 3)
    print(pool._server._process.pid, *[episode.seat._pid for episode in episodes], flush=True)
    call = lambda name, what: {"type": "function", "function": {"name": name, "arguments": {"what": what}}}
    answer_calls(episodes, [[call("act", "spins loudly")], [call("act", "fine"), call("do", "spins loudly")], []])
"""


def test_no_process_outlives_a_killed_trainer(tmp_path: Path) -> None:
    script = tmp_path / "trainer.py"
    script.write_text(KILLED)
    root = Path(__file__).parents[2]
    with subprocess.Popen(
        [sys.executable, str(script)], stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": str(root)}
    ) as trainer:
        assert trainer.stdout is not None
        started = [psutil.Process(int(number)) for number in trainer.stdout.readline().split()]
        assert len(started) == 4
        assert [trainer.stdout.readline() for _ in range(2)] == ["spins\n"] * 2  # else they end with their pipe
        trainer.kill()

    assert_ended(started)


# Hostile calls


class Recorder:
    """Records every method that is called."""

    def __init__(self) -> None:
        self.called: list[str] = []

    def reset(self, **row: Any) -> None:
        self.called.clear()

    def offered(self, x: Any = None) -> str:  # no description is needed: the pool is built by hand below
        """Do.

        Args:
            x: Anything.
        """
        self.called.append("offered")
        return "ok"

    def get_reward(self) -> float:
        self.called.append("get_reward")
        return 1.0

    def _private(self) -> None:
        self.called.append("_private")

    def __len__(self) -> int:
        self.called.append("__len__")
        return 0

    @property
    def value(self) -> int:
        self.called.append("value")
        return 0

    @classmethod
    def built(cls) -> None:
        raise AssertionError("class methods are no tools")


class Other(Recorder):
    def others(self) -> str:
        """Do something else."""
        self.called.append("others")
        return "ok"


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
NAMES = st.sampled_from(
    ["offered", "others", "reset", "get_reward", "_private", "__class__", "__init__", "__len__", "value", "built",
     "called", "called.clear", "environment", "Recorder.offered", "offered ", "", "eval", "os.system", "nope"]
)  # fmt: skip
CALLS = st.fixed_dictionaries(
    {"type": st.just("function") | JSON, "function": st.fixed_dictionaries({"name": NAMES | JSON, "arguments": JSON})}
    | {"name": JSON}
) | st.fixed_dictionaries({}, optional={"type": JSON, "name": JSON, "function": JSON})


@pytest.fixture(scope="module")
def recorders() -> Environments:
    return Environments({"one": Recorder, "other": Other}, timeout=60.0)


@settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(CALLS, min_size=25, max_size=25), st.lists(CALLS, min_size=25, max_size=25))
def test_only_offered_tools_are_ever_called(recorders: Environments, first: list[Any], second: list[Any]) -> None:
    """10,000 calls: 200 examples of two episodes of 25 calls."""
    recorders.release()
    one, other = recorders.start([{"environment": "one"}, {"environment": "other"}])

    played = answer_calls([one, other], [first, second])

    assert set(one.environment.called) <= {"offered"}
    assert set(other.environment.called) <= {"offered", "others"}
    for episode, calls, its_round in zip((one, other), (first, second), played, strict=True):
        assert len(its_round.answers) == len(calls)
        worked = [answer for answer in its_round.answers if not answer.failed]
        assert len(worked) == len(episode.environment.called)
        assert all(isinstance(answer.content, str) and isinstance(answer.name, str) for answer in its_round.answers)
