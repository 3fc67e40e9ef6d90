"""The trainer with each generation engine: which one generates, and when it is told of a new policy."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from accelerate import Accelerator
from torch import nn

from rlhf_ppo.config.checks import EngineName
from rlhf_ppo.generation.continuous import ContinuousEngine
from rlhf_ppo.generation.engine_factory import make_engine
from rlhf_ppo.generation.protocol import Sampled
from rlhf_ppo.generation.sampling import called
from rlhf_ppo.generation.transformers_engine import TransformersEngine
from rlhf_ppo.models.policy_and_value import response_logprobs
from tests.conftest import make_tokenizer, needs_continuous, prompt_rows, tiny_policy
from tests.runs import QUICK, MakeArgs, MakeTrainer, assert_identical, history, parameters, train_and_record


class Talkative:
    """transformers' `generate`, with log-probabilities; counts its calls."""

    reads_sharded = False

    def __init__(self) -> None:
        self.inner, self.changes, self.calls = TransformersEngine(64), 0, 0

    def sample(self, policy: nn.Module, prompts: Any, config: Any) -> Sampled:
        self.calls += 1
        ids = self.inner.sample(policy, prompts, config).ids
        mask = torch.ones_like(ids, dtype=torch.bool)
        whole = torch.cat((prompts.input_ids, ids), dim=1), torch.cat((prompts.attention_mask, mask), dim=1), mask
        with torch.no_grad():
            logprobs = response_logprobs(policy, *whole, config.temperature or 1.0)[0]
        return Sampled(ids, logprobs)

    def policy_changed(self) -> None:
        self.changes += 1


# ---- Names ----


@pytest.mark.parametrize("name", get_args(EngineName))
def test_the_docs_explain_an_engine(name: str) -> None:
    page = Path(__file__).parents[2] / "docs" / "generation.md"
    has_row = f"\n| `{name}` " in page.read_text(encoding="utf-8")
    assert has_row, f"{name} needs a row in docs/generation.md"


@needs_continuous
@pytest.mark.parametrize("name", [name for name in get_args(EngineName) if name != "vllm"])  # see tests/vllm
def test_an_engine_is_made_by_its_name(make_args: MakeArgs, name: str) -> None:
    args = make_args(generation_engine=name)
    engine = make_engine(args, tiny_policy(), Accelerator(cpu=True), make_tokenizer(), None)
    assert called(engine) == f"generation_engine={name!r}"


# ---- Who generates ----


@needs_continuous
def test_continuous_batching_trains_evaluates_and_fills_tables(make_trainer: MakeTrainer) -> None:
    """With one choice at each step it is the run of `generate`; its log-probabilities are those of that one choice."""
    ends = []
    for engine in ("transformers", "continuous"):
        trainer = make_trainer(
            **QUICK, top_k=1, generation_engine=engine, eval_dataset=prompt_rows(5), num_sample_generations=1,
            importance_sampling_correction=False, eval_strategy="steps", eval_steps=2, bf16=False,
        )  # fmt: skip
        assert isinstance(trainer.sampler.engine, ContinuousEngine) is (engine == "continuous")
        rollouts = train_and_record(trainer)
        log = [{key: value for key, value in entry.items() if "sampling/" not in key} for entry in history(trainer)]
        ends.append((parameters(trainer), log, trainer.generate_completions().to_dict()))  # type: ignore
    assert_identical(ends[1], ends[0])
    assert all(not rollout.responses.sampling_logprobs.any() for rollout in rollouts), "certain of each token"


def test_the_engine_is_told_when_the_policy_may_have_changed(make_trainer: MakeTrainer) -> None:
    trainer = make_trainer(**QUICK, eval_dataset=prompt_rows(9), per_device_eval_batch_size=2)
    trainer.sampler.engine = engine = Talkative()
    trainer.train()
    assert (engine.calls, engine.changes) == (3, 1 + 3), "at the start, and after each update"
    trainer.evaluate()
    assert (engine.calls, engine.changes) == (3 + 5, 4 + 1), "once for all batches"
    trainer.generate_completions()
    assert engine.changes == 5 + 1
