"""Win rates, their intervals, and the rate at equal length."""

from __future__ import annotations

import numpy as np
import pytest

from rlhf_ppo.reporting.win_rate import WinRate, agreement, length_controlled_rate


def test_a_tie_counts_half_and_a_failed_verdict_not_at_all() -> None:
    found = WinRate.of([0.2, -1.0, 0.0, 0.9, None], lengths=[3, 3, 3, 3, 3], others=[3, 3, 3, 3, 3])

    assert found == WinRate(wins=2, losses=1, ties=1, failed=1)
    assert found.rate == 2.5 / 4
    assert found.length_controlled == pytest.approx(2.5 / 4, abs=1e-4)  # where lengths say nothing
    assert str(found).startswith("Model win rate: 62.5% (95% interval ")
    assert "; 4 judged: 2 wins, 1 losses, 1 ties; 1 failed verdicts)\nLength-controlled win rate: 62.5%" in str(found)


def test_lengths_are_those_of_the_rows_that_were_judged() -> None:
    ours, theirs = [1, 90, 2, 3], [50, 1, 2, 50]
    found = WinRate.of([1.0, None, -1.0, 1.0], lengths=ours, others=theirs)
    expected = WinRate.of([1.0, -1.0, 1.0], lengths=[1, 2, 3], others=[50, 2, 50])
    assert found.length_controlled == expected.length_controlled != pytest.approx(2 / 3, abs=0.01)


def test_few_prompts_prove_nothing_and_ties_narrow_the_interval_of_many() -> None:
    """A sign test of 4 wins in 4 has p = .125. Of many prompts: mean and standard error of the outcomes."""
    assert WinRate(wins=4, losses=0, ties=1, failed=0).interval()[0] < 0.5 < WinRate(9, 0, 1, 0).interval()[0]
    outcomes = np.repeat([1, 0, 0.5], [200, 50, 150])
    half = 1.96 * outcomes.std() / 20
    assert WinRate(200, 50, 150, 0).interval() == pytest.approx((0.6875 - half, 0.6875 + half), abs=0.005)


def test_the_orders_agree_where_both_prefer_the_same_response_or_none() -> None:
    orders = [(1.0, 0.2), (-1.0, -1.0), (0.0, 0.0), (1.0, -1.0), (1.0, 0.0), (None, 1.0), (None, None)]

    assert agreement(orders) == 3 / 5 and agreement([(None, 1.0)]) is None
    assert str(WinRate.of([1.0], [1], [1], [(1.0, 1.0)])).endswith("\nBoth orders agree on 100.0% of the judged pairs")
    assert "orders" not in str(WinRate.of([1.0], [1], [1]))


def test_the_rate_at_equal_length_is_the_intercept_of_a_logistic_regression() -> None:
    """Newton's method on the same likelihood and prior."""
    generator = np.random.default_rng(0)
    differences = generator.integers(-400, 600, size=300)
    x = np.tanh(differences / differences.std())
    won = (generator.random(300) < 1 / (1 + np.exp(-(-0.4 + 1.5 * x)))).astype(float)
    won[:30] = 0.5

    weights, design = np.zeros(2), np.stack([np.ones(300), x], axis=1)
    for _ in range(50):
        p = 1 / (1 + np.exp(-design @ weights))
        gradient = design.T @ (p - won) + np.array([0, weights[1]])
        hessian = design.T @ (design * (p * (1 - p))[:, None]) + np.diag([0, 1])
        weights -= np.linalg.solve(hessian, gradient)
    assert weights[1] > 1
    rate = length_controlled_rate(won.tolist(), differences.tolist())
    assert rate == pytest.approx(1 / (1 + np.exp(-weights[0])), abs=1e-5)
    assert rate < won.mean() - 0.05
