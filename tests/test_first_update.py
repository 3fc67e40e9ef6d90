"""The first update, every number of it, against float64 NumPy on unpadded rows (`tests/oracles.py`)."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose
from transformers import DataCollatorWithPadding, GenerationConfig

from rlhf_ppo import PPOTrainer
from rlhf_ppo.models import fused, policy_and_value
from tests import oracles, recorded_update
from tests.conftest import make_tokenizer, tiny_scorer
from tests.recorded_update import (
    EOS,
    LOGGED_ONLY,
    NUM_EPISODES,
    Update,
    check_update,
    number_of_tokens,
    share_of_w4,
)


@pytest.fixture
def run_update(make_trainer: Callable[..., PPOTrainer]) -> Callable[..., Update]:
    """`recorded_update.run_update` with the trainer factory filled in."""
    return functools.partial(recorded_update.run_update, make_trainer)


def leaking_generation_config() -> dict[str, Any]:
    """A stored generation_config that would change the sampling in every way it can."""
    config = GenerationConfig(
        repetition_penalty=1.5,
        no_repeat_ngram_size=2,
        suppress_tokens=[3, 4, 5],
        eos_token_id=[EOS, 8, 9, 10],
        forced_eos_token_id=EOS,
        min_new_tokens=4,
        do_sample=True,
        temperature=3.0,
        top_k=3,
        top_p=0.5,
        min_p=0.3,
    )
    return {"generation_config": config}


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
    "leaking_generation_config": leaking_generation_config,
    "top_k_50_of_128": lambda: {"config": {"vocab_size": 128}, "top_k": 50},
    "temperature": lambda: {"temperature": 1.3},
}
"""What must not move the start: the ratio is 1, and the KL to an identical reference 0."""

NUMBERS: dict[str, Callable[[], dict[str, Any]]] = {
    **SETUPS,
    "k3": lambda: {"kl_estimator": "k3"},
    "whiten_rewards": lambda: {"whiten_rewards": True},
    "missing_eos_penalty": lambda: {"missing_eos_penalty": 1.5},
    "missing_eos_score": lambda: {"missing_eos_score": -1.5},
    "score_clip": lambda: {"reward_funcs": number_of_tokens, "score_clip": 0.3, "missing_eos_penalty": 1.5},
    "score_clip_and_missing_eos_score": lambda: {
        "reward_funcs": number_of_tokens,
        "score_clip": 0.3,
        "missing_eos_score": -1.5,
    },
    "bootstrap_truncated": lambda: {"bootstrap_truncated": True, "gamma": 0.9, "lam": 0.8},
    "coefficients": lambda: {"kl_coef": 0.7, "vf_coef": 0.5, "cliprange": 0.05, "cliprange_value": 0.3},
    "another_stop_token": lambda: {"stop_token": None, "stop_token_id": 5, "missing_eos_penalty": 1.5},
    "no_stop_token": lambda: {"stop_token": None, "missing_eos_penalty": 1.5, "bootstrap_truncated": True},
    "top_k": lambda: {"top_k": 5},
    "top_p_and_min_p": lambda: {"top_p": 0.8, "min_p": 0.02},
    "one_row_micro_batches": lambda: {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 12},
    "gradient_checkpointing": lambda: {"gradient_checkpointing": True},
    "reward_model": lambda: {"reward_model": tiny_scorer(seed=7), "reward_funcs": None},
    "several_rewards": lambda: {
        "reward_model": tiny_scorer(seed=7),
        "reward_funcs": [share_of_w4, number_of_tokens],
        "reward_weights": [0.5, -2.0, 3.0],
    },
    "weights_by_name": lambda: {
        "reward_funcs": [share_of_w4, number_of_tokens],
        "reward_weights": '{"number_of_tokens": 3.0, "share_of_w4": -2.0}',
    },
}


def test_the_plain_update_exercises_every_term(run_update: Callable[..., Update]) -> None:
    logged = run_update().logged
    assert logged["objective/kl"] > 1 and logged["policy/approxkl_avg"] > 1e-3 and logged["val/ratio_var"] > 1e-4
    assert 0.02 < logged["policy/clipfrac_avg"] < 0.8 and 0.02 < logged["val/clipfrac_avg"] < 0.8
    assert 0 < logged["response/ended_frac"] < 1 and logged["objective/scores"] > 0


@pytest.mark.parametrize("variant", NUMBERS)
def test_the_first_update_equals_numpy(run_update: Callable[..., Update], variant: str) -> None:
    check_update(run_update(**NUMBERS[variant]()))


def test_numbers_do_not_depend_on_how_the_vocabulary_is_chunked(
    run_update: Callable[..., Update], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(policy_and_value, "MAX_CHUNK_ELEMENTS", 3 * 32)  # three tokens at a time
    check_update(run_update())


@pytest.mark.parametrize("setup", SETUPS)
def test_ratio_starts_at_one_and_kl_at_zero(run_update: Callable[..., Update], setup: str) -> None:
    update = run_update(**{**SETUPS[setup](), "ref_model": None, "num_ppo_epochs": 1, "num_mini_batches": 1})
    assert update.logged["val/ratio"] == pytest.approx(1, abs=1e-4)
    assert_allclose(torch.cat(update.trainer.ratios), 1, rtol=0, atol=1e-4)
    assert update.logged["objective/kl"] == pytest.approx(0, abs=1e-6)
    assert_allclose(update.trainer.rollout.logprobs, update.trainer.rollout.ref_logprobs, rtol=0, atol=1e-6)
    assert update.logged["policy/approxkl_avg"] < 1e-8
    assert update.logged["policy/clipfrac_avg"] == update.logged["val/clipfrac_avg"] == 0
    assert_allclose(update.logged["objective/non_score_reward"], 0, atol=1e-6)


@pytest.mark.parametrize("setup", ["leaking_generation_config", "pad_is_eos", "right_padding"])
def test_samples_and_numbers_are_those_of_the_plain_setup(run_update: Callable[..., Update], setup: str) -> None:
    plain, update = run_update(), run_update(**SETUPS[setup]())
    assert update.episodes == plain.episodes
    for key in plain.logged.keys() - {key for key in LOGGED_ONLY if key.startswith("time/")} - {"eps"}:
        assert update.logged[key] == pytest.approx(plain.logged[key], rel=1e-5, abs=1e-6), key


# ---- Gradients ----


def slopes(update: Update, step: int, model: str, name: str, directions: list[Any]) -> list[float]:
    """Derivatives of the oracle's loss along unit directions of one parameter, by central differences."""
    before, width = update.steps[step], 1e-5
    weights = {"policy": dict(before.policy), "value_model": dict(before.value_model)}
    start = weights[model][name]

    def loss(value: Any) -> float:
        weights[model][name] = value
        tokens = oracles.token_figures(
            update.llama, update.episodes, update.known, before.rows, **weights, settings=update.settings
        )
        return oracles.total_loss(tokens, update.settings)

    return [(loss(start + width * way) - loss(start - width * way)) / (2 * width) for way in directions]


@pytest.mark.parametrize("step", [0, -1])
def test_gradients_of_the_whole_loss_equal_finite_differences(run_update: Callable[..., Update], step: int) -> None:
    """At the first step, and at the last, where many tokens are clipped and have no gradient.

    Of every parameter, along its gradient (which must give the norm) and across (which must give 0).
    """
    # With a pad_token_id, torch's Embedding gives that id's row no gradient, though it may be sampled.
    update = run_update(vf_coef=0.5, config={"pad_token_id": None})
    random = np.random.default_rng(0)
    for model, gradients in update.snapshots.gradients[step].items():
        for name, gradient in gradients.items():
            norm = np.linalg.norm(gradient)
            along, across = gradient / norm, random.normal(size=gradient.shape)
            across -= (across * along).sum() * along
            across /= np.linalg.norm(across)
            measured = slopes(update, step, model, name, [along, across])
            assert_allclose(measured, [norm, 0], rtol=0, atol=1e-5 * norm + 1e-9, err_msg=f"{model}.{name}")


def test_a_plain_sgd_step_goes_down_the_gradient(run_update: Callable[..., Update]) -> None:
    update = run_update(num_ppo_epochs=1, num_mini_batches=1, sgd=0.5)
    before, after = update.snapshots.weights
    for model, gradients in update.snapshots.gradients[0].items():
        for name, gradient in gradients.items():
            assert_allclose(after[model][name], before[model][name] - 0.5 * gradient, rtol=1e-6, atol=1e-7)
            assert gradient.any(), name


def test_the_entropy_is_computed_where_it_is_logged(
    run_update: Callable[..., Update], monkeypatch: pytest.MonkeyPatch
) -> None:
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
    run_update()
    assert seen == {(False, False), (True, True)}


# ---- bf16 ----


def test_bf16_ratio_is_one_where_rollout_and_learning_pass_the_same_rows(run_update: Callable[..., Update]) -> None:
    update = run_update(
        bf16=True,
        ref_model=None,
        num_ppo_epochs=1,
        num_mini_batches=1,
        per_device_train_batch_size=NUM_EPISODES,
        gradient_accumulation_steps=1,
        local_rollout_forward_batch_size=NUM_EPISODES,
    )
    error = max(
        np.abs(ours - exact).max()
        for ours, exact in zip(update.per_token(update.trainer.rollout.logprobs), update.known.logprobs, strict=True)
    )
    assert 1e-3 < error < 0.5, "bf16 autocast was not used, or something else is wrong"
    assert update.logged["val/ratio"] == pytest.approx(1, abs=1e-4)
    assert update.logged["objective/kl"] == pytest.approx(0, abs=1e-6)


def test_bf16_ratio_is_near_one_however_the_rows_are_cut(run_update: Callable[..., Update]) -> None:
    """bf16 sums of differently shaped batches differ in their last bit (2^-8); measured: 2e-2 a token, 7e-4 mean."""
    update = run_update(bf16=True, ref_model=None, num_ppo_epochs=1, num_mini_batches=1)
    assert_allclose(torch.cat(update.trainer.ratios), 1, rtol=0, atol=0.06)
    assert update.logged["val/ratio"] == pytest.approx(1, abs=5e-3)
    assert update.logged["policy/approxkl_avg"] < 1e-4
    assert update.logged["objective/kl"] == pytest.approx(0, abs=1e-6)
