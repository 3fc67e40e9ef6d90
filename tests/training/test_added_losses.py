"""Losses beside PPO's in whole updates: gradients against those of transformers, by autograd."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from rlhf_ppo import PPOTrainer
from tests.conftest import tiny_policy
from tests.runs import QUICK, history, parameters, record_rollouts

MakeTrainer = Callable[..., Any]

ONE_STEP: dict[str, Any] = QUICK | {
    **{"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4, "total_episodes": 8, "response_length": 8},
    **{"learning_rate": 0.01, "optim": "sgd", "lr_scheduler_type": "constant", "max_grad_norm": 0.0},
    **{"stop_token_id": 7, "stop_token": None, "kl_coef": 0.0},
}
"""One optimizer step, whose change of the weights is linear in the loss, over four micro-batches."""


def share_of_even(completion_ids: list[list[int]], **columns: Any) -> list[float]:
    return [sum(one % 2 == 0 for one in ids) / len(ids) for ids in completion_ids]


def policy_gradient(loss: Callable[[Any], Tensor]) -> dict[str, Tensor]:
    """The gradient of a loss of the policy as it starts, from transformers' own forward pass."""
    policy = tiny_policy()
    loss(policy).backward()
    return {f"policy.{name}": value.grad for name, value in policy.named_parameters() if value.grad is not None}


def assert_adds(plain: PPOTrainer, added: PPOTrainer, gradient: dict[str, Tensor], coef: float) -> None:
    """Two runs differ by one step along a gradient, and only in the policy."""
    without, weights = parameters(plain), parameters(added)
    for name, before in without.items():
        step = -0.01 * coef * gradient[name] if name in gradient else torch.zeros_like(before)
        torch.testing.assert_close(weights[name] - before, step, rtol=1e-3, atol=2e-7, msg=name)
    assert max(float(value.abs().max()) for value in gradient.values()) * 0.01 * coef > 1e-4


@pytest.mark.parametrize("threshold", [0.2, 1.0])
def test_responses_with_a_good_score_are_imitated(make_trainer: MakeTrainer, threshold: float) -> None:
    """The penalty of those that do not end counts; above 1 there is none."""
    shaping: dict[str, Any] = {"missing_eos_penalty": 0.5, "reward_funcs": share_of_even}
    plain, added = (
        make_trainer(**ONE_STEP | shaping),
        make_trainer(**ONE_STEP | shaping, positive_nll_coef=0.5, positive_nll_threshold=threshold),
    )
    rollouts = record_rollouts(added)
    for trainer in (plain, added):
        trainer.train()
    scores = rollouts[0].scores - 0.5 * ~rollouts[0].stopped
    positive = scores > threshold
    logged = history(added)[0]
    share = float((rollouts[0].response_mask & positive[:, None]).sum() / rollouts[0].response_mask.sum())
    assert logged["policy/positive_frac"] == pytest.approx(share, rel=1e-5)
    if threshold == 1.0:
        assert share == 0 and "loss/positive_nll_avg" not in logged
        assert all(torch.equal(value, parameters(plain)[name]) for name, value in parameters(added).items())
        return
    assert 0 < int(positive.sum()) < int((rollouts[0].scores > threshold).sum()) < 8

    def nll(policy: Any) -> Tensor:
        rows = rollouts[0][positive.nonzero().squeeze(1)]
        mask = rows.response_mask
        positions = (rows.attention_mask.long().cumsum(dim=1) - 1).clamp(min=0)
        ids = rows.query_responses
        logits = policy(ids, attention_mask=rows.attention_mask.long(), position_ids=positions).logits / 0.7
        logprobs = logits.log_softmax(-1)[:, :-1].gather(2, ids[:, 1:, None]).squeeze(2)[:, -mask.shape[1] :]
        return -logprobs[mask].mean()

    assert_adds(plain, added, policy_gradient(nll), 0.5)
    assert logged["loss/positive_nll_avg"] == pytest.approx(float(nll(tiny_policy())), rel=1e-5)
