"""The logs of a run as health checks read them: newest, first and usual values of a metric."""

from __future__ import annotations

import bisect
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeGuard

from rlhf_ppo.reporting.judgements import JUDGED_RATE

Log = Mapping[str, Any]


@dataclass(frozen=True)
class RunContext:
    """Properties of a run that its metrics are compared with.

    Attributes:
        response_length: Longest response, tokens.
        max_grad_norm: Gradient norm at which gradients are clipped.
        num_episodes: Episodes of an update.
        can_end: Whether there is a stop token or a stop string.
        end_counts: Whether a missing stop token changes the score.
        judge: The evaluation metric that training does not see.
        clips_tokens: Whether the loss clips the ratios of tokens, not those of responses, most of which are clipped.
        reward_accuracy: Accuracy of the reward model on held-out pairs, if it was measured.
    """

    response_length: int = 53
    max_grad_norm: float = 1.0
    num_episodes: int = 64
    can_end: bool = True
    end_counts: bool = False
    judge: str = "eval_score"
    clips_tokens: bool = True
    reward_accuracy: float | None = None


class History:
    """The logs of training, of evaluations and of the judge, in order.

    Args:
        logs: All logs of the run so far, as in `TrainerState.log_history`.
        run: Properties of the run.
    """

    def __init__(self, logs: Sequence[Log], run: RunContext | None = None) -> None:
        self.run = run or RunContext()
        self._series: dict[str, _Series] = {}
        self.updates: list[Log] = []
        self.evaluations: list[Log] = []
        self.judgements: list[Log] = []
        for log in logs:
            self.add(log)

    def add(self, log: Log) -> None:
        """Append a log, if it is one of training, or holds a win rate or the metric that training does not see."""
        if "loss" in log:
            self.updates.append(log)
        elif is_number(log.get(JUDGED_RATE)):
            self.judgements.append(log)
        elif is_number(log.get(self.run.judge)) and is_number(log.get("step")):
            self.evaluations.append(log)

    def last(self, key: str, count: int) -> list[float]:
        """Return a metric of the last `count` logs, or an empty list if a value is missing."""
        values = [log[key] for log in self.updates[-count:] if is_number(log.get(key))]
        return values if len(values) == count else []

    def first(self, key: str) -> float:
        """Return a metric of the first log that has it, or NaN."""
        return self._read(key).first

    def largest(self, key: str) -> float:
        """Return the largest value of a metric in all logs, or minus infinity."""
        return self._read(key).largest

    def newest_and_usual(self, key: str) -> tuple[float, float, int]:
        """Return the newest value of a metric, the median of the earlier values, and their number.

        Logs of critic warm-up, in which the policy does not change, are left out.
        """
        series = self._read(key)
        values, number = series.of_policy, len(series.of_policy) - 1
        if number < 1:
            return series.latest, math.nan, max(number, 0)
        place = bisect.bisect_left(values, series.latest)

        def earlier(index: int) -> float:
            return values[index if index < place else index + 1]

        return series.latest, (earlier((number - 1) // 2) + earlier(number // 2)) / 2, number

    def between(self, key: str, first: float, last: float) -> list[float]:
        """Return a metric of the logs from one step to another."""
        found: list[float] = []
        for log in reversed(self.updates):
            if is_number(step := log.get("step")):
                if step < first:
                    break
                if step <= last and is_number(log.get(key)):
                    found.append(log[key])
        return found[::-1]

    def stretches(self, key: str, length: int, count: int) -> list[list[float]]:
        """Return a metric of the last `count` stretches of `length` logs, or an empty list if a value is missing."""
        values = self.last(key, length * count)
        return [values[start : start + length] for start in range(0, len(values), length)]

    def _read(self, key: str) -> _Series:
        series = self._series.setdefault(key, _Series())
        while series.num_read < len(self.updates):
            series.read(self.updates[series.num_read], key)
        return series


@dataclass
class _Series:
    """Running summary of a metric, so that a check does not read all logs again.

    Attributes:
        num_read: Number of logs read.
        first: The first value, or NaN.
        largest: The largest value.
        of_policy: The values outside critic warm-up, sorted.
        latest: The latest of these.
    """

    num_read: int = 0
    first: float = math.nan
    largest: float = -math.inf
    of_policy: list[float] = field(default_factory=list)
    latest: float = math.nan

    def read(self, log: Log, key: str) -> None:
        self.num_read += 1
        if not is_number(value := log.get(key)):
            return
        self.first = value if math.isnan(self.first) else self.first
        self.largest = max(self.largest, value)
        if not log.get("val/critic_warmup"):
            bisect.insort(self.of_policy, value)
            self.latest = value


def is_number(value: Any) -> TypeGuard[float]:
    """Return whether a value is a finite number."""
    return isinstance(value, int | float) and math.isfinite(value)
