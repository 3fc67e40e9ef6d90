"""Servers as they fail, by what is odd about them: what they write on the connection, and what is said of it."""

from __future__ import annotations

import contextlib
import gzip
import json
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from rlhf_ppo.rewards import ScoringBatch
from tests.rewards.test_functions import make_batch

Act = Callable[[socket.socket], Any]
FOR_EVER = 20.0
"""Seconds for which a server goes on that does not end its answer; no limit in the tests is half as long."""
CHUNKED = b"Transfer-Encoding: chunked\r\n\r\n"
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"
GOOD = b'{"rewards": [1.0, 2.0]}'


@dataclass(frozen=True)
class Case:
    """What a server does.

    Attributes:
        acts: What it does with the first connections; then it answers well.
        error: What is said where the last repetition fails too; None where it answers in the end, or at once.
        repeated: Whether the request is repeated.
    """

    acts: Act
    error: str | None
    repeated: bool = True


def respond(body: bytes, head: bytes = HEAD, length: int | None = None) -> Act:
    def act(connection: socket.socket) -> None:
        size = len(body) if length is None else length
        connection.sendall(head + f"Content-Length: {size}\r\n\r\n".encode() + body)

    return act


def status(line: str, *headers: str, body: bytes = b"") -> Act:
    return respond(body, "\r\n".join([f"HTTP/1.1 {line}", *headers, ""]).encode())


def raw(*parts: bytes) -> Act:
    return lambda connection: [connection.sendall(part) for part in parts]


def trickle(before: bytes, byte: bytes, pause: float = 0.02) -> Act:
    """Send one byte after the other."""

    def act(connection: socket.socket) -> None:
        connection.sendall(before)
        with contextlib.suppress(OSError):
            for _ in range(int(FOR_EVER / pause)):
                connection.sendall(byte)
                time.sleep(pause)

    return act


def silent(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        connection.settimeout(FOR_EVER)
        while connection.recv(65536):  # the rest of the request, until the other side is tired of waiting
            pass


def reset(connection: socket.socket) -> None:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def endless(connection: socket.socket) -> None:
    connection.sendall(HEAD + b"\r\n[")
    with contextlib.suppress(OSError):
        while True:
            connection.sendall(b"0," * 4096)


def rewards(value: Any) -> Act:
    return respond(json.dumps({"rewards": value}).encode())


SHAPE = r'must answer \{"rewards": \[...\]\} with 2 entries'
NO_JSON = "answered something that is not JSON"
LATE = "did not answer .*timed out: no whole answer after 0.4 seconds"
VALUE = "the reward function 'score' at http://127.0.0.1:[0-9]+/score returned"

ODD: dict[str, Case] = {
    "closes at once": Case(raw(), "did not answer"),
    "resets the connection": Case(reset, "did not answer"),
    "never answers": Case(silent, LATE),
    "trickles the status": Case(trickle(b"HTTP/1.1 200 ", b"O"), LATE),
    "trickles the headers": Case(trickle(HEAD, b"X: y\r\n"), LATE),
    "trickles the body": Case(trickle(HEAD + b"Content-Length: 1000\r\n\r\n", b" "), LATE),
    "trickles chunks": Case(trickle(HEAD + CHUNKED, b"1\r\n \r\n"), LATE),
    "breaks off": Case(respond(b'{"rewards": [1.0', length=400), "without sending complete message body"),
    "says too short a length": Case(respond(GOOD, length=5), NO_JSON),
    "speaks no HTTP": Case(raw(b"SSH-2.0-OpenSSH_9.6\r\n"), "did not answer .*disconnected"),
    "sends a header without end": Case(raw(HEAD + b"X: " + b"y" * 200_000), "Receive buffer too long"),
    "sends a thousand headers": Case(raw(HEAD + b"X: y\r\n" * 1000), "did not answer .*disconnected"),
    "is not found": Case(status("404 Not Found", body=b"no such judge"), r"status 404 \(no such judge\)", False),
    "refuses the question": Case(status("400 Bad Request"), "status 400", False),
    "can not": Case(status("501 Not Implemented"), "status 501", False),
    "refuses the token": Case(status("401 Unauthorized"), r"status 401 \(Unauthorized\)", False),
    "redirects": Case(status("302 Found", "Location: /elsewhere?key=s3cret"),
                      r"status 302 .*give the address http://127.0.0.1:[0-9]+/elsewhere if you trust it", False),
    "says its rewards twice": Case(respond(b'{"rewards": [1, 2], "rewards": [2, 1]}'),
                                   "the key rewards is repeated in the JSON object"),
    "redirects to itself": Case(status("307 Temporary Redirect", "Location: /score"), "status 307", False),
    "says nothing": Case(status("204 No Content"), NO_JSON),
    "is overloaded": Case(status("429 Too Many Requests", "Retry-After: 0"), "status 429"),
    "is overloaded until a date": Case(status("503 Busy", "Retry-After: Wed, 21 Oct 2065 07:28:00 GMT"), "status 503"),
    "fails": Case(status("500 Internal Server Error", body=b"Traceback " * 1000), r"status 500 \(Traceback .{,200}\)"),
    "answers HTML": Case(respond(b"<html>busy</html>"), NO_JSON),
    "answers nothing": Case(respond(b""), NO_JSON),
    "answers Latin-1": Case(respond('{"rewards": "ä"}'.encode("latin-1")), NO_JSON),
    "answers UTF-16": Case(respond(GOOD.decode().encode("utf-16")), None),
    "answers with a byte order mark": Case(respond(b"\xef\xbb\xbf" + GOOD), None),
    "answers with chunks": Case(raw(HEAD + CHUNKED + b"17\r\n" + GOOD + b"\r\n0\r\n\r\n"), None),
    "answers without a length": Case(raw(HEAD + b"\r\n" + GOOD), None),
    "packs a bomb": Case(respond(gzip.compress(b"0" * 10**7), HEAD + b"Content-Encoding: gzip\r\n"),
                         f"{NO_JSON} .*compressed as 'gzip'"),
    "nests deeply": Case(respond(b"[" * 10**5 + b"]" * 10**5), "JSON that is nested too deeply", False),
    "announces gigabytes": Case(respond(b"[", length=2 * 10**9), "answered with 2000000000 bytes", False),
    "answers without end": Case(endless, "answered with more than 1000000 bytes", False),
    "answers a list": Case(respond(b"[1, 2]"), SHAPE, False),
    "answers another key": Case(respond(b'{"scores": [1, 2]}'), SHAPE, False),
    "answers null": Case(respond(b"null"), SHAPE, False),
    "answers too many": Case(rewards([1.0, 2.0, 3.0]), SHAPE, False),
    "answers too few": Case(rewards([1.0]), SHAPE, False),
    "answers one number": Case(rewards(1.0), SHAPE, False),
    "answers NaN": Case(respond(b'{"rewards": [1.0, NaN]}'), f"{VALUE} nan for row 1", False),
    "answers beyond all numbers": Case(respond(b'{"rewards": [1e999, 1]}'), f"{VALUE} inf for row 0", False),
    "answers texts": Case(rewards(["1.0", 2.0]), f"{VALUE} '1.0'", False),
    "answers objects": Case(rewards([{"score": 1.0}, 2.0]), f"{VALUE} .*'score': 1.0", False),
    "answers a number of 10000 digits": Case(respond(b'{"rewards": [1, ' + b"9" * 10000 + b"]}"), NO_JSON),
    "answers for other tokens": Case(rewards([[1.0] * 9, [1.0]]), f"{VALUE} 9 rewards for the . tokens", False),
}  # fmt: skip


def two_rows(**columns: list[Any]) -> ScoringBatch:
    """Two responses, of three tokens and of one."""
    three = make_batch()
    names = ("query_responses", "attention_mask", "response_mask", "ended")
    return ScoringBatch(**{name: getattr(three, name)[:2] for name in names}, columns=columns)


@contextlib.contextmanager
def serving(act: Act, times: int) -> Iterator[Any]:
    """Serve on this machine: `act` so many times, then good answers; yield the address and who has connected."""
    listener = socket.create_server(("127.0.0.1", 0))
    seen: list[Any] = []

    def handle(connection: socket.socket, do: Act) -> None:
        with connection, contextlib.suppress(OSError):
            connection.settimeout(FOR_EVER)
            head = b""
            while b"\r\n\r\n" not in head and not head.startswith(b"\x16"):  # the greeting of TLS
                head += connection.recv(65536)
            do(connection)
            if do is not reset:
                connection.shutdown(socket.SHUT_WR)
                while connection.recv(65536):  # an unread rest would reset the connection
                    pass

    def accept() -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, peer = listener.accept()
                seen.append(peer)
                do = act if len(seen) <= times else respond(GOOD)
                threading.Thread(target=handle, args=[connection, do], daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}/score", seen
    finally:
        listener.close()
