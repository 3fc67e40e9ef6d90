"""Masked statistics against NumPy loops, literals and the edges where a naive formula divides by zero."""

import math

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from rlhf_ppo.algorithm import masked
from rlhf_ppo.algorithm.masked import (
    exact_type,
    lowest_share,
    masked_mean,
    masked_range,
    masked_var,
    masked_whiten,
    zero_outside,
)

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


@pytest.mark.parametrize("share", [0.0, 0.07, 0.2, 0.5, 0.99])
def test_the_lowest_share_of_all_ranks_tokens(share):
    parts = [ragged(seed, rows=3, length=length) for seed, length in ((1, 7), (2, 4))]
    rows = [(torch.tensor(values), torch.tensor(mask)) for values, mask in parts]

    def found(rank):
        def gather(own):  # of both ranks, in the shape that the call gives
            if own.dtype == torch.long:
                return torch.tensor([values.numel() for values, _ in rows])
            flat = [values.float().masked_fill(~mask, INF).flatten() for values, mask in rows]
            padded = [torch.nn.functional.pad(each, (0, own.shape[1] - len(each)), value=INF) for each in flat]
            assert torch.equal(padded[rank], own[0])
            return torch.stack(padded)

        return lowest_share(*rows[rank], share, gather)

    ordered = np.sort(np.concatenate([values[mask] for values, mask in parts]))
    chosen = set(ordered[: int(share * len(ordered))])
    for rank, (values, mask) in enumerate(parts):
        expected = [[v in chosen and m for v, m in zip(*row, strict=True)] for row in zip(values, mask, strict=True)]
        assert found(rank).tolist() == expected


def test_equal_values_are_chosen_together_or_not_at_all():
    values, mask = torch.tensor([[0.0, 0.0, 1.0, 1.0, 2.0, 9.0]]), torch.tensor([[True] * 5 + [False]])
    chosen = {
        share: lowest_share(values, mask, share, lambda x: x).sum().item() for share in (0.2, 0.4, 0.6, 0.8, 0.99)
    }
    assert chosen == {0.2: 0, 0.4: 2, 0.6: 2, 0.8: 4, 0.99: 4}
    assert not lowest_share(torch.zeros(2, 3), torch.ones(2, 3, dtype=torch.bool), 0.5, lambda x: x).any()
    assert not lowest_share(values, torch.zeros_like(mask), 0.5, lambda x: x).any()


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


class WithoutFloat64(TorchDispatchMode):
    """Refuse float64, as Apple's GPUs do."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and result.dtype == torch.float64:
            raise TypeError(
                "Cannot convert a MPS Tensor to float64 dtype as the MPS framework doesn't support float64."
            )
        return result


def test_apples_gpus_which_have_no_float64(monkeypatch):
    assert exact_type(torch.device("mps")) == torch.float32 and exact_type(torch.device("cuda")) == torch.float64
    values, mask = torch.tensor([[1.0, 2.0, 6.0]]), torch.ones(1, 3, dtype=torch.bool)
    expected = masked_whiten(values, mask)
    monkeypatch.setattr(masked, "exact_type", lambda device: torch.float32)
    with WithoutFloat64():
        assert torch.equal(masked_whiten(values, mask), expected)
        found = masked.ScoreMoments().including(values[0], lambda total: total)
    assert (found.mean, found.std) == pytest.approx((3.0, 7**0.5), rel=1e-6)


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


def test_an_integer_mask_is_an_error():
    with pytest.raises(TypeError, match=r"torch\.int64.*mask\.bool\(\)"):
        masked_mean(torch.ones(2), torch.ones(2, dtype=torch.long))


def test_a_mask_of_another_shape_is_an_error_not_a_broadcast():
    with pytest.raises(ValueError, match=r"\(3,\).*\(3, 3\)"):
        masked_mean(torch.ones(3, 3), torch.ones(3, dtype=torch.bool))


@pytest.mark.parametrize("statistic", [masked_mean, masked_var, masked_whiten])
@pytest.mark.parametrize("num_tokens", [0, 1])
def test_gradients_below_two_tokens_are_finite(statistic, num_tokens):
    values = torch.tensor([[3.0, 5.0]], requires_grad=True)
    statistic(values, torch.arange(2)[None] < num_tokens).sum().backward()
    assert values.grad is not None and bool(values.grad.isfinite().all())
