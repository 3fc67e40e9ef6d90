"""KL estimators and coefficient, the missing-EOS penalty and where the reward lands."""

import math

import numpy as np
import pytest
import torch

from rlhf_ppo.algorithm.advantages import (
    AdaptiveKLController,
    check_coefficient,
    clip_scores,
    kl_estimate,
    penalize_missing_eos,
    replace_missing_eos,
    token_rewards,
)

NAN, INF = float("nan"), float("inf")


def test_k1_and_k3_literals():
    logprobs = torch.tensor([[-1.2, -0.4, -2.0]])
    ref_logprobs = torch.tensor([[-0.5, -0.9, -2.0]])
    # k3: exp(0.7) - 1 - 0.7 = 2.0137527 - 1.7; exp(-0.5) - 1 + 0.5 = 0.6065307 - 0.5.
    k1, k3 = torch.tensor([[-0.7, 0.5, 0.0]]), torch.tensor([[0.3137527, 0.1065307, 0.0]])
    torch.testing.assert_close(kl_estimate(logprobs, ref_logprobs, "k1"), k1, atol=1e-6, rtol=0)
    torch.testing.assert_close(kl_estimate(logprobs, ref_logprobs, "k3"), k3, atol=1e-6, rtol=0)


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_estimators_average_to_the_categorical_kl(estimator):
    policy, reference = np.array([0.5, 0.2, 0.2, 0.1]), np.array([0.1, 0.3, 0.25, 0.35])
    expected = sum(p * math.log(p / q) for p, q in zip(policy, reference, strict=True))
    kl = kl_estimate(torch.tensor(policy).log()[None], torch.tensor(reference).log()[None], estimator)
    assert float((policy * kl[0].numpy()).sum()) == pytest.approx(expected, rel=1e-5)


def test_k3_of_close_policies_is_not_rounded_away():
    # (d^2 / 2) to first order; exp(-d) - 1 + d in float32 has an error of 6e-8, ten times the result.
    d = torch.tensor([[1e-4, -1e-4, 1e-3]])
    kl = kl_estimate(d, torch.zeros_like(d), "k3")
    torch.testing.assert_close(kl, torch.tensor([[5e-9, 5e-9, 5e-7]]), rtol=1e-2, atol=0)


def test_log_probabilities_are_subtracted_in_float32():
    logprobs, ref = torch.tensor([[-8.0625]], dtype=torch.bfloat16), torch.tensor([[-0.0078125]], dtype=torch.bfloat16)
    assert kl_estimate(logprobs, ref, "k1").item() == -8.0546875  # in bfloat16: -8.0625


def test_only_responses_without_the_stop_token_are_penalised():
    scores = torch.tensor([1.0, -2.0, 0.5])
    ended = torch.tensor([True, False, False])
    torch.testing.assert_close(penalize_missing_eos(scores, ended, 1.5), torch.tensor([1.0, -3.5, -1.0]))
    assert scores.tolist() == [1.0, -2.0, 0.5]  # the caller's scores are left alone


def test_scores_are_clipped_on_both_sides():
    scores = torch.tensor([3.0, -3.0, 0.5, NAN])
    torch.testing.assert_close(clip_scores(scores, 2.0), torch.tensor([2.0, -2.0, 0.5, NAN]), equal_nan=True)
    torch.testing.assert_close(clip_scores(scores, None), scores, equal_nan=True)


def test_scores_of_responses_without_the_stop_token_are_replaced():
    scores, ended = torch.tensor([1.0, -2.0, NAN, NAN]), torch.tensor([True, False, False, True])
    expected = torch.tensor([1.0, -1.0, NAN, NAN])  # what has no score is left out of the update, not punished
    torch.testing.assert_close(replace_missing_eos(scores, ended, -1.0), expected, equal_nan=True)
    torch.testing.assert_close(replace_missing_eos(scores, ended, None), scores, equal_nan=True)
    assert replace_missing_eos(torch.tensor([5.0]), torch.tensor([False]), 0.0).tolist() == [0.0]


def oracle_token_rewards(kl, scores, mask, kl_coef, token_scores):
    """Walk every response to its last real token and pay there."""
    non_score, rewards = np.zeros(mask.shape), np.zeros(mask.shape)
    for i in range(mask.shape[0]):
        last = None
        for t in range(mask.shape[1]):
            if mask[i, t]:
                non_score[i, t] = -kl_coef * kl[i, t]
                rewards[i, t] = non_score[i, t] + token_scores[i, t]
                last = t
        rewards[i, last] += scores[i]
    return non_score, rewards


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("holes", [False, True])
def test_rewards_equal_the_loop(seed, holes):
    rng = np.random.default_rng(seed)
    mask = np.arange(6) < rng.integers(1, 7, 5)[:, None]
    if holes:  # a tool's tokens inside a response
        mask &= rng.random(mask.shape) < 0.6
        mask[:, 0] |= ~mask.any(axis=1)
    kl, scores = np.where(mask, rng.normal(size=mask.shape), NAN), rng.normal(size=5)
    tensors = torch.tensor(kl, dtype=torch.float32), torch.tensor(scores, dtype=torch.float32), torch.tensor(mask)
    token_scores = np.where(mask, rng.normal(size=mask.shape), NAN)
    for per_token in (None, torch.tensor(token_scores, dtype=torch.float32)):
        expected = oracle_token_rewards(kl, scores, mask, 0.3, 0 * mask if per_token is None else token_scores)
        for result, oracle in zip(token_rewards(*tensors, 0.3, per_token), expected, strict=True):
            assert result.dtype == torch.float32
            np.testing.assert_allclose(result.numpy(), oracle, atol=1e-6)


# ---- The coefficient ----


@pytest.mark.parametrize(
    ("kl", "episodes", "coef"),
    [
        (12.0, 100, 0.204),
        (6.6, 100, 0.202),
        (0.0, 100, 0.196),
        (12.0, 10, 0.2004),
        (12.0, 5000, 0.24),  # five horizons
        (0.0, 5000, 0.16),
        (NAN, 100, 0.2),
    ],
)
def test_the_coefficient_moves_by_at_most_a_fifth_of_the_share_of_the_horizon(
    kl: float, episodes: int, coef: float
) -> None:
    controller = AdaptiveKLController(0.2, target=6.0, horizon=1000)
    controller.update(kl, episodes)
    assert controller.coef == pytest.approx(coef, rel=1e-9)


@pytest.mark.parametrize("coef", [-1e-9, math.nan, math.inf])
def test_a_coefficient_that_would_reward_divergence_is_an_error(coef: float) -> None:
    with pytest.raises(ValueError, match=rf"kl_controller: AdaptiveKLController\.coef={coef} must be finite and"):
        check_coefficient(AdaptiveKLController(coef, 6.0, 100))
