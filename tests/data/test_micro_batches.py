"""An optimizer step is one mini-batch: how many there are, what is in them, and that cutting them changes nothing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from datasets import Dataset
from transformers import TrainerCallback

from rlhf_ppo import PPOTrainer
from rlhf_ppo.data.rollout import Experience
from rlhf_ppo.reporting.metrics import UpdateStatistics
from tests.conftest import prompt_rows, tiny_policy, tiny_scorer

COMBINATIONS = [(1, 1, 1), (1, 4, 2), (2, 2, 4), (4, 1, 2), (8, 4, 4)]


class Counts(TrainerCallback):
    """Counts the events of the optimizer, in each update."""

    def __init__(self) -> None:
        self.events: list[Counter[str]] = []

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        self.events.append(Counter())

    def on_substep_end(self, *args: Any, **kwargs: Any) -> None:
        self.events[-1]["substep"] += 1

    def on_pre_optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        self.events[-1]["before"] += 1

    def on_optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        self.events[-1]["step"] += 1


@pytest.mark.parametrize("per_device, accumulation, num_mini_batches", COMBINATIONS)
def test_optimizer_steps_are_epochs_times_mini_batches(
    make_trainer: Callable[..., PPOTrainer], per_device: int, accumulation: int, num_mini_batches: int
) -> None:
    """In every update: each of these is a whole data epoch, whose end must not add a step."""
    batch, num_ppo_epochs, num_updates = per_device * accumulation, 3, 2
    counts, small = Counts(), {"num_hidden_layers": 1, "hidden_size": 16, "intermediate_size": 16}
    trainer = make_trainer(
        model=tiny_policy(**small),
        value_model=tiny_scorer(seed=2, **small),
        train_dataset=Dataset.from_list(prompt_rows(batch)),
        per_device_train_batch_size=per_device,
        gradient_accumulation_steps=accumulation,
        num_mini_batches=num_mini_batches,
        num_ppo_epochs=num_ppo_epochs,
        total_episodes=batch * num_updates,
        response_length=2,
        callbacks=[counts],
    )
    trainer.train()
    steps = num_ppo_epochs * num_mini_batches
    micro_batches = -(-(batch // num_mini_batches) // per_device)
    expected = {"step": steps, "before": steps, "substep": steps * (micro_batches - 1)}
    assert [dict(+events) for events in counts.events] == [{k: v for k, v in expected.items() if v}] * num_updates
    taken = {int(state["step"]) for state in trainer.optimizer.state.values()}
    assert taken == {num_updates * steps}
    assert trainer.state.global_step == num_updates


# ---- Cutting ----


class CuttingTrainer(PPOTrainer):
    """Instead of learning, takes the gradient of the same mini-batch cut into micro-batches of several sizes."""

    row_limits = (1, 2, 3, 5, 8, 12, 100)
    budgets = (1, 17, 30)
    """Tokens: fewer than any row has, than two long rows have, and enough for several."""

    def learn(self, experience: Experience) -> Any:
        self.model.train()
        self.experience = experience
        statistics = UpdateStatistics()
        for size in self.row_limits:
            self.args.per_device_train_batch_size = size
            statistics.grad_norm = self.optimizer_step(experience, UpdateStatistics())
        for budget in self.budgets:
            self.args.max_tokens_per_micro_batch = budget
            self.optimizer_step(experience, UpdateStatistics())
        return statistics


class Gradients(TrainerCallback):
    """Keeps every gradient before each optimizer step."""

    def __init__(self) -> None:
        self.taken: list[dict[str, torch.Tensor]] = []

    def on_pre_optimizer_step(self, *args: Any, model: Any, **kwargs: Any) -> None:
        self.taken.append({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})


@pytest.mark.parametrize("extra", [{}, {"gradient_checkpointing": True}], ids=["plain", "checkpointing"])
def test_gradients_do_not_depend_on_how_a_mini_batch_is_cut(
    make_trainer: Callable[..., PPOTrainer], extra: dict[str, Any]
) -> None:
    """Within 1e-6, of gradients whose largest element is between 0.1 and 1; the rows are ragged on both sides."""
    policy, value_model = tiny_policy(initializer_range=0.1), tiny_scorer(seed=2, initializer_range=0.1)
    policy.lm_head.weight.data[1] *= 8  # EOS more often
    gradients = Gradients()
    trainer = make_trainer(
        CuttingTrainer,
        model=policy,
        value_model=value_model,
        ref_model=tiny_policy(seed=5),
        train_dataset=Dataset.from_list(prompt_rows(12)),
        optimizers=(torch.optim.SGD([*policy.parameters(), *value_model.parameters()], lr=0.0), None),
        callbacks=[gradients],
        per_device_train_batch_size=12,
        gradient_accumulation_steps=1,
        num_mini_batches=1,
        total_episodes=12,
        max_grad_norm=0.0,
        **extra,
    )
    trainer.train()
    lengths = trainer.experience.response_mask.sum(dim=1)
    assert lengths.min() <= 2 and lengths.max() == 8
    cuts = (*CuttingTrainer.row_limits, *(f"at most {budget} tokens" for budget in CuttingTrainer.budgets))
    assert len(gradients.taken) == len(cuts)
    whole = gradients.taken[len(CuttingTrainer.row_limits) - 1]
    assert len(whole) == len(list(trainer.model.parameters()))
    assert 0.1 < max(float(gradient.abs().max()) for gradient in whole.values()) < 1
    for size, cut in zip(cuts, gradients.taken, strict=True):
        for name, gradient in cut.items():
            difference = float((gradient - whole[name]).abs().max())
            assert difference < 1e-6, f"{name} differs by {difference} in micro-batches of {size}"


# ---- Shuffling ----


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


def orders(make_trainer: Callable[..., PPOTrainer], **overrides: Any) -> list[list[list[int]]]:
    trainer = make_trainer(OrderTrainer, num_ppo_epochs=2, num_mini_batches=2, total_episodes=16, **overrides)
    trainer.train()
    return trainer.orders


def test_every_epoch_is_a_new_partition_and_every_run_the_same(make_trainer: Callable[..., PPOTrainer]) -> None:
    first, again = orders(make_trainer), orders(make_trainer)
    assert first == again
    epochs = [update[start : start + 2] for update in first for start in (0, 2)]
    for epoch in epochs:
        assert [len(minibatch) for minibatch in epoch] == [4, 4]
        assert sorted(epoch[0] + epoch[1]) == list(range(8))
    assert len({str(epoch) for epoch in epochs}) == len(epochs) == 4  # two updates of two epochs, no order twice
    assert orders(make_trainer, seed=4) != first
