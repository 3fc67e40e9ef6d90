"""GAE against its definition as a sum, and its bits against the recursion in float32."""

import numpy as np
import pytest
import torch

from rlhf_ppo.algorithm.advantages import gae

GARBAGE = [float("nan"), float("inf"), -float("inf"), 1e30]


def episode(seed, rows=4, length=6):
    """Random right-padded rewards and values whose padding is garbage, with bootstrap values."""
    rng = np.random.default_rng(seed)
    mask = np.arange(length) < rng.integers(1, length + 1, rows)[:, None]
    rewards, values = (np.where(mask, rng.normal(size=mask.shape), rng.choice(GARBAGE, mask.shape)) for _ in range(2))
    return rewards, values, mask, rng.normal(size=rows)


def run(rewards, values, mask, gamma, lam, bootstrap=None):
    """Call the library on float64 arrays and return float64 arrays."""
    rewards, values = torch.tensor(rewards), torch.tensor(values)
    final = None if bootstrap is None else torch.tensor(bootstrap)
    advantages, returns = gae(rewards, values, torch.tensor(mask), gamma=gamma, lam=lam, bootstrap_values=final)
    assert advantages.dtype == returns.dtype == torch.float32
    return advantages.numpy().astype(np.float64), returns.numpy().astype(np.float64)


def td_errors(rewards, values, gamma, final):
    """One row's `r_t + gamma V_{t+1} - V_t`."""
    following = [*values[1:], final]
    return [r + gamma * n - v for r, v, n in zip(rewards, values, following, strict=True)]


def oracle_sum(rewards, values, mask, gamma, lam, bootstrap):
    """The definition, O(T^2): `A_t = sum_l (gamma lam)^l delta_{t+l}` over the row's real tokens."""
    advantages = np.zeros(mask.shape)
    for i in range(mask.shape[0]):
        real = np.flatnonzero(mask[i])
        deltas = td_errors(rewards[i, real], values[i, real], gamma, bootstrap[i])
        for k, t in enumerate(real):
            advantages[i, t] = sum((gamma * lam) ** step * delta for step, delta in enumerate(deltas[k:]))
    return advantages


def assert_matches(result, advantages, values, mask):
    """Compare both outputs, returns being `A + V` on real tokens, and demand zeros elsewhere."""
    np.testing.assert_allclose(result[0], advantages, atol=1e-5)
    np.testing.assert_allclose(result[1], np.where(mask, advantages + values, 0.0), atol=1e-5)
    assert not result[0][~mask].any()
    assert not result[1][~mask].any()


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(
    ("gamma", "lam"), [(1.0, 0.95), (0.9, 0.5), (0.5, 0.9), (1.0, 1.0), (0.8, 1.0), (0.8, 0.0), (0.0, 0.7)]
)
@pytest.mark.parametrize("cut", [False, True])
def test_gae_equals_its_definition_as_a_sum(seed, gamma, lam, cut):
    rewards, values, mask, bootstrap = episode(seed)
    result = run(rewards, values, mask, gamma, lam, bootstrap if cut else None)
    expected = oracle_sum(rewards, values, mask, gamma, lam, bootstrap if cut else np.zeros(4))
    assert_matches(result, expected, values, mask)


@pytest.mark.parametrize("seed", range(5))
def test_tokens_outside_the_mask_are_passed_over_wherever_they_stand(seed):
    rng = np.random.default_rng(seed)
    mask = rng.random((3, 8)) < 0.5
    mask[:, 4] = True
    rewards, values = (np.where(mask, rng.normal(size=mask.shape), np.nan) for _ in range(2))
    result = run(rewards, values, mask, 0.9, 0.8, np.ones(3))
    assert_matches(result, oracle_sum(rewards, values, mask, 0.9, 0.8, np.ones(3)), values, mask)


def test_low_precision_inputs_are_summed_in_float32():
    # 256 rewards of 1 before one of 1: bfloat16 cannot count past 256.
    ones, zeros = torch.ones(1, 257, dtype=torch.bfloat16), torch.zeros(1, 257, dtype=torch.bfloat16)
    advantages, _ = gae(ones, zeros, torch.ones(1, 257, dtype=torch.bool), gamma=1.0, lam=1.0)
    assert advantages[0, 0].item() == 257.0


@pytest.mark.parametrize("cut", [False, True])
def test_the_bits_are_those_of_the_recursion_in_float32(cut):
    rewards, values, mask, bootstrap = episode(seed=9, rows=8, length=30)
    discount, trace = np.float32(0.95), np.float32(0.95 * 0.9)
    expected = np.zeros(mask.shape, dtype=np.float32)
    for i in range(8):
        following, advantage = np.float32(bootstrap[i] if cut else 0), np.float32(0)
        for t in reversed(np.flatnonzero(mask[i])):
            reward, value = np.float32(rewards[i, t]), np.float32(values[i, t])
            advantage = reward + discount * following - value + trace * advantage
            expected[i, t], following = advantage, value
    advantages, _ = run(rewards, values, mask, 0.95, 0.9, bootstrap if cut else None)
    assert advantages.astype(np.float32).tolist() == expected.tolist()
