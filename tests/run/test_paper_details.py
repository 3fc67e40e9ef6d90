"""The points of *The N+ Implementation Details of RLHF with PPO* (2403.17031) that are the trainer's, one by one.

A run with the preset nplus on tiny models of the paper's family, with dropout in their configurations and prompts of
several lengths. What it did is computed again with the models' own forward passes, one response at a time, and NumPy.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from numpy.testing import assert_allclose
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM, GPTNeoXForSequenceClassification

from rlhf_ppo import PPOConfig, PPOTrainer, preset
from rlhf_ppo.data.rollout import Experience, Rollout
from tests.conftest import QUIET, make_tokenizer, prompt_rows

PAD, EOS = 0, 1
TEMPERATURE, KL_COEF = 0.7, 0.05
RESPONSE_LENGTH = 20


def neox(kind: Any, seed: int, **overrides: Any) -> Any:
    torch.manual_seed(seed)
    sizes: dict[str, Any] = {"vocab_size": 32, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    return kind(
        GPTNeoXConfig(
            **sizes | {"num_attention_heads": 4, "max_position_embeddings": 64, "initializer_range": 0.2} | overrides,
            attention_dropout=0.1,
            hidden_dropout=0.1,
            pad_token_id=PAD,
            eos_token_id=EOS,
        )
    )


@dataclass
class Run:
    """What a run was given, what it did, and what it said."""

    policy: Any
    reference: Any
    reward: Any
    trainer: Any
    rollouts: list[Rollout] = field(default_factory=list)
    experiences: list[Experience] = field(default_factory=list)

    @cached_property
    def rows(self) -> list[tuple[list[int], list[int]]]:
        """Prompt and response of each row of the first update, up to and with EOS."""
        first, rows = self.rollouts[0], []
        for ids, real in zip(first.query_responses, first.attention_mask.bool(), strict=True):
            prompt, response = ids[: first.context_length], ids[first.context_length :]
            given = prompt[real[: first.context_length]].tolist()
            sampled = response.tolist()
            rows.append((given, sampled[: sampled.index(EOS) + 1] if EOS in sampled else sampled))
        return rows


class _Keeps(PPOTrainer):
    kept: Run

    def collect_rollout(self, *args: Any) -> Rollout:
        self.kept.rollouts.append(super().collect_rollout(*args))
        return self.kept.rollouts[-1]

    def estimate_advantages(self, rollout: Rollout) -> Experience:
        self.kept.experiences.append(super().estimate_advantages(rollout))
        return self.kept.experiences[-1]


def run_of(folder: Path, **overrides: Any) -> Run:
    policy, reward = neox(GPTNeoXForCausalLM, 0), neox(GPTNeoXForSequenceClassification, 1, num_labels=1)
    reference = neox(GPTNeoXForCausalLM, 5)
    sizes = {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 2, "total_episodes": 48}
    options: dict[str, Any] = QUIET | sizes | {"response_length": RESPONSE_LENGTH, "logging_steps": 1, "seed": 3}
    args = PPOConfig(str(folder), **preset("nplus") | options | overrides)
    given = [copy.deepcopy(model) for model in (policy, reference, reward)]
    trainer = _Keeps(
        args=args,
        processing_class=make_tokenizer(),
        model=given[0],
        ref_model=given[1],
        reward_model=given[2],
        train_dataset=Dataset.from_list(prompt_rows(48)),
    )
    run = trainer.kept = Run(policy, reference, reward, trainer)
    trainer.train()
    return run


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return run_of(tmp_path_factory.mktemp("nplus"))


def logprobs_of(model: Any, prompt: list[int], response: list[int]) -> Any:
    """Log-probabilities of a response on its own: no padding, no dropout, logits divided by the temperature."""
    with torch.no_grad():
        logits = model.eval()(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1] / TEMPERATURE
    return logits.log_softmax(-1).gather(1, torch.tensor(response)[:, None])[:, 0].numpy()


def test_queries_are_padded_left_and_neither_padding_nor_dropout_changes_a_log_probability(run: Run) -> None:
    """Pads are masked, dropout is off, and samples and both models' log-probabilities are at 0.7."""
    first = run.rollouts[0]
    assert {len(prompt) for prompt, _ in run.rows} > {1, 2}
    assert not first.attention_mask[:, 0].all() and first.attention_mask[:, first.context_length - 1].all()
    for row, (prompt, response) in enumerate(run.rows):
        for model, logprobs in ((run.policy, first.logprobs), (run.reference, first.ref_logprobs)):
            assert logprobs is not None
            assert_allclose(logprobs[row, : len(response)], logprobs_of(model, prompt, response), atol=2e-5)


def test_the_value_model_starts_as_the_reward_model_and_leaves_it_alone(run: Run) -> None:
    """A copy of its own, which learns; the reward model and the reference stay."""
    models = run.trainer
    for now, before, stays in (
        (models.value_model, run.reward, False),
        (models.policy_model, run.policy, False),
        (models.reward_model, run.reward, True),
        (models.reference.model, run.reference, True),
    ):
        pairs = zip(now.parameters(), before.parameters(), strict=True)
        assert all(torch.equal(*pair) for pair in pairs) is stays
    of_policy, of_value = ({id(p) for p in model.parameters()} for model in (models.policy_model, models.value_model))
    assert not of_policy & of_value
