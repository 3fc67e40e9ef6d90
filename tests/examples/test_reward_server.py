"""The example server, asked by the library's endpoint: alone, in a run, and with a token."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from examples.reward_server import make_server
from rlhf_ppo.rewards.endpoint import RewardEndpoint


@pytest.fixture
def address() -> Iterator[str]:
    server = make_server(port=0)
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def ask(url: str, completions: list[str], completion_ids: list[list[int]], **columns: Any) -> list[Any]:
    endpoint = RewardEndpoint(url, retries=0, batch_size=2)
    prompts = ["p"] * len(completions)
    return asyncio.run(endpoint(prompts=prompts, completions=completions, completion_ids=completion_ids, **columns))


def test_numbers_null_and_rewards_per_token(address: str) -> None:
    assert ask(f"{address}/brevity", ["a", "b c d e", ""], [[5], [6], [7]], topic=["x", "y", "z"]) == [1.0, 0.25, None]
    assert ask(f"{address}/no_repetition", ["a", "b"], [[5, 5, 6, 6], [7]]) == [[0, -1, 0, -1], [0]]
