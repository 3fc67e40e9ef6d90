"""A bandit whose KL-regularised optimum is known: pi* = pi_ref exp(reward / kl_coef) / Z (2205.11275)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from rlhf_ppo import PPOConfig, PPOTrainer
from tests.conftest import QUIET, make_tokenizer, tiny_policy, tiny_scorer

KL_COEF, PROMPT, BATCH, UPDATES = 0.4, [5, 6], 256, 24


@torch.no_grad()
def log_probabilities(policy: Any) -> torch.Tensor:
    return policy.eval()(torch.tensor([PROMPT])).logits[0, -1].double().log_softmax(-1)


@pytest.mark.learning
@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_k1_finds_the_optimum_of_the_kl_regularised_reward_and_k3_ends_below_the_start(
    estimator: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """An action is one token, of 32. Measured over two seeds: k1 slope 1.001 and 1.001, KL .002; k3 KL .97."""
    policy = tiny_policy()
    paid = torch.rand(policy.config.vocab_size, generator=torch.Generator().manual_seed(3)).double()
    reference = log_probabilities(policy)
    args = PPOConfig(
        str(tmp_path), total_episodes=UPDATES * BATCH, per_device_train_batch_size=BATCH, response_length=1,
        temperature=1.0, kl_coef=KL_COEF, kl_estimator=estimator, learning_rate=3e-2, num_ppo_epochs=2, **QUIET,
    )  # fmt: skip
    PPOTrainer(
        args, make_tokenizer(), policy, value_model=tiny_scorer(), train_dataset=[{"input_ids": PROMPT}] * BATCH,
        reward_funcs=lambda completion_ids, **_: [paid[ids[0]].item() for ids in completion_ids],
    ).train()  # fmt: skip

    learned, best = log_probabilities(policy), (reference + paid / KL_COEF).log_softmax(-1)
    share, moved = learned.exp(), learned - reference
    centred = paid - (share * paid).sum()
    slope = (share * centred * moved).sum() / (share * centred**2).sum()
    distance = (share * (learned - best)).sum()
    objective = (share * (paid - KL_COEF * moved)).sum() - (reference.exp() * paid).sum()  # less that at the start
    if estimator == "k1":
        assert slope == pytest.approx(1 / KL_COEF, rel=0.03) and distance < 0.01 and objective > 0.09
    else:
        assert distance > 0.3 and objective < 0
    assert ("does not optimise the KL-regularised reward" in caplog.text) == (estimator == "k3")
