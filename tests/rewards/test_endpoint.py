"""Rewards from a real server on this machine, which drops, delays and corrupts its answers."""

from __future__ import annotations

import asyncio
import pickle
import threading
import time
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast, TrainerState

from rlhf_ppo.rewards import RewardFunction
from rlhf_ppo.rewards.endpoint import TOKEN_VARIABLE, RewardEndpoint
from tests.rewards.local_server import Request, drop, lengths, says, url
from tests.rewards.test_functions import make_batch


def endpoint(server: Any, **options: Any) -> RewardEndpoint:
    return RewardEndpoint(url(server), **{"backoff": 0.001, **options})


def ask(reward: RewardEndpoint, completions: list[str], **columns: Any) -> list[Any]:
    ids = [[1] * len(text) for text in completions]
    return asyncio.run(reward(prompts=["p"] * len(ids), completions=completions, completion_ids=ids, **columns))


def test_the_request_is_what_the_contract_says(server: Any) -> None:
    columns = {"answer": ["4", None], "trainer_state": TrainerState(), "log_metric": print, "log_extra": print}
    columns["environments"] = [object(), object()]  # live objects of this process
    assert ask(endpoint(server), ["abc", "de"], **columns) == [3.0, 2.0]
    headers, body = server.requests[0]
    assert headers["Content-Type"] == "application/json" and "Authorization" not in headers
    assert body == {
        "prompts": ["p", "p"],
        "completions": ["abc", "de"],
        "completion_ids": [[1, 1, 1], [1, 1]],
        "columns": {"answer": ["4", None]},
    }


def test_the_token_comes_from_the_environment(server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TOKEN_VARIABLE, "secret")
    monkeypatch.setenv("MINE", "other")
    reward = endpoint(server)
    ask(reward, ["a"])
    ask(endpoint(server, token_variable="MINE"), ["a"])
    assert [headers["Authorization"] for headers, _ in server.requests] == ["Bearer secret", "Bearer other"]
    assert "secret" not in repr(reward) and b"secret" not in pickle.dumps(reward)


def test_requests_hold_at_most_a_batch_and_rewards_keep_their_order(server: Any) -> None:
    texts = ["a" * length for length in (5, 1, 4, 2, 3)]
    assert ask(endpoint(server, batch_size=2), texts, number=[0, 1, 2, 3, 4]) == [5.0, 1.0, 4.0, 2.0, 3.0]
    sent = sorted((body["columns"]["number"], len(body["completion_ids"])) for _, body in server.requests)
    assert sent == [([0, 1], 2), ([2, 3], 2), ([4], 1)]


@pytest.mark.parametrize(("concurrency", "together"), [(1, 1), (2, 2), (8, 4)])
def test_requests_run_at_the_same_time_up_to_a_limit(server: Any, concurrency: int, together: int) -> None:
    running, most, meeting = 0, 0, threading.Barrier(together, timeout=30)

    def count(request: Request) -> None:
        nonlocal running, most
        with server.lock:
            running += 1
            most = max(most, running)
        meeting.wait()
        time.sleep(0.1)  # for one too many to show
        with server.lock:
            running -= 1
        lengths(request)

    server.replies = [count] * 4
    assert ask(endpoint(server, batch_size=1, concurrency=concurrency), ["a", "b", "c", "d"]) == [1.0] * 4
    assert most == together


def test_the_last_repetition_says_which_rows_were_asked_for(server: Any) -> None:
    server.replies = [lengths, drop, drop]
    with pytest.raises(
        ConnectionError, match=f"{url(server)}, asked for the rows 1 to 1, did not answer.*last of 2 times"
    ):
        ask(endpoint(server, retries=1, batch_size=1, concurrency=1), ["a", "b", "c"])


def test_the_wait_doubles(server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []

    async def sleep(seconds: float) -> None:
        waits.append(seconds)

    monkeypatch.setattr(asyncio, "sleep", sleep)
    server.replies = [drop] * 3
    assert ask(endpoint(server, retries=3, backoff=0.5), ["a"]) == [1.0]
    assert waits == [0.5, 1.0, 2.0]


def test_it_is_a_reward_function(server: Any, tokenizer: PreTrainedTokenizerFast) -> None:
    reward = RewardFunction(endpoint(server), tokenizer, TrainerState)
    assert reward.is_async and reward.name == "score"
    server.replies = [says('{"rewards": [0.5, null, -1]}'), says('{"rewards": [[1, 2, 3], [4], null]}')]
    assert reward(make_batch())[[0, 2]].tolist() == [0.5, -1.0]
    assert reward(make_batch(answer=["a", "b", "c"]))[:2].tolist() == [[1.0, 2.0, 3.0], [4.0, 0.0, 0.0]]
    assert server.requests[1][1]["columns"] == {"answer": ["a", "b", "c"]}


def test_a_column_that_is_no_json_is_named(server: Any) -> None:
    with pytest.raises(TypeError, match="column 'image' cannot be sent"):
        ask(endpoint(server), ["a"], number=[1], image=[object()])
    assert server.requests == []


@pytest.mark.parametrize(
    ("address", "name"),
    [
        ("http://localhost:8000/v1/helpful/", "helpful"),
        ("https://judge.example", "judge.example"),
        ("http://localhost:8000/score?key=1", "score"),
    ],
)
def test_its_name(address: str, name: str) -> None:
    reward: Any = RewardEndpoint(address)
    assert reward.__name__ == name
    named: Any = RewardEndpoint(address, name="mine")
    assert named.__name__ == pickle.loads(pickle.dumps(named)).__name__ == "mine"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"url": "ftp://host/x"}, "url='ftp://host/x' must be an address"),
        ({"url": "http://"}, "url='http://' must be an address"),
        *(({name: value}, f"{name}={value}") for name, value in
          [("timeout", 0), ("timeout", -1), ("retries", -1), ("backoff", -1), ("batch_size", 0), ("concurrency", 0)]),
    ],
)  # fmt: skip
def test_settings_are_checked(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        RewardEndpoint(**{"url": "http://host", **options})
