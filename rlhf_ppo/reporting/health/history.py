"""What a health check looks at: the logs of a run so far, and what of its arguments gives them meaning."""

from __future__ import annotations

import bisect
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeGuard

Log = Mapping[str, Any]


@dataclass(frozen=True)
class Surroundings:
    """What a run's figures are compared with.

    Attributes:
        response_length: Longest response, tokens.
        max_grad_norm: What gradients are clipped to.
        num_episodes: Episodes of an update.
        can_end: Whether there is a stop token or a stop string.
        end_counts: Whether the score of a response without one is changed.
        judge: The evaluation metric that training does not see.
        clips_tokens: Whether the ratio of a single token is clipped, not that of a response, of which most are.
    """

    response_length: int = 53
    max_grad_norm: float = 1.0
    num_episodes: int = 64
    can_end: bool = True
    end_counts: bool = False
    judge: str = "eval_score"
    clips_tokens: bool = True


@dataclass
class _Series:
    """A metric's logs so far, summed up so that a check of one log need not read all that came before.

    Attributes:
        num_read: Logs that are counted in.
        first: The first value; NaN before.
        largest: The largest value.
        of_policy: The values outside critic warm-up, in ascending order.
        latest: The last of these.
    """

    num_read: int = 0
    first: float = math.nan
    largest: float = -math.inf
    of_policy: list[float] = field(default_factory=list)
    latest: float = math.nan

    def read(self, log: Log, key: str) -> None:
        self.num_read += 1
        if not _is_number(value := log.get(key)):
            return
        self.first = value if math.isnan(self.first) else self.first
        self.largest = max(self.largest, value)
        if not log.get("val/critic_warmup"):
            bisect.insort(self.of_policy, value)
            self.latest = value


class History:
    """The logs of training and of evaluations, in order.

    Args:
        logs: All logs of the run so far, as in `TrainerState.log_history`.
        run: What the figures are compared with.
    """

    def __init__(self, logs: Sequence[Log], run: Surroundings | None = None) -> None:
        self.run = run or Surroundings()
        self._series: dict[str, _Series] = {}
        self.updates: list[Log] = []
        self.evaluations: list[Log] = []
        for log in logs:
            self.add(log)

    def add(self, log: Log) -> None:
        """Append a log, if it is one of training or one that holds the judge's metric."""
        if "loss" in log:
            self.updates.append(log)
        elif _is_number(log.get(self.run.judge)) and _is_number(log.get("step")):
            self.evaluations.append(log)

    def last(self, key: str, count: int) -> list[float]:
        """Return a metric of the last `count` logs; nothing where one of them has none, or there are fewer."""
        values = [log[key] for log in self.updates[-count:] if _is_number(log.get(key))]
        return values if len(values) == count else []

    def first(self, key: str) -> float:
        """Return a metric of the first log that has it, or NaN."""
        return self._read(key).first

    def largest(self, key: str) -> float:
        """Return the largest value of a metric in all logs, or minus infinity."""
        return self._read(key).largest

    def newest_and_usual(self, key: str) -> tuple[float, float, int]:
        """Return the newest value of a metric, the median of those before it, and how many these are.

        Logs of critic warm-up, in which the policy does not change, are left out.
        """
        series = self._read(key)
        values, number = series.of_policy, len(series.of_policy) - 1
        if number < 1:
            return series.latest, math.nan, max(number, 0)
        place = bisect.bisect_left(values, series.latest)

        def before(index: int) -> float:
            return values[index if index < place else index + 1]

        return series.latest, (before((number - 1) // 2) + before(number // 2)) / 2, number

    def _read(self, key: str) -> _Series:
        series = self._series.setdefault(key, _Series())
        while series.num_read < len(self.updates):
            series.read(self.updates[series.num_read], key)
        return series

    def between(self, key: str, first: float, last: float) -> list[float]:
        """Return a metric of the logs from one step to another."""
        found: list[float] = []
        for log in reversed(self.updates):
            if _is_number(step := log.get("step")):
                if step < first:
                    break
                if step <= last and _is_number(log.get(key)):
                    found.append(log[key])
        return found[::-1]

    def stretches(self, key: str, length: int, count: int) -> list[list[float]]:
        """Return a metric of the last `count` stretches of `length` logs; nothing where there are fewer."""
        values = self.last(key, length * count)
        return [values[start : start + length] for start in range(0, len(values), length)]


def _is_number(value: Any) -> TypeGuard[float]:
    return isinstance(value, int | float) and math.isfinite(value)
