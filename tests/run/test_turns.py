"""`gae_level="turn"` in whole updates."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from rlhf_ppo.algorithm.advantages import turn_gae, turn_starts
from rlhf_ppo.algorithm.losses import ValueLoss, explained_variance
from rlhf_ppo.data.rollout import Experience
from tests.episodes import RespondsInTurns
from tests.runs import history, parameters

MakeTrainer = Callable[..., Any]

RUN: dict[str, Any] = {
    **{"per_device_train_batch_size": 8, "gradient_accumulation_steps": 1, "num_mini_batches": 1, "num_ppo_epochs": 1},
    **{"gae_level": "turn", "total_episodes": 8, "gamma": 0.99, "lam": 0.9, "optim": "sgd", "learning_rate": 1.0},
    **{"max_grad_norm": 0.0, "stop_token": "eos", "response_length": 24},
}
"""One update of one step on eight responses of several turns."""


class Recorded(RespondsInTurns):
    """Keeps what the update reads."""

    def estimate_advantages(self, rollout: Any) -> Experience:
        self.rollout = rollout
        return super().estimate_advantages(rollout)

    def compute_advantages(self, rollout: Any, rewards: Tensor) -> tuple[Tensor, Tensor]:
        self.rewards, self.returned = rewards, super().compute_advantages(rollout, rewards)
        return self.returned

    def value_loss(self, values: Tensor, experience: Experience) -> ValueLoss:
        values.register_hook(lambda gradient: self.__dict__.setdefault("gradients", []).append(gradient))
        self.learned, self.values = experience, values.detach()
        return super().value_loss(values, experience)


def test_the_value_of_a_turns_first_token_learns_alone_and_micro_batches_change_nothing(
    make_trainer: MakeTrainer,
) -> None:
    trainer = make_trainer(Recorded, **RUN)
    trainer.train()
    rollout, (advantages, returns) = trainer.rollout, trainer.returned
    given = trainer.rewards, rollout.values, rollout.loss_mask, 0.99, 0.9
    for found, expected in zip((advantages, returns), turn_gae(*given), strict=True):
        assert torch.equal(found, expected)

    part, starts = trainer.learned, turn_starts(trainer.learned.loss_mask)
    assert 8 < starts.sum() < part.loss_mask.sum()  # more turns than responses, and fewer than tokens
    expected = 0.1 * (trainer.values - part.returns) / starts.sum()
    torch.testing.assert_close(trainer.gradients[0], expected * starts)

    logged = history(trainer)[0]
    starts = turn_starts(rollout.loss_mask)
    variance = explained_variance(rollout.values, returns, starts)
    assert logged["val/explained_variance"] == pytest.approx(float(variance), rel=1e-5)
    assert logged["val/returns_mean"] == pytest.approx(float(returns[starts].mean()), rel=1e-5)
    half_squares = 0.5 * (rollout.values - returns)[starts].square()
    assert logged["loss/value_avg"] == pytest.approx(float(half_squares.mean()), rel=1e-4)

    cut = make_trainer(RespondsInTurns, **RUN | {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 8})
    cut.train()
    for name, weight in parameters(trainer).items():
        torch.testing.assert_close(parameters(cut)[name], weight, rtol=0, atol=2e-5)
