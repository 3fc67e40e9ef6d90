"""A vLLM that runs in the training process, on a CPU."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig

from rlhf_ppo import PPOTrainer
from rlhf_ppo.generation.sampling import sample_with, sampling_config
from tests.conftest import prompt_rows
from tests.vllm.episodes import check_episodes
from tests.vllm.training import (
    EOS,
    MOST,
    NEAR,
    differences,
    first_logs,
    greedy_agreement,
    load_policy,
    make_vllm_trainer,
    policy_of,
    sample_as,
    some_prompts,
)  # fmt: skip

# ---- One run of three updates ----


@pytest.fixture(scope="module")
def trained(saved: Path, tmp_path_factory: pytest.TempPathFactory) -> PPOTrainer:
    trainer = make_vllm_trainer(saved, tmp_path_factory.mktemp("trained"))
    trainer.train()
    return trainer


def test_the_log_probabilities_of_training_are_vllm_s(trained: PPOTrainer) -> None:
    """In each update: the weights of the update before have arrived."""
    logs = first_logs(trained)
    assert len(logs) == 3
    assert max(log["sampling/sampling_logp_difference/max"] for log in logs) < NEAR


def test_it_generates_from_the_trained_weights(trained: PPOTrainer, saved: Path) -> None:
    assert greedy_agreement(trained, policy_of(trained)) == 1
    assert greedy_agreement(trained, load_policy(saved)) < 0.9


def test_evaluation(trained: PPOTrainer) -> None:
    assert 0 <= trained.evaluate()["eval_score"] <= 1


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": 0.7},
        {"top_k": 5},
        {"top_p": 0.8},
        {"top_k": 5, "top_p": 0.8, "temperature": 1.3},
        {"suppressed": list(range(24, 32))},
    ],
    ids=lambda options: " ".join(options) or "plain",
)
def test_log_probabilities_are_those_of_the_distribution_that_was_asked_for(
    trained: PPOTrainer, options: dict[str, Any]
) -> None:
    sampled, prompts = sample_as(trained, **options)
    assert differences(trained, sampled, prompts, **options).max() < NEAR
    if "suppressed" in options:
        assert sampled.ids.max() < 24


@pytest.mark.parametrize("stops", [[EOS], [EOS, 5, 6, 7]])
def test_rows_end_at_a_stop_token_or_have_all_tokens(trained: PPOTrainer, stops: list[int]) -> None:
    config = sampling_config(trained.args, trained.tokens.stop, None)
    config.temperature, config.eos_token_id = 2.0, stops
    prompts = some_prompts(64)  # of 16, none ended on one machine
    sampled = sample_with(trained.sampler.engine, policy_of(trained), prompts, config)
    assert sampled.lengths is not None
    lengths = sampled.lengths.tolist()
    assert len(set(lengths)) > 1 and max(lengths) == 12
    for ids, length in zip(sampled.ids.tolist(), lengths, strict=True):
        assert length == 12 or ids[length - 1] in stops
        assert not set(ids[: length - 1]) & set(stops)


def test_a_prompt_that_just_fits_has_its_whole_response(trained: PPOTrainer) -> None:
    trained.evaluate([{"input_ids": [5] * (MOST - 12)}])
    with pytest.raises(ValueError, match=r"take 65 positions, but vllm_max_model_length=64"):
        trained.evaluate([{"input_ids": [5] * (MOST - 11)}])


def test_what_vllm_cuts_all_the_same_is_an_error(trained: PPOTrainer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Past every other check: a limit of vLLM's that nobody knows of."""
    monkeypatch.setattr("rlhf_ppo.generation.sampling.check_lengths", lambda *given: None)
    monkeypatch.setattr("rlhf_ppo.run.datasets.check_lengths", lambda *given: None)
    rows = [{"input_ids": [4 + row] * 60} for row in range(6)]
    with pytest.raises(RuntimeError, match=r"'vllm' cut the response to row \d .*: 4 tokens after a prompt of 60, wh"):
        trained.evaluate(rows)


def test_prompts_of_one_token(trained: PPOTrainer) -> None:
    trained.evaluate(prompt_rows(4, longest=1))


def test_episodes_of_several_turns(saved: Path, tmp_path: Path) -> None:
    assert check_episodes(saved, tmp_path, total_episodes=16)["several"] > 8


# ---- Adapters ----


def frozen(trainer: PPOTrainer) -> dict[str, torch.Tensor]:
    return {name: weight.clone() for name, weight in trainer.model.named_parameters() if not weight.requires_grad}


def assert_unchanged(trainer: PPOTrainer, before: dict[str, torch.Tensor]) -> None:
    now = dict(trainer.model.named_parameters())
    assert before and all(torch.equal(now[name], weight) for name, weight in before.items())


def test_lora_with_another_stop_token_than_eos(saved: Path, tmp_path: Path) -> None:
    """The base stays bit for bit, what vLLM samples with is the merged policy, and EOS ends nothing."""
    lora = LoraConfig(r=4, target_modules="all-linear")
    trainer = make_vllm_trainer(
        saved, tmp_path, peft_config=lora, stop_token=None, stop_token_id=13, response_length=24, learning_rate=2e-2
    )
    before, answers = frozen(trainer), []
    generate = trainer.sampler.engine.vllm.generate  # type: ignore
    trainer.sampler.engine.vllm.generate = lambda *a, **k: answers.append(generate(*a, **k)) or answers[-1]  # type: ignore
    trainer.train()
    trainer.evaluate()
    trainer.evaluate()
    assert_unchanged(trainer, before)
    rows = [ids for _, answer, _, _ in answers for ids in answer]
    assert all(13 not in ids[:-1] and (len(ids) == 24 or ids[-1] == 13) for ids in rows)
    assert any(EOS in ids[:-1] for ids in rows) and any(ids[-1] == 13 and len(ids) < 24 for ids in rows)
    assert max(log["sampling/sampling_logp_difference/max"] for log in first_logs(trainer)) < NEAR
    assert greedy_agreement(trainer, policy_of(trainer)) == 1


def test_one_base_and_a_float32_checkpoint_that_vllm_reads_in_16_bits(
    saved: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    from vllm_on_cpu import patch_trl  # pyright: ignore[reportMissingImports]

    patch_trl(dtype="auto")
    try:
        trainer = make_vllm_trainer(
            saved, tmp_path, value_model=None, peft_config=LoraConfig(r=4, target_modules="all-linear"),
            share_base_model=True, total_episodes=16,
        )  # fmt: skip
    finally:
        patch_trl()
    lines = [record.getMessage() for record in caplog.records if record.getMessage().startswith("vLLM samples")]
    assert len(lines) == 1 and re.search(
        r"samples in b?float16, but the policy is trained in float32; .* corr", lines[0]
    )
    before = frozen(trainer)
    trainer.train()
    assert_unchanged(trainer, before)
    largest = max(log["sampling/sampling_logp_difference/max"] for log in first_logs(trainer))
    assert NEAR < largest < 1
