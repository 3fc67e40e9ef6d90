"""Gradients of both models over played episodes, against unpadded rows whose gaps are context and nothing else."""

from __future__ import annotations

import copy
import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig
from transformers import LlamaForSequenceClassification

from rlhf_ppo import PPOTrainer
from rlhf_ppo.data.rollout import Rollout
from tests.agents.chat import ppo_config
from tests.agents.games import Talk, player, sharp, tokenizer_of_words
from tests.runs import record_rollouts

GAMMA, LAM, VF = 0.97, 0.9, 0.3

RUN: dict[str, Any] = {
    **{"response_length": 120, "per_device_train_batch_size": 8, "num_generations": 1, "optim": "sgd"},
    **{"learning_rate": 1.0, "max_grad_norm": 0.0, "lr_scheduler_type": "constant", "kl_coef": 0.0, "gamma": GAMMA},
    **{
        "lam": LAM,
        "vf_coef": VF,
        "num_mini_batches": 1,
        "bootstrap_truncated": True,
        "gradient_accumulation_steps": 2,
    },
}


def advantages_of_row(rewards: Any, values: Any, end: float, starts: list[int], level: str) -> tuple[Any, Any]:
    """GAE by its definition on a row whose gaps are cut out; a turn is one action at `level` turn."""
    if level == "token":
        starts = list(range(len(rewards)))
    bounds = [*starts, len(rewards)]
    paid = np.array([rewards[a:b].sum() for a, b in itertools.pairwise(bounds)])
    value = values[starts]
    delta = paid + GAMMA * np.append(value[1:], end) - value
    steps = np.arange(len(delta))
    found = np.array([((GAMMA * LAM) ** (steps[t:] - t) * delta[t:]).sum() for t in steps])
    return np.repeat(found, np.diff(bounds)), found + value


def expected_gradients(policy: Any, value_model: Any, rollout: Rollout, level: str) -> dict[str, torch.Tensor]:
    policy, value_model = (copy.deepcopy(model).double().eval() for model in (policy, value_model))
    rows: list[tuple[Any, ...]] = []
    width = rollout.response_mask.shape[1]
    for row, ids in enumerate(rollout.query_responses):
        real = rollout.attention_mask[row]
        unpadded, written = ids[real], rollout.response_mask[row][real[-width:]].nonzero().flatten()
        start = len(unpadded) - int(real[-width:].sum())
        places = start + written
        logits = policy(input_ids=unpadded[None]).logits[0].log_softmax(-1)
        logprobs = logits[places - 1].gather(1, unpadded[places][:, None])[:, 0]
        body = value_model.get_base_model() if hasattr(value_model, "get_base_model") else value_model
        all_values = body.score(body.model(input_ids=unpadded[None]).last_hidden_state)[0, :, 0]
        rewards = rollout.token_scores[row][real[-width:]][written].double().numpy().copy()
        rewards[-1] += float(rollout.scores[row])
        end = 0.0 if bool(rollout.ended[row]) else float(all_values[-1].detach())
        starts = [k for k, place in enumerate(places.tolist()) if k == 0 or place != places[k - 1] + 1]
        given = (rewards, all_values[places - 1].detach().numpy(), end, starts, level)
        advantages, returns = advantages_of_row(*given)
        learned = torch.tensor(starts) if level == "turn" else torch.arange(len(places))
        rows.append((logprobs, advantages, all_values[places - 1][learned], torch.tensor(returns), len(starts)))
    advantages = np.concatenate([row[1] for row in rows])
    whitened = torch.tensor((advantages - advantages.mean()) / np.sqrt(advantages.var(ddof=1) + 1e-8))
    logprobs, values, returns = (torch.cat([row[k] for row in rows]) for k in (0, 2, 3))
    assert {row[4] for row in rows} == {1, 2, 3, 4}
    loss = -(logprobs * whitened).mean() + VF * 0.5 * (values - returns).square().mean()
    loss.backward()
    return {
        f"{name}.{key}": value.grad
        for name, model in (("policy", policy), ("value_model", value_model))
        for key, value in model.named_parameters()
        if value.grad is not None and value.requires_grad
    }


@pytest.mark.parametrize("level", ["token", "turn"])
@pytest.mark.parametrize(("attention", "lora"), [("sdpa", False), ("eager", False), ("sdpa", True), ("eager", True)])
def test_gradients_of_both_models(tmp_path: Path, level: str, attention: str, lora: bool) -> None:
    policy: Any = sharp(player())
    config = copy.deepcopy(policy.config)
    config.num_labels = 1
    torch.manual_seed(1)
    value_model = LlamaForSequenceClassification(config)
    for model in (policy, value_model):
        model.set_attn_implementation(attention)
    adapters = LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    given: dict[str, Any] = {"peft_config": adapters, "value_peft_config": adapters} if lora else {}
    rows = [
        {"prompt": "a b c"[: 1 + 2 * (row % 3)], "seed": row, "kind": "wild", "moves": 1 + row % 4}
        for row in range(16)
    ]
    trainer: Any = PPOTrainer(
        ppo_config(tmp_path, **RUN, gae_level=level),
        tokenizer_of_words(),
        policy,
        value_model=value_model,
        train_dataset=rows,
        reward_funcs="length",
        environment_factory=Talk,
        **given,
    )
    models = (trainer.policy_model, trainer.value_model)
    before = {name: value.detach().clone() for name, value in trainer.model.named_parameters()}
    kept = copy.deepcopy(models)
    rollouts = record_rollouts(trainer)
    trainer.train()

    assert trainer._run.unwrapped(trainer.model).packs_rows == (attention == "sdpa")
    expected = expected_gradients(*kept, rollouts[0], level)
    after = dict(trainer.model.named_parameters())
    moved = {name: (before[name] - value).detach().double() for name, value in after.items() if value.requires_grad}
    assert moved.keys() == expected.keys() and max(value.abs().max() for value in moved.values()) > 0.01
    for name, gradient in expected.items():
        torch.testing.assert_close(
            moved[name], gradient, rtol=1e-4, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}"
        )
