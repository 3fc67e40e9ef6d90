"""One PPO update of two short responses, from scores to gradients, worked out by hand.

Row 0 has three tokens and ends with the stop token; row 1 has two and was cut, so its third column is padding, filled
with garbage. gamma 0.5, lam 0.8 (their product 0.4), kl_coef 0.2, penalty 1, both clip ranges 0.2.

KL, k1 = logprob - ref_logprob:
    row 0: -1.2 + 0.5 = -0.7    -0.4 + 0.9 = 0.5    -2.0 + 1.5 = -0.5
    row 1: -0.9 + 0.8 = -0.1    -1.6 + 1.8 = 0.2
Scores: 1.3 stands, 0.54 - 1 = -0.46 (no stop token).
Rewards, -0.2 KL, plus the score at the last token:
    row 0:  0.14    -0.10    0.10 + 1.30 = 1.40
    row 1:  0.02    -0.04 - 0.46 = -0.50
TD errors r + 0.5 V' - V, nothing after the last token:
    row 0:  0.14 + 0.30 - 0.10 = 0.34    -0.10 + 0.20 - 0.60 = -0.50    1.40 - 0.40 = 1.00
    row 1:  0.02 - 0.10 + 0.30 = 0.22    -0.50 + 0.20 = -0.30
Advantages delta + 0.4 A', from the right:
    row 0:  0.34 + 0.4 * -0.10 = 0.30    -0.50 + 0.4 * 1.00 = -0.10    1.00
    row 1:  0.22 + 0.4 * -0.30 = 0.10    -0.30
Returns A + V:
    row 0:  0.4    0.5    1.4
    row 1: -0.2   -0.5
Whitening over the five: sum 1.0, mean 0.2; deviations 0.1, -0.3, 0.8, -0.1, -0.5; squares 0.01 + 0.09 + 0.64 + 0.01 +
0.25 = 1.00; over 4: variance 0.25, deviation 0.5:
    row 0:  0.2   -0.6    1.6
    row 1: -0.2   -1.0
"""

import torch

from rlhf_ppo.algorithm import (
    approx_kl,
    clipped_policy_loss,
    clipped_value_loss,
    gae,
    kl_estimate,
    masked_mean,
    masked_var,
    masked_whiten,
    penalize_missing_eos,
    token_mean,
    token_rewards,
    zero_outside,
)

NAN, INF = float("nan"), float("inf")
MASK = torch.tensor([[True, True, True], [True, True, False]])
LOGPROBS = torch.tensor([[-1.2, -0.4, -2.0], [-0.9, -1.6, NAN]])
REF_LOGPROBS = torch.tensor([[-0.5, -0.9, -1.5], [-0.8, -1.8, -INF]])
VALUES = torch.tensor([[0.1, 0.6, 0.4], [-0.3, -0.2, INF]])
SCORES = torch.tensor([1.3, 0.54])
STOPPED = torch.tensor([True, False])

REWARDS = torch.tensor([[0.14, -0.10, 1.40], [0.02, -0.50, 0.0]])
ADVANTAGES = torch.tensor([[0.3, -0.1, 1.0], [0.1, -0.3, 0.0]])
RETURNS = torch.tensor([[0.4, 0.5, 1.4], [-0.2, -0.5, 0.0]])
WHITENED = torch.tensor([[0.2, -0.6, 1.6], [-0.2, -1.0, 0.0]])


def assert_equal(actual, expected):
    torch.testing.assert_close(actual, torch.as_tensor(expected), atol=1e-6, rtol=0)


def chain():
    """Run the library from scores to whitened advantages; return every stage."""
    kl = kl_estimate(LOGPROBS, REF_LOGPROBS, "k1")
    scores = penalize_missing_eos(SCORES, STOPPED, 1.0)
    non_score_reward, rewards = token_rewards(kl, scores, MASK, kl_coef=0.2)
    advantages, returns = gae(rewards, VALUES, MASK, gamma=0.5, lam=0.8)
    return scores, non_score_reward, rewards, advantages, returns, masked_whiten(advantages, MASK)


def test_scores_to_whitened_advantages():
    scores, non_score_reward, rewards, advantages, returns, whitened = chain()
    assert_equal(scores, [1.3, -0.46])
    assert_equal(non_score_reward, [[0.14, -0.10, 0.10], [0.02, -0.04, 0.0]])
    assert_equal(rewards, REWARDS)
    assert_equal(advantages, ADVANTAGES)
    assert_equal(masked_mean(advantages, MASK), 0.2)
    assert_equal(masked_var(advantages, MASK), 0.25)
    assert_equal(returns, RETURNS)
    assert_equal(whitened, WHITENED)


def test_policy_loss_and_gradient():
    """The new probabilities are 1.5, 1.5, 0.5 and 0.5, 1.1 times the old: every corner of the clip.

    row 0:  A  0.2, rho 1.5: -0.30 against clipped -0.24: -0.24, clipped, gradient 0
            A -0.6, rho 1.5:  0.90 against         0.72:   0.90,          gradient -A rho = 0.9
            A  1.6, rho 0.5: -0.80 against        -1.28:  -0.80,          gradient -0.8
    row 1:  A -0.2, rho 0.5:  0.10 against         0.16:   0.16, clipped, gradient 0
            A -1.0, rho 1.1:  1.10 on both:                1.10,          gradient 1.1
    Sum 1.12, over 5 tokens 0.224; gradients over 5. Clipped 2 / 5. Ratio (1.5 + 1.5 + 0.5 + 0.5 + 1.1) / 5 = 1.02.
    approx_kl: ln 1.5 = 0.4054651, ln 0.5 = -0.6931472, ln 1.1 = 0.0953102; halved squares 0.0822010, 0.2402265,
    0.0045420; (2 * 0.0822010 + 2 * 0.2402265 + 0.0045420) / 5 = 0.1298794.
    """
    moved = torch.tensor([[0.4054651, 0.4054651, -0.6931472], [-0.6931472, 0.0953102, INF]])
    logprobs = (LOGPROBS + moved).requires_grad_()
    result = clipped_policy_loss(zero_outside(logprobs, MASK), LOGPROBS, WHITENED, cliprange=0.2)
    loss = token_mean(result.loss, MASK, num_tokens=5)
    (gradient,) = torch.autograd.grad(loss, logprobs)

    assert_equal(zero_outside(result.loss, MASK), [[-0.24, 0.90, -0.80], [0.16, 1.10, 0.0]])
    assert_equal(loss, 0.224)
    assert_equal(gradient, [[0.0, 0.18, -0.16], [0.0, 0.22, 0.0]])
    assert (result.clipped & MASK).tolist() == [[True, False, False], [True, False, False]]
    assert_equal(masked_mean(result.clipped, MASK), 0.4)
    assert_equal(masked_mean(result.ratio, MASK), 1.02)
    assert_equal(masked_mean(approx_kl(logprobs, LOGPROBS), MASK), 0.1298794)


def test_value_loss_and_gradient():
    """Half the larger of two squared errors, clip range 0.2.

    row 0:  V 0.45 (was  0.1, so  0.3), R  0.4: 0.05 against 0.10:  0.005, clipped, gradient 0
            V 0.90 (was  0.6, so  0.8), R  0.5: 0.40 against 0.30:  0.080,          gradient V - R = 0.4
            V 0.50 (was  0.4, itself),  R  1.4: 0.90 on both:       0.405,          gradient -0.9
    row 1:  V -0.7 (was -0.3, so -0.5), R -0.2: 0.50 against 0.30:  0.125,          gradient -0.5
            V -0.55 (was -0.2, so -0.4), R -0.5: 0.05 against 0.10: 0.005, clipped, gradient 0
    Sum 0.62, over 5 tokens 0.124; gradients over 5. Clipped 2 / 5.
    """
    values = torch.tensor([[0.45, 0.90, 0.50], [-0.70, -0.55, NAN]], requires_grad=True)
    result = clipped_value_loss(zero_outside(values, MASK), VALUES, RETURNS, cliprange_value=0.2)
    loss = token_mean(result.loss, MASK, num_tokens=5)
    (gradient,) = torch.autograd.grad(loss, values)

    assert_equal(zero_outside(result.loss, MASK), [[0.005, 0.080, 0.405], [0.125, 0.005, 0.0]])
    assert_equal(loss, 0.124)
    assert_equal(gradient, [[0.0, 0.08, -0.18], [-0.10, 0.0, 0.0]])
    assert (result.clipped & MASK).tolist() == [[True, False, False], [False, True, False]]
    assert_equal(masked_mean(result.clipped, MASK), 0.4)
