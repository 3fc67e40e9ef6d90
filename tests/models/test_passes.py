"""What every forward pass shares: padding is nothing, wherever and whatever it is, and dropout is off."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_allclose
from torch import Tensor

from rlhf_ppo.models.packing import hidden_states
from tests.conftest import tiny_policy
from tests.models.architectures import tiny_model

MODELS = {name: tiny_model(name) for name in ("llama", "gpt2", "opt", "bloom")}
"""Rotary positions, learned ones, learned ones with an offset, and none: ALiBi from the mask."""
ROWS = [[5, 0, 9], [31, 1, 0, 7, 7, 12], [4]]
"""Id 0 is the models' PAD and 1 their EOS; here both are real tokens."""


def pad(rows: list[list[int]], left: list[int], right: list[int], fill: list[int]) -> tuple[Tensor, Tensor]:
    """Put padding of `fill` ids, cycled, on both sides of every row; the rows come out equally long."""
    width = max(x + len(row) + y for x, row, y in zip(left, rows, right, strict=True))
    ids = torch.tensor(fill * len(rows) * width)[: len(rows) * width].view(len(rows), width).clone()
    mask = torch.zeros(len(rows), width, dtype=torch.bool)
    for index, row in enumerate(rows):
        ids[index, left[index] : left[index] + len(row)] = torch.tensor(row)
        mask[index, left[index] : left[index] + len(row)] = True
    return ids, mask


AMOUNTS = st.lists(st.integers(0, 4), min_size=len(ROWS), max_size=len(ROWS))


@pytest.mark.parametrize("name", MODELS)
@settings(max_examples=15, deadline=None)
@given(left=AMOUNTS, right=AMOUNTS, fill=st.lists(st.sampled_from([0, 1, 5, 47, 48, 10**6]), min_size=1, max_size=5))
def test_states_depend_on_neither_side_amount_nor_ids_of_the_padding(
    name: str, left: list[int], right: list[int], fill: list[int]
) -> None:
    """The padding ids may be EOS, or outside the vocabulary."""
    model = MODELS[name]
    ids, mask = pad(ROWS, left, right, fill)
    with torch.no_grad():
        states = hidden_states(model, ids, mask)
        for row, tokens in enumerate(ROWS):
            alone = model.base_model(input_ids=torch.tensor([tokens])).last_hidden_state[0]
            assert_allclose(states[row][mask[row]], alone, rtol=0, atol=1e-5 * float(alone.abs().max()))


def test_rows_are_no_longer_than_their_real_tokens_wherever_the_padding_is() -> None:
    """Padding between prompt and response too: one row's prompt is long, the other's response."""
    model, seen = tiny_policy(), []
    model.model.embed_tokens.register_forward_hook(lambda _, inputs, output: seen.append(inputs[0]))
    mask = torch.tensor([[1, 1, 1, 1, 1, 0, 0, 0], [0, 0, 0, 0, 1, 1, 1, 1]], dtype=torch.bool)
    ids = torch.arange(10, 26).view(2, 8)
    states = hidden_states(model, ids, mask)
    assert seen[0].tolist() == [[10, 11, 12, 13, 14], [22, 23, 24, 25, 0]]
    assert states.shape == (2, 8, 32) and not states[~mask].any() and states[mask].all()
