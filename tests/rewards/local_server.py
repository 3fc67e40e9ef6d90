"""A reward server on this machine whose answers a test chooses: right, late, broken off, or nonsense."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler
from typing import Any

Reply = Callable[["Request"], None]

SHORT = 1.0
"""A time limit in seconds, long enough for an answer on a busy machine, of tests in which it is exceeded."""


class Request(BaseHTTPRequestHandler):
    """Keeps every request and replies with the next of the server's replies, or lengths for ever."""

    server: Any

    def do_POST(self) -> None:
        self.body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with self.server.lock:
            self.server.requests.append((self.headers, self.body))
            reply = self.server.replies.pop(0) if self.server.replies else lengths
        reply(self)

    def answer(self, text: str, status: int = 200, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(text)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *_: Any) -> None: ...


def lengths(request: Request) -> None:
    request.answer(json.dumps({"rewards": [float(len(text)) for text in request.body["completions"]]}))


def drop(request: Request) -> None:
    request.close_connection = True


def delay(request: Request) -> None:
    """Answer nothing for longer than `SHORT`."""
    time.sleep(3 * SHORT)
    request.close_connection = True


def cut_off(request: Request) -> None:
    request.answer('{"rewards": [1.0,', headers={"Content-Length": "400"})
    request.close_connection = True


def says(text: str, status: int = 200, **headers: str) -> Reply:
    return lambda request: request.answer(text, status, headers)


def url(server: Any) -> str:
    return f"http://127.0.0.1:{server.server_port}/v1/score"
