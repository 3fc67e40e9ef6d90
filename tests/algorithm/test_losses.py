"""Clipped losses, their gradients and their averages against NumPy loops and literals."""

import math

import numpy as np
import pytest
import torch

from rlhf_ppo.algorithm.advantages import gae
from rlhf_ppo.algorithm.losses import (
    approx_kl,
    clipped_policy_loss,
    clipped_value_loss,
    explained_variance,
    importance_weights,
    sequence_weights,
    token_mean,
)

NAN = float("nan")


def test_a_token_without_advantage_is_not_counted_as_clipped():
    result = clipped_policy_loss(torch.tensor([1.0]), torch.tensor([0.0]), torch.tensor([0.0]), 0.2)
    assert result.clipped.tolist() == [False]


def test_losses_are_computed_in_float32():
    def low(value):
        return torch.tensor([value], dtype=torch.bfloat16)

    # In bfloat16 -8.0625 - -0.0078125 would round to -8.0625, and 256 + 1 to 256.
    policy = clipped_policy_loss(low(-8.0625), low(-0.0078125), low(1.0), 0.2)
    assert policy.ratio.item() == pytest.approx(math.exp(-8.0546875), rel=1e-5)
    assert approx_kl(low(-8.0625), low(-0.0078125)).item() == pytest.approx(0.5 * 8.0546875**2, rel=1e-6)
    value = clipped_value_loss(low(256.0), low(256.0), low(-1.0), 9.0)
    assert value.loss.item() == 0.5 * 257**2
    for tensor in (policy.loss, policy.ratio, value.loss):
        assert tensor.dtype == torch.float32


def test_explained_variance_at_its_marks():
    returns, mask = torch.tensor([[1.0, 2.0, 4.0]]), torch.ones(1, 3, dtype=torch.bool)
    assert explained_variance(returns, returns, mask).item() == 1.0
    assert explained_variance(returns + 5, returns, mask).item() == 1.0  # a constant offset is not variance
    assert explained_variance(torch.full((1, 3), 7.0), returns, mask).item() == pytest.approx(0.0, abs=1e-6)
    assert explained_variance(-returns, returns, mask).item() == pytest.approx(-3.0)
    assert explained_variance(returns, torch.full((1, 3), 2.0), mask).item() == 0.0  # nothing to explain
    assert explained_variance(returns, returns, torch.tensor([[True, False, False]])).item() == 0.0


def test_returns_that_are_constant_up_to_rounding_leave_nothing_to_explain():
    values = torch.randn(2, 1000, generator=torch.Generator().manual_seed(0))
    rewards, mask = torch.zeros(2, 1000), torch.ones(2, 1000, dtype=torch.bool)
    for score in (0.0, 1.0, -1000.0):
        rewards[:, -1] = score
        returns = gae(rewards, values, mask, gamma=1.0, lam=1.0)[1]
        assert returns.unique().numel() > 1
        assert explained_variance(values, returns, mask).item() == 0.0
    returns = 1000 + torch.randn(2, 1000)  # which differ by more
    assert explained_variance(returns, returns, mask).item() == 1.0


# ---- Truncated importance sampling ----


def test_importance_weights_by_hand():
    # ratios 1, e, 1/e, 3 (cut to 2), exactly 2, and one of a token that the engine thought almost impossible
    old = torch.tensor([[-1.0, -1.0, -2.0], [math.log(0.6), math.log(0.5), -1.0]])
    sampling = torch.tensor([[-1.0, -2.0, -1.0], [math.log(0.2), math.log(0.25), -200.0]])
    weights = importance_weights(old, sampling, clip_max=2.0)
    np.testing.assert_allclose(weights, [[1.0, 2.0, math.exp(-1)], [2.0, 2.0, 2.0]], rtol=1e-6)
    weights = importance_weights(old, sampling, clip_max=2.9)
    np.testing.assert_allclose(weights, [[1.0, math.e, math.exp(-1)], [2.9, 2.0, 2.9]], rtol=1e-6)


def test_importance_weights_are_constants_in_float32():
    old = torch.tensor([-1.0, -2.0], dtype=torch.float64, requires_grad=True)
    weights = importance_weights(old, torch.tensor([-1.5, -1.5], dtype=torch.bfloat16), clip_max=2.0)
    assert weights.dtype == torch.float32 and not weights.requires_grad


def test_weights_scale_each_tokens_loss_and_gradient_and_nothing_else():
    old, advantages = torch.full((4,), -1.0), torch.tensor([1.0, -1.0, 1.0, 2.0])
    logprobs = (old + torch.tensor([0.0, 0.1, 0.5, -0.1])).requires_grad_()
    weights = torch.tensor([0.5, 2.0, 1.5, 1.0])
    plain = clipped_policy_loss(logprobs, old, advantages, 0.2)
    weighted = clipped_policy_loss(logprobs, old, advantages, 0.2, weights)
    expected = [-0.5, 2 * math.exp(0.1), -1.5 * 1.2, -2 * math.exp(-0.1)]
    assert weighted.loss.tolist() == pytest.approx(expected)
    (gradient,) = torch.autograd.grad(weighted.loss.sum(), logprobs)
    assert gradient.tolist() == pytest.approx([-0.5, 2 * math.exp(0.1), 0.0, -2 * math.exp(-0.1)])
    assert torch.equal(weighted.ratio, plain.ratio) and torch.equal(weighted.clipped, plain.clipped)


# ---- Options ----


def test_clip_higher_leaves_better_tokens_more_room_above_and_none_below():
    logprobs = torch.tensor([1.25, 1.3, 1.25, 0.75, 0.75]).log().requires_grad_()
    advantages = torch.tensor([2.0, 2.0, -2.0, -2.0, 2.0])
    result = clipped_policy_loss(logprobs, torch.zeros(5), advantages, 0.2, cliprange_high=0.28)
    (gradient,) = torch.autograd.grad(result.loss.sum(), logprobs)
    np.testing.assert_allclose(result.loss.detach(), [-2.5, -2.56, 2.5, 1.6, -1.5], rtol=1e-6)
    np.testing.assert_allclose(gradient, [-2.5, 0, 2.5, 0, -1.5], rtol=1e-6)
    assert result.clipped.tolist() == [False, True, False, True, False]


def test_without_a_range_values_are_not_clipped():
    values = torch.tensor([5.0, 0.1], requires_grad=True)
    result = clipped_value_loss(values, torch.zeros(2), torch.ones(2), None)
    (gradient,) = torch.autograd.grad(result.loss.sum(), values)
    np.testing.assert_allclose(result.loss.detach(), [8.0, 0.405], rtol=1e-6)
    np.testing.assert_allclose(gradient, [4.0, -0.9], rtol=1e-6)
    assert not result.clipped.any()


@pytest.mark.parametrize("cuts", [[[0, 1, 2]], [[1, 2], [0]], [[2], [0], [1]]], ids=str)
def test_parts_of_any_cut_add_up_to_the_mean_over_responses(cuts):
    losses = torch.tensor([[3.0, 6.0, NAN, 9.0], [2.0, 7.0, 7.0, 7.0], [5.0, 5.0, 5.0, 5.0]])
    mask = torch.tensor([[1, 1, 0, 1], [1, 0, 0, 0], [0, 0, 0, 0]]).bool()  # the last response has no score
    total = 0.0
    for rows in cuts:
        weights = sequence_weights(mask[rows], 4.0, None if len(cuts) == 1 else lambda own: torch.tensor(2))
        total += float(token_mean(losses[rows] * weights, mask[rows], 4.0))
    assert total == pytest.approx((6 + 2) / 2)
