"""Asking a server: one POST of JSON, repeated where that may help, that shows nobody a secret."""

from __future__ import annotations

import asyncio
import base64
import http.client
import ipaddress
import itertools
import json
import math
import os
import urllib.error
import urllib.parse
from dataclasses import dataclass
from typing import Any

from rlhf_ppo.config.redaction import secrets_of, shown_address, shown_addresses, without
from rlhf_ppo.config.validation import Interval, check_range, check_type
from rlhf_ppo.rewards.posting import TooLargeError, post
from rlhf_ppo.terminal.foreign import visible, visible_logger

logger = visible_logger(__name__)

_NOT_NEGATIVE, _AT_LEAST_ONE = Interval(0, math.inf), Interval(1, math.inf)
_SETTINGS: dict[str, tuple[type, Interval, str]] = {
    "timeout": (float, Interval(0, math.inf, open_low=True), "seconds that one request may take"),
    "retries": (int, _NOT_NEGATIVE, "how often a failed request is repeated"),
    "backoff": (float, _NOT_NEGATIVE, "seconds before the first repetition"),
    "concurrency": (int, _AT_LEAST_ONE, "most requests at one time"),
    "max_answer_bytes": (int, _AT_LEAST_ONE, "longest answer"),
}
_RETRIED_STATUS = frozenset({408, 429, 500, 502, 503, 504})


class RefusedError(ConnectionError):
    """A server has answered with a status that no repetition changes.

    Attributes:
        status: The status, such as 401 or 404.
    """

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


@dataclass(repr=False)
class Server:
    """A server that is asked with JSON and answers with JSON; several requests may run at the same time.

    Attributes are those of `rlhf_ppo.rewards.endpoint.RewardEndpoint`, which says when a request is repeated and what
    errors show of the address.

    Raises:
        TypeError: A setting is of another type.
        ValueError: The address is none of `http` or `https`, or a number is out of its range.
    """

    url: str
    timeout: float
    retries: int
    backoff: float
    concurrency: int
    token_variable: str
    max_answer_bytes: int

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
        self._check_channel()
        for field, (kind, interval, meaning) in _SETTINGS.items():
            check_setting(self.place, field, getattr(self, field), kind, interval, meaning)

    async def answer(self, question: Any, where: str) -> Any:
        """Post as often as need be, and return the decoded answer.

        Args:
            question: What is sent, as JSON.
            where: Who is asked for what, the beginning of errors and warnings.

        Raises:
            ConnectionError: The server could not be asked, after all repetitions; `RefusedError` where its status
                forbids them.
        """
        self._check_channel()  # again: the environment may have changed
        body = json.dumps(question).encode()
        for attempt in itertools.count():
            outcome = await self._attempt(body)
            if not isinstance(outcome, _Failure):
                return outcome
            reason = self.shown(outcome.reason)  # outside of the handler: the error's own text may hold the address
            if not outcome.is_repeated:
                message = f"{where} {reason}"
                raise ConnectionError(message) if outcome.status is None else RefusedError(message, outcome.status)
            if attempt == self.retries:
                raise ConnectionError(f"{where} {reason}, the last of {attempt + 1} times")
            pause = max(self.backoff * 2**attempt, min(outcome.asks_for, self.timeout))
            logger.warning(f"{where} {reason}: repetition {attempt + 1} of {self.retries} in {pause:g} s.")
            await asyncio.sleep(pause)

    async def _attempt(self, body: bytes) -> Any:
        try:
            answer = await post(self._address(), body, self._headers(), self.timeout, self.max_answer_bytes)
            return json.loads(answer, object_pairs_hook=_object)
        except urllib.error.HTTPError as error:
            reason = f"answered with the status {error.code} ({error.reason}){self._elsewhere(error)}"
            asks_for = _seconds(error.headers.get("Retry-After"))
            return _Failure(reason, error.code in _RETRIED_STATUS, asks_for, error.code)
        except TooLargeError as error:
            limit = f"max_answer_bytes={self.max_answer_bytes}"
            return _Failure(f"answered with {error}, of which {limit} are read", is_repeated=False)
        except RecursionError:
            return _Failure("answered with JSON that is nested too deeply", is_repeated=False)
        except (OSError, http.client.HTTPException) as error:
            return _Failure(f"did not answer ({getattr(error, 'reason', error)!r})")
        except ValueError as error:
            return _Failure(
                f"answered something that is no JSON ({error}): check the address, and what the server logs"
            )

    def shown(self, text: str) -> str:
        """Return a text in one visible line, without what nobody may see of the address, and without the token."""
        sent = self._authorization().rpartition(" ")[2]
        token = os.environ.get(self.token_variable, "")
        return visible(without(shown_addresses(text), {*secrets_of(self.url), sent, token}), one_line=True)

    def _elsewhere(self, error: urllib.error.HTTPError) -> str:
        location = error.headers.get("Location")
        if not 300 <= error.code < 400 or location is None:
            return ""
        place = shown_address(urllib.parse.urljoin(self.url, location))
        return (
            f"; redirects are not followed, so that no secret goes elsewhere: give the address {place} if you trust it"
        )

    def _check_channel(self) -> None:
        """Refuse to send a password or a token in the clear, but to this machine itself.

        Raises:
            ValueError: It would be.
        """
        parts = urllib.parse.urlsplit(self.url)
        if parts.scheme == "http" and self._authorization() and not _is_this_machine(str(parts.hostname)):
            has_user = "@" in parts.netloc
            secret = "the password in it" if has_user else f"the token of {self.token_variable}"
            without = "leave the password out" if has_user else f"unset {self.token_variable}"
            raise ValueError(
                f"url={self.place!r} is plain http, which shows {secret} to everybody on the way: use https, or a "
                f"tunnel to localhost, or {without}"
            )

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


def check_setting(place: str, field: str, value: Any, kind: type, interval: Interval, meaning: str) -> None:
    """Check a server's setting.

    Args:
        place: The address, as it may be shown.
        field: The setting's name.
        value: What it was set to.
        kind: Its type.
        interval: Its range.
        meaning: What it says.

    Raises:
        TypeError: It is of another type.
        ValueError: It is out of its range.
    """
    try:
        check_type(field, value, kind, meaning)
        check_range(field, value, interval, meaning)
    except (TypeError, ValueError) as error:
        raise type(error)(f"the endpoint {place}: {error}") from None


@dataclass(frozen=True)
class _Failure:
    """Why a request gave no answer, whether it is worth a repetition, and after how many seconds by the server."""

    reason: str
    is_repeated: bool = True
    asks_for: float = 0.0
    status: int | None = None


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the dict of an object of JSON; a key that stands there twice is an error."""
    found = dict(pairs)
    if len(found) < len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"an object with two values of the key {max(keys, key=keys.count)!r}")
    return found


def _seconds(retry_after: str | None) -> float:
    """Read the header `Retry-After`; a date counts as nothing asked for."""
    return float(retry_after) if retry_after is not None and retry_after.strip().isdecimal() else 0.0


def _encoded(userinfo: str) -> str:
    """Return `user:password` of an address as basic authentication sends it."""
    user, _, password = userinfo.partition(":")
    pair = f"{urllib.parse.unquote(user)}:{urllib.parse.unquote(password)}"
    return base64.b64encode(pair.encode()).decode()


def _is_this_machine(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")


def _has_valid_port(parts: urllib.parse.SplitResult) -> bool:
    try:
        return parts.port is None or parts.port > 0
    except ValueError:  # its text would show what stands there
        return False
