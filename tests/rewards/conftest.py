"""Fixtures of the reward tests."""

import threading
from collections.abc import Iterator
from http.server import ThreadingHTTPServer
from typing import Any

import pytest

from tests.rewards.local_server import Request


@pytest.fixture
def server() -> Iterator[Any]:
    http = ThreadingHTTPServer(("127.0.0.1", 0), Request)
    http.requests, http.replies, http.lock = [], [], threading.Lock()  # pyright: ignore[reportAttributeAccessIssue]
    threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
    yield http
    http.shutdown()
    http.server_close()
