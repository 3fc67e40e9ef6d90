"""Options of published recipes in whole updates: what they change, in every way that an update is cut and learned."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rlhf_ppo import PPOTrainer
from rlhf_ppo.algorithm.advantages import gae
from rlhf_ppo.algorithm.losses import PolicyLoss, clipped_policy_loss
from rlhf_ppo.data.rollout import Experience
from tests.conftest import tiny_policy
from tests.runs import QUICK, InOnePass, history, parameters, record_rollouts

MakeTrainer = Callable[..., Any]

UPDATE: dict[str, Any] = QUICK | {
    **{"per_device_train_batch_size": 8, "num_ppo_epochs": 2, "num_mini_batches": 2, "total_episodes": 8},
    **{
        "stop_token_id": 7,
        "stop_token": None,
        "response_length": 8,
        "learning_rate": 1.0,
        "optim": "sgd",
        "lr_scheduler_type": "constant",
    },
}
"""One update of eight responses of several lengths, in four steps that move the policy far."""

OPTIONS: dict[str, dict[str, Any]] = {
    "cliprange_high": {"cliprange_high": 1.5},
    "cliprange_value": {"cliprange_value": None},
    "entropy_coef": {"entropy_coef": 0.1},
    "ptx": {"ptx_coef": 0.5, "ptx_dataset": [{"text": "w1 w2 w3 " * length} for length in (1, 3, 2, 4, 1)]},
    "sequence": {"loss_aggregation": "sequence"},
    "lam_policy": {"lam_policy": 0.3},
    "lam_critic": {"lam_critic": 1.0},
}


@pytest.fixture(scope="module")
def plain_weights() -> dict[str, dict[str, Tensor]]:
    return {}


def trained(make_trainer: MakeTrainer, *trainer_class: Any, **arguments: Any) -> PPOTrainer:
    trainer = make_trainer(*trainer_class, **UPDATE | arguments)
    trainer.train()
    return trainer


@pytest.mark.parametrize("option", OPTIONS)
def test_an_option_changes_the_update_the_same_however_it_is_cut_and_learned(
    make_trainer: MakeTrainer, option: str, plain_weights: dict[str, dict[str, Tensor]]
) -> None:
    """In turn with one part to a mini-batch, and at once with a part for each response."""
    plain = plain_weights.setdefault("plain", parameters(trained(make_trainer)))
    whole = parameters(trained(make_trainer, **OPTIONS[option]))
    assert any(not torch.equal(whole[name], plain[name]) for name in whole)
    cut = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 8}
    parts = parameters(trained(make_trainer, InOnePass, **OPTIONS[option] | cut))
    for name, weight in whole.items():
        torch.testing.assert_close(parts[name], weight, rtol=0, atol=2e-4, msg=lambda text: f"{name}: {text}")  # noqa: B023


def test_two_lambdas_are_two_passes(make_trainer: MakeTrainer) -> None:
    trainer = make_trainer(**UPDATE, lam_policy=0.3, lam_critic=0.9)
    rollouts, seen = record_rollouts(trainer), []
    trainer.compute_advantages = lambda *given: (
        seen.append((given, PPOTrainer.compute_advantages(trainer, *given))) or seen[-1][1]
    )
    trainer.train()
    (_rollout, rewards), (advantages, returns) = seen[0]
    given = rewards, rollouts[0].values, rollouts[0].loss_mask, 1.0
    assert torch.equal(advantages, gae(*given, 0.3)[0]) and torch.equal(returns, gae(*given, 0.9)[1])


# ---- Policy losses by name ----


def plain(logprobs: Tensor, experience: Experience, args: Any) -> PolicyLoss:
    return clipped_policy_loss(logprobs, experience.logprobs, experience.advantages, args.cliprange)


FILE = """
from rlhf_ppo.algorithm.losses import clipped_policy_loss

def loss(logprobs, experience, args):
    return clipped_policy_loss(logprobs, experience.logprobs, experience.advantages, args.cliprange)
"""


def test_a_loss_of_ones_own_is_a_function_a_file_or_a_dotted_name(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    (tmp_path / "losses.py").write_text(FILE)
    expected = parameters(trained(make_trainer))
    for named in (f"{tmp_path}/losses.py:loss", f"{__name__}.plain"):
        weights = parameters(trained(make_trainer, policy_loss=named))
        assert all(torch.equal(weights[name], expected[name]) for name in expected)


# ---- What goes on from update to update ----


def test_the_coefficient_follows_the_kl(make_trainer: MakeTrainer) -> None:
    trainer = make_trainer(**QUICK, ref_model=tiny_policy(seed=5), kl_coef=0.5, kl_target=0.01, kl_horizon=6)
    trainer.train()
    logged = [entry for entry in history(trainer) if "objective/kl" in entry]
    coefs = [0.5]
    for entry in logged[:-1]:
        error = min(max(entry["objective/kl"] / 0.01 - 1, -0.2), 0.2)
        coefs.append(coefs[-1] * (1 + error * 2 / 6))
    assert [entry["objective/kl_coef"] for entry in logged] == pytest.approx(coefs, rel=1e-6) and len(set(coefs)) == 3
    for entry, coef in zip(logged, coefs, strict=True):
        assert entry["objective/non_score_reward"] == pytest.approx(-coef * entry["objective/kl"], rel=1e-5)


class Watching(PPOTrainer):
    """Keeps how far each step's mini-batch was from where it was sampled."""

    def policy_loss(self, logprobs: Tensor, experience: Experience) -> PolicyLoss:
        shift = (logprobs.detach() - experience.logprobs)[experience.loss_mask].double()
        self.__dict__.setdefault("moved", []).append(shift.exp() - 1 - shift)
        return super().policy_loss(logprobs, experience)


def epochs_of(make_trainer: MakeTrainer, kl_stop: float) -> tuple[list[Tensor], dict[str, Any]]:
    """Train one update of up to four epochs of four micro-batches; return each epoch's KLs and the log."""
    cut = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4, "num_ppo_epochs": 4}
    trainer = make_trainer(Watching, **UPDATE | cut | {"learning_rate": 0.1, "kl_stop": kl_stop})
    trainer.train()
    return [torch.cat(trainer.moved[start : start + 4]) for start in range(0, len(trainer.moved), 4)], history(
        trainer
    )[0]


def test_epochs_end_once_the_policy_has_moved_far_enough(make_trainer: MakeTrainer) -> None:
    """In an epoch, not since the update began, whose mean is smaller."""
    epochs, logged = epochs_of(make_trainer, 1e6)
    assert len(epochs) == 4 and logged["policy/kl_stop_epoch"] == 4
    second, both = epochs[1].mean(), torch.cat(epochs[:2]).mean()
    assert 0 < epochs[0].mean() < both < second
    learned, logged = epochs_of(make_trainer, float(both + second) / 2)
    assert len(learned) == 2 and logged["policy/kl_stop_epoch"] == 2
    assert logged["policy/kl_avg"] == pytest.approx(float(both), rel=1e-3)


# ---- The value model's own learning rate ----


def test_the_value_model_learns_at_its_own_rate_on_the_same_schedule(make_trainer: MakeTrainer) -> None:
    start = parameters(make_trainer(**UPDATE))
    once = {
        "num_ppo_epochs": 1,
        "num_mini_batches": 1,
        "learning_rate": 0.1,
        "max_grad_norm": 0.0,
        "weight_decay": 0.1,
    }
    plain, own = (parameters(trained(make_trainer, **once, critic_learning_rate=rate)) for rate in (None, 0.02))
    for name, before in start.items():
        part = 0.2 if name.startswith("value_model.") else 1.0
        torch.testing.assert_close(own[name] - before, part * (plain[name] - before), rtol=1e-4, atol=1e-6)
    assert any((plain[name] - start[name]).abs().max() > 1e-3 for name in start if name.startswith("value_model."))
