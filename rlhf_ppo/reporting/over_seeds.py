"""The win rates of policies that were trained with different seeds, together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class SeedWinRates:
    """The win rates of policies that differ in PPO's seed.

    Attributes:
        seeds: Their seeds.
        rates: Share of prompts won by each, in [0, 1].
        intervals: Low and high end of each rate's interval over prompts.
        length_controlled: Each rate at equal length, or None.
    """

    seeds: Sequence[int]
    rates: Sequence[float]
    intervals: Sequence[Sequence[float]]
    length_controlled: Sequence[float | None]

    @property
    def mean(self) -> float:
        """Mean over seeds."""
        return float(np.mean(self.rates))

    @property
    def standard_error(self) -> float | None:
        """Standard deviation over seeds (`n - 1` in its denominator), divided by `sqrt(n)`; None of one seed."""
        count = len(self.rates)
        return float(np.std(self.rates, ddof=1) / np.sqrt(count)) if count > 1 else None

    def lines(self) -> Iterator[str]:
        """Yield a line for each seed, and one for all."""
        yield "Win rates:"
        for seed, rate, (low, high), controlled in zip(
            self.seeds, self.rates, self.intervals, self.length_controlled, strict=True
        ):
            equal = "" if controlled is None else f", {100 * controlled:.2f}% at equal length"
            yield f"  seed {seed}: {100 * rate:.2f}% (95% interval {100 * low:.2f} to {100 * high:.2f}){equal}"
        if (error := self.standard_error) is not None:
            yield f"  mean of {len(self.rates)} seeds: {100 * self.mean:.2f}%, standard error {100 * error:.2f}"

    def as_json(self) -> dict[str, Any]:
        """Return the figures."""
        columns = zip(self.seeds, self.rates, self.intervals, self.length_controlled, strict=True)
        names = ("seed", "win_rate", "interval", "length_controlled")
        by_seed = [dict(zip(names, column, strict=True)) for column in columns]
        return {"win_rate": self.mean, "standard_error": self.standard_error, "seeds": by_seed}
