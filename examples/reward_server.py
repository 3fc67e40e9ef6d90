"""A reward server that needs only the standard library, for `reward_funcs="http://127.0.0.1:8000/brevity"`.

Start it, here with a token that both sides read from the environment, and train against it:

    export RLHF_PPO_REWARD_TOKEN=secret
    python examples/reward_server.py --port 8000

The contract (see docs/rewards.md): a POST of JSON with lists of the same length,

    {"prompts": [...], "completions": [...], "completion_ids": [[...], ...], "columns": {"<name>": [...], ...}}

is answered with one reward per completion, a number, null (not scored), or a list of one number per token:

    {"rewards": [0.5, null, -1.0]}

Replace `REWARDS` with your own functions.
"""

from __future__ import annotations

import argparse
import hmac
import json
import os
from collections.abc import Callable
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

TOKEN = "RLHF_PPO_REWARD_TOKEN"


def brevity(completions: list[Any], **_: Any) -> list[float | None]:
    """Reward short texts, from 1 for one word down to 0; leave empty ones unscored."""
    return [1 / len(text.split()) if text.split() else None for text in completions]


def no_repetition(completion_ids: list[list[int]], **_: Any) -> list[list[float]]:
    """Charge each token that repeats the one before it."""
    return [[-1.0 * (t > 0 and ids[t] == ids[t - 1]) for t in range(len(ids))] for ids in completion_ids]


REWARDS: dict[str, Callable[..., list[Any]]] = {"/brevity": brevity, "/no_repetition": no_repetition}


class RewardHandler(BaseHTTPRequestHandler):
    """Answers each request with the reward that its path names."""

    def do_POST(self) -> None:
        """Score one request. For a malformed request, answer with a status that the trainer does not retry."""
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        token, given = os.environ.get(TOKEN), self.headers.get("Authorization", "")
        if token and not hmac.compare_digest(given.encode(), f"Bearer {token}".encode()):
            return self._answer(401, {"error": f"send the token of {TOKEN}"})
        if self.path not in REWARDS:
            return self._answer(404, {"error": f"there are {sorted(REWARDS)}"})
        try:
            table = json.loads(body)
            rewards = REWARDS[self.path](
                prompts=table["prompts"],
                completions=table["completions"],
                completion_ids=table["completion_ids"],
                **table["columns"],
            )
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            return self._answer(400, {"error": f"{type(error).__name__}: {error}"})
        return self._answer(200, {"rewards": rewards})

    def _answer(self, status: int, content: dict[str, Any]) -> None:
        body = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing: a run makes many requests."""


def make_server(port: int = 8000, host: str = "127.0.0.1") -> ThreadingHTTPServer:
    """Return a server that is bound and waits for `serve_forever`; port 0 takes a free port."""
    return ThreadingHTTPServer((host, port), RewardHandler)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description="Serve rewards over HTTP.", usage=argparse.SUPPRESS, allow_abbrev=False
    )
    parser.add_argument("--host", default="127.0.0.1", help="default: %(default)s")
    parser.add_argument("--port", type=int, default=8000, help="default: %(default)s")
    arguments = parser.parse_args()
    try:
        server = make_server(arguments.port, arguments.host)
    except (OSError, OverflowError) as error:
        parser.error(f"--host {arguments.host} --port {arguments.port} cannot be served: {error}")
    print(f"Rewards at {', '.join(f'http://{arguments.host}:{arguments.port}{path}' for path in REWARDS)}", flush=True)
    with suppress(KeyboardInterrupt):
        server.serve_forever()
