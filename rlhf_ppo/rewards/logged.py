"""Metrics that reward functions log themselves, through the `log_metric` argument of GRPO's convention."""

from __future__ import annotations

from dataclasses import dataclass, field

from accelerate.utils import gather_object


@dataclass
class LoggedMetrics:
    """Collects `log_metric(name, value)` calls between two readings.

    Attributes:
        values: This rank's values by name.
    """

    values: dict[str, list[float]] = field(default_factory=dict)

    def log(self, name: str, value: float) -> None:
        """Note one value."""
        self.values.setdefault(name, []).append(float(value))

    def drain(self) -> dict[str, float]:
        """Return the means over calls and ranks, and forget the values; all ranks must call this together."""
        own, self.values = self.values, {}
        merged: dict[str, list[float]] = {}
        for of_one_rank in gather_object([own]):
            for name, numbers in of_one_rank.items():
                merged.setdefault(name, []).extend(numbers)
        return {name: sum(numbers) / len(numbers) for name, numbers in merged.items()}
