"""Clip ranges, sequence ratios, aggregations, lambdas and controllers of the recipes against numbers by hand."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_allclose
from torch import Tensor

from rlhf_ppo.algorithm.advantages import AdaptiveKLController, check_coefficient, gae, length_adaptive_lam
from rlhf_ppo.algorithm.losses import (
    PolicyLoss,
    aggregation_weights,
    clipped_policy_loss,
    clipped_value_loss,
    imitation_weights,
    masked_ratio_policy_loss,
    sequence_clipped_policy_loss,
    token_mean,
    weight_clipped_policy_loss,
)


def of_ratios(ratios: list[float], advantages: list[float], **how: Any) -> tuple[PolicyLoss, Tensor]:
    """Loss of tokens with these ratios, and its gradient by their log-probabilities."""
    logprobs = torch.tensor(ratios).log().requires_grad_()
    result = clipped_policy_loss(logprobs, torch.zeros(len(ratios)), torch.tensor(advantages), 0.2, **how)
    result.loss.sum().backward()
    assert logprobs.grad is not None
    return result, logprobs.grad


def test_clip_higher_leaves_better_tokens_more_room_above_and_none_below() -> None:
    result, gradient = of_ratios([1.25, 1.3, 1.25, 0.75, 0.75], [2.0, 2.0, -2.0, -2.0, 2.0], cliprange_high=0.28)
    assert_allclose(result.loss.detach(), [-2.5, -2.56, 2.5, 1.6, -1.5], rtol=1e-6)
    assert_allclose(gradient, [-2.5, 0, 2.5, 0, -1.5], rtol=1e-6)
    assert result.clipped.tolist() == [False, True, False, True, False]


def test_dual_clip_bounds_the_loss_of_worse_tokens_alone() -> None:
    result, gradient = of_ratios([5.0, 2.5, 0.5, 5.0, 0.5], [-2.0, -2.0, -2.0, 2.0, 2.0], dual_clip=3.0)
    assert_allclose(result.loss.detach(), [6.0, 5.0, 1.6, -2.4, -1.0], rtol=1e-6)
    assert_allclose(gradient, [0, 5.0, 0, 0, -1.0], rtol=1e-6)
    assert result.clipped.tolist() == [True, False, True, True, False]


def test_without_a_range_values_are_not_clipped() -> None:
    values = torch.tensor([5.0, 0.1], requires_grad=True)
    result = clipped_value_loss(values, torch.zeros(2), torch.ones(2), None)
    result.loss.sum().backward()
    assert_allclose(result.loss.detach(), [8.0, 0.405], rtol=1e-6)
    assert_allclose(values.grad, [4.0, -0.9], rtol=1e-6)
    assert not result.clipped.any()


MASK = torch.tensor([[True, True, False, True], [True, False, False, False]])


def test_a_responses_ratio_is_the_geometric_mean_of_its_tokens() -> None:
    logprobs = torch.tensor([[-1.0, -2.0, math.nan, -0.5], [-1.0, 9.0, 9.0, 9.0]], requires_grad=True)
    old = torch.tensor([[-1.1, -2.1, -1.0, -0.4], [-1.4, 0.0, 0.0, 0.0]])
    advantages = torch.tensor([[2.0, -1.0, 5.0, 3.0], [1.0, 5.0, 5.0, 5.0]])
    result = sequence_clipped_policy_loss(logprobs, old, advantages, MASK, 0.3, 0.4, torch.full((2, 4), 0.5))
    token_mean(result.loss, MASK, 1).backward()
    first, second = math.exp(0.1 / 3), math.exp(0.4)
    assert_allclose(result.ratio.detach()[MASK], [first, first, first, second], rtol=1e-5)
    expected = [-first, 0.5 * first, -1.5 * first, -0.5 * 1.4]
    assert_allclose(result.loss.detach()[MASK], expected, rtol=1e-5)
    assert result.clipped[MASK].tolist() == [False, False, False, True]
    assert logprobs.grad is not None
    assert_allclose(logprobs.grad[MASK], [*expected[:3], 0], rtol=1e-5)


def test_where_advantages_are_equal_the_gradient_is_that_of_the_responses_ratio() -> None:
    logprobs, old = torch.tensor([[-1.0, -2.0, -0.5]]), torch.tensor([[-1.1, -2.1, -0.4]])
    ours, theirs = logprobs.clone().requires_grad_(), logprobs.clone().requires_grad_()
    mask = torch.ones(1, 3, dtype=torch.bool)
    sequence_clipped_policy_loss(ours, old, torch.full((1, 3), 2.0), mask, 0.1).loss.mean().backward()
    (-2.0 * (theirs - old).mean().exp()).backward()
    assert_allclose(ours.grad, theirs.grad, rtol=1e-5)


def test_clipped_weights_leave_every_token_its_gradient() -> None:
    logprobs = torch.tensor([-1.0, -1.0, -3.0], requires_grad=True)
    old = torch.tensor([-1.0, -2.0, -2.0])
    result = weight_clipped_policy_loss(
        logprobs, old, torch.tensor([2.0, 2.0, -1.0]), 1.5, torch.tensor([1.0, 0.5, 1])
    )
    result.loss.sum().backward()
    small = math.exp(-1)
    assert_allclose(result.loss.detach(), [2.0, 1.5, -3 * small], rtol=1e-6)
    assert_allclose(logprobs.grad, [-2.0, -1.5, small], rtol=1e-6)
    assert result.clipped.tolist() == [False, False, False]
    assert result.figures["policy/weight_clipfrac_avg"].tolist() == [0.0, 1.0, 0.0]
    assert_allclose(result.ratio, [1.0, math.e, small], rtol=1e-6)


def test_dis_drops_what_leaves_the_trust_region_whatever_the_sign() -> None:
    """Ratios 1, 1.5, 2.5, .5, .1 with low .8 and high 1: the third and the last are outside."""
    logprobs = torch.tensor([1.0, 1.5, 2.5, 0.5, 0.1]).log().requires_grad_()
    result = masked_ratio_policy_loss(
        logprobs,
        torch.zeros(5),
        torch.tensor([2.0, -1.0, -3.0, 4.0, 5.0]),
        0.8,
        1.0,
        torch.tensor([1.0, 0.5, 1, 1, 1]),
    )
    result.loss.sum().backward()
    assert_allclose(result.loss.detach(), [-2.0, 0.75, 0.0, -2.0, 0.0], rtol=1e-6)
    assert_allclose(logprobs.grad, [-2.0, 0.75, 0.0, -2.0, 0.0], rtol=1e-6)
    assert result.clipped.tolist() == [False, False, True, False, True]


LOSSES_OF_TOKENS: dict[str, Callable[..., PolicyLoss]] = {
    "ppo": lambda new, old, advantages: clipped_policy_loss(new, old, advantages, 0.2),
    "clip higher": lambda new, old, advantages: clipped_policy_loss(new, old, advantages, 0.2, None, 0.6),
    "dual clip": lambda new, old, advantages: clipped_policy_loss(new, old, advantages, 0.2, dual_clip=1.5),
    "gspo": lambda new, old, advantages: sequence_clipped_policy_loss(
        new, old, advantages, torch.ones_like(new, dtype=torch.bool), 0.1
    ),
    "dis": lambda new, old, advantages: masked_ratio_policy_loss(new, old, advantages, 0.8, 1.0),
    "cispo": lambda new, old, advantages: weight_clipped_policy_loss(new, old, advantages, 1.2),
}


@pytest.mark.parametrize("name", LOSSES_OF_TOKENS)
def test_clipped_are_the_tokens_without_a_gradient(name: str) -> None:
    """Ratios from 0.2 to 5 with advantages of both signs, 40 responses of 5 tokens."""
    generator = torch.Generator().manual_seed(0)
    old, new = (torch.empty(40, 5).uniform_(-1.6, 0.0, generator=generator) for _ in range(2))
    advantages = torch.randn(40, 5, generator=generator)
    new.requires_grad_()
    result = LOSSES_OF_TOKENS[name](new, old, advantages)
    result.loss.sum().backward()
    assert new.grad is not None and torch.equal(result.clipped, new.grad == 0)
    assert bool(result.clipped.any()) == (name != "cispo") and not result.clipped.all()


# ---- Aggregation ----

LOSSES = torch.tensor([[3.0, 6.0, math.nan, 9.0], [2.0, 7.0, 7.0, 7.0], [5.0, 5.0, 5.0, 5.0]])
OF_THREE = torch.cat([MASK, torch.zeros(1, 4, dtype=torch.bool)])  # the last response has no score
AGGREGATED = {"token": 20 / 4, "sequence": (6 + 2) / 2, "constant": 20 / (2 * 5)}


@pytest.mark.parametrize("aggregation", AGGREGATED)
@pytest.mark.parametrize("cuts", [[[0, 1, 2]], [[1, 2], [0]], [[2], [0], [1]]], ids=str)
def test_shares_of_any_cut_add_up_to_the_aggregated_loss(aggregation: str, cuts: list[list[int]]) -> None:
    """Whether ranks or micro-batches make it."""
    num_responses = sum(OF_THREE[rows].any(dim=1).sum() for rows in cuts)
    total = 0.0
    for rows in cuts:
        weights = aggregation_weights(OF_THREE[rows], aggregation, 4.0, 5, lambda own: num_responses)
        losses = LOSSES[rows] if weights is None else LOSSES[rows] * weights
        total += float(token_mean(losses, OF_THREE[rows], 4.0))
    assert total == pytest.approx(AGGREGATED[aggregation])


@pytest.mark.parametrize("aggregation", AGGREGATED)
def test_a_process_alone_counts_only_responses_with_loss_tokens(aggregation: str) -> None:
    weights = aggregation_weights(OF_THREE, aggregation, 4.0, 5)
    losses = LOSSES if weights is None else LOSSES * weights
    assert float(token_mean(losses, OF_THREE, 4.0)) == pytest.approx(AGGREGATED[aggregation])


def test_an_unknown_aggregation_is_an_error() -> None:
    with pytest.raises(ValueError, match="loss_aggregation='mean' is unknown"):
        aggregation_weights(MASK, "mean", 4.0, 5)


# ---- Lambdas ----


@pytest.mark.parametrize(
    ("gamma", "lam", "returns"),
    [(1.0, 1.0, [6.0, 5.0, 3.0]), (0.5, 1.0, [2.75, 3.5, 3.0]), (1.0, 0.5, [3.625, 4.25, 3.0])],
)
def test_returns_are_those_that_others_publish(gamma: float, lam: float, returns: list[float]) -> None:
    rewards, values = torch.tensor([[1.0, 2.0, 3.0]] * 2), torch.tensor([[0.5, 1.0, 1.5]] * 2)
    mask = torch.ones(2, 3, dtype=torch.bool)
    assert_allclose(gae(rewards, values, mask, gamma, lam)[1], [returns] * 2)
    of_rows = gae(rewards, values, mask, gamma, torch.tensor([lam, 0.0]))
    assert_allclose(of_rows[1][0], returns)
    assert_allclose(of_rows[1][1], gae(rewards, values, mask, gamma, 0.0)[1][1])


def test_a_longer_response_has_a_larger_lambda() -> None:
    mask = torch.zeros(4, 100, dtype=torch.bool)
    for row, length in enumerate((100, 40, 20, 5)):
        mask[row, ::1][:length] = True
    assert_allclose(length_adaptive_lam(mask, 0.05), [0.8, 0.5, 0.0, 0.0], atol=1e-6)
    assert np.all(np.diff(length_adaptive_lam(mask, 0.2)) < 0.1)


# ---- Adaptive KL ----


@pytest.mark.parametrize(
    ("kl", "episodes", "coef"), [(12.0, 100, 0.204), (6.6, 100, 0.202), (0.0, 100, 0.196), (12.0, 10, 0.2004)]
)
def test_the_coefficient_moves_by_at_most_a_fifth_of_the_share_of_the_horizon(
    kl: float, episodes: int, coef: float
) -> None:
    controller = AdaptiveKLController(0.2, target=6.0, horizon=1000)
    controller.update(kl, episodes)
    assert controller.coef == pytest.approx(coef, rel=1e-9)


positive = st.floats(min_value=0, exclude_min=True, allow_infinity=False)
anything = st.floats()


@given(positive, positive, st.floats(min_value=1, allow_infinity=False), st.lists(st.tuples(anything, st.integers(1))))
def test_the_coefficient_stays_positive_and_finite_and_moves_towards_the_target(
    coef: float, target: float, horizon: float, updates: list[tuple[float, int]]
) -> None:
    controller = AdaptiveKLController(coef, target, horizon)
    for kl, episodes in updates:
        before = controller.coef
        controller.update(kl, episodes)
        check_coefficient(controller)
        assert 0 < controller.coef < math.inf
        least, most = max(0.8 * before, sys.float_info.min), max(1.2 * before, sys.float_info.min)
        assert min(least, sys.float_info.max) * (1 - 1e-9) <= controller.coef <= most * (1 + 1e-9)
        if kl > target:
            assert controller.coef >= before
        elif kl < target:
            assert controller.coef <= max(before, sys.float_info.min)
        elif math.isnan(kl):
            assert controller.coef == before


@pytest.mark.parametrize("kl", [100.0, 0.0])
def test_a_coefficient_at_its_limit_comes_back(kl: float) -> None:
    controller = AdaptiveKLController(0.1, target=6.0, horizon=1)
    for _ in range(5000):
        controller.update(kl, 64)
    limit = controller.coef
    for _ in range(100):
        controller.update(100.0 - kl, 64)
    assert 0 < controller.coef < math.inf and controller.coef / limit != pytest.approx(1, rel=0.9)


@pytest.mark.parametrize("coef", [-1e-9, math.nan, math.inf])
def test_a_coefficient_that_would_reward_divergence_is_an_error(coef: float) -> None:
    with pytest.raises(ValueError, match=rf"kl_controller: AdaptiveKLController\.coef={coef} must be finite and"):
        check_coefficient(AdaptiveKLController(coef, 6.0, 100))


def test_imitation_is_a_mean_over_the_tokens_of_positive_responses_of_all_ranks() -> None:
    positive = torch.tensor([True, False])
    nll = torch.tensor([[1.0, 2.0, 9.0, 6.0], [8.0, 8.0, 8.0, 8.0]])
    weights = imitation_weights(MASK, positive, num_tokens=4.0)
    assert float(token_mean(weights * nll, MASK, 4.0)) == pytest.approx(3.0)
    on_two_ranks = imitation_weights(MASK, positive, num_tokens=8.0, reduce_sum=lambda count: count + 3)
    assert float(token_mean(on_two_ranks * nll, MASK, 8.0)) == pytest.approx(1.5)  # half of that of both
    assert not imitation_weights(MASK, ~positive & positive, num_tokens=4.0).any()
