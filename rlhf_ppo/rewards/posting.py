"""One HTTP request within a time and a size: a server cannot make it last longer, or fill the memory."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import socket
import threading
import time
import urllib.error
import urllib.request
from typing import Any

from rlhf_ppo.rewards.waiting import in_daemon_thread

_BLOCK = 1 << 16


class TooLargeError(Exception):
    """An answer has more bytes than are read."""


async def post(address: str, body: bytes, headers: dict[str, str], seconds: float, most_bytes: int) -> bytes:
    """Post once, and return the answer.

    The request runs in a daemon thread, so that a program can end while a server has not answered. Redirects are not
    followed: they would carry the token to another server. Compression is not asked for, and nothing is unpacked.

    Args:
        address: Where to.
        body: What.
        headers: With which headers.
        seconds: How long all of it may take, from looking up the host to the last byte.
        most_bytes: How long the answer may be.

    Raises:
        TimeoutError: The time is up; the connection is closed.
        TooLargeError: The answer is longer.
        OSError: The server cannot be reached, or breaks off; `urllib.error.HTTPError` if its status is an error.
        http.client.HTTPException: What it answers is no HTTP.
        ValueError: The answer is compressed.
    """
    exchange = _Exchange(seconds, most_bytes)
    request = urllib.request.Request(address, data=body, headers=headers, method="POST")
    answer = asyncio.wrap_future(in_daemon_thread(exchange.run, request))
    try:
        return await asyncio.wait_for(answer, seconds)
    except TimeoutError:
        raise TimeoutError(f"timed out: no whole answer after {seconds:g} seconds") from None
    finally:
        exchange.cut()


class _Exchange:
    """A request and its answer, whose connection another thread can cut."""

    def __init__(self, seconds: float, most_bytes: int) -> None:
        self.seconds, self.most_bytes = seconds, most_bytes
        self._until = time.monotonic() + seconds
        self._sockets: list[socket.socket] = []
        self._lock, self._is_cut = threading.Lock(), False

    def run(self, request: urllib.request.Request) -> bytes:
        """Send the request and read the answer."""
        opener = urllib.request.build_opener(_NoRedirects, _Handler(self), _SecureHandler(self))
        try:
            with opener.open(request, timeout=self.seconds) as response:
                return self._read(response)
        except urllib.error.HTTPError as error:
            error.msg = self._excerpt(error)  # here, in the thread that may wait for the rest
            raise

    def cut(self) -> None:
        """Close the connection, so that a thread that waits for it goes on and ends."""
        with self._lock:
            self._is_cut = True
            sockets, self._sockets = self._sockets, []
        for connection in sockets:
            with connection, contextlib.suppress(OSError):  # of one that is closed already
                connection.shutdown(socket.SHUT_RDWR)

    def opened(self, connection: socket.socket) -> None:
        """Take note of a connection; of a copy, since TLS takes the original apart."""
        with self._lock:
            self._sockets.append(connection.dup())
            is_late = self._is_cut
        if is_late:
            self.cut()

    def _read(self, response: Any) -> bytes:
        if (packed := response.headers.get("Content-Encoding", "identity")) != "identity":
            raise ValueError(f"compressed as {packed!r}, which was not asked for: turn compression off")
        announced = response.length
        if announced is not None and announced > self.most_bytes:
            raise TooLargeError(f"{announced} bytes")
        parts: list[bytes] = []
        size = 0
        while part := response.read1(_BLOCK):
            parts.append(part)
            size += len(part)
            if size > self.most_bytes:
                raise TooLargeError(f"more than {self.most_bytes} bytes")
            if time.monotonic() > self._until:
                raise TimeoutError
        if response.length:
            raise http.client.IncompleteRead(b"", response.length)
        return b"".join(parts)

    def _excerpt(self, error: urllib.error.HTTPError) -> str:
        try:
            return error.read(200).decode(errors="replace") or str(error.reason)
        except (OSError, ValueError, http.client.HTTPException):
            return str(error.reason)


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_: Any) -> None:
        return None


class _Handler(urllib.request.HTTPHandler):
    def __init__(self, exchange: _Exchange) -> None:
        super().__init__()
        self.exchange = exchange

    def http_open(self, req: urllib.request.Request) -> Any:
        return self.do_open(_noting(http.client.HTTPConnection, self.exchange), req)


class _SecureHandler(urllib.request.HTTPSHandler):
    def __init__(self, exchange: _Exchange) -> None:
        super().__init__()
        self.exchange = exchange

    def https_open(self, req: urllib.request.Request) -> Any:
        return self.do_open(_noting(http.client.HTTPSConnection, self.exchange), req)


def _noting(kind: type[http.client.HTTPConnection], exchange: _Exchange) -> Any:
    """Return a kind of connection that tells the exchange of its socket as soon as there is one."""

    def make(*args: Any, **kwargs: Any) -> http.client.HTTPConnection:
        connection: Any = kind(*args, **kwargs)
        create = connection._create_connection

        def create_and_tell(*how: Any) -> socket.socket:
            made = create(*how)
            exchange.opened(made)
            return made

        connection._create_connection = create_and_tell
        return connection

    return make
