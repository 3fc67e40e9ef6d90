"""Rows of a forward pass are no longer than their real tokens."""

from __future__ import annotations

import torch

from rlhf_ppo.models.packing import hidden_states
from tests.conftest import tiny_policy


def test_rows_are_no_longer_than_their_real_tokens_wherever_the_padding_is() -> None:
    """Padding between prompt and response too: one row's prompt is long, the other's response."""
    model, seen = tiny_policy(), []
    model.model.embed_tokens.register_forward_hook(lambda _, inputs, output: seen.append(inputs[0]))
    mask = torch.tensor([[1, 1, 1, 1, 1, 0, 0, 0], [0, 0, 0, 0, 1, 1, 1, 1]], dtype=torch.bool)
    ids = torch.arange(10, 26).view(2, 8)
    states = hidden_states(model, ids, mask)
    assert seen[0].tolist() == [[10, 11, 12, 13, 14], [22, 23, 24, 25, 0]]
    assert states.shape == (2, 8, 32) and not states[~mask].any() and states[mask].all()
