"""The first update, every number of it, against float64 NumPy on unpadded rows (`tests/fuzz/simulation.py`)."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose
from transformers import DataCollatorWithPadding, GenerationConfig

from rlhf_ppo import PPOTrainer
from rlhf_ppo.data.prefix_tree import prefix_tree
from rlhf_ppo.models import fused, policy_and_value
from tests.conftest import make_tokenizer, prompt_rows
from tests.fuzz.recording import NUM_PROMPTS, padded, stopping_policy, train
from tests.fuzz.simulation import Simulation, matched
from tests.fuzz.test_configurations import check_simulation, check_steps
from tests.generation.test_transformers_engine import OWN

ONE_UPDATE: dict[str, Any] = {
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 6,
    "total_episodes": 12,
    "local_rollout_forward_batch_size": 5,
    "cliprange_value": 0.1,
}
AT_ITS_START: dict[str, Any] = {"reference": "the policy", "num_ppo_epochs": 1, "num_mini_batches": 1}
CLOSE = 0.1
"""Of the tolerances of random configurations."""


def leaking_policy() -> Any:
    """Its stored generation_config would change the sampling in every way but several EOS tokens, which do end it."""
    policy = stopping_policy()
    policy.generation_config = GenerationConfig(**{**OWN, "eos_token_id": 1}, do_sample=True)
    return policy


def pad_outside_the_vocabulary() -> dict[str, Any]:
    tokenizer = make_tokenizer()
    tokenizer.add_special_tokens({"pad_token": "[PAD]"})
    assert tokenizer.pad_token_id == 32
    return {"processing_class": tokenizer}


def right_padding() -> dict[str, Any]:
    tokenizer = make_tokenizer(padding_side="right")
    return {"processing_class": tokenizer, "data_collator": DataCollatorWithPadding(tokenizer)}


SETUPS: dict[str, Callable[[], dict[str, Any]]] = {
    "plain": dict,
    "pad_is_eos": lambda: {"processing_class": make_tokenizer(pad_token="<eos>")},
    "pad_outside_the_vocabulary": pad_outside_the_vocabulary,
    "right_padding": right_padding,
    "dropout": lambda: {"model": stopping_policy(attention_dropout=0.5)},
    "leaking_generation_config": lambda: {"model": leaking_policy()},
}
"""What must move no number."""

LORA: dict[str, Any] = {"adapter": "lora", "reference": "the policy"}
TURNS: dict[str, Any] = {"responses": "turns", "gamma": 0.9, "lam": 0.8}
ALL_REWARDS: dict[str, Any] = {
    "reward": "of all kinds",
    "reward_weights": {"length": -2.0, "share": 1.5, "tokens": 3.0, "reward_model": 0.5},
}
ONE_BASE: dict[str, Any] = {**LORA, "share_base_model": True, "value_model": "made"}
NUMBERS: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 1.3},
    "k3": {"kl_estimator": "k3"},
    "whiten_rewards": {"whiten_rewards": True},
    "missing_eos_penalty": {"missing_eos_penalty": 1.5},
    "missing_eos_score": {"missing_eos_score": -1.5},
    "score_clip": {"score_clip": 0.3, "missing_eos_penalty": 1.5},
    "score_clip_and_missing_eos_score": {"score_clip": 0.3, "missing_eos_score": -1.5},
    "bootstrap_truncated": {"bootstrap_truncated": True, "gamma": 0.9, "lam": 0.8},
    "coefficients": {"kl_coef": 0.7, "vf_coef": 0.5, "cliprange": 0.05, "cliprange_value": 0.3},
    "another_stop_token": {"stop_token": None, "stop_token_id": 5, "missing_eos_penalty": 1.5},
    "no_stop_token": {"stop_token": None, "missing_eos_penalty": 1.5, "bootstrap_truncated": True},
    "top_k": {"top_k": 5},
    "top_p_and_min_p": {"top_p": 0.8, "min_p": 0.02},
    "one_row_micro_batches": {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 12},
    "gradient_checkpointing": {"gradient_checkpointing": True},
    "reward_model": {"reward": "model"},
    "several_rewards": {"reward": "several", "reward_weights": [0.5, -2.0, 3.0]},
    "rewards_of_all_kinds": {**ALL_REWARDS, "score_clip": 0.7, "missing_eos_score": -1.0},
    "scaling_clip_and_penalty": {**ALL_REWARDS, "score_scaling": True, "score_clip": 1.0, "missing_eos_penalty": 0.25},
    "scaling_over_updates": {**ALL_REWARDS, "score_scaling": True, "total_episodes": 36},
    "scaling_and_replacement": {**ALL_REWARDS, "score_scaling": True, "missing_eos_score": -1.0},
    "cliprange_high": {"cliprange_high": 0.6},
    "no_cliprange_value": {"cliprange_value": None},
    "entropy": {"entropy_coef": 0.1},
    "texts_beside": {"ptx_coef": 0.5},
    "means_of_sequences": {"loss_aggregation": "sequence"},
    "entropy_of_sequences": {"entropy_coef": 0.1, "loss_aggregation": "sequence"},
    "two_lambdas": {"lam_policy": 0.3, "lam_critic": 0.9},
    "critic_learning_rate": {"critic_learning_rate": 0.05, "weight_decay": 0.1},
    "a_norm_that_clips": {"max_grad_norm": 0.05},
    "no_norm": {"max_grad_norm": 0.0},
    "at_once": {"loss": "at once", "per_device_train_batch_size": 1, "gradient_accumulation_steps": 12},
    "adapters": LORA,
    "one_base": ONE_BASE,
    "one_base_recomputed": {**ONE_BASE, "gradient_checkpointing": True},
    "one_base_at_once": {**ONE_BASE, "loss": "at once"},
    "stop_strings": {"stop_strings": ["w3", "w4"], "missing_eos_score": -5.0},
    "stop_strings_without_a_token": {"stop_strings": ["w3", "w4"], "stop_token": None, "missing_eos_penalty": 1.0},
    "an_engine_that_says": {"engine": "says log-probabilities", "importance_sampling_clip_max": 1.2},
    "an_engine_without_correction": {"engine": "says log-probabilities", "importance_sampling_correction": False},
    "kl_target": {"kl_target": 0.5, "kl_horizon": 30, "total_episodes": 36},
    "kl_stop": {"kl_stop": 0.3, "num_ppo_epochs": 4},
    "critic_warmup": {"critic_warmup_steps": 2, "total_episodes": 36},
    "warmup_of_an_adaptive_penalty": {
        "critic_warmup_steps": 2,
        "kl_target": 0.5,
        "kl_horizon": 30,
        "total_episodes": 36,
    },
    "log_of_several_updates": {"logging_steps": 2, "total_episodes": 36},
    "unscored_by_one_of_two": {"reward": "some None of one", "reward_weights": [2.0, 0.5]},
    "few_tokens_a_pass": {"max_tokens_per_micro_batch": 17},
    "unscored": {"reward": "some None", "per_device_train_batch_size": 1, "gradient_accumulation_steps": 12},
    "unscored_whitened": {"reward": "some None", "whiten_rewards": True, "missing_eos_penalty": 1.0},
    "unscored_scaled": {"reward": "some None", "score_scaling": True, "score_clip": 1.0},
    "nothing_shared": {"share_prefixes": False},
    "turns": {**TURNS, "bootstrap_truncated": True, "missing_eos_penalty": 1.5},
    "advantages_of_turns": {**TURNS, "gae_level": "turn", "bootstrap_truncated": True},
    "turns_of_adapters": {**TURNS, **LORA, "gae_level": "turn"},
    "padded_advantages_of_turns": {**TURNS, "gae_level": "turn"},
    "padded_turns": {**TURNS, "reward": "tokens", "reward_weights": [2.0, 0.5], "whiten_rewards": True},
    "turns_of_few_tokens_a_pass": {
        **ALL_REWARDS,
        **TURNS,
        "max_tokens_per_micro_batch": 20,
        "bootstrap_truncated": True,
        "missing_eos_score": -1.5,
    },
}


def test_the_plain_update_exercises_every_term(tmp_path: Path) -> None:
    logged = train(ONE_UPDATE, tmp_path).state.log_history[0]
    assert logged["objective/kl"] > 1 and logged["policy/approxkl_avg"] > 1e-3 and logged["val/ratio_var"] > 1e-4
    assert 0.02 < logged["policy/clipfrac_avg"] < 0.8 and 0.02 < logged["val/clipfrac_avg"] < 0.8
    assert 0 < logged["response/ended_frac"] < 1 and logged["objective/scores"] > 0


@pytest.mark.parametrize("variant", NUMBERS)
def test_the_first_update_equals_numpy(tmp_path: Path, variant: str) -> None:
    configuration = {**ONE_UPDATE, **NUMBERS[variant]}
    with padded() if variant.startswith("padded") else nullcontext():
        check_simulation(configuration, train(configuration, tmp_path), CLOSE)


@pytest.mark.parametrize("variant", ["temperature", "adapters", "one_base_recomputed", "turns", "few_tokens_a_pass"])
def test_the_first_update_equals_numpy_where_each_shared_token_is_computed_once(
    tmp_path: Path, variant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rlhf_ppo.data.prefix_tree.prefix_tree", partial(prefix_tree, min_shared=1))
    monkeypatch.setattr("tests.fuzz.simulation.SHORTEST", 1)
    configuration = {**ONE_UPDATE, "per_device_train_batch_size": 4, "gradient_accumulation_steps": 3}
    configuration |= {"num_generations": 4, **NUMBERS[variant]}
    trainer = train(configuration, tmp_path)
    check_simulation(configuration, trainer, CLOSE)
    assert trainer.state.log_history[0]["batch/shared_frac"] > 0.1


def test_the_turns_leave_gaps_and_their_policy_ends_some_itself(tmp_path: Path) -> None:
    trainer = train({**ONE_UPDATE, **NUMBERS["turns"]}, tmp_path)
    written = [episode.written for episode in trainer.episodes]
    assert any(False in row[: len(episode.own)] for row, episode in zip(written, trainer.episodes, strict=True))
    assert {row[-1] for row in written} == {row[0] for row in written} == {True, False}
    assert any(1 in np.array(row.response)[row.own] and not row.ended for row in trainer.episodes)


@pytest.mark.parametrize("variant", ["whiten_rewards", "an_engine_that_says", "turns"])
def test_step_takes_the_update_of_the_same_responses(tmp_path: Path, variant: str) -> None:
    configuration = {**ONE_UPDATE, **NUMBERS[variant]}
    check_steps(configuration, train(configuration, tmp_path), tmp_path / "steps")


@pytest.mark.parametrize("setup", SETUPS)
def test_no_setup_moves_a_number(tmp_path: Path, setup: str) -> None:
    trainer = train(ONE_UPDATE, tmp_path, SETUPS[setup]())
    check_simulation(ONE_UPDATE, trainer, CLOSE)
    prompts = [row["input_ids"] for row in prompt_rows(NUM_PROMPTS)]
    assert all(prompt in prompts for prompt in trainer.updates[0].prompts)
    plain = train(ONE_UPDATE, tmp_path)
    ours, others = (Simulation(ONE_UPDATE).known(each.updates[0]).episodes for each in (trainer, plain))
    assert ours == others


@pytest.mark.parametrize("setup", SETUPS)
def test_ratio_starts_at_one_and_kl_at_zero(tmp_path: Path, setup: str) -> None:
    trainer = train({**ONE_UPDATE, **AT_ITS_START}, tmp_path, SETUPS[setup]())
    logged, rollout = trainer.state.log_history[0], trainer.updates[0].rollout
    assert logged["val/ratio"] == pytest.approx(1, abs=1e-5) and logged["val/first_logratio"] < 1e-5
    assert logged["objective/kl"] == pytest.approx(0, abs=1e-6)
    assert_allclose(rollout.logprobs, rollout.ref_logprobs, rtol=0, atol=1e-6)
    assert logged["policy/approxkl_avg"] < 1e-8
    assert logged["policy/clipfrac_avg"] == logged["val/clipfrac_avg"] == 0
    assert_allclose(logged["objective/non_score_reward"], 0, atol=1e-6)


def test_numbers_do_not_depend_on_how_the_vocabulary_is_chunked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(policy_and_value, "MAX_CHUNK_ELEMENTS", 3 * 32)  # three tokens at a time
    check_simulation(ONE_UPDATE, train(ONE_UPDATE, tmp_path), CLOSE)


# ---- Gradients ----


@pytest.mark.parametrize("step", [0, -1])
def test_gradients_of_the_whole_loss_equal_finite_differences(tmp_path: Path, step: int) -> None:
    """At the first step, and at the last, where many tokens are clipped and have no gradient.

    Of every parameter, along its gradient (which must give the norm) and across (which must give 0).
    """
    configuration = {**ONE_UPDATE, "vf_coef": 0.5, "max_grad_norm": 0.0}
    seen = train(configuration, tmp_path).updates[0]
    simulation, random, width = Simulation(configuration), np.random.default_rng(0), 1e-5
    known, taken = simulation.known(seen), seen.steps[step]
    rows = matched(known.episodes, seen.steps)[step]
    for name, gradient in taken.gradients.items():
        norm = np.linalg.norm(gradient)
        along, across = gradient / norm, random.normal(size=gradient.shape)
        if "embed_tokens" in name:
            across[0] = 0  # torch's Embedding gives the row of padding no gradient, though it may be sampled
        across -= (across * along).sum() * along
        across /= np.linalg.norm(across)
        measured = []
        for way in (along, across):
            moved = (taken.before[name] + side * width * way for side in (1, -1))
            above, below = (simulation.tokens(known, {**taken.before, name: each}, rows)[0].loss for each in moved)
            measured.append((above - below) / (2 * width))
        assert_allclose(measured, [norm, 0], rtol=0, atol=1e-5 * norm + 1e-9, err_msg=name)


def test_the_entropy_is_computed_where_it_is_logged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the optimizer steps, and not in the rollout's passes of policy and reference."""
    seen: set[tuple[bool, bool]] = set()
    computed = fused._sums

    def see(scaled: torch.Tensor, with_entropy: bool) -> Any:
        seen.add((phase[-1] == "learn", with_entropy))
        return computed(scaled, with_entropy)

    phase = ["rollout"]
    learn = PPOTrainer.learn
    monkeypatch.setattr(PPOTrainer, "learn", lambda *args: (phase.append("learn"), learn(*args))[1])
    monkeypatch.setattr(fused, "_sums", see)
    train(ONE_UPDATE, tmp_path)
    assert seen == {(False, False), (True, True)}


# ---- bf16 ----


def test_bf16_ratio_is_one_where_rollout_and_learning_pass_the_same_rows(tmp_path: Path) -> None:
    one_pass = {"per_device_train_batch_size": 12, "gradient_accumulation_steps": 1}
    configuration = {**ONE_UPDATE, **AT_ITS_START, **one_pass, "bf16": True, "local_rollout_forward_batch_size": 12}
    trainer = train(configuration, tmp_path)
    known = Simulation(configuration).known(trainer.updates[0])
    given, logged = trainer.updates[0].rollout.logprobs, trainer.state.log_history[0]
    rows = zip(given, known.episodes, known.logprobs, strict=True)
    error = max(np.abs(ours[episode.own].double().numpy() - exact).max() for ours, episode, exact in rows)
    assert 1e-3 < error < 0.5, "bf16 autocast was not used, or something else is wrong"
    assert logged["val/ratio"] == pytest.approx(1, abs=1e-4)
    assert logged["objective/kl"] == pytest.approx(0, abs=1e-6)


def test_bf16_ratio_is_near_one_however_the_rows_are_cut(tmp_path: Path) -> None:
    """bf16 sums of differently shaped batches differ in their last bit (2^-8); measured: 2e-2 a token, 7e-4 mean."""
    logged = train({**ONE_UPDATE, **AT_ITS_START, "bf16": True}, tmp_path).state.log_history[0]
    assert logged["val/ratio"] == pytest.approx(1, abs=5e-3) and logged["val/first_logratio"] < 0.02
    assert logged["policy/approxkl_avg"] < 1e-4
    assert logged["objective/kl"] == pytest.approx(0, abs=1e-6)
