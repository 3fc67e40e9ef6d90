"""Estimates against what models, gradients and optimizers really hold, and arithmetic by hand."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import (
    GPT2Config,
    GPT2ForSequenceClassification,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
)

from rlhf_ppo import PPOTrainer
from rlhf_ppo.forecast import describe, forecast, multiplied_dtype
from rlhf_ppo.models.counting import count_pass
from rlhf_ppo.reporting.estimate import (
    Sharding,
    Workload,
    estimate_update,
    measure_rates,
    optimizer_bytes_per_parameter,
)
from tests.conftest import tiny_policy

SIZES: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 50,
    "pad_token_id": 0,
}
WORKLOAD = Workload(
    rows=6,
    rows_per_call=4,
    rows_per_micro_batch=2,
    prompt_length=7,
    response_length=5,
    num_ppo_epochs=3,
    recomputes=False,
)


def models() -> tuple[LlamaForCausalLM, LlamaForSequenceClassification, LlamaForCausalLM]:
    torch.manual_seed(0)
    config = LlamaConfig(**SIZES, num_labels=1, attn_implementation="sdpa")
    return LlamaForCausalLM(config), LlamaForSequenceClassification(config), LlamaForCausalLM(config)


def held(tensors: Any) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def test_weights_gradients_and_optimizer_are_what_a_step_leaves() -> None:
    policy, value_model, reference = models()
    trained = [*policy.parameters(), *value_model.parameters()]
    optimizer = torch.optim.AdamW(trained)
    for parameter in trained:
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    state = [value for values in optimizer.state.values() for value in values.values() if value.dim() > 0]

    estimate = estimate_update(policy, value_model, [reference], WORKLOAD, 8.0)
    assert estimate.weights == held(trained)
    assert estimate.gradients == held(parameter.grad for parameter in trained)
    assert estimate.optimizer == held(state)
    assert estimate.frozen == held(reference.parameters())


def test_only_what_is_trained_has_gradients_and_state() -> None:
    policy, value_model, _ = models()
    adapted = get_peft_model(policy, LoraConfig(r=2, target_modules=["q_proj"]))  # pyright: ignore[reportArgumentType]
    value_model.requires_grad_(False)
    value_model.score.requires_grad_(True)
    num_trained = 2 * (2 * 16 + 2 * 16) + 16  # two layers of A (2, 16) and B (16, 2), and the head
    estimate = estimate_update(adapted, value_model, [], WORKLOAD, 8.0)
    assert (estimate.gradients, estimate.optimizer, estimate.frozen) == (4 * num_trained, 8 * num_trained, 0)


def test_arithmetic_by_hand() -> None:
    # Rotary angles are a product of matrices in some versions of transformers; GPT-2 has none.
    config = GPT2Config(
        n_embd=16, n_inner=24, n_layer=2, n_head=2, vocab_size=50, num_labels=1, attn_implementation="sdpa"
    )
    policy, value_model, reference = (
        GPT2LMHeadModel(config),
        GPT2ForSequenceClassification(config),
        GPT2LMHeadModel(config),
    )
    length = 12
    layer = 2 * length * (3 * 16 * 16 + 16 * 16 + 2 * 16 * 24)  # q, k and v, o, the two of the MLP
    attention = 2 * 2 * length * length * 16  # scores and their sum of values, not halved by the causal mask
    body, head = 2 * (layer + attention), 2 * 16 * 50 * 5
    # A row: generated once, seen by the reference once, by policy and value model once and 3 x 3 in learning.
    per_row = 2 * (body + head) + (1 + 3 * 3) * (2 * body + head)
    estimate = estimate_update(policy, value_model, [reference], WORKLOAD, 8.0)
    assert estimate.flops == 6 * per_row
    assert estimate.decoded == held(policy.parameters()) * 5 * 2  # 4 rows and 2 rows
    recomputing = dataclasses.replace(WORKLOAD, recomputes=True)
    more = estimate_update(policy, value_model, [reference], recomputing, 8.0)
    assert more.flops - estimate.flops == 6 * 3 * (2 * body + head)
    assert estimate.seconds(1e3, 1e2) == pytest.approx(estimate.flops / 1e3 + estimate.decoded / 1e2)


def test_memory_grows_with_what_it_is_for() -> None:
    policy, value_model, reference = models()

    def of(**changes: int) -> Any:
        return estimate_update(policy, value_model, [reference], dataclasses.replace(WORKLOAD, **changes), 8.0)

    base = of()
    # Rotary angles are those of all rows.
    assert of(rows_per_micro_batch=4).learning == pytest.approx(2 * base.learning, rel=0.01)
    assert base.generation == 2 * 2 * 1 * 8 * 12 * 4 * 4  # keys and values, layers, heads, size, tokens, rows, bytes
    assert of(rows_per_call=2).generation == base.generation // 2
    assert of(rows_per_call=100).generation == of(rows_per_call=6).generation
    assert base.peak == (
        base.weights + base.frozen + base.gradients + base.optimizer + max(base.generation, base.learning)
    )


@pytest.mark.parametrize(
    ("stage", "is_fsdp", "expected"),
    [
        (None, False, Sharding(1, 1, 1)),
        (1, False, Sharding(1, 1, 4)),
        (2, False, Sharding(1, 4, 4)),
        (3, False, Sharding(4, 4, 4)),
        (None, True, Sharding(4, 4, 4)),
    ],
)
def test_what_each_engine_spreads(stage: int | None, is_fsdp: bool, expected: Sharding) -> None:
    assert Sharding.of(stage, is_fsdp, 4) == expected
    policy, value_model, reference = models()
    whole = estimate_update(policy, value_model, [reference], WORKLOAD, 8.0)
    spread = estimate_update(policy, value_model, [reference], WORKLOAD, 8.0, expected)
    assert spread.weights == whole.weights // expected.weights
    assert spread.frozen == whole.frozen // expected.weights
    assert spread.gradients == whole.gradients // expected.gradients
    assert spread.optimizer == whole.optimizer // expected.optimizer
    assert (spread.generation - whole.generation > 0) == (expected.weights > 1)  # the policy is gathered to generate


@pytest.mark.parametrize(
    ("optimizer_class", "kwargs", "expected"),
    [
        (torch.optim.AdamW, {}, 8),
        (torch.optim.SGD, {"lr": 0.1}, 0),
        (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}, 4),
        (torch.optim.RMSprop, {}, 4),
    ],
)
def test_optimizers_are_measured(optimizer_class: Any, kwargs: dict[str, Any], expected: int) -> None:
    assert optimizer_bytes_per_parameter(optimizer_class, kwargs) == pytest.approx(expected, abs=0.01)


def test_rates_are_work_over_the_best_time(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = iter([0.0, 9.0, 10.0, 13.0, 20.0, 22.0, 30.0, 34.0] * 2)  # the first of four warms up; the best takes 2 s
    monkeypatch.setattr("rlhf_ppo.reporting.estimate.time.perf_counter", lambda: next(ticks))
    assert measure_rates(torch.device("cpu"), torch.float32) == (2 * 768**3 / 2, 4 * 2**24 / 2)


def test_a_run_starts_with_one_line(make_trainer: Callable[..., PPOTrainer], capsys: Any) -> None:
    trainer = make_trainer(disable_tqdm=False)
    [line] = [line for line in capsys.readouterr().out.splitlines() if line.startswith("Estimated per device")]
    estimate = forecast(trainer)
    assert estimate is not None
    assert estimate.weights == held(trainer.model.parameters())
    text = describe(estimate, torch.device("cpu"), torch.float32, trainer.args.num_total_batches)
    assert line.partition(", and ")[0] == text.partition(", and ")[0]
    assert "and at least" in line and "not counted is what each call costs" in line  # .075 s, where .004 s was said
    make_trainer(disable_tqdm=True)
    assert "Estimated" not in capsys.readouterr().out


@pytest.mark.parametrize(("args", "dtype"), [
    ({}, torch.float64), ({"bf16": True}, torch.bfloat16), ({"fp16": True}, torch.float16),
])  # fmt: skip
def test_rates_are_measured_in_the_precision_of_the_products(args: dict[str, bool], dtype: torch.dtype) -> None:
    arguments: Any = SimpleNamespace(**{"bf16": False, "fp16": False, **args})
    assert multiplied_dtype(arguments, tiny_policy().double()) == dtype


def test_activations_count_as_training_will_keep_them(make_trainer: Callable[..., PPOTrainer]) -> None:
    """Trainer switches checkpointing on in `train`, after the line."""
    kept = forecast(make_trainer())
    trainer = make_trainer(gradient_checkpointing=True)
    recomputed = forecast(trainer)
    assert kept is not None and recomputed is not None and recomputed.learning < kept.learning / 4
    models = (trainer.policy_model, trainer.value_model)
    assert not any(getattr(module, "gradient_checkpointing", False) for model in models for module in model.modules())
    trainer.train()
    length = round(sum(len(row["input_ids"]) for row in trainer.train_dataset) / 32) + 8
    of_policy, of_value_model = (count_pass(model, 4, length).saved_bytes for model in models)
    in_chunk = 4 * 4 * 8 * 32
    assert recomputed.learning == max(of_policy + in_chunk, of_value_model)


def test_both_models_activations_count_where_they_do_not_learn_in_turn(
    make_trainer: Callable[..., PPOTrainer],
) -> None:
    class AtOnce(PPOTrainer):
        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            return super().compute_loss(*args, **kwargs)

    in_turn, at_once = forecast(make_trainer()), forecast(make_trainer(AtOnce))
    assert in_turn is not None and at_once is not None
    in_chunk = 4 * 4 * 8 * 32
    assert at_once.learning - in_turn.learning == pytest.approx(in_turn.learning - in_chunk, rel=0.05)


def test_a_micro_batch_cut_by_tokens_has_as_many_full_rows_as_fit(make_trainer: Callable[..., PPOTrainer]) -> None:
    by_rows = forecast(make_trainer(per_device_train_batch_size=2, gradient_accumulation_steps=4))
    length = round(sum(len(row["input_ids"]) for row in make_trainer().train_dataset) / 32) + 8
    for tokens in (2 * length, 3 * length - 1):
        assert forecast(make_trainer(max_tokens_per_micro_batch=tokens)) == by_rows
    assert forecast(make_trainer(max_tokens_per_micro_batch=3 * length)) != by_rows


@pytest.mark.parametrize("step", ["optimizer_bytes_per_parameter", "measure_rates"])
def test_what_cannot_be_counted_or_measured_can_still_be_trained(
    make_trainer: Callable[..., PPOTrainer], monkeypatch: pytest.MonkeyPatch, capsys: Any, step: str
) -> None:
    def fails(*_: Any) -> float:
        raise RuntimeError("no such kernel")

    monkeypatch.setattr(f"rlhf_ppo.forecast.{step}", fails)
    warnings: list[str] = []
    monkeypatch.setattr("rlhf_ppo.forecast.logger.warning", warnings.append)
    make_trainer(disable_tqdm=False)
    assert "Estimated" not in capsys.readouterr().out
    assert warnings == ["No estimate of memory and time: RuntimeError: no such kernel"]
