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
from rlhf_ppo.data.experience import Experience
from rlhf_ppo.training.policy_losses import resolve_policy_loss
from tests.runs import QUICK, history, parameters, record_rollouts

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
    "dual_clip": {"dual_clip": 1.25},
    "cliprange_value": {"cliprange_value": None},
    "entropy_coef": {"entropy_coef": 0.1},
    "sequence": {"loss_aggregation": "sequence"},
    "constant": {"loss_aggregation": "constant"},
    "gspo": {"policy_loss": "gspo"},
    "cispo": {"policy_loss": "cispo", "cliprange_high": 1.0},
    "lam_policy": {"lam_policy": 0.3},
    "lam_critic": {"lam_critic": 1.0},
    "length_adaptive_alpha": {"length_adaptive_alpha": 0.3},
}


class InOnePass(PPOTrainer):
    """Learns from both models at once, as engines do."""

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        return super().compute_loss(*args, **kwargs)


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


def doubled(logprobs: Tensor, experience: Experience, args: Any) -> PolicyLoss:
    result = plain(logprobs, experience, args)
    return result._replace(loss=2 * result.loss, figures={"policy/twice": 2 * result.ratio})


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


def test_its_figures_are_logged(make_trainer: MakeTrainer) -> None:
    trainer = make_trainer(**UPDATE)
    trainer._policy_loss = doubled
    trainer.train()
    logged = history(trainer)[0]
    assert logged["policy/twice"] == pytest.approx(2 * logged["val/ratio"], rel=1e-5)


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ("grpo", ValueError, r"policy_loss='grpo' names no loss; write one of \['ppo', 'gspo', 'cispo'\]"),
        ("missing.py:loss", ValueError, "policy_loss holds 'missing.py:loss', but there is no file"),
        ("os.path.curdir", TypeError, "policy_loss holds 'os.path.curdir', which is '.' and cannot be called"),
        (3, TypeError, "policy_loss=3 must be a name or a function"),
    ],
)
def test_what_is_no_loss_is_an_error(given: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        resolve_policy_loss(given)
