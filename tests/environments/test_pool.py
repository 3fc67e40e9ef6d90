"""Discovery of tools, one environment for each row, seeds, reports, stand-ins, and errors at construction."""

import importlib.util
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from rlhf_ppo.environments.isolation import GivenUpError, ProcessDiedError, ProcessSeat
from rlhf_ppo.environments.pool import Environments, EpisodeError, answer_calls, ask_rewards
from rlhf_ppo.environments.tools import MARK, shortened
from rlhf_ppo.processes import waiting
from tests.environments.adapted import RagenEnv
from tests.environments.kinds import Base, Broken, Counter, Derived, Plain, later, multiply

Make = Callable[..., Environments]


@pytest.fixture(params=["thread", "process"])
def make(request: pytest.FixtureRequest) -> Iterator[Make]:
    made: list[Environments] = []

    def environments(factory: Any, tools: Any = (), **options: Any) -> Environments:
        made.append(Environments(factory, tools, isolation=request.param, **options))
        return made[-1]

    yield environments
    for pool in made:
        pool.close()


def call(name: str, **arguments: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


# Discovery


def test_tools_are_the_standalone_ones_then_the_public_functions_of_the_class(make: Make) -> None:
    kind = make(Derived, [multiply, later]).kinds[None]

    assert list(kind.tools) == [
        "multiply",
        "later",
        "add",
        "boom",
        "echo",
        "slow",
        "stop",
    ]  # inherited, static, sorted
    assert [name for name, tool in kind.tools.items() if tool.is_async] == ["later", "slow"]
    assert [name for name, tool in kind.tools.items() if not tool.of_environment] == ["multiply", "later"]
    assert (kind.class_name, kind.class_key) == ("Derived", "tests.environments.kinds.Derived")
    assert (kind.has_reward, kind.has_turn_rewards, kind.is_text, kind.takes_seed) == (True, True, False, True)
    described = {schema["function"]["name"]: schema["function"]["parameters"] for schema in kind.schemas or []}
    assert described["add"] == {
        "type": "object", "properties": {"amount": {"type": "integer", "description": "How much."}},
        "required": ["amount"],
    }  # fmt: skip
    assert list(described["multiply"]["properties"]) == ["left", "right"]
    assert list(described["echo"]["properties"]) == ["text"]


def test_an_environment_without_tools_shows_none(make: Make) -> None:
    kind = make(Plain).kinds[None]

    assert (kind.schemas, kind.has_reward, kind.has_turn_rewards, kind.takes_seed) == (None, False, False, False)


def test_tools_without_environments(make: Make) -> None:
    pool = make(None, [multiply, later])
    (episode,) = pool.start([{"prompt": "Q"}])

    (played,) = answer_calls([episode], [[call("later", text="x"), call("multiply", left=2, right=3), call("reset")]])

    assert (episode.environment, episode.observation) == (None, None)
    assert [answer.content for answer in played.answers] == ["6", "{'error': 'Tool reset not found.'}", "x"]
    assert (played.done, played.truncated, played.rewarded) == (False, False, False)
    assert ask_rewards([episode]) == [None]


# Rows


def test_reset_gets_the_columns_and_a_seed_where_the_row_has_none(make: Make) -> None:
    pool = make({"counter": Counter, "plain": Plain})
    rows = [
        {"environment": "counter", "prompt": "Q", "size": 3},
        {"environment": "plain", "size": 4},
        {"environment": "counter", "seed": 5},
        {"environment": "counter"},
    ]

    first, second, third, fourth = pool.start(rows, [7, 8, 9, 10])

    assert first.observation == "[('prompt', 'Q'), ('size', 3)] 7"
    assert second.observation == "{'size': 4}"  # names no seed; `environment` is not passed on
    assert third.observation == "[] 5" and fourth.observation == "[] 10"
    assert rows[0] == {"environment": "counter", "prompt": "Q", "size": 3}


def test_reset_cannot_change_the_row(make: Make) -> None:
    row = {"prompt": [{"role": "user", "content": "Q"}], "spoil": True}

    make(Plain).start([row])

    assert row == {"prompt": [{"role": "user", "content": "Q"}], "spoil": True}


def test_a_name_that_no_environment_has(make: Make) -> None:
    pool = make({"counter": Counter})

    with pytest.raises(ValueError, match=r"environment='maze', but environment_factory has \['counter'\]"):
        pool.start([{"environment": "maze"}])


def test_environments_are_made_once_and_reset_often(make: Make) -> None:
    pool = make(Base)
    first = pool.start([{}] * 2)
    more = pool.start([{}])  # the first two are still played
    seats = [episode.seat for episode in (*first, *more)]
    assert len({id(seat) for seat in seats}) == 3

    pool.release()
    again = pool.start([{}] * 4)

    assert [episode.seat for episode in again[:3]] == seats
    assert [episode.observation for episode in again] == ["reset 2", "reset 2", "reset 2", "reset 1"]


# Reports


def test_a_round_pays_what_it_appended_and_reads_the_end(make: Make) -> None:
    (episode,) = make(Counter).start([{}])
    rounds = [
        answer_calls([episode], [calls])[0]
        for calls in ([call("add", amount=2), call("add", amount=3)], [call("echo", text="x")], [], [call("stop")], [])
    ]

    assert [(one.turn_reward, one.rewarded, one.done) for one in rounds] == [
        (5.0, True, False), (0.0, False, False), (0.0, False, False), (0.0, False, True), (0.0, False, True),
    ]  # fmt: skip
    assert ask_rewards([episode]) == [7.5]


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("text", "ValueError: turn_rewards holds 'much'"),
        ("nan", "ValueError: turn_rewards holds nan"),
        ("object", "TypeError: turn_rewards is int; make it a list of numbers"),
        ("shorter", "turn_rewards became shorter within an episode"),
        ("done", "TypeError: done is str; set it to True or False"),
        ("property", "KeyError: 'mine'"),
    ],
)
def test_wrong_reports_name_environment_and_row(fault: str, message: str, make: Make) -> None:
    fine, wrong = make(Broken).start([{}, {}])

    with pytest.raises(EpisodeError, match=r"row 1 of the batch, environment Broken: reading turn_rewards") as caught:
        answer_calls([fine, wrong], [[call("do", fault="none")], [call("do", fault=fault)]])

    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("value", "message"), [("much", "get_reward returned 'much'"), (float("inf"), "returned inf")]
)
def test_get_reward_returns_a_finite_number_or_none(value: Any, message: str, make: Make) -> None:
    fine, wrong = make(Broken).start([{"reward": None}, {"reward": value}])

    assert ask_rewards([fine]) == [None]
    with pytest.raises(EpisodeError, match=rf"row 1 .*Broken: get_reward failed: .*{message}"):
        ask_rewards([fine, wrong])


def test_an_observation_is_text(make: Make) -> None:
    with pytest.raises(EpisodeError, match=r"row 0 .*reset failed: TypeError: reset returned int; return a text"):
        make(Broken).start([{"observation": 5}])


# Answers


def test_long_answers_lose_their_middle(make: Make) -> None:
    (episode,) = make(Counter, max_response_length=10).start([{}])
    texts = ["x" * 10, "abcdefghijk", "boom" * 10]

    (played,) = answer_calls([episode], [[call("echo", text=text) for text in texts]])

    assert [answer.content for answer in played.answers] == ["x" * 10, f"abcde{MARK}ghijk", f"boomb{MARK}mboom"]
    assert [shortened("abc", length) for length in (0, 1, 2, 3)] == [MARK, f"a{MARK}", f"a{MARK}c", "abc"]


def test_a_list_stays_a_list_of_plain_data(make: Make) -> None:
    (episode,) = make(Broken).start([{}])

    (played,) = answer_calls([episode], [[call("blocks")]])

    assert played.answers[0].content == [{"type": "text", "text": "a?"}, 1, "2.5j", ["b"]]


def test_answers_stand_in_trls_order(make: Make) -> None:
    (episode,) = make(Counter, [multiply, later]).start([{}])
    calls = [
        call("slow", amount=1), call("later", wrong="x"), call("add", amount=2), call("nope"), call("later", text="t"),
        call("boom"), {"type": "other", "name": "odd"}, call("slow", wrong=2), {"type": "function", "function": {
            "name": "add", "arguments": "x"}},
    ]  # fmt: skip

    (played,) = answer_calls([episode], [calls])

    # TRL: sync calls and whatever fails before it runs, in order; then the async calls, in order
    assert [(answer.name, answer.content) for answer in played.answers] == [
        ("later", """{'error': "later() got an unexpected keyword argument 'wrong'"}"""),
        ("add", "2"),
        ("nope", "{'error': 'Tool nope not found.'}"),
        ("boom", """{'error': "'no'"}"""),
        ("odd", "{'error': 'Unsupported tool call type: other'}"),
        ("slow", """{'error': "Counter.slow() got an unexpected keyword argument 'wrong'"}"""),
        ("add", "{'error': 'tests.environments.kinds.Counter.add() argument after ** must be a mapping, not str'}"),
        ("slow", "{'slow': 1}"),
        ("later", "t"),
    ]
    assert [answer.failed for answer in played.answers] == [True, False, *[True] * 5, False, False]
    assert played.answers[1].message == {"role": "tool", "name": "add", "content": "2"}


# Stand-ins


@pytest.mark.parametrize("make", ["process"], indirect=True)
def test_reward_functions_read_a_stand_in(make: Make) -> None:
    (episode,) = make(Counter).start([{}])
    answer_calls([episode], [[call("add", amount=2)]])

    assert episode.environment.total == 2
    assert episode.environment.log == [["add", 2]]
    assert episode.environment.add(amount=3) == 5
    with pytest.raises(AttributeError, match="missing"):
        _ = episode.environment.missing
    assert not hasattr(episode.environment, "missing") and not hasattr(episode.environment, "_hidden")
    with pytest.raises(RuntimeError, match="thing holds object, which does not cross the pipe"):
        _ = episode.environment.thing
    with pytest.raises(AttributeError, match="cannot be set"):
        episode.environment.total = 3


# Errors at construction


def undescribed(x):
    return x


class Called:
    __name__ = "called"

    def __call__(self, x: int) -> int:
        """Return it.

        Args:
            x: A number.
        """
        return x


@pytest.mark.parametrize(
    ("factory", "tools", "message"),
    [
        (object, (), "environment_factory: object has no method `reset`"),
        ({"a": Counter, "b": object}, (), r"environment_factory\['b'\]: object has no method `reset`"),
        (5, (), "environment_factory is 5; pass a class"),
        (None, [5], "tools holds 5; pass functions"),
        (None, [Called()], "tools holds an object of Called with `__call__`; pass functions .*, or such methods"),
        (None, multiply, "tools=<function multiply at .* must be a list of functions"),
        (RagenEnv, (), "the tool .* cannot be described .*; wrap an environment whose `step` .* in text_environment"),
        (
            None,
            [undescribed],
            "the tool 'undescribed' cannot be described for the chat template: .*give each parameter",
        ),
        (None, [multiply, multiply], r"tools have several tools of the names \['multiply'\]"),
        (lambda: 1 / 0, (), "environment_factory made no environment: ZeroDivisionError"),
    ],
    ids=[
        *(
            "no reset",
            "no reset in a dict",
            "no factory",
            "no tool",
            "an object",
            "no list",
            "a game",
            "no type hints",
            "twice",
        ),
        "raises",
    ],
)
def test_errors_at_construction(factory: Any, tools: Any, message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        Environments(factory, tools)


@pytest.mark.parametrize(("factory", "tools"), [(lambda: Counter(), []), (None, [lambda x: x])])
def test_what_another_process_cannot_import_is_an_error_at_construction(factory: Any, tools: Any) -> None:
    with pytest.raises(ValueError, match="define factories and tools at the top level of a module"):
        Environments(factory, tools, isolation="process")


SCRIPT = """
from rlhf_ppo.environments.isolation import ForkServer, ProcessSeat

class Mine:
    def reset(self, **row):
        self.row = row

    def add(self, x: int) -> int:
        return sum(self.row["start"], x)

{guard}
    server = ForkServer([Mine], [], None, None, 60.0)
    seat = ProcessSeat(server, 0)
    seat.ask(60.0, "reset", {{"start": [1, 2]}})
    print(seat.ask(60.0, "call", "add", {{"x": 4}})["value"]["content"])
    print(seat.class_of(seat.ask(60.0, "describe")["value"]) is Mine)
    server.close()
"""


@pytest.mark.parametrize(
    ("guard", "printed"),
    [
        ('if __name__ == "__main__":', "7\nTrue\n"),
        ("if True:", 'put the script\'s calls under if __name__ == "__main__"'),
    ],
)
def test_an_environment_of_the_script_itself(guard: str, printed: str, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT.format(guard=guard))
    paths = {"PYTHONPATH": str(Path(__file__).parents[2])}

    ran = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, env={**os.environ, **paths})

    assert printed in (ran.stdout if ran.returncode == 0 else ran.stderr), ran.stderr
    assert (ran.returncode == 0) == (printed in ran.stdout)


def test_a_thread_is_ended_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The system gives the number of a thread that has ended to a new one, which a second attempt would end."""
    begun, goes_on, ended = threading.Event(), threading.Event(), list[int]()

    def wait() -> str:
        """Wait.

        Returns:
            A word.
        """
        begun.set()
        goes_on.wait(60)
        return "done"

    def ask() -> None:
        with pytest.raises(GivenUpError):
            seat.ask(60.0, "call", "wait", {})

    monkeypatch.setattr(waiting, "end_thread", ended.append)
    pool = Environments(None, [wait], timeout=60.0)
    seat, thread = pool.tool_seat(), threading.Thread(target=ask)
    thread.start()
    assert begun.wait(60)
    seat.give_up()
    seat.close()
    goes_on.set()
    thread.join()
    seat.close()

    assert len(ended) == 1
    pool.close()


@pytest.mark.parametrize("use", ["a request that is sent", "a time limit that ends the call"])
def test_a_connection_stays_open_while_it_is_used(use: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the system gives its number to the next connection, which the late use would hit."""
    pool = Environments(Counter, isolation="process", timeout=60.0)
    (episode,) = pool.start([{"start": 1}])
    seat, has_number, is_closed = episode.seat, threading.Event(), threading.Event()
    assert isinstance(seat, ProcessSeat)

    def ask() -> None:
        with pytest.raises(ProcessDiedError):
            seat.ask(60.0, "describe")

    def send(connection: Connection, message: bytes) -> None:
        os.write(late(connection.fileno()), message)

    def late(number: int) -> int:
        has_number.set()
        assert is_closed.wait(60)
        return number

    duplicate = os.dup
    with monkeypatch.context() as patched:
        if use == "a request that is sent":
            patched.setattr(Connection, "send_bytes", send)
            thread = threading.Thread(target=ask)
        else:
            patched.setattr(os, "dup", lambda number: duplicate(late(number)))
            thread = threading.Thread(target=seat.give_up)
        thread.start()
        assert has_number.wait(60)
    seat.close()
    pairs = [socket.socketpair() for _ in range(4)]
    is_closed.set()
    thread.join()

    for one, other in pairs:
        for sender, receiver in ((one, other), (other, one)):
            sender.send(b"x")
            assert receiver.recv(64) == b"x"
        one.close()
        other.close()
    pool.close()


def test_an_environment_of_a_file_that_no_import_finds(tmp_path: Path) -> None:
    file = tmp_path / "lake.py"
    file.write_text("class Lake:\n    def reset(self):\n        return 'ice'\n")
    found = importlib.util.spec_from_file_location("file_of_a_command_line", file)
    assert found is not None and found.loader is not None
    sys.modules["file_of_a_command_line"] = module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    pool = Environments(module.Lake, isolation="process")

    (episode,) = pool.start([{}])

    assert episode.observation == "ice"
    pool.close()
