"""Odd reward servers: each request ends in time, in a reward or in one sentence, and with a line per repetition."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from typing import Any

import pytest

from rlhf_ppo.rewards import RewardFunction
from rlhf_ppo.rewards.endpoint import RewardEndpoint, logger
from tests.conftest import make_tokenizer
from tests.faults.odd_servers import FOR_EVER, LATE, ODD, serving, trickle, two_rows
from tests.rewards.test_functions import STATE

SETTINGS: dict[str, Any] = {"retries": 1, "backoff": 0.01, "max_answer_bytes": 10**6, "batch_size": 2}
SECRET = "s3cret"


def limit(oddity: str, seconds: float) -> float:
    """Return a time limit, the given one where it is to be exceeded."""
    return seconds if ODD[oddity].error == LATE else 60.0


def ask(address: str, **settings: Any) -> list[float]:
    reward = RewardEndpoint(f"{address}?key={SECRET}", **{**SETTINGS, **settings})
    return RewardFunction(reward, make_tokenizer(), lambda: STATE)(two_rows()).tolist()


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is logged of repetitions."""
    found: list[str] = []
    monkeypatch.setattr(logger, "warning", found.append)
    return found


@pytest.mark.parametrize("oddity", ODD)
def test_it_ends_in_time_and_in_one_sentence(oddity: str, lines: list[str]) -> None:
    case, timeout = ODD[oddity], limit(oddity, 0.4)
    before = time.monotonic()
    with serving(case.acts, times=2) as (address, seen):
        if case.error is None:
            assert ask(address, timeout=timeout) == [1.0, 2.0] and len(seen) == 1
            return
        with pytest.raises((ConnectionError, ValueError, TypeError), match=case.error) as raised:
            ask(address, timeout=timeout)
        assert time.monotonic() - before < FOR_EVER / 2
        said = " ".join([str(raised.value), *getattr(raised.value, "__notes__", [])])
        assert address in said
        assert [address in line and "repetition 1 of 1 in 0.01 s" in line for line in lines] == [True] * case.repeated
        assert SECRET not in said + "".join(lines)
        assert len(seen) == 1 + case.repeated


@pytest.mark.parametrize("oddity", [name for name, case in ODD.items() if case.repeated and case.error is not None])
def test_one_repetition_mends_it(oddity: str) -> None:
    with serving(ODD[oddity].acts, times=1) as (address, seen):
        assert ask(address, timeout=limit(oddity, 1.0)) == [1.0, 2.0]
        assert len(seen) == 2


def test_a_server_that_speaks_no_tls() -> None:
    with serving(ODD["answers HTML"].acts, times=9) as (address, _):
        with pytest.raises(ConnectionError, match=r"did not answer .*SSL"):
            ask(address.replace("http:", "https:"))


def test_a_host_lookup_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    released = threading.Event()
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: released.wait(FOR_EVER) and [])
    before = time.monotonic()
    with pytest.raises(ConnectionError, match=LATE):
        ask("http://judge.example/score", timeout=0.4)
    released.set()
    assert time.monotonic() - before < FOR_EVER / 2


def test_a_port_where_nobody_listens() -> None:
    with pytest.raises(ConnectionError, match=r"ConnectionRefusedError.* the last of 2 times"):
        ask("http://127.0.0.1:9/score")


def test_the_server_says_how_long_to_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """At least the own pause, at most the time of a request."""
    waits: list[float] = []

    async def sleep(seconds: float) -> None:
        waits.append(seconds)

    monkeypatch.setattr(asyncio, "sleep", sleep)
    head = b"HTTP/1.1 429 Too Many Requests\r\nContent-Length: 0\r\nRetry-After: "
    for asked_for in (b"0", b"2", b"900", b"soon", b"-5"):
        with serving(lambda connection, n=asked_for: connection.sendall(head + n + b"\r\n\r\n"), times=1) as (
            where,
            _,
        ):
            assert ask(where, timeout=30.0, backoff=1.0) == [1.0, 2.0]
    assert waits == [1.0, 2.0, 30.0, 1.0, 1.0]


def test_reward_timeout_limits_all_repetitions_together() -> None:
    with serving(trickle(b"HTTP/1.1 200 ", b"O"), times=99) as (address, _):
        reward = RewardEndpoint(address, timeout=0.3, retries=50, backoff=0.0)
        source = RewardFunction(reward, make_tokenizer(), lambda: STATE, timeout=1.0)
        before = time.monotonic()
        with pytest.raises(
            TimeoutError, match="'score', given the rows 0 to 1, has not returned within reward_timeout=1"
        ):
            source(two_rows())
        assert time.monotonic() - before < FOR_EVER / 2
