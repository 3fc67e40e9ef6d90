"""What a health check looks at: the logs of a run so far, and what of its arguments gives them meaning."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

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


class History:
    """The logs of training and of evaluations, in order.

    Args:
        logs: All logs of the run so far, as in `TrainerState.log_history`.
        run: What the figures are compared with.
    """

    def __init__(self, logs: Sequence[Log], run: Surroundings | None = None) -> None:
        self.run = run or Surroundings()
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
        return next((log[key] for log in self.updates if _is_number(log.get(key))), math.nan)

    def all(self, key: str) -> list[float]:
        """Return a metric of all logs that have it."""
        return [log[key] for log in self.updates if _is_number(log.get(key))]

    def of_policy(self, key: str) -> list[float]:
        """Return a metric of all logs that have it, but for those of critic warm-up, in which the policy stands."""
        return [log[key] for log in self.updates if _is_number(log.get(key)) and not log.get("val/critic_warmup")]

    def between(self, key: str, first: float, last: float) -> list[float]:
        """Return a metric of the logs from one step to another."""
        logs = (log for log in self.updates if _is_number(log.get(key)) and _is_number(log.get("step")))
        return [log[key] for log in logs if first <= log["step"] <= last]

    def stretches(self, key: str, length: int, count: int) -> list[list[float]]:
        """Return a metric of the last `count` stretches of `length` logs; nothing where there are fewer."""
        values = self.last(key, length * count)
        return [values[start : start + length] for start in range(0, len(values), length)]


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)
