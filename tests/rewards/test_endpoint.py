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
from rlhf_ppo.rewards.scorer import WrongRewardError
from tests.rewards.local_server import Request, cut_off, drop, lengths, says, url
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


BUSY = (408, 429, 500, 502, 503, 504)


def test_it_is_a_reward_function(server: Any, tokenizer: PreTrainedTokenizerFast) -> None:
    reward = RewardFunction(endpoint(server), TrainerState)
    assert reward.is_async and reward.name == "score"
    server.replies = [says('{"rewards": [0.5, null, -1]}'), says('{"rewards": [[1, 2, 3], [4], null]}')]
    assert reward(make_batch(tokenizer))[[0, 2]].tolist() == [0.5, -1.0]
    assert reward(make_batch(tokenizer, answer=["a", "b", "c"]))[:2].tolist() == [[1.0, 2.0, 3.0], [4.0, 0.0, 0.0]]
    assert server.requests[1][1]["columns"] == {"answer": ["a", "b", "c"]}


@pytest.mark.parametrize("failure", [drop, cut_off, *(says("busy", status) for status in BUSY)])
def test_a_failed_request_is_repeated_and_the_last_one_names_its_rows(
    failure: Any, server: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[float] = []

    async def sleep(seconds: float) -> None:
        waits.append(seconds)

    monkeypatch.setattr(asyncio, "sleep", sleep)
    server.replies = [failure] * 3
    assert ask(endpoint(server, retries=3, backoff=0.5), ["a"]) == [1.0] and waits == [0.5, 1.0, 2.0]
    server.replies = [lengths, failure, failure]
    wanted = f"^the endpoint {url(server)}, asked for the rows 1 to 1, .*last of 2 attempts"
    with pytest.raises(ConnectionError, match=wanted):
        ask(endpoint(server, retries=1, batch_size=1, concurrency=1), ["a", "b"])


def test_the_first_request_that_fails_ends_the_call(server: Any) -> None:
    """Repetitions go before requests that have not begun, so the wait does not grow with the number of responses."""
    server.replies = [drop] * 200
    with pytest.raises(ConnectionError, match=r"rows [01] to [01], .*last of 3 attempts"):
        ask(endpoint(server, retries=2, batch_size=1, concurrency=2), ["a"] * 40)
    assert len(server.requests) <= 2 * 3


@pytest.mark.parametrize(
    ("reply", "kind", "words"),
    [
        (says("no", 401), ConnectionError, r"answered with the status 401 \(no\)"),
        (says("", 302, Location="http://h/"), ConnectionError, "answered with the status 302"),
        (says("[]"), WrongRewardError, r"answered \[\]: it must answer"),
        (says('{"rewards": [1]}'), WrongRewardError, "with 2 entries"),
        (says("<html>"), ConnectionError, r"answered no JSON, with the status 200 \(<html>\)"),
    ],
)
def test_other_answers_are_errors_at_once(reply: Any, kind: type[Exception], words: str, server: Any) -> None:
    server.replies = [reply]
    with pytest.raises(kind, match=words):
        ask(endpoint(server), ["a", "b"])
    assert len(server.requests) == 1
