"""Rewards from an HTTP server, and the HTTP requests that reward endpoints and chat judges share.

A reward request is a POST of `application/json` with one entry per response in each list:

    {"prompts": [...], "completions": [...], "completion_ids": [[...], ...], "columns": {"<name>": [...], ...}}

The answer has the status 200 and one reward per response, in the same order: a number, null (not scored), or a list of
numbers, one for each of its `completion_ids`:

    {"rewards": [0.5, null, -1.0]}
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import logging
import os
import urllib.parse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import httpx

from rlhf_ppo.data.images import data_url
from rlhf_ppo.rewards.scorer import WrongRewardError
from rlhf_ppo.terminal import redact_url, redact_urls, visible_logger

logger = visible_logger(__name__)

TOKEN_VARIABLE = "RLHF_PPO_REWARD_TOKEN"
"""The environment variable that holds the bearer token, unless another is named."""

_NOT_SENT = frozenset({"trainer_state", "log_extra", "log_metric", "environments"})
_RETRIED_STATUS = frozenset({408, 429, 500, 502, 503, 504})


class NoAnswerError(ConnectionError):
    """All repetitions of a request failed."""


@dataclass(repr=False)
class RewardEndpoint:
    """A reward function on a server, with `GRPOTrainer`'s signature. Several requests run at the same time.

    A request is repeated when the connection fails or times out, and when the server answers with the status 408, 429,
    500, 502, 503 or 504. The `n`-th repetition waits `backoff * 2^(n-1)` seconds, and is logged. Redirects are not
    followed. Errors and metrics show only the host and path of the address.

    Attributes:
        url: The address, `http` or `https`. `user:password@` before the host is sent as basic authentication instead
            of the token.
        name: Name in metrics, weights and errors; empty takes the last part of the path, or else the host.
        timeout: Seconds to wait for the connection, and for each part of the answer.
        retries: Number of repetitions of a failed request.
        backoff: Seconds before the first repetition.
        batch_size: Maximum number of responses in a request.
        concurrency: Maximum number of concurrent requests.
        token_variable: The environment variable with the token for `Authorization: Bearer <token>`; nothing is sent
            if it is not set.
    """

    url: str
    name: str = ""
    timeout: float = 60.0
    retries: int = 5
    backoff: float = 1.0
    batch_size: int = 32
    concurrency: int = 8
    token_variable: str = TOKEN_VARIABLE

    def __post_init__(self) -> None:
        self.display_url = redact_url(self.url)
        parts = urllib.parse.urlsplit(self.url)
        self.__name__ = self.name or parts.path.strip("/").rpartition("/")[2] or str(parts.hostname)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(url={self.display_url!r}, name={self.__name__!r})"

    async def __call__(
        self,
        prompts: Sequence[object],
        completions: Sequence[object],
        completion_ids: Sequence[object],
        **columns: Any,
    ) -> list[Any]:
        """Score every response.

        Raises:
            ConnectionError: All repetitions of a request failed; the message names its rows.
            WrongRewardError: The answer does not hold one reward per response.
        """
        table = {"prompts": prompts, "completions": completions, "completion_ids": completion_ids}
        columns = {name: values for name, values in columns.items() if name not in _NOT_SENT}

        slots = asyncio.Semaphore(self.concurrency)  # kept between repetitions: the first failure ends the call

        async def score(start: int) -> list[Any]:
            rows = range(start, min(start + self.batch_size, len(completions)))
            where = f"the endpoint {self.display_url}, asked for the rows {rows.start} to {rows.stop - 1},"
            payload = {**_rows_of(table, rows), "columns": _rows_of(columns, rows)}
            async with slots:
                answer = await post_json(client, self.url, payload, where, self.retries, self.backoff)
            rewards = answer.get("rewards") if isinstance(answer, dict) else None
            if not isinstance(rewards, list) or len(rewards) != len(rows):
                wanted = f'{{"rewards": [...]}} with {len(rows)} entries'
                raise WrongRewardError(f"{where} answered {answer!r:.120}: it must answer {wanted}")
            return rewards

        async with http_client(self.timeout, self.concurrency, self.token_variable) as client:
            parts = await asyncio.gather(*[score(start) for start in range(0, len(completions), self.batch_size)])
        return [reward for part in parts for reward in part]


def _rows_of(table: Mapping[str, Sequence[object]], rows: range) -> dict[str, list[object]]:
    return {name: list(values[rows.start : rows.stop]) for name, values in table.items()}


def as_json(value: Any) -> Any:
    """Return an image as a `data:` URL."""
    return data_url(value) if hasattr(value, "convert") else json.JSONEncoder().default(value)


def http_client(timeout: float, concurrency: int, token_variable: str) -> httpx.AsyncClient:
    """Return a client for JSON requests.

    Args:
        timeout: Seconds to wait for the connection, and for each part of the answer.
        concurrency: Maximum number of concurrent requests; others wait.
        token_variable: The environment variable with the bearer token; nothing is sent if it is not set.
    """
    token = os.environ.get(token_variable)
    return httpx.AsyncClient(
        headers={"Content-Type": "application/json"} | ({"Authorization": f"Bearer {token}"} if token else {}),
        timeout=httpx.Timeout(timeout, pool=None),
        limits=httpx.Limits(max_connections=concurrency),
    )


async def post_json(
    client: httpx.AsyncClient, url: str, payload: object, where: str, retries: int, backoff: float
) -> Any:
    """Send a request, repeat it while it fails, and return the decoded answer.

    Args:
        client: From `http_client`.
        url: The address.
        payload: The request's body, encoded as JSON.
        where: Name of the server and the request; errors and warnings begin with it.
        retries: Number of repetitions of a failed request.
        backoff: Seconds before the first repetition; each further one waits twice as long.

    Raises:
        NoAnswerError: The last repetition failed.
        ConnectionError: The server answered with another status, such as 401, or without JSON.
    """
    body = json.dumps(payload, default=as_json)
    for attempt in itertools.count():
        try:
            response = await client.post(url, content=body)
        except httpx.TransportError as error:
            reason = f"did not answer ({error!r})"
        else:
            if response.is_success:
                with contextlib.suppress(ValueError):
                    return response.json()
            text = response.text[:200] or response.reason_phrase
            answered = "answered no JSON," if response.is_success else "answered"
            reason = f"{answered} with the status {response.status_code} ({text})"
            if response.status_code not in _RETRIED_STATUS:
                raise ConnectionError(f"{where} {reason}")
        if attempt >= retries:
            raise NoAnswerError(f"{where} {reason} at the last of {attempt + 1} attempts")
        pause = backoff * 2**attempt
        logger.warning(f"{where} {reason}: repetition {attempt + 1} of {retries} in {pause:g} s.")
        await asyncio.sleep(pause)


class _OnceASecond(logging.Filter):
    """Drop a message that equals the last one, of another request that failed at the same time."""

    last, at = "", 0.0

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether the message is another, or later."""
        is_new = record.getMessage() != self.last or record.created > self.at + 1
        self.last, self.at = record.getMessage(), record.created
        return is_new


logger.addFilter(_OnceASecond())


def _hide_secrets(record: logging.LogRecord) -> bool:
    """Hide queries and passwords of the addresses that httpx logs at INFO."""
    record.msg, record.args = redact_urls(record.getMessage()), None
    return True


logging.getLogger("httpx").addFilter(_hide_secrets)
