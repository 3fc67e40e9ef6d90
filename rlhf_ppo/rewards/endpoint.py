"""Rewards from a server: prompts and responses go out as JSON, numbers come back.

The request is a POST of `application/json` with one entry per response in each list:

    {"prompts": [...], "completions": [...], "completion_ids": [[...], ...], "columns": {"<name>": [...], ...}}

The answer has the status 200 and one reward per response, in the same order: a number, null (not scored), or a list of
numbers, one for each of its `completion_ids`:

    {"rewards": [0.5, null, -1.0]}
"""

from __future__ import annotations

import asyncio
import json
import math
import urllib.parse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlhf_ppo.config.validation import Interval
from rlhf_ppo.rewards.asking import Server, check_setting

TOKEN_VARIABLE = "RLHF_PPO_REWARD_TOKEN"
"""The environment variable that holds the bearer token, unless another is named."""

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
        self.place = self._server.place
        check_setting(
            self.place, "batch_size", self.batch_size, int, Interval(1, math.inf), "most responses in one request"
        )
        parts = urllib.parse.urlsplit(self.url)
        self.__name__ = self.name or parts.path.strip("/").rpartition("/")[2] or str(parts.hostname)

    @property
    def _server(self) -> Server:
        return Server(
            self.url, self.timeout, self.retries, self.backoff, self.concurrency, self.token_variable,
            self.max_answer_bytes,
        )  # fmt: skip

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
        answer = await self._server.answer(self._question(table), where)
        rewards = answer.get("rewards") if isinstance(answer, dict) else None
        if not isinstance(rewards, list) or len(rewards) != len(rows):
            wanted = f'{{"rewards": [...]}} with {len(rows)} entries'
            raise ValueError(f"{where} answered {self._server.shown(f'{answer!r:.120}')}: it must answer {wanted}")
        return rewards

    def _question(self, table: Mapping[str, list[Any]]) -> dict[str, Any]:
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
        return {name: table[name] for name in fixed} | {"columns": columns}
