"""Discovery of tools, one environment for each row, seeds, rounds, time limits, and errors that name the row."""

import asyncio
import re
import time
import traceback
from typing import Any, ClassVar

import pytest

from rlhf_ppo.environments import waiting
from rlhf_ppo.environments.pool import Environments, EpisodeError, answer_turns, ask_rewards
from tests.environments.kinds import Counter, Derived, Parrot, Plain, later, multiply, never, sleep


def call(name: str, **arguments: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


def played(episode: Any, *calls: Any) -> Any:
    (found,) = answer_turns([episode], [calls])
    return found


# Discovery


def test_tools_are_the_standalone_ones_then_the_public_functions_of_the_class() -> None:
    kind = Environments(Derived, [multiply, later]).kinds[None]

    own = ["add", "block", "boom", "echo", "hang", "slow", "stop"]  # inherited, static, sorted
    assert list(kind.tools) == ["multiply", "later", *own]
    assert [name for name, tool in kind.tools.items() if tool.is_async] == ["later", "block", "slow"]
    assert (kind.cls, kind.has_reward, kind.has_turn_rewards, kind.takes_seed) == (Derived, True, True, True)
    described = {schema["function"]["name"]: schema["function"]["parameters"] for schema in kind.schemas or []}
    assert list(described["multiply"]["properties"]) == ["left", "right"]
    assert described["add"]["properties"] == {"amount": {"type": "integer", "description": "How much."}}

    plain = Environments(Plain).kinds[None]
    assert (plain.schemas, plain.has_reward, plain.has_turn_rewards, plain.takes_seed) == (None, False, False, False)


def test_tools_without_environments() -> None:
    (episode,) = Environments(None, [multiply, later]).start([{"prompt": "Q"}])
    found = played(episode, call("later", text="x"), call("multiply", left=2, right=3), call("reset"))

    assert (episode.environment, episode.observation) == (None, None)
    assert [answer.content for answer in found.answers] == ["6", "{'error': 'Tool reset not found.'}", "x"]
    assert (found.done, found.truncated, found.turn_reward) == (False, False, 0)


def test_tools_beside_an_environment_that_takes_messages_are_not_shown() -> None:
    kinds = Environments({"talk": Parrot, "count": Counter}, [multiply]).kinds
    assert kinds["talk"].schemas is None and "multiply" in kinds["count"].tools
    with pytest.raises(
        ValueError, match=r"tools=\['multiply'\] can never be called: an environment with takes_messages"
    ):
        Environments(Parrot, [multiply])


# Rows


def test_rows_have_environments_and_turn_rewards_of_their_own() -> None:
    class Listed:
        turn_rewards: ClassVar[list[float]] = []

        def reset(self, **row: Any) -> None: ...

    one = Counter()
    with pytest.raises(EpisodeError, match="environment_factory returned an environment twice: make a new one"):
        Environments(lambda: one).start([{}, {}])
    with pytest.raises(
        EpisodeError, match="two environments have the same list turn_rewards: make a new one in reset"
    ):
        Environments(Listed).start([{}, {}])
    assert len(Environments(Counter).start([{}, {}])) == 2


def test_reset_gets_a_copy_of_the_columns_and_a_seed_where_the_row_has_none() -> None:
    pool = Environments({"counter": Counter, "plain": Plain})
    asked = [{"role": "user", "content": "Q"}]
    rows: list[dict[str, Any]] = [
        {"environment": "counter", "prompt": "Q", "size": 3},
        {"environment": "plain", "size": 4},
        {"environment": "counter", "seed": 5},
        {"environment": "counter"},
        {"environment": "plain", "prompt": asked, "spoil": True},
        {"environment": "plain", "method": "GET"},
    ]
    texts = [episode.observation for episode in pool.start(rows, [7, 8, 9, 10, 11, 12])]

    assert texts[:4] == ["[('prompt', 'Q'), ('size', 3)] 7", "{'size': 4}", "[] 5", "[] 10"]
    assert texts[5] == "{'method': 'GET'}"
    assert asked == [{"role": "user", "content": "Q"}] and rows[0]["environment"] == "counter"


def test_environments_are_used_again_and_a_lost_one_is_replaced() -> None:
    pool = Environments(Counter, timeout=0.3)
    first = pool.start([{}] * 2)
    made = [episode.environment for episode in first]
    assert [episode.environment for episode in pool.start([{}] * 3)][:2] == made
    again = pool.start([{}] * 2)
    lost = played(again[0], call("hang"), call("add", amount=1), call("echo", text="x"))

    assert lost.lost and again[0].lost and ask_rewards(again) == [None, 0.0]
    assert [answer.content for answer in lost.answers] == [
        "{'error': 'hang did not return within 0.3 seconds.'}",
        *["{'error': 'The environment did not survive an earlier call.'}"] * 2,
    ]
    replaced = [episode.environment for episode in pool.start([{}] * 3)]
    assert made[0] not in replaced and made[1] in replaced
    assert played(pool.start([{}])[0], call("add", amount=1)).turn_reward == 1


# Rounds


def test_a_round_pays_what_it_appended_and_reads_the_end() -> None:
    (episode,) = Environments(Counter).start([{}])
    turns = ([call("add", amount=2), call("add", amount=3)], [call("echo", text="x")], [call("stop")])
    rounds = [played(episode, *calls) for calls in turns]

    assert [(one.turn_reward, one.done) for one in rounds] == [(5.0, False), (0.0, False), (0.0, True)]
    assert ask_rewards([episode]) == [7.5]


def test_answers_stand_in_trls_order() -> None:
    """Sync calls and whatever fails before it runs, in order; then the async calls, in order."""
    (episode,) = Environments(Counter, [multiply, later]).start([{}])
    found = played(
        episode,
        *(call("slow", amount=1), call("later", wrong="x"), call("add", amount=2), call("nope")),
        *(call("later", text="t\ud800"), call("boom"), {"type": "other", "name": "odd"}, call("slow", wrong=2)),
        {"type": "function", "function": {"name": "add", "arguments": "x"}},
    )

    assert [(answer.name, answer.content) for answer in found.answers] == [
        ("later", """{'error': "later() got an unexpected keyword argument 'wrong'"}"""),
        ("add", "2"),
        ("nope", "{'error': 'Tool nope not found.'}"),
        ("boom", """{'error': "'no'"}"""),
        ("odd", "{'error': 'Unsupported tool call type: other'}"),
        ("slow", """{'error': "Counter.slow() got an unexpected keyword argument 'wrong'"}"""),
        ("add", "{'error': 'tests.environments.kinds.Counter.add() argument after ** must be a mapping, not str'}"),
        ("slow", "{'slow': 1}"),
        ("later", "t?"),
    ]
    assert [answer.failed for answer in found.answers] == [True, False, *[True] * 5, False, False]
    assert found.answers[1].message == {"role": "tool", "name": "add", "content": "2"}


def test_a_standalone_tool_and_an_async_one_lose_their_call_alone() -> None:
    (episode,) = Environments(Counter, [sleep, never], timeout=0.3).start([{}])
    found = played(episode, call("never"), call("sleep"), call("add", amount=1), call("slow", amount=1))

    late = [
        "{'error': 'sleep did not return within 0.3 seconds.'}",
        "{'error': 'never did not return within 0.3 seconds.'}",
    ]
    assert [answer.content for answer in found.answers] == [late[0], "1", late[1], "{'slow': 1}"]
    assert not found.lost


def test_a_coroutine_that_blocks_the_event_loop_loses_the_episode() -> None:
    one, other = Environments(Counter, [later], timeout=0.3).start([{}] * 2)
    found = played(one, call("block"))

    assert found.lost and found.answers[0].content == "{'error': 'block did not return within 0.3 seconds.'}"
    assert played(other, call("later", text="x")).answers[0].content == "x"


class Late:
    """Takes messages; `respond` blocks the event loop or waits, or answers at once."""

    takes_messages = True
    was_cancelled = False

    def reset(self, **row: Any) -> None: ...

    async def respond(self, text: str) -> str:
        if text == "block":
            time.sleep(1e6)
        if text == "exit":
            raise SystemExit(1)
        if text == "wait":
            try:
                await asyncio.sleep(1e6)
            except asyncio.CancelledError:
                Late.was_cancelled = True
                raise
        return text


def test_a_late_coroutine_is_cancelled_and_a_blocked_event_loop_left() -> None:
    episodes = Environments(Late, timeout=0.3).start([{}] * 3)
    rounds = answer_turns(episodes, ["wait", "block", "block"])
    again = Environments(Late, timeout=0.3).start([{}] * 2)

    assert [one.lost for one in rounds] == [True] * 3
    assert [one.answers[0].content for one in answer_turns(again, ["x", "y"])] == ["x", "y"]
    assert answer_turns(again, ["wait", "x"])[0].lost and Late.was_cancelled


async def leave(how: str) -> None:
    """Leave.

    Args:
        how: exit or cancel.
    """
    raise SystemExit(1) if how == "exit" else asyncio.CancelledError


def test_a_coroutine_that_exits_or_is_cancelled_loses_its_call_alone() -> None:
    (episode,) = Environments(None, [leave, later], timeout=5).start([{}])
    found = played(episode, call("leave", how="exit"), call("leave", how="cancel"), call("later", text="x"))
    assert [answer.content for answer in found.answers] == ["{'error': 'SystemExit(1)'}", "{'error': ''}", "x"]

    rounds = answer_turns(Environments(Late, timeout=5).start([{}] * 2), ["exit", "x"])
    assert [one.answers[0].content for one in rounds] == ["{'error': 'SystemExit(1)'}", "x"]


TEXTS = [{"type": "text", "text": "a"}]


@pytest.mark.parametrize(
    ("returned", "content"),
    [
        (TEXTS, TEXTS),
        (["a", "b"], "['a', 'b']"),
        ([{"title": "Dune"}], "[{'title': 'Dune'}]"),
        ([{"type": "book"}], "[{'type': 'book'}]"),
        ([], "[]"),
        ([{"type": "text", "text": "a\udcff"}], [{"type": "text", "text": "a?"}]),
    ],
)
def test_a_list_is_an_answer_s_text_unless_it_holds_blocks_of_text(returned: list[Any], content: Any) -> None:
    def find() -> list[Any]:
        """Find."""
        return returned

    (episode,) = Environments(None, [find]).start([{}])
    assert played(episode, call("find")).answers[0].content == content


@pytest.mark.parametrize("appended", [["0.5"], [[1.0]], 0.5, "no"])
def test_turn_rewards_of_another_type_are_an_error_that_names_the_row(appended: Any) -> None:
    (episode,) = Environments(Counter).start([{}])
    episode.num_paid, episode.environment.turn_rewards = 0, appended
    message = (
        f"row 0 of the batch, environment Counter: turn_rewards must be a list .*then {re.escape(repr(appended))}"
    )
    with pytest.raises(EpisodeError, match=message):
        answer_turns([episode], [[]])


def test_calls_that_start_at_once_share_one_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client of asyncio, which environments may share, works on one loop only."""
    made: list[asyncio.AbstractEventLoop] = []

    def new() -> asyncio.AbstractEventLoop:
        time.sleep(0.05)  # the other calls ask meanwhile
        made.append(asyncio.SelectorEventLoop())
        return made[-1]

    class Awaits(Plain):
        async def reset(self, **row: Any) -> None: ...  # pyright: ignore[reportIncompatibleMethodOverride]

    monkeypatch.setattr(asyncio, "new_event_loop", new)
    waiting._event_loop.cache_clear()
    Environments(Awaits).start([{}] * 8)
    assert len(made) == 1


def test_an_environment_that_takes_messages(caplog: pytest.LogCaptureFixture) -> None:
    pool = Environments(Parrot)
    assert pool.kinds[None].takes_messages and not pool.kinds[None].tools
    rounds = answer_turns(pool.start([{}] * 2), ["ab", "bad"])

    assert [(one.answers[0].content, one.turn_reward) for one in rounds] == [("abab", 2), ("{'error': 'bad word'}", 0)]
    assert "Parrot.respond failed, and the policy reads this as its answer: {'error': 'bad word'}" in caplog.messages


# Errors


class Broken(Counter):
    def reset(self, fails: bool = False, **row: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        if fails:
            raise ValueError("no board \x1b[2J")
        return super().reset()

    def get_reward(self) -> float:
        raise KeyError("mine")


def test_errors_name_environment_and_row() -> None:
    pool = Environments(Broken)
    where = "row 1 of the batch, environment Broken"
    with pytest.raises(EpisodeError, match=f"{where}: reset failed: ValueError: no board") as error:
        pool.start([{}, {"fails": True}])
    assert "\x1b" not in "".join(traceback.format_exception(error.value)), "it would clear the terminal"
    episodes = pool.start([{}, {}])
    with pytest.raises(EpisodeError, match=f"{where}: get_reward failed: KeyError"):
        ask_rewards(episodes[1:])
    with pytest.raises(EpisodeError, match=f"{where}: turn_rewards must be a list of finite numbers"):
        answer_turns(episodes, [[], [call("add", amount=float("nan"))]])
    silent = Environments(Plain).start([{}, {}])
    setattr(silent[1].environment, "turn_" + "rewards", [0.5])  # as a helper outside of the class does
    with pytest.raises(
        EpisodeError, match=r"row 1 of the batch, environment Plain: .* define turn_rewards on the class"
    ):
        answer_turns(silent, [[], []])
    episodes[1].environment.turn_rewards.clear()
    with pytest.raises(EpisodeError, match=f"{where}: turn_rewards .*appended until the next reset"):
        answer_turns(episodes, [[], []])
