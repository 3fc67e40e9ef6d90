"""Win rates over seeds, and intervals."""

from __future__ import annotations

import pandas as pd
import pytest

from rlhf_ppo.reporting.judgements import Judged, SeedWinRates, over_seeds, student_quantile, wilson_interval


def test_the_mean_over_seeds_has_a_standard_error() -> None:
    found = SeedWinRates([0.6, 0.7, 0.8], [(0.5, 0.7), (0.61, 0.79), (0.7, 0.9)], [0.55, None, 0.75])

    assert found.mean == pytest.approx(0.7) and found.standard_error == pytest.approx(0.1 / 3**0.5)
    assert SeedWinRates([0.5], [(0.4, 0.6)], [None]).standard_error is None


def test_runs_that_were_judged_alike_have_a_mean_over_seeds() -> None:
    def judged(name: str, rate: float, seed: int, judge: str = "a", kind: str = "", sampling: int = 0) -> Judged:
        options = {"seed": sampling, "model": f"runs/{name}", "judge_model": judge}
        run = {"seed": seed, "without_seed": kind}
        figures = {"win_rate": rate, "interval": [rate - 0.1, rate + 0.1], "options": options, "run": run}
        return Judged(name, figures, pd.DataFrame())

    first, second = judged("one", 0.6, 0), judged("two", 0.8, 1)
    others = [judged("three", 0.1, 2, judge="b"), judged("four", 0.1, 3, kind="another kl_coef")]
    (found,) = over_seeds([first, second, *others])
    assert found == {"names": ["one", "two"], "mean": pytest.approx(0.7), "standard_error": pytest.approx(0.1)}
    assert over_seeds([first, judged("again", 0.8, 0, sampling=1)]) == []


@pytest.mark.parametrize(
    ("share", "count", "low", "high"), [(0.5, 100, 0.4038, 0.5962), (1.0, 10, 0.7225, 1.0), (0.0, 10, 0.0, 0.2775)]
)
def test_the_interval_is_wilsons(share: float, count: int, low: float, high: float) -> None:
    assert wilson_interval(share, count) == pytest.approx((low, high), abs=1e-4)


@pytest.mark.parametrize(("freedom", "expected"), [(1, 12.706), (10, 2.228), (11, 2.201), (20, 2.086), (100, 1.984)])
def test_the_quantile_is_students(freedom: int, expected: float) -> None:
    assert student_quantile(freedom) == pytest.approx(expected, abs=3e-3)
