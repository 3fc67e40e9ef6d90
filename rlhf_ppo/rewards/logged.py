"""What reward functions log themselves, through `log_metric` and `log_extra` of GRPO's convention."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from accelerate.utils import gather_object

from rlhf_ppo.processes.collectives import on_any_rank
from rlhf_ppo.rewards.returned import WrongRewardError
from rlhf_ppo.terminal.foreign import visible

LogMetric = Callable[[str, float], None]
LogExtra = Callable[[str, list[Any]], None]


@dataclass
class LoggedByFunctions:
    """Collects `log_metric(name, value)` and `log_extra(column, values)` calls between two readings.

    Attributes:
        values: This rank's metrics by name.
        columns: Columns for the sample table, one value per row of the last batch.
    """

    is_used: bool = True
    values: dict[str, list[float]] = field(default_factory=dict)
    columns: dict[str, list[Any]] = field(default_factory=dict)

    def log_extra(self, column: str, values: Sequence[Any]) -> None:
        """Note a column of the batch that is being scored."""
        self.columns[column] = list(values)

    def drain_columns(self) -> dict[str, list[Any]]:
        """Return this rank's columns of the last batch and forget them."""
        columns, self.columns = self.columns, {}
        return columns

    def log_metric(self, name: str, value: float) -> None:
        """Note one value."""
        self.values.setdefault(name, []).append(float(value))

    def forget(self) -> None:
        """Forget all that was noted."""
        self.values, self.columns = {}, {}

    def drain(self) -> dict[str, float]:
        """Return the metrics' means over calls and ranks and forget all; every rank must call this together."""
        self.columns = {}
        if not self.is_used:
            return {}
        own, self.values = self.values, {}
        if not on_any_rank(bool(own)):
            return {}
        merged: dict[str, list[float]] = {}
        for of_one_rank in gather_object([own]):
            for name, numbers in of_one_rank.items():
                merged.setdefault(name, []).extend(numbers)
        return {name: sum(numbers) / len(numbers) for name, numbers in merged.items()}


@dataclass(frozen=True)
class CheckedLog:
    """`log_metric` and `log_extra` as a reward function gets them, which refuse at the call what cannot be logged.

    Attributes:
        function: The reward function's name.
        num_rows: Rows of the batch that it scores.
        metric: Takes the metrics.
        extra: Takes the columns.
    """

    function: str
    num_rows: int
    metric: LogMetric
    extra: LogExtra

    def log_metric(self, name: str, value: float) -> None:
        """Log one number.

        Raises:
            WrongRewardError: The name is no text, or the value no number that a float holds.
        """
        name = self._name("log_metric", name)
        self.metric(name, self._float("log_metric", name, value))

    def log_extra(self, column: str, values: Sequence[Any]) -> None:
        """Log a column of the sample table.

        Raises:
            WrongRewardError: The name is no text, there is not one value for each row, or one cannot be written.
        """
        column = self._name("log_extra", column)
        if isinstance(values, str | bytes) or not hasattr(values, "__iter__"):
            raise self._wrong(
                "log_extra", column, values, f"pass a list of {self.num_rows} values, one per completion"
            )
        listed = list(values)
        if len(listed) != self.num_rows:
            fix = f"pass one value per completion, None where there is none; there are {self.num_rows} completions"
            raise self._wrong("log_extra", column, values, f"it has {len(listed)} values: {fix}")
        for value in listed:
            if isinstance(value, int):
                self._float("log_extra", column, value)
            elif value is not None and not isinstance(value, float):
                self._encodable("log_extra", column, str(value))
        self.extra(column, listed)

    def _name(self, argument: str, name: Any) -> str:
        if not isinstance(name, str) or not name:
            raise self._wrong(argument, name, None, "pass a text as the name")
        self._encodable(argument, name, name)
        return visible(name, one_line=True)

    def _float(self, argument: str, name: str, value: Any) -> float:
        try:
            return float(value)
        except (TypeError, ValueError):
            raise self._wrong(argument, name, value, "pass one number") from None
        except OverflowError:
            raise self._wrong(argument, name, value, "pass numbers below 1e308, which a float holds") from None

    def _encodable(self, argument: str, name: str, text: str) -> None:
        try:
            text.encode()
        except UnicodeEncodeError:
            fix = "it holds half of a surrogate pair, which no file takes: pass text.encode(errors='replace').decode()"
            raise self._wrong(argument, name, text, fix) from None

    def _wrong(self, argument: str, name: Any, value: Any, fix: str) -> WrongRewardError:
        return WrongRewardError(
            f"the reward function {self.function!r} called {argument}({_shown(name)}, {_shown(value)}): {fix}"
        )


def _shown(value: Any) -> str:
    try:
        return f"{value!r:.60}"
    except ValueError:  # Python writes no integer of more than 4300 digits
        return "an integer of thousands of digits"
