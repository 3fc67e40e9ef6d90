"""Rewards from a server: prompts and responses go out as JSON, numbers come back.

The request is a POST of `application/json` with one entry per response in each list:

    {"prompts": [...], "completions": [...], "completion_ids": [[...], ...], "columns": {"<name>": [...], ...}}

The answer has the status 200 and one reward per response, in the same order: a number, null (not scored), or a list of
numbers, one for each of its `completion_ids`:

    {"rewards": [0.5, null, -1.0]}
"""

from __future__ import annotations

import asyncio
import base64
import http.client
import itertools
import json
import math
import os
import urllib.error
import urllib.parse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from transformers.utils import logging

from rlhf_ppo.config.redaction import secrets_of, shown_address, shown_addresses, without
from rlhf_ppo.config.validation import Interval, check_range, check_type
from rlhf_ppo.rewards.posting import TooLargeError, post

logger = logging.get_logger(__name__)

TOKEN_VARIABLE = "RLHF_PPO_REWARD_TOKEN"
"""The environment variable that holds the bearer token, unless another is named."""

_NOT_NEGATIVE, _AT_LEAST_ONE = Interval(0, math.inf), Interval(1, math.inf)
_SETTINGS: dict[str, tuple[type, Interval, str]] = {
    "timeout": (float, Interval(0, math.inf, open_low=True), "seconds that one request may take"),
    "retries": (int, _NOT_NEGATIVE, "how often a failed request is repeated"),
    "backoff": (float, _NOT_NEGATIVE, "seconds before the first repetition"),
    "batch_size": (int, _AT_LEAST_ONE, "most responses in one request"),
    "concurrency": (int, _AT_LEAST_ONE, "most requests at one time"),
    "max_answer_bytes": (int, _AT_LEAST_ONE, "longest answer"),
}
_RETRIED_STATUS = frozenset({408, 429, 500, 502, 503, 504})
_NOT_SENT = frozenset({"trainer_state", "log_extra", "log_metric"})


@dataclass(repr=False)
class RewardEndpoint:
    """A reward function that asks a server, with `GRPOTrainer`'s signature; several requests run at the same time.

    A request is repeated when the connection fails or times out, when the server answers with the status 408, 429,
    500, 502, 503 or 504, and when the answer is no JSON. The `n`-th repetition waits `backoff * 2^(n-1)` seconds, or
    as long as the server asks for by `Retry-After`, up to `timeout`. Each is logged. Redirects are not followed.

    Errors and metrics show of the address only host and path.

    Attributes:
        url: Where to post to, `http` or `https`; `user:password@` before the host is sent as HTTP's basic
            authentication, instead of the token.
        name: Name in metrics, weights and errors; empty takes the last part of the path, or else the host.
        timeout: Seconds that one request may take, from looking up the host to the last byte of the answer.
        retries: How often a failed request is repeated.
        backoff: Seconds before the first repetition.
        batch_size: Most responses in one request.
        concurrency: Most requests at one time.
        token_variable: The environment variable with the token for `Authorization: Bearer <token>`; nothing is sent
            where it is not set.
        max_answer_bytes: Longest answer; of a longer one the rest is not read.

    Raises:
        TypeError: A setting is of another type.
        ValueError: The address is none of `http` or `https`, or a number is out of its range.
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
        parts = urllib.parse.urlsplit(self.url)
        self.place = shown_address(self.url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"url={self.place!r} must be an address such as 'http://localhost:8000/score'")
        if not _has_valid_port(parts):
            raise ValueError(
                f"url={self.place!r} has no valid port; special characters of a user and a password are written as "
                "%40 for @, %3A for :, %2F for /"
            )
        for field, (kind, interval, meaning) in _SETTINGS.items():
            try:
                check_type(field, getattr(self, field), kind, meaning)
                check_range(field, getattr(self, field), interval, meaning)
            except (TypeError, ValueError) as error:
                raise type(error)(f"the endpoint {self.place}: {error}") from None
        self.__name__ = self.name or parts.path.strip("/").rpartition("/")[2] or parts.hostname

    def __repr__(self) -> str:
        return f"{type(self).__name__}(url={self.place!r}, name={self.__name__!r})"

    async def __call__(
        self, prompts: Sequence[Any], completions: Sequence[Any], completion_ids: Sequence[Any], **columns: Any
    ) -> list[Any]:
        """Score every response.

        Raises:
            ConnectionError: The server could not be asked, after all repetitions; names the rows.
            ValueError: It answered something else than one reward per response.
            TypeError: A column cannot be sent as JSON.
        """
        table = {
            "prompts": prompts,
            "completions": completions,
            "completion_ids": completion_ids,
            **{name: values for name, values in columns.items() if name not in _NOT_SENT},
        }
        slots = asyncio.Semaphore(self.concurrency)

        async def score(start: int) -> list[Any]:
            rows = range(start, min(start + self.batch_size, len(completions)))
            async with slots:
                return await self._ask({name: list(values[start : rows.stop]) for name, values in table.items()}, rows)

        parts = await asyncio.gather(*[score(start) for start in range(0, len(completions), self.batch_size)])
        return [reward for part in parts for reward in part]

    async def _ask(self, table: Mapping[str, list[Any]], rows: range) -> list[Any]:
        """Send one request and return its rewards."""
        where = f"the endpoint {self.place}, asked for the rows {rows.start} to {rows.stop - 1},"
        answer = await self._answer(self._body(table), where)
        rewards = answer.get("rewards") if isinstance(answer, dict) else None
        if not isinstance(rewards, list) or len(rewards) != len(rows):
            wanted = f'{{"rewards": [...]}} with {len(rows)} entries'
            raise ValueError(f"{where} answered {self._shown(f'{answer!r:.120}')}: it must answer {wanted}")
        return rewards

    async def _answer(self, body: bytes, where: str) -> Any:
        """Post as often as need be, and return the decoded answer."""
        for attempt in itertools.count():
            outcome = await self._attempt(body)
            if not isinstance(outcome, _Failure):
                return outcome
            reason = self._shown(outcome.reason)  # outside of the handler: the error's own text may hold the address
            if not outcome.is_repeated:
                raise ConnectionError(f"{where} {reason}")
            if attempt == self.retries:
                raise ConnectionError(f"{where} {reason}, the last of {attempt + 1} times")
            pause = max(self.backoff * 2**attempt, min(outcome.asks_for, self.timeout))
            logger.warning(f"{where} {reason}: repetition {attempt + 1} of {self.retries} in {pause:g} s.")
            await asyncio.sleep(pause)

    async def _attempt(self, body: bytes) -> Any:
        try:
            answer = await post(self._address(), body, self._headers(), self.timeout, self.max_answer_bytes)
            return json.loads(answer)
        except urllib.error.HTTPError as error:
            reason = f"answered with the status {error.code} ({error.reason})"
            return _Failure(reason, error.code in _RETRIED_STATUS, _seconds(error.headers.get("Retry-After")))
        except TooLargeError as error:
            limit = f"max_answer_bytes={self.max_answer_bytes}"
            return _Failure(f"answered with {error}, of which {limit} are read", is_repeated=False)
        except RecursionError:
            return _Failure("answered with JSON that is nested too deeply", is_repeated=False)
        except (OSError, http.client.HTTPException) as error:
            return _Failure(f"did not answer ({getattr(error, 'reason', error)!r})")
        except ValueError as error:
            return _Failure(f"answered something that is no JSON ({error})")

    def _shown(self, text: str) -> str:
        """Return a text without what nobody may see of the address, and without the token."""
        sent = self._authorization().rpartition(" ")[2]
        token = os.environ.get(self.token_variable, "")
        return without(shown_addresses(text), {*secrets_of(self.url), sent, token})

    def _body(self, table: Mapping[str, list[Any]]) -> bytes:
        fixed = ("prompts", "completions", "completion_ids")
        columns = {name: values for name, values in table.items() if name not in fixed}
        for name, values in columns.items():
            try:
                json.dumps(values)
            except (TypeError, ValueError) as error:
                raise TypeError(
                    f"the column {name!r} cannot be sent to the endpoint {self.place}: {error}; remove it from the "
                    "data set, or make it text"
                ) from error
        return json.dumps({name: table[name] for name in fixed} | {"columns": columns}).encode()

    def _authorization(self) -> str:
        userinfo = urllib.parse.urlsplit(self.url).netloc.rpartition("@")[0]
        token = os.environ.get(self.token_variable)
        return f"Basic {_encoded(userinfo)}" if userinfo else f"Bearer {token}" if token else ""

    def _headers(self) -> dict[str, str]:
        authorization = self._authorization()
        return {"Content-Type": "application/json"} | ({"Authorization": authorization} if authorization else {})

    def _address(self) -> str:
        parts = urllib.parse.urlsplit(self.url)
        return urllib.parse.urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))


@dataclass(frozen=True)
class _Failure:
    """Why a request gave no answer, whether it is worth a repetition, and after how many seconds by the server."""

    reason: str
    is_repeated: bool = True
    asks_for: float = 0.0


def _seconds(retry_after: str | None) -> float:
    """Read the header `Retry-After`; a date counts as nothing asked for."""
    return float(retry_after) if retry_after is not None and retry_after.strip().isdecimal() else 0.0


def _encoded(userinfo: str) -> str:
    """Return `user:password` of an address as basic authentication sends it."""
    user, _, password = userinfo.partition(":")
    pair = f"{urllib.parse.unquote(user)}:{urllib.parse.unquote(password)}"
    return base64.b64encode(pair.encode()).decode()


def _has_valid_port(parts: urllib.parse.SplitResult) -> bool:
    try:
        return parts.port is None or parts.port > 0
    except ValueError:  # its text would show what stands there
        return False
