"""Policy losses by name."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlhf_ppo import PPOTrainer
from rlhf_ppo.algorithm.losses import PolicyLoss, clipped_policy_loss
from rlhf_ppo.data.rollout import Experience
from tests.runs import QUICK, MakeTrainer, parameters

UPDATE: dict[str, Any] = QUICK | {
    **{"per_device_train_batch_size": 8, "num_ppo_epochs": 2, "num_mini_batches": 2, "total_episodes": 8},
    **{"stop_token": None, "stop_token_id": 7, "response_length": 8},
    **{"learning_rate": 1.0, "optim": "sgd", "lr_scheduler_type": "constant"},
}
"""One update of eight responses of several lengths, in four steps that move the policy far."""


def narrow(logprobs: Tensor, experience: Experience, args: Any) -> PolicyLoss:
    return clipped_policy_loss(logprobs, experience.logprobs, experience.advantages, args.cliprange / 4)


FILE = """
from rlhf_ppo.algorithm.losses import clipped_policy_loss

def narrow(logprobs, experience, args):
    return clipped_policy_loss(logprobs, experience.logprobs, experience.advantages, args.cliprange / 4)
"""


def test_a_loss_of_ones_own_is_a_function_a_file_or_a_dotted_name(make_trained: MakeTrainer, tmp_path: Path) -> None:
    (tmp_path / "losses.py").write_text(FILE)
    expected, default = (parameters(make_trained(**UPDATE, cliprange=value)) for value in (0.05, 0.2))
    assert any(not torch.equal(default[name], expected[name]) for name in expected)
    given = partial(PPOTrainer, policy_loss=narrow)
    trained = [make_trained(given, **UPDATE)]
    trained += [
        make_trained(**UPDATE, policy_loss=f"{where}narrow") for where in (f"{tmp_path}/losses.py:", f"{__name__}.")
    ]
    for weights in map(parameters, trained):
        assert all(torch.equal(weights[name], expected[name]) for name in expected)
