"""Masked statistics against NumPy loops, literals and the edges where a naive formula divides by zero."""

import math

import numpy as np
import pytest
import torch

from rlhf_ppo.algorithm.advantages import masked_mean, masked_range, masked_var, masked_whiten, zero_outside

NAN, INF = float("nan"), float("inf")


def oracle_mean_and_var(values, mask):
    """Textbook mean and Bessel-corrected variance of the selected values, in float64."""
    kept = [float(v) for row, keep in zip(values, mask, strict=True) for v, k in zip(row, keep, strict=True) if k]
    mean = math.fsum(kept) / len(kept)
    return mean, math.fsum((v - mean) ** 2 for v in kept) / (len(kept) - 1)


def ragged(seed, rows=4, length=7):
    """Random float64 values with NaN padding on the right of rows of random length."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, length + 1, rows)
    mask = np.arange(length) < lengths[:, None]
    return np.where(mask, rng.normal(2.0, 3.0, (rows, length)), NAN), mask


@pytest.mark.parametrize("seed", range(5))
def test_mean_var_and_whitening_equal_the_loop(seed):
    values, mask = ragged(seed)
    mean, var = oracle_mean_and_var(values, mask)
    tensors = torch.tensor(values, dtype=torch.float32), torch.tensor(mask)
    assert masked_mean(*tensors).item() == pytest.approx(mean, rel=1e-5)
    assert masked_var(*tensors).item() == pytest.approx(var, rel=1e-5)
    expected = np.where(mask, (values - mean) / math.sqrt(var + 1e-8), 0.0)
    np.testing.assert_allclose(masked_whiten(*tensors).numpy(), expected, atol=1e-5)
    kept = np.where(mask, expected + mean, 0.0)
    np.testing.assert_allclose(masked_whiten(*tensors, shift_mean=False).numpy(), kept, atol=1e-5)


def test_the_range_is_that_of_the_real_tokens_of_all_ranks():
    values = torch.tensor([[1.0, 9.0, -8.0], [-3.0, 4.0, 0.0]])
    mask = torch.tensor([[True, False, False], [True, True, True]])
    of_another_rank = torch.tensor([[2.0, 7.0]])  # -2 to 7

    assert masked_range(values, mask, lambda own: torch.cat([own, of_another_rank])) == (-3.0, 7.0)
    assert masked_range(values, ~mask & mask, lambda own: own) == (INF, -INF)


def test_whitening_adds_1e_8_to_the_variance():
    # +-7.0710678e-5 has variance 2 * 5e-9 / 1 = 1e-8, so it is divided by sqrt(2e-8) and gives +-0.5, not +-0.7071.
    values = torch.tensor([[7.0710678e-5, -7.0710678e-5]])
    whitened = masked_whiten(values, torch.ones(1, 2, dtype=torch.bool))
    torch.testing.assert_close(whitened, torch.tensor([[0.5, -0.5]]), atol=1e-5, rtol=0)


def test_one_real_token_has_no_variance():
    values, mask = torch.tensor([[NAN, 3.0, INF]]), torch.tensor([[False, True, False]])
    assert masked_mean(values, mask).item() == 3.0
    assert masked_var(values, mask).item() == 0.0
    assert masked_whiten(values, mask).tolist() == [[0.0, 0.0, 0.0]]
    assert masked_whiten(values, mask, shift_mean=False).tolist() == [[0.0, 3.0, 0.0]]


def test_no_real_token_gives_zeros():
    values, mask = torch.full((2, 3), NAN), torch.zeros(2, 3, dtype=torch.bool)
    assert masked_mean(values, mask).item() == 0.0
    assert masked_var(values, mask).item() == 0.0
    assert masked_whiten(values, mask, shift_mean=False).tolist() == [[0.0] * 3] * 2


def test_a_large_offset_keeps_the_variance():
    # E[x^2] - E[x]^2 would leave nothing of 1 and 2 beside 1e4 squared in float32.
    values = torch.tensor([[10000.0, 10001.0, 10002.0]])
    assert masked_var(values, torch.ones(1, 3, dtype=torch.bool)).item() == pytest.approx(1.0, abs=1e-3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64, torch.bool])
def test_everything_is_computed_in_float32(dtype):
    # bfloat16 cannot hold 257: the sum of 257 ones rounds to 256 there.
    values, mask = torch.ones(1, 257, dtype=dtype), torch.ones(1, 257, dtype=torch.bool)
    assert masked_mean(values, mask).item() == 1.0
    for result in (masked_mean(values, mask), masked_var(values, mask), masked_whiten(values, mask)):
        assert result.dtype == torch.float32


def test_zero_outside_lets_no_gradient_into_the_padding():
    values = torch.tensor([1.0, NAN, INF, 2.0], requires_grad=True)
    mask = torch.tensor([True, False, False, False])
    # The padding of the old log-probabilities is garbage too: the ratio there is NaN and 0 * NaN would be NaN.
    ratio = (zero_outside(values, mask) - torch.tensor([1.0, NAN, -INF, -INF])).exp()
    zero_outside(ratio, mask).sum().backward()
    assert values.grad is not None
    assert values.grad.tolist() == [1.0, 0.0, 0.0, 0.0]


@pytest.mark.parametrize("statistic", [masked_mean, masked_var, masked_whiten])
@pytest.mark.parametrize("num_tokens", [0, 1])
def test_gradients_below_two_tokens_are_finite(statistic, num_tokens):
    values = torch.tensor([[3.0, 5.0]], requires_grad=True)
    statistic(values, torch.arange(2)[None] < num_tokens).sum().backward()
    assert values.grad is not None and bool(values.grad.isfinite().all())
