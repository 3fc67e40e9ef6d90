"""Win rates over seeds, and intervals."""

from __future__ import annotations

import pytest

from rlhf_ppo.reporting.judgements import SeedWinRates, student_quantile, wilson_interval


def test_the_mean_over_seeds_has_a_standard_error() -> None:
    found = SeedWinRates([3, 4, 9], [0.6, 0.7, 0.8], [(0.5, 0.7), (0.61, 0.79), (0.7, 0.9)], [0.55, None, 0.75])

    assert list(found.lines()) == [
        "Win rates:",
        "  seed 3: 60.00% (95% interval 50.00 to 70.00), 55.00% at equal length",
        "  seed 4: 70.00% (95% interval 61.00 to 79.00)",
        "  seed 9: 80.00% (95% interval 70.00 to 90.00), 75.00% at equal length",
        "  mean of 3 seeds: 70.00%, standard error 5.77",  # .1 / sqrt(3)
    ]
    said = found.as_json()
    assert said["win_rate"] == pytest.approx(0.7) and said["standard_error"] == pytest.approx(0.1 / 3**0.5)
    assert said["seeds"][1] == {"seed": 4, "win_rate": 0.7, "interval": (0.61, 0.79), "length_controlled": None}


def test_one_seed_has_no_standard_error() -> None:
    found = SeedWinRates([0], [0.5], [(0.4, 0.6)], [None])

    assert found.standard_error is None and len(list(found.lines())) == 2


@pytest.mark.parametrize(
    ("share", "count", "low", "high"), [(0.5, 100, 0.4038, 0.5962), (1.0, 10, 0.7225, 1.0), (0.0, 10, 0.0, 0.2775)]
)
def test_the_interval_is_wilsons(share: float, count: int, low: float, high: float) -> None:
    assert wilson_interval(share, count) == pytest.approx((low, high), abs=1e-4)


@pytest.mark.parametrize(("freedom", "expected"), [(1, 12.706), (10, 2.228), (11, 2.201), (20, 2.086), (100, 1.984)])
def test_the_quantile_is_students(freedom: int, expected: float) -> None:
    assert student_quantile(freedom) == pytest.approx(expected, abs=3e-3)
