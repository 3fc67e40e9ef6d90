"""What Trainer is told about PPO: the order of the prompts, the loss that is logged, and what is counted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from datasets import Dataset
from transformers import TrainerCallback

from rlhf_ppo import PPOTrainer
from tests.conftest import prompt_rows, tiny_policy, tiny_scorer
from tests.runs import QUICK, SeenPrompts, record_rollouts

MakeTrainer = Callable[..., PPOTrainer]


# ---- The order of the prompts ----


TOKENS = list(range(3, 15))


def passes(make_trainer: MakeTrainer, resume: bool | str = False, **overrides: Any) -> list[list[int]]:
    """Train for three passes over twelve prompts of one token each; return their order in each pass."""
    run = {**QUICK, "total_episodes": 3 * len(TOKENS), "response_length": 1, "logging_steps": 99, **overrides}
    dataset = Dataset.from_dict({"input_ids": [[token] for token in TOKENS]})
    small = {"model": tiny_policy(num_hidden_layers=1), "value_model": tiny_scorer(num_hidden_layers=1)}
    trainer = make_trainer(SeenPrompts, train_dataset=dataset, **small, **{**run, "per_device_train_batch_size": 4})
    trainer.train(resume_from_checkpoint=resume)
    seen = [ids[0] for prompts in trainer.seen for ids in prompts]
    return [seen[start : start + len(TOKENS)] for start in range(0, len(seen), len(TOKENS))]


@pytest.mark.parametrize("strategy", ["random", "group_by_length"])
def test_each_pass_has_an_order_of_its_own_that_the_seed_alone_decides(
    strategy: str, make_trainer: MakeTrainer
) -> None:
    orders = passes(make_trainer, train_sampling_strategy=strategy)
    assert [sorted(order) for order in orders] == [TOKENS] * 3
    assert TOKENS not in orders and len({tuple(order) for order in orders}) == 3
    others = passes(make_trainer, train_sampling_strategy=strategy, data_seed=11)
    assert not {tuple(order) for order in orders} & {tuple(order) for order in others}
    run = {"data_seed": 11, "seed": 5, "temperature": 0.5}  # other random numbers
    assert passes(make_trainer, train_sampling_strategy=strategy, **run) == others


# ---- The loss that is logged ----


class OnePassLosses(PPOTrainer):
    """Keeps the loss of each mini-batch, computed in one pass over all of it, under the update's number."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.losses: dict[int, list[float]] = {}
        super().__init__(*args, **kwargs)

    def optimizer_step(self, minibatch: Any, statistics: Any) -> Any:
        with torch.no_grad():
            loss = float(self.compute_loss(self.model, minibatch))
        self.losses.setdefault(self.state.global_step + 1, []).append(loss)
        return super().optimizer_step(minibatch, statistics)


SEVERAL_STEPS = {
    "per_device_train_batch_size": 2,  # two micro-batches to a mini-batch
    "gradient_accumulation_steps": 6,
    "num_ppo_epochs": 2,
    "num_mini_batches": 3,
    "total_episodes": 5 * 12,
    "response_length": 4,
    "logging_steps": 2,
}


def test_the_logged_loss_is_the_mean_over_the_optimizer_steps_since_the_last_log(make_trainer: MakeTrainer) -> None:
    trainer = make_trainer(OnePassLosses, **SEVERAL_STEPS)
    output = trainer.train()
    assert {update: len(losses) for update, losses in trainer.losses.items()} == dict.fromkeys(range(1, 6), 6)
    logged = {entry["step"]: entry["loss"] for entry in trainer.state.log_history if "loss" in entry}
    assert {2, 4} <= logged.keys()
    after = 0
    for step, loss in logged.items():
        since = [loss for update in range(after + 1, step + 1) for loss in trainer.losses[update]]
        assert loss == pytest.approx(sum(since) / len(since), rel=1e-4), f"logged at update {step}"
        after = step
    every = [loss for losses in trainer.losses.values() for loss in losses]
    assert output.training_loss == pytest.approx(sum(every) / len(every), rel=1e-4)


# ---- What is carried, clipped and counted ----


def test_no_gradient_is_carried_into_the_next_optimizer_step(make_trainer: MakeTrainer) -> None:
    class Fresh(PPOTrainer):
        def optimizer_step(self, *args: Any) -> Any:
            assert all(value.grad is None or not value.grad.any() for value in self.model.parameters())
            return super().optimizer_step(*args)

    make_trainer(Fresh, **{**SEVERAL_STEPS, "total_episodes": 12}).train()


@pytest.mark.parametrize(("max_grad_norm", "expected"), [(1e-3, 1e-3), (0.0, None)], ids=["clipped", "as it is"])
def test_the_gradient_is_clipped_where_a_norm_is_set(
    max_grad_norm: float, expected: float | None, make_trainer: MakeTrainer
) -> None:
    norms: list[float] = []

    class Norms(TrainerCallback):
        def on_pre_optimizer_step(self, *args: Any, model: Any, **kwargs: Any) -> None:
            norms.append(float(torch.cat([value.grad.flatten() for value in model.parameters()]).norm()))

    trainer = make_trainer(**QUICK, max_grad_norm=max_grad_norm, callbacks=[Norms()])
    trainer.train()
    logged = [entry["grad_norm"] for entry in trainer.state.log_history if "grad_norm" in entry]
    assert min(logged) > 1e-2
    assert norms == pytest.approx([expected] * 3 if expected else logged, rel=1e-4)


def test_episodes_epochs_and_tokens_are_counted(make_trainer: MakeTrainer) -> None:
    rows = prompt_rows(8)
    run = {**QUICK, "total_episodes": 12, "max_steps": 6}
    tokens, held = {}, {"no": 0, "all": 0, "non_padding": 0}
    for counted in held:
        trainer = make_trainer(**run, train_dataset=Dataset.from_list(rows), include_num_input_tokens_seen=counted)
        rollouts = record_rollouts(trainer)
        trainer.train()
        entries = [entry for entry in trainer.state.log_history if "episode" in entry]
        assert [entry["episode"] for entry in entries] == [2, 4, 6, 8, 10, 12]
        assert [entry["epoch"] for entry in entries] == [0.25, 0.5, 0.75, 1.0, 1.25, 1.5]
        assert trainer.state.num_train_epochs == 2  # one and a half, begun twice
        tokens[counted] = trainer.state.num_input_tokens_seen
        logged = [entry.get("num_input_tokens_seen", 0) for entry in trainer.state.log_history]
        assert logged[-1] == tokens[counted]
    held["all"] = sum(rollout.attention_mask.numel() for rollout in rollouts)
    held["non_padding"] = sum(int(rollout.attention_mask.sum()) for rollout in rollouts)
    assert tokens == held and 0 < held["non_padding"] < held["all"]
