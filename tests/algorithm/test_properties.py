"""Padding, its content, micro-batches and the number of ranks change no number."""

import itertools
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rlhf_ppo.algorithm import (
    clipped_policy_loss,
    clipped_value_loss,
    explained_variance,
    gae,
    kl_estimate,
    masked_mean,
    masked_var,
    masked_whiten,
    token_mean,
    token_rewards,
    zero_outside,
)

GARBAGE = [float("nan"), float("inf"), -float("inf"), 1e30, 0.0]
examples = settings(max_examples=100, deadline=None)


class Batch(NamedTuple):
    """A right-padded batch whose padding holds garbage; all `(B, T)` but `scores` and `bootstrap`, `(B,)`."""

    mask: Tensor
    logprobs: Tensor
    ref_logprobs: Tensor
    values: Tensor
    new_logprobs: Tensor
    new_values: Tensor
    scores: Tensor
    bootstrap: Tensor

    def rows(self, start, stop):
        return Batch(*(x[start:stop] for x in self))

    def padded(self, num_columns, rng):
        """Append columns, refill all padding with other garbage."""
        width = self.mask.shape[1]

        def pad(x):
            if x.ndim == 1:
                return x
            wider = torch.tensor(rng.choice(GARBAGE, (len(x), width + num_columns)), dtype=torch.float32)
            wider[:, :width] = torch.where(self.mask, x, wider[:, :width])
            return wider

        mask = torch.cat([self.mask, torch.zeros(len(self.mask), num_columns, dtype=torch.bool)], dim=1)
        return Batch(mask, *(pad(x) for x in self[1:]))


@st.composite
def batches(draw, min_rows=1):
    rows, length = draw(st.integers(min_rows, 5)), draw(st.integers(1, 6))
    lengths = draw(st.lists(st.integers(1, length), min_size=rows, max_size=rows))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    mask = np.arange(length) < np.array(lengths)[:, None]
    tokens = [np.where(mask, rng.normal(size=mask.shape), rng.choice(GARBAGE, mask.shape)) for _ in range(5)]
    floats = [torch.tensor(x, dtype=torch.float32) for x in [*tokens, *rng.normal(size=(2, rows))]]
    return Batch(torch.tensor(mask), *floats)


def advantages_and_returns(batch):
    """Scores to whitened advantages and returns."""
    kl = kl_estimate(batch.logprobs, batch.ref_logprobs, "k3")
    _, rewards = token_rewards(kl, batch.scores, batch.mask, kl_coef=0.3)
    rewards = masked_whiten(rewards, batch.mask, shift_mean=False)
    advantages, returns = gae(rewards, batch.values, batch.mask, 0.9, 0.8, batch.bootstrap)
    return masked_whiten(advantages, batch.mask), returns


def loss_and_gradients(batch, advantages, returns, num_tokens):
    """Total loss of a (micro-)batch and its gradients with respect to new log-probabilities and new values."""
    logprobs, values = (x.clone().requires_grad_() for x in (batch.new_logprobs, batch.new_values))
    policy = clipped_policy_loss(zero_outside(logprobs, batch.mask), batch.logprobs, advantages, 0.2)
    value = clipped_value_loss(zero_outside(values, batch.mask), batch.values, returns, 0.2)
    loss = token_mean(policy.loss + 0.1 * value.loss, batch.mask, num_tokens)
    return loss.detach(), *torch.autograd.grad(loss, (logprobs, values))


def assert_close(actual, expected):
    torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-5)


@examples
@given(batches(), st.integers(0, 4), st.integers(0, 2**32 - 1))
def test_padding_and_what_it_holds_do_not_matter(batch, num_columns, seed):
    padded = batch.padded(num_columns, np.random.default_rng(seed))
    width, num_tokens = batch.mask.shape[1], int(batch.mask.sum())
    results = advantages_and_returns(batch)
    padded_results = advantages_and_returns(padded)
    for result, padded_result in zip(results, padded_results, strict=True):
        assert_close(padded_result[:, :width], result)
        assert not padded_result[~padded.mask].any()
    loss, *gradients = loss_and_gradients(batch, *results, num_tokens)
    padded_loss, *padded_gradients = loss_and_gradients(padded, *padded_results, num_tokens)
    assert_close(padded_loss, loss)
    for gradient, padded_gradient in zip(gradients, padded_gradients, strict=True):
        assert_close(padded_gradient[:, :width], gradient)
        assert not padded_gradient[~padded.mask].any()
        assert gradient.isfinite().all()


@examples
@given(batches(min_rows=2), st.data())
def test_the_cut_into_micro_batches_does_not_matter(batch, data):
    rows, num_tokens = len(batch.mask), int(batch.mask.sum())
    advantages, returns = advantages_and_returns(batch)
    whole = loss_and_gradients(batch, advantages, returns, num_tokens)
    bounds = [0, *sorted(data.draw(st.sets(st.integers(1, rows - 1)))), rows]
    parts = [
        loss_and_gradients(batch.rows(a, b), advantages[a:b], returns[a:b], num_tokens)
        for a, b in itertools.pairwise(bounds)
    ]
    losses, *gradients = zip(*parts, strict=True)
    assert_close(torch.stack(losses).sum(), whole[0])
    for part, expected in zip(gradients, whole[1:], strict=True):
        assert_close(torch.cat(part), expected)


def on_ranks(function, shards):
    """Call `function(*shard, reduce_sum)` for every shard at once; `reduce_sum` meets the other ranks at a barrier."""
    barrier, inbox = threading.Barrier(len(shards), timeout=30), [torch.empty(0)] * len(shards)

    def work(rank):
        def reduce_sum(tensor):
            inbox[rank] = tensor.clone()
            barrier.wait()
            total = torch.stack(inbox).sum(dim=0)
            barrier.wait()  # nobody writes the next tensor before everybody has read this one
            return total

        try:
            return function(*shards[rank], reduce_sum=reduce_sum)
        except BaseException:
            barrier.abort()
            raise

    with ThreadPoolExecutor(len(shards)) as pool:
        return list(pool.map(work, range(len(shards))))


@examples
@given(batches(min_rows=2), st.data())
def test_the_spread_over_ranks_does_not_matter(batch, data):
    cut = data.draw(st.integers(1, len(batch.mask) - 1))
    if data.draw(st.booleans()):
        batch.mask[:cut] = False  # a rank may have nothing real to add
    shards = [(batch.values[part], batch.mask[part]) for part in (slice(0, cut), slice(cut, None))]
    for statistic in (masked_mean, masked_var):
        expected = statistic(batch.values, batch.mask)
        for result in on_ranks(statistic, shards):
            assert_close(result, expected)
    for shift_mean in (True, False):
        whitened = on_ranks(lambda v, m, reduce_sum, s=shift_mean: masked_whiten(v, m, s, reduce_sum), shards)
        assert_close(torch.cat(whitened), masked_whiten(batch.values, batch.mask, shift_mean))

    pairs = [(batch.values[p], batch.new_values[p], batch.mask[p]) for p in (slice(0, cut), slice(cut, None))]
    expected = explained_variance(batch.values, batch.new_values, batch.mask)
    for result in on_ranks(explained_variance, pairs):
        torch.testing.assert_close(result, expected, atol=1e-4, rtol=1e-4)


single = st.floats(allow_nan=False, allow_infinity=False, width=32)


@examples
@given(single, st.integers(1, 5), st.integers(1, 300), st.randoms(), st.integers(0, 5))
def test_equal_values_whiten_to_exactly_zero(value, rows, length, random, cut):
    """Of any magnitude, under any mask, however they are spread over ranks."""
    mask = torch.tensor([[random.random() < 0.7 for _ in range(length)] for _ in range(rows)])
    values = torch.where(mask, value, torch.tensor([random.choice(GARBAGE) for _ in range(length)]))
    shards = [(values[part], mask[part]) for part in (slice(0, cut), slice(cut, None)) if len(values[part])]
    kept = zero_outside(torch.full_like(values, value), mask)
    for shift_mean, expected in ((True, torch.zeros_like(values)), (False, kept)):
        assert torch.equal(masked_whiten(values, mask, shift_mean), expected)
        whitened = on_ranks(lambda v, m, reduce_sum, s=shift_mean: masked_whiten(v, m, s, reduce_sum), shards)
        assert torch.equal(torch.cat(whitened), expected)
    assert [float(var) for var in on_ranks(masked_var, shards)] == [0.0] * len(shards)
