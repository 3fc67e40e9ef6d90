"""What reward functions log themselves, through `log_metric` and `log_extra` of GRPO's convention."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from accelerate.utils import gather_object


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
        merged: dict[str, list[float]] = {}
        for of_one_rank in gather_object([own]):
            for name, numbers in of_one_rank.items():
                merged.setdefault(name, []).extend(numbers)
        return {name: sum(numbers) / len(numbers) for name, numbers in merged.items()}
