"""Ports for servers that are started later, by another process."""

from __future__ import annotations

import random
import socket

EPHEMERAL = 32768
"""From here on Linux gives ports away by itself, to whoever asks for any; elsewhere from higher ones."""


def free_port() -> int:
    """Return a port that nobody listens on, and that the system gives to nobody before it is used."""
    while True:
        with socket.socket() as server:
            try:
                server.bind(("127.0.0.1", random.SystemRandom().randrange(10_000, EPHEMERAL)))
            except OSError:
                continue
            return server.getsockname()[1]
