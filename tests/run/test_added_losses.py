"""Losses beside PPO's in whole updates: gradients against those of transformers, by autograd."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from rlhf_ppo import PPOTrainer
from tests.conftest import tiny_policy
from tests.runs import QUICK, history, parameters

MakeTrainer = Callable[..., Any]

ONE_STEP: dict[str, Any] = QUICK | {
    **{"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4, "total_episodes": 8, "response_length": 8},
    **{"learning_rate": 0.01, "optim": "sgd", "lr_scheduler_type": "constant", "max_grad_norm": 0.0},
    **{"stop_token_id": 7, "stop_token": None, "kl_coef": 0.0},
}
"""One optimizer step, whose change of the weights is linear in the loss, over four micro-batches."""


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


TEXTS: list[dict[str, Any]] = [
    *({"text": " ".join(f"w{number + step}" for step in range(1 + number))} for number in range(5)),
    {"prompt": "w9 w8", "completion": " w7 w6"},
    {"prompt": "w3", "completion": " w1 <eos>"},
    {"input_ids": [5, 6, 7, 8], "completion_mask": [0, 0, 1, 1]},
]
LEARNED = [(row, 1) for row in ([3, 1], [4, 5, 1], [5, 6, 7, 1], [6, 7, 8, 9, 1], [7, 8, 9, 10, 11, 1])]
LEARNED += [([12, 11, 10, 9, 1], 2), ([6, 4, 1], 1), ([5, 6, 7, 8], 2)]
"""Token ids of these rows, and how many are only read: the first, or the prompt."""


def test_texts_are_learned_from_beside_ppo(make_trainer: MakeTrainer) -> None:
    plain, added = make_trainer(**ONE_STEP), make_trainer(**ONE_STEP, ptx_coef=2.0, ptx_dataset=TEXTS)
    for trainer in (plain, added):
        trainer.train()

    def nll(policy: Any) -> Tensor:
        total, number = torch.zeros(()), 0
        for ids, num_read in LEARNED:
            logprobs = policy(torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
            total = total - logprobs.gather(1, torch.tensor(ids[1:])[:, None])[num_read - 1 :].sum()
            number += len(ids) - num_read
        return total / number

    assert_adds(plain, added, policy_gradient(nll), 2.0)
    expected = float(nll(tiny_policy()))
    assert history(added)[0]["loss/ptx_avg"] == pytest.approx(expected, rel=1e-5)
    loss = history(plain)[0]["loss"] + 2.0 * expected
    assert history(added)[0]["loss"] == pytest.approx(loss, abs=1e-3)
    assert "loss/ptx_avg" not in history(plain)[0]
    assert "eval_score" in added.evaluate(TEXTS[:5])  # another data set, of prompts alone


def test_every_pass_draws_each_text_once_in_an_order_of_its_own(make_trainer: MakeTrainer) -> None:
    modelling = make_trainer(**QUICK, ptx_coef=1.0, ptx_dataset=TEXTS)._ptx
    passes = [[modelling._drawn(8 * number + place) for place in range(8)] for number in range(3)]
    assert all(sorted(drawn) == sorted(modelling.texts) for drawn in passes)
    assert passes[0] != passes[1] != passes[2] != passes[0]
    assert [modelling._drawn(place) for place in range(8)] == passes[0]
    other = make_trainer(**QUICK, ptx_coef=1.0, ptx_dataset=TEXTS, seed=4)._ptx
    assert [other._drawn(place) for place in range(8)] != passes[0]


def test_the_ranks_take_rows_of_one_order(make_trainer: MakeTrainer, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = make_trainer(**QUICK | {"per_device_train_batch_size": 4}, ptx_coef=1.0, ptx_dataset=TEXTS)
    found: list[list[int]] = []
    for rank in (0, 1):
        monkeypatch.setattr(type(trainer.accelerator), "process_index", rank)
        rows = trainer._ptx._rows()
        found += [ids[mask].tolist() for ids, mask in zip(rows.query_responses, rows.attention_mask, strict=True)]
    assert sorted(found) == sorted(ids for ids, _ in LEARNED)
