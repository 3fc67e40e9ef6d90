"""Where real tokens stand, against masks read one by one; and how rarely learning waits for its device."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhf_ppo import PPOTrainer
from rlhf_ppo.data.rollout import HostMasks, PackedIndices
from rlhf_ppo.models import packing
from tests.conftest import tiny_policy, tiny_scorer


@settings(deadline=None)
@given(rows=st.lists(st.tuples(st.integers(1, 4), st.integers(0, 3)), min_size=1, max_size=5), hole=st.booleans())
def test_places_are_those_of_each_real_token(rows: list[tuple[int, int]], hole: bool) -> None:
    mask = torch.tensor([[False] * (4 - p) + [True] * (p + r) + [False] * (3 - r) for p, r in rows])
    if hole:  # no batch of the trainer has one, but `hidden_states` takes any mask
        mask[0, 3] = False
    places, response = PackedIndices.of(mask, mask[:, 4:]), mask[:, 4:]
    lengths = [sum(row) for row in mask.tolist()]
    assert places.lengths.tolist() == lengths and places.longest == max(lengths)
    assert places.starts.tolist() == [sum(lengths[:row]) for row in range(len(rows) + 1)]
    assert places.starts.dtype == torch.int32
    assert places.tokens.tolist() == [i for i, real in enumerate(mask.flatten().tolist()) if real]
    numbered = [(row, number) for row, length in enumerate(lengths) for number in range(length)]
    assert places.positions.tolist() == [number for _, number in numbered]
    assert places.squeezed.tolist() == [row * max(lengths) + number for row, number in numbered]
    assert places.responses.tolist() == [i for i, real in enumerate(response.flatten().tolist()) if real]
    assert places.response_tokens.tolist() == [i // 3 * 7 + 4 + i % 3 for i in places.responses.tolist()]
    ids = torch.arange(mask.numel()).view(mask.shape) + 10**6
    expected = [row[real].tolist() for row, real in zip(ids, mask, strict=True)]
    assert [row[:n].tolist() for row, n in zip(places.squeeze(ids), lengths, strict=True)] == expected
    assert not places.squeeze(ids)[~places.squeezed_mask].any()


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_learning_waits_for_its_device_at_most_twice_per_micro_batch(
    make_trainer: Callable[..., PPOTrainer], monkeypatch: pytest.MonkeyPatch, attention: str
) -> None:
    """Packed rows, attended to as on an accelerator, and padded ones."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    monkeypatch.setattr(packing, "_attend_row_by_row", packing._attend_padded)
    from counters import waits  # pyright: ignore[reportMissingImports]

    trainer = make_trainer(
        model=tiny_policy(attn_implementation=attention),
        value_model=tiny_scorer(seed=2, attn_implementation=attention),
        num_mini_batches=1,
        total_episodes=16,
    )
    learn, policy_loss, counted, num_parts = trainer.learn, trainer.policy_loss, [], []

    def counting(*args: Any) -> Any:
        with waits() as counter:
            result = learn(*args)
        counted.append(counter)
        return result

    def noting(*args: Any) -> Any:
        num_parts.append(1)
        return policy_loss(*args)

    monkeypatch.setattr(trainer, "learn", counting)
    monkeypatch.setattr(trainer, "policy_loss", noting)
    trainer.train()
    assert len(num_parts) == 8 and len(counted) == 2
    assert 0 < sum(counter.total for counter in counted) <= 2 * len(num_parts), [each.places for each in counted]


def test_both_masks_are_copied_from_their_device_once(monkeypatch: pytest.MonkeyPatch) -> None:
    copies, copied = [], torch.Tensor.cpu
    monkeypatch.setattr(torch.Tensor, "cpu", lambda tensor: copies.append(tensor.shape) or copied(tensor))
    attention, response = torch.tensor([[False, True, True]]), torch.tensor([[True, False]])
    masks = HostMasks.of(attention, response)

    assert masks.attention.tolist() == attention.tolist() and masks.response.tolist() == response.tolist()
    assert len(copies) == 1 and masks.are_of(attention, response)
