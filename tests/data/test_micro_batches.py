"""The order of mini-batches, and the rows of a pass; tests/test_first_update.py has how mini-batches are cut."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rlhf_ppo import PPOTrainer
from rlhf_ppo.data.rollout import Experience, Prompts, Responses, forward_in_batches
from rlhf_ppo.generation.sampling import join_responses
from tests.runs import MakeTrainer


class OrderTrainer(PPOTrainer):
    """Keeps the rows of each mini-batch, told by their ids, under the index of the update."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.orders: list[list[list[int]]] = []
        super().__init__(*args, **kwargs)

    def learn(self, experience: Experience) -> Any:
        self.rows = [row.tolist() for row in experience.returns]
        assert len({tuple(row) for row in self.rows}) == len(self.rows)
        self.orders.append([])
        return super().learn(experience)

    def optimizer_step(self, minibatch: Experience, statistics: Any) -> float | torch.Tensor:
        self.orders[-1].append([self.rows.index(row.tolist()) for row in minibatch.returns])
        return super().optimizer_step(minibatch, statistics)


def orders(make_trained: MakeTrainer, **overrides: Any) -> list[list[list[int]]]:
    return make_trained(OrderTrainer, num_ppo_epochs=2, num_mini_batches=2, total_episodes=16, **overrides).orders


def test_every_epoch_is_a_new_partition_and_every_run_the_same(make_trained: MakeTrainer) -> None:
    first, again = orders(make_trained), orders(make_trained)
    assert first == again
    epochs = [update[start : start + 2] for update in first for start in (0, 2)]
    for epoch in epochs:
        assert [len(minibatch) for minibatch in epoch] == [4, 4]
        assert sorted(epoch[0] + epoch[1]) == list(range(8))
    assert len({str(epoch) for epoch in epochs}) == len(epochs) == 4  # two updates of two epochs, no order twice
    assert orders(make_trained, seed=4) != first


@pytest.mark.parametrize("is_packed", [False, True])
def test_a_forward_pass_has_no_more_rows_than_allowed(is_packed: bool) -> None:
    ids = torch.arange(5 * 6).view(5, 6)
    responses = join_responses(Prompts.of_rows(ids[:, :4].tolist(), 0, ids.device), ids[:, 4:], None, 0)
    rows: list[int] = []

    def evaluate(part: Responses) -> tuple[torch.Tensor]:
        rows.append(len(part))
        return (part.query_responses[:, -1].float(),)

    (last,) = forward_in_batches(responses, evaluate, 2, is_packed)
    assert rows == [2, 2, 1] and last.tolist() == ids[:, -1].tolist()
