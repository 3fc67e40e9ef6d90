"""Rewards from an HTTP server, and the HTTP client that reward endpoints and chat judges share.

A reward request is a POST of `application/json` with one entry per response in each list:

    {"prompts": [...], "completions": [...], "completion_ids": [[...], ...], "columns": {"<name>": [...], ...}}

The answer has the status 200 and one reward per response, in the same order: a number, null (not scored), or a list of
numbers, one for each of its `completion_ids`:

    {"rewards": [0.5, null, -1.0]}
"""

from __future__ import annotations

import asyncio
import base64
import functools
import ipaddress
import itertools
import json
import logging
import math
import os
import ssl
import urllib.parse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import httpx

from rlhf_ppo.config.validation import Interval, check_range, check_type, unique_keys
from rlhf_ppo.terminal import hide_secrets, redact_url, redact_urls, secrets_of, visible, visible_logger

logger = visible_logger(__name__)

TOKEN_VARIABLE = "RLHF_PPO_REWARD_TOKEN"
"""The environment variable that holds the bearer token, unless another is named."""

_NOT_SENT = frozenset({"trainer_state", "log_extra", "log_metric", "environments"})
_PRIVATE_NAMES = (".localhost", ".local", ".internal", ".svc")
"""Ends of names outside the public DNS. Names without a dot, such as Compose's services, are private too."""

_RETRIED_STATUS = frozenset({408, 429, 500, 502, 503, 504})
_NOT_NEGATIVE, _AT_LEAST_ONE = Interval(0, math.inf), Interval(1, math.inf)
_SETTINGS: dict[str, tuple[type, Interval, str]] = {
    "timeout": (float, Interval(0, math.inf, open_low=True), "seconds that one request may take"),
    "retries": (int, _NOT_NEGATIVE, "how often a failed request is repeated"),
    "backoff": (float, _NOT_NEGATIVE, "seconds before the first repetition"),
    "batch_size": (int, _AT_LEAST_ONE, "most responses in one request"),
    "concurrency": (int, _AT_LEAST_ONE, "most requests at one time"),
    "max_answer_bytes": (int, _AT_LEAST_ONE, "longest answer"),
}


@dataclass(repr=False)
class RewardEndpoint:
    """A reward function on a server, with `GRPOTrainer`'s signature. Several requests run at the same time.

    A request is repeated when the connection fails or times out, when the server answers with the status 408, 429,
    500, 502, 503 or 504, and when the answer is not JSON. The `n`-th repetition waits `backoff * 2^(n-1)` seconds, or
    as long as the server's `Retry-After` says, up to `timeout`. Each repetition is logged. Redirects are not followed.

    Errors and metrics show only the host and path of the address.

    Attributes:
        url: The address, `http` or `https`. `user:password@` before the host is sent as basic authentication instead
            of the token.
        name: Name in metrics, weights and errors; empty takes the last part of the path, or else the host.
        timeout: Seconds that one request may take, from the host lookup to the last byte of the answer.
        retries: Number of repetitions of a failed request.
        backoff: Seconds before the first repetition.
        batch_size: Most responses in one request.
        concurrency: Most requests at one time.
        token_variable: The environment variable with the token for `Authorization: Bearer <token>`; nothing is sent
            if it is not set.
        max_answer_bytes: Longest answer; the rest of a longer one is not read.

    Raises:
        TypeError: A setting has another type.
        ValueError: The address is not `http` or `https`, or a number is out of its range.
    """

    url: str
    name: str = ""
    timeout: float = 60.0
    retries: int = 5
    backoff: float = 1.0
    batch_size: int = 32
    concurrency: int = 8
    token_variable: str = TOKEN_VARIABLE
    max_answer_bytes: int = 1 << 25

    def __post_init__(self) -> None:
        self._client = HttpClient(
            self.url, self.timeout, self.retries, self.backoff, self.token_variable, self.max_answer_bytes
        )
        self.display_url = self._client.display_url
        check_settings(self, self.display_url)
        parts = urllib.parse.urlsplit(self.url)
        self.__name__ = self.name or parts.path.strip("/").rpartition("/")[2] or str(parts.hostname)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(url={self.display_url!r}, name={self.__name__!r})"

    async def __call__(
        self, prompts: Sequence[Any], completions: Sequence[Any], completion_ids: Sequence[Any], **columns: Any
    ) -> list[Any]:
        """Score every response.

        Raises:
            ConnectionError: All repetitions of a request failed; the message names its rows.
            ValueError: The answer does not hold one reward per response.
            TypeError: A column cannot be sent as JSON.
        """
        table = {"prompts": prompts, "completions": completions, "completion_ids": completion_ids}
        columns = {name: values for name, values in columns.items() if name not in _NOT_SENT}
        self._check_columns(columns)
        slots = asyncio.Semaphore(self.concurrency)

        async def score(start: int) -> list[Any]:
            rows = range(start, min(start + self.batch_size, len(completions)))
            async with slots:
                return await self._request({**_rows_of(table, rows), "columns": _rows_of(columns, rows)}, rows)

        parts = await asyncio.gather(*[score(start) for start in range(0, len(completions), self.batch_size)])
        return [reward for part in parts for reward in part]

    async def _request(self, payload: Mapping[str, Any], rows: range) -> list[Any]:
        """Send one request and return its rewards."""
        where = f"the endpoint {self.display_url}, asked for the rows {rows.start} to {rows.stop - 1},"
        answer = await self._client.post(payload, where)
        rewards = answer.get("rewards") if isinstance(answer, dict) else None
        if not isinstance(rewards, list) or len(rewards) != len(rows):
            wanted = f'{{"rewards": [...]}} with {len(rows)} entries'
            raise ValueError(f"{where} answered {self._client.redacted(f'{answer!r:.120}')}: it must answer {wanted}")
        return rewards

    def _check_columns(self, columns: Mapping[str, Any]) -> None:
        for name, values in columns.items():
            try:
                json.dumps(list(values))
            except (TypeError, ValueError) as error:
                raise TypeError(
                    f"the column {name!r} cannot be sent to the endpoint {self.display_url}: {error}; remove it from "
                    "the data set, or make it text"
                ) from error


def _rows_of(table: Mapping[str, Sequence[Any]], rows: range) -> dict[str, list[Any]]:
    return {name: list(values[rows.start : rows.stop]) for name, values in table.items()}


class RefusedError(ConnectionError):
    """A server answered with a status for which requests are not repeated.

    Attributes:
        status: The status, such as 401 or 404.
    """

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


@dataclass(repr=False)
class HttpClient:
    """Post JSON to one address and decode the JSON answer; several requests may run at the same time.

    `RewardEndpoint` documents the attributes, when a request is repeated, and which parts of the address errors show.

    Raises:
        TypeError: A setting has another type.
        ValueError: The address is not `http` or `https`, or a number is out of its range.
    """

    url: str
    timeout: float
    retries: int
    backoff: float
    token_variable: str
    max_answer_bytes: int

    def __post_init__(self) -> None:
        parts = urllib.parse.urlsplit(self.url)
        self.display_url = redact_url(self.url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"url={self.display_url!r} must be an address such as 'http://localhost:8000/score'")
        if not _has_valid_port(self.url):
            raise ValueError(
                f"url={self.display_url!r} has no valid port; special characters of a user and a password are written "
                "as %40 for @, %3A for :, %2F for /"
            )
        self._check_channel()
        check_settings(self, self.display_url)

    async def post(self, payload: Any, where: str) -> Any:
        """Send a request, repeat it while it fails, and return the decoded answer.

        Args:
            payload: The request's body, encoded as JSON.
            where: Name of the server and the request; errors and warnings begin with it.

        Raises:
            ConnectionError: The last repetition failed; `RefusedError` if the server's status forbids repetitions.
        """
        self._check_channel()  # again: the environment may have changed
        body = json.dumps(payload).encode()
        for attempt in itertools.count():
            outcome = await self._attempt(body)
            if not isinstance(outcome, _Failure):
                return outcome
            reason = self.redacted(outcome.reason)  # raised outside of `except`: the cause may hold the address
            if not outcome.is_repeated:
                message = f"{where} {reason}"
                raise ConnectionError(message) if outcome.status is None else RefusedError(message, outcome.status)
            if attempt == self.retries:
                raise ConnectionError(f"{where} {reason}, the last of {attempt + 1} times")
            pause = max(self.backoff * 2**attempt, min(outcome.retry_after, self.timeout))
            logger.warning(f"{where} {reason}: repetition {attempt + 1} of {self.retries} in {pause:g} s.")
            await asyncio.sleep(pause)

    async def _attempt(self, body: bytes) -> Any:
        """Send one request within the time limit; return the decoded answer or a `_Failure`."""
        address = httpx.URL(self.url).copy_with(userinfo=b"")
        client = httpx.AsyncClient(timeout=None, verify=_ssl_context())
        try:
            async with asyncio.timeout(self.timeout), client:
                async with client.stream("POST", address, content=body, headers=self._headers()) as response:
                    answer = await self._read(response)
            return json.loads(answer, object_pairs_hook=unique_keys)
        except _Failure as failure:
            return failure
        except TimeoutError:
            return _Failure(f"did not answer (timed out: no whole answer after {self.timeout:g} seconds)")
        except (httpx.HTTPError, OSError) as error:
            return _Failure(f"did not answer ({_root_cause(error)!r})")
        except RecursionError:
            return _Failure("answered with JSON that is nested too deeply", is_repeated=False)
        except ValueError as error:
            return _Failure(f"answered something that is not JSON ({error}): check the address and the server's log")

    async def _read(self, response: httpx.Response) -> bytes:
        """Return the answer's body, as long as its status, encoding and size are those of an answer."""
        if not response.is_success:
            text = await _excerpt(response) or response.reason_phrase
            raise _Failure(
                f"answered with the status {response.status_code} ({text}){self._redirect_hint(response)}",
                response.status_code in _RETRIED_STATUS,
                _seconds(response.headers.get("Retry-After")),
                response.status_code,
            )
        if (encoding := response.headers.get("Content-Encoding", "identity")) != "identity":
            raise ValueError(f"compressed as {encoding!r}, which was not asked for: turn compression off")
        limit = f"of which max_answer_bytes={self.max_answer_bytes} are read"
        announced = int(response.headers.get("Content-Length", 0))
        if announced > self.max_answer_bytes:
            raise _Failure(f"answered with {announced} bytes, {limit}", is_repeated=False)
        answer = bytearray()
        async for part in response.aiter_raw():
            answer += part
            if len(answer) > self.max_answer_bytes:
                raise _Failure(f"answered with more than {self.max_answer_bytes} bytes, {limit}", is_repeated=False)
        return bytes(answer)

    def redacted(self, text: str) -> str:
        """Return a text in one line, without control characters, the address's secrets and the token."""
        sent = self._authorization().rpartition(" ")[2]
        token = os.environ.get(self.token_variable, "")
        return visible(hide_secrets(redact_urls(text), {*secrets_of(self.url), sent, token}), one_line=True)

    def _redirect_hint(self, response: httpx.Response) -> str:
        if not response.has_redirect_location:
            return ""
        target = redact_url(urllib.parse.urljoin(self.url, response.headers["Location"]))
        return (
            f"; redirects are not followed, so that no secret goes elsewhere: give the address {target} if you trust "
            "it"
        )

    def _check_channel(self) -> None:
        """Raise a `ValueError` if a password or a token would be sent unencrypted over a public network."""
        parts = urllib.parse.urlsplit(self.url)
        if parts.scheme == "http" and self._authorization() and not _is_private(str(parts.hostname)):
            has_user = "@" in parts.netloc
            secret = "the password in it" if has_user else f"the token of {self.token_variable}"
            fix = "leave the password out" if has_user else f"unset {self.token_variable}"
            raise ValueError(
                f"url={self.display_url!r} is plain http, which shows {secret} to everybody on the way: use https, or "
                f"a tunnel to localhost, or a name or address of a private network, or {fix}"
            )

    def _headers(self) -> dict[str, str]:
        headers = {"Content-Type": "application/json", "Accept-Encoding": "identity"}
        authorization = self._authorization()
        return headers | ({"Authorization": authorization} if authorization else {})

    def _authorization(self) -> str:
        userinfo = urllib.parse.urlsplit(self.url).netloc.rpartition("@")[0]
        if userinfo:
            user, _, password = map(urllib.parse.unquote, userinfo.partition(":"))
            return f"Basic {base64.b64encode(f'{user}:{password}'.encode()).decode()}"
        token = os.environ.get(self.token_variable)
        return f"Bearer {token}" if token else ""


def check_settings(server: object, display_url: str) -> None:
    """Check the types and ranges of a server's settings.

    Args:
        server: An object with some of these settings as attributes.
        display_url: The address without secrets.

    Raises:
        TypeError: A setting has another type.
        ValueError: A number is out of its range.
    """
    for field, (kind, interval, meaning) in _SETTINGS.items():
        if not hasattr(server, field):
            continue
        try:
            check_type(field, getattr(server, field), kind, meaning)
            check_range(field, getattr(server, field), interval, meaning)
        except (TypeError, ValueError) as error:
            raise type(error)(f"the endpoint {display_url}: {error}") from None


class _Failure(Exception):
    """A failed request: the reason, whether to repeat it, and the server's `Retry-After` and status."""

    def __init__(
        self, reason: str, is_repeated: bool = True, retry_after: float = 0.0, status: int | None = None
    ) -> None:
        super().__init__(reason)
        self.reason, self.is_repeated, self.retry_after, self.status = reason, is_repeated, retry_after, status


@functools.cache
def _ssl_context() -> ssl.SSLContext:
    """Return the system's certificates; httpx would read its own for each client."""
    return ssl.create_default_context()


def _hide_secrets(record: logging.LogRecord) -> bool:
    """Hide queries and passwords of the addresses that httpx logs at INFO."""
    record.msg, record.args = redact_urls(record.getMessage()), None
    return True


logging.getLogger("httpx").addFilter(_hide_secrets)


async def _excerpt(response: httpx.Response) -> str:
    """Return the first 200 bytes of an error's body, as many of them as arrive."""
    text = bytearray()
    try:
        async for part in response.aiter_raw():
            text += part
            if len(text) >= 200:
                break
    except httpx.HTTPError:
        pass
    return text[:200].decode(errors="replace")


def _root_cause(error: BaseException) -> BaseException:
    """Return the operating system's error behind those of httpx and its libraries, or else httpx's own."""
    chain = [error]
    while (cause := chain[-1].__cause__ or chain[-1].__context__) is not None:
        chain.append(cause)
    return next((cause for cause in reversed(chain) if isinstance(cause, OSError | ExceptionGroup)), error)


def _seconds(retry_after: str | None) -> float:
    """Read the header `Retry-After`; a date counts as 0."""
    return float(retry_after) if retry_after is not None and retry_after.strip().isdecimal() else 0.0


def _is_private(host: str) -> bool:
    """Return whether a host is this machine or one of a private network, by its address or by its name."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        is_number = host[:1].isdigit()  # 134744072 is 8.8.8.8
        return host.endswith(_PRIVATE_NAMES) or not (is_number or "." in host)
    return not (getattr(address, "ipv4_mapped", None) or address).is_global


def _has_valid_port(url: str) -> bool:
    try:
        port = urllib.parse.urlsplit(url).port
        httpx.URL(url)
    except (ValueError, httpx.InvalidURL):  # their texts would show parts of the address
        return False
    return port is None or port > 0
