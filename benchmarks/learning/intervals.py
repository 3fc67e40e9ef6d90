"""Means and differences over seeds with 95% intervals of Student's t."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import fmean, stdev
from typing import NamedTuple

import numpy as np

LEVEL = 0.95


class Estimate(NamedTuple):
    """A mean or a difference.

    Attributes:
        value: The estimate.
        half: Half the width of its interval; NaN without a degree of freedom.
        p: The two-sided p-value of its being 0; NaN without a degree of freedom.
        how: `paired`, `Welch` or empty.
    """

    value: float
    half: float
    p: float
    how: str = ""

    def shown(self, digits: int = 3, signed: bool = False) -> str:
        """Print the estimate with its interval in brackets."""
        sign = "+" if signed else ""
        value = f"{self.value:{sign}.{digits}f}"
        if math.isnan(self.half):
            return value
        low, high = self.value - self.half, self.value + self.half
        interval = f"[{low:{sign}.{digits}f}, {high:{sign}.{digits}f}]"
        return f"{value} {interval}{f' {self.how}' if self.how else ''}"


def share_within(t: float, degrees: float) -> float:
    """Return `P(|T| < t)` of Student's t by the trapezoidal rule: the integral of `cos(x)^(degrees - 1)`."""
    angles, shares = _shares(degrees)
    return float(np.interp(math.atan(t / math.sqrt(degrees)), angles, shares))


def t_of(share: float, degrees: float) -> float:
    """Return the `t` with `P(|T| < t) = share`."""
    angles, shares = _shares(degrees)
    return math.sqrt(degrees) * math.tan(float(np.interp(share, shares, angles)))


def _shares(degrees: float) -> tuple[np.ndarray, np.ndarray]:
    angles = np.linspace(0, math.pi / 2, 100_001)
    density = np.cos(angles).clip(0) ** (degrees - 1)
    sums = np.concatenate(([0.0], np.cumsum((density[1:] + density[:-1]) / 2)))
    return angles, sums / sums[-1]


def estimate(value: float, error: float, degrees: float, how: str = "") -> Estimate:
    """Return an estimate with its interval, given its standard error and degrees of freedom."""
    if degrees <= 0 or math.isnan(error):
        return Estimate(value, math.nan, math.nan, how)
    p = 1 - share_within(abs(value) / error, degrees) if error > 0 else float(value == 0)
    return Estimate(value, t_of(LEVEL, degrees) * error, p, how)


def mean(values: Sequence[float]) -> Estimate:
    """Return the mean over seeds."""
    number = len(values)
    error = stdev(values) / math.sqrt(number) if number > 1 else math.nan
    return estimate(fmean(values), error, number - 1)


def difference(ours: Mapping[int, float], theirs: Mapping[int, float]) -> Estimate:
    """Return the mean difference between values by seed.

    Paired over the seeds in common where these are all of one side and at least two; else Welch's, with the
    Welch-Satterthwaite degrees of freedom.

    Args:
        ours: Values by seed.
        theirs: Those to subtract.
    """
    common = sorted(ours.keys() & theirs.keys())
    if len(common) == min(len(ours), len(theirs)) >= 2:
        return mean([ours[seed] - theirs[seed] for seed in common])._replace(how="paired")
    value = fmean(ours.values()) - fmean(theirs.values())
    if min(len(ours), len(theirs)) < 2:
        return Estimate(value, math.nan, math.nan)
    parts = [stdev(each.values()) ** 2 / len(each) for each in (ours, theirs)]
    if sum(parts) == 0:
        return estimate(value, 0.0, len(ours) + len(theirs) - 2, "Welch")
    each = zip(parts, (ours, theirs), strict=True)
    degrees = sum(parts) ** 2 / sum(part**2 / (len(side) - 1) for part, side in each)
    return estimate(value, math.sqrt(sum(parts)), degrees, "Welch")


def at_equal(ours: Sequence[tuple[float, float]], theirs: Sequence[tuple[float, float]]) -> Estimate | None:
    """Return the difference in `y` between runs at the same `x`, by analysis of covariance.

        y = a + d [is ours] + b x        by least squares over the runs of both; d is returned

    Args:
        ours: `(x, y)` of each run.
        theirs: Likewise.

    Returns:
        The difference; None where the ranges of `x` do not overlap, so that the line would be extrapolated.
    """
    xs = [[x for x, _ in side] for side in (ours, theirs)]
    if max(map(min, xs)) > min(map(max, xs)):
        return None
    runs = [(1.0, float(mine), x) for mine, side in enumerate((theirs, ours)) for x, _ in side]
    design, y = np.array(runs), np.array([y for _, y in (*theirs, *ours)])
    inverse = np.linalg.pinv(design.T @ design)
    fitted = inverse @ design.T @ y
    degrees = len(runs) - int(np.linalg.matrix_rank(design))
    variance = ((y - design @ fitted) ** 2).sum() / degrees if degrees > 0 else math.nan
    return estimate(float(fitted[1]), math.sqrt(variance * inverse[1, 1]), degrees)
