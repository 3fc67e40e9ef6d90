"""Estimates against what models, gradients and optimizers really hold, and arithmetic by hand."""

from __future__ import annotations

import dataclasses
import gc
import itertools
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from torch.testing._internal.two_tensor import TwoTensor
from transformers import (
    GPT2Config,
    GPT2ForSequenceClassification,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
)

from rlhf_ppo import PPOTrainer
from rlhf_ppo.estimate.run import describe, measure_rates, optimizer_bytes_per_parameter
from rlhf_ppo.estimate.update import (
    Estimate,
    Sharding,
    Workload,
    copy_without_storage,
    count_pass,
    estimate_update,
    stored_bytes,
)
from rlhf_ppo.models.heads import multiply_head_in_float32
from rlhf_ppo.models.unwrapping import multiplied_dtype
from tests.conftest import tiny_policy, tiny_scorer

SIZES: dict[str, Any] = {
    "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "vocab_size": 50, "pad_token_id": 0,
}  # fmt: skip
WORKLOAD = Workload(
    rows=6, rows_per_call=4, rows_per_micro_batch=2, prompt_length=7, response_length=5, num_ppo_epochs=3,
    recomputes=False,
)  # fmt: skip


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
    head_gradient = 4 * 50 * 16
    twice = 2 * (base.learning - head_gradient) + head_gradient
    assert of(rows_per_micro_batch=4).learning == pytest.approx(twice, rel=0.01)
    logits = 4 * 4 * 50
    # Keys and values, layers, heads, size, tokens, rows, bytes.
    assert base.generation == 2 * 2 * 1 * 8 * 12 * 4 * 4 + logits
    assert of(rows_per_call=2).generation == base.generation // 2
    assert of(rows_per_call=100).generation == of(rows_per_call=6).generation
    assert base.peak == (
        base.weights + base.frozen + base.gradients + base.optimizer + max(base.generation, base.learning)
    )


@pytest.mark.parametrize(
    ("stage", "is_fsdp", "expected"),
    [
        (None, False, Sharding(1, 1, 1, buckets=True, processes=4)),
        (1, False, Sharding(1, 1, 4, processes=4)),
        (2, False, Sharding(1, 4, 4, processes=4)),
        (3, False, Sharding(4, 4, 4, processes=4)),
        (None, True, Sharding(4, 4, 4, is_fsdp=True, processes=4)),
    ],
)
def test_what_each_engine_spreads(stage: int | None, is_fsdp: bool, expected: Sharding) -> None:
    assert Sharding.of(stage, is_fsdp, 4) == expected
    policy, value_model, reference = models()
    whole = estimate_update(policy, value_model, [reference], WORKLOAD, 8.0)
    spread = estimate_update(policy, value_model, [reference], WORKLOAD, 8.0, expected)
    assert spread.weights == whole.weights // expected.weights
    assert spread.frozen == whole.frozen // expected.weights
    assert spread.gradients == whole.gradients * (2 if expected.buckets else 1) // expected.gradients
    assert spread.optimizer == whole.optimizer // expected.optimizer
    assert (spread.generation - whole.generation > 0) == (expected.weights > 1)  # the policy is gathered to generate


def test_16_bits_by_hand() -> None:
    """DeepSpeed stores 2 bytes a weight and keeps 4 beside Adam's 8; FSDP gathers 2; autocast casts linear layers."""
    policy, value_model, reference = models()
    num_policy, num_value_model = (sum(p.numel() for p in model.parameters()) for model in (policy, value_model))
    num_trained, half = num_policy + num_value_model, torch.bfloat16
    workload = dataclasses.replace(WORKLOAD, dtype=half)

    def of(sharding: Sharding, **changes: Any) -> Any:
        def autocast() -> Any:
            return torch.autocast("cpu", half, enabled=sharding.stored is None)

        given = dataclasses.replace(workload, **changes)
        return estimate_update(policy, value_model, [reference], given, 8.0, sharding, autocast)

    stage2 = of(Sharding.of(2, False, 4, half))
    assert (stage2.weights, stage2.frozen) == (2 * num_trained, 2 * num_policy)
    assert (stage2.gradients, stage2.optimizer) == (4 * num_trained // 4, 12 * num_trained // 4)
    fsdp, alone = of(Sharding.of(None, True, 4, half)), of(Sharding.of(None, False, 1, half))
    assert (fsdp.weights, fsdp.gradients, fsdp.optimizer) == (num_trained, num_trained, 2 * num_trained)
    assert (alone.weights, alone.gradients) == (4 * num_trained, 4 * num_trained)

    num_linear = 2 * (2 * 16 * 16 + 2 * 8 * 16 + 3 * 16 * 24)  # q, o, k, v and the MLP's of two layers
    head, logits, cache = 50 * 16, 4 * 4 * 50, 2 * 2 * 1 * 8 * 12 * 4 * 2
    assert stage2.generation == cache + logits
    outside_of_value_model = head + 16 + 16  # embeddings, norm and head come with the policy's
    assert fsdp.generation == cache + logits + 2 * (num_policy + outside_of_value_model)
    assert alone.generation == cache + logits + 2 * (num_linear + head)
    policy.requires_grad_(False)
    assert of(Sharding.of(None, False, 1, half)).generation == cache + logits + 2 * head  # it is cast for a call
    policy.lm_head.bfloat16()
    assert of(Sharding.of(None, False, 1, half)).generation == cache + logits
    policy.lm_head.float()
    policy.requires_grad_(True)
    assert of(Sharding(), copies_policy=True).generation == cache + logits + 2 * num_policy

    whole, stored = (
        [count_pass(model, 2, 12, *given).saved_bytes for model in (policy, value_model)]
        for given in (
            (lambda: torch.autocast("cpu", half),),
            (lambda: torch.autocast("cpu", half, enabled=False), half),
        )
    )
    assert whole[0] - stored[0] >= 2 * num_linear  # which autocast's weights are saved for the backward pass
    in_head = 6 * 2 * 5 * 50  # logits in float32 and as the product gave them
    # The gradient has the weight's type where that is the products' too, and one product gives it.
    assert alone.learning == sum(whole) + in_head + (4 + 2) * head
    assert stage2.learning == sum(stored) + in_head + 2 * head
    of_layers = (num_linear + 2 * 2 * 16) // 2
    outside = num_policy + num_value_model - 2 * 2 * of_layers
    assert fsdp.learning == stage2.learning + 2 * (outside + 2 * 2 * of_layers)


def test_a_head_in_float32_and_a_reference_that_moves_by_hand() -> None:
    """A head that is stored in 16 bits has a copy, its gradient is added up in float32, logits are not rounded."""
    policy, value_model, reference = models()
    workload = dataclasses.replace(WORKLOAD, dtype=torch.bfloat16)

    def of(stage: int | None, **changes: Any) -> Any:
        sharding = Sharding.of(stage, False, 4 if stage else 1, torch.bfloat16)
        given = dataclasses.replace(workload, **changes)
        autocast = partial(torch.autocast, "cpu", torch.bfloat16, enabled=stage is None)
        return estimate_update(policy, value_model, [reference], given, 8.0, sharding, autocast)

    stored, cast = of(2), of(None)
    multiply_head_in_float32(policy, True)
    head, rounded_logits = 50 * 16, 2 * 2 * 5 * 50
    assert of(2).generation - stored.generation == 4 * head
    assert of(2).learning - stored.learning == (4 + 2) * head - rounded_logits
    assert of(None).generation - cast.generation == -2 * head
    assert of(None).learning - cast.learning == -2 * head - rounded_logits
    num_policy = sum(value.numel() for value in policy.parameters())
    assert of(2, moves_reference=True).frozen - stored.frozen == 4 * num_policy
    assert of(None, moves_reference=True).frozen == cast.frozen


def test_where_activations_are_recomputed_one_block_has_all_of_its_own() -> None:
    policy, value_model, _ = models()
    kept = [count_pass(model, 2, 12).saved_bytes for model in (policy, value_model)]
    for model in (policy, value_model):
        model.gradient_checkpointing_enable()
        model.train()
    recomputed = [count_pass(model, 2, 12).saved_bytes for model in (policy, value_model)]
    found = estimate_update(policy, value_model, [], dataclasses.replace(WORKLOAD, recomputes=True), 8.0).learning
    in_head = 4 * 2 * 5 * 50 + 4 * 50 * 16
    assert found == sum(recomputed) + max(in_head, kept[0] // 2) + kept[1] // 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("given", "least"),
    [
        ({"bf16": True}, 0.93),
        ({"bf16": True, "gradient_checkpointing": True}, 0.93),
        ({"bf16": True, "peft_config": LoraConfig(r=4, target_modules="all-linear")}, 0.85),
    ],
    ids=["bf16", "recomputing", "LoRA"],
)
def test_the_peak_is_what_a_run_takes(
    make_trainer: Callable[..., PPOTrainer], given: dict[str, Any], least: float
) -> None:
    """All tensors' memory in an update of two epochs, but for what was there before; what is not counted is little."""
    config = LlamaConfig(
        hidden_size=128, intermediate_size=384, num_hidden_layers=4, num_attention_heads=4, vocab_size=2048,
        pad_token_id=0, num_labels=1,
    )  # fmt: skip
    trainer = make_trainer(
        model=LlamaForCausalLM(config), value_model=LlamaForSequenceClassification(config), num_mini_batches=1,
        train_dataset=Dataset.from_list([{"input_ids": [5] * 24}] * 8), total_episodes=8, response_length=16, **given,
    )  # fmt: skip
    estimate = forecast(trainer)
    assert estimate is not None
    expected = estimate.peak - estimate.weights - estimate.frozen
    gc.collect()  # what is freed of other tests would count
    assert least < expected / peak_of_tensors(trainer.train) < 1.02


def peak_of_tensors(function: Callable[[], Any]) -> int:
    """The most bytes that a call has allocated at a time and not freed."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
        function()
    events: Any = profiler.profiler.kineto_results.events()  # pyright: ignore[reportOptionalMemberAccess]
    allocated = sorted((event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]")
    return max(itertools.accumulate(num_bytes for _, num_bytes in allocated))


def forecast(trainer: PPOTrainer, *rows: int) -> Estimate | None:
    return trainer._estimate.forecast(*rows)


class TwoBytes(torch.optim.Optimizer):
    """Keeps a state made of two tensors, as `adamw_torch_8bit` of torchao does; its own `nbytes` is that of one."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})

    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            codes = torch.zeros_like(parameter, dtype=torch.uint8)
            self.state[parameter]["exp_avg"] = TwoTensor(codes, codes.clone())


@pytest.mark.parametrize(
    ("optimizer_class", "kwargs", "expected"),
    [
        (torch.optim.AdamW, {}, 8),
        (torch.optim.SGD, {"lr": 0.1}, 0),
        (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}, 4),
        (torch.optim.RMSprop, {}, 4),
        (TwoBytes, {}, 2),
    ],
)
def test_optimizers_are_measured(optimizer_class: Any, kwargs: dict[str, Any], expected: int) -> None:
    assert optimizer_bytes_per_parameter(optimizer_class, kwargs) == pytest.approx(expected, abs=0.01)


def test_rates_are_work_over_the_best_time(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = iter([0.0, 9.0, 10.0, 13.0, 20.0, 22.0, 30.0, 34.0] * 2)  # the first of four warms up; the best takes 2 s
    monkeypatch.setattr("rlhf_ppo.estimate.run.time.perf_counter", lambda: next(ticks))
    assert measure_rates(torch.device("cpu"), torch.float32) == (2 * 768**3 / 2, 4 * 2**24 / 2)


def test_a_run_starts_with_one_line(
    make_trainer: Callable[..., PPOTrainer], monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """The constructor measures nothing and evaluation needs none of it."""
    measured: list[str] = []
    for step in (measure_rates, optimizer_bytes_per_parameter, estimate_update):
        monkeypatch.setattr(f"rlhf_ppo.estimate.run.{step.__name__}", noting(step, measured))
    trainer = make_trainer(disable_tqdm=False, eval_dataset=[{"input_ids": [5, 6]}] * 2, total_episodes=8)
    trainer.evaluate()
    assert measured == [] and "Estimate" not in capsys.readouterr().out
    trainer.train()
    trainer.train()
    estimate = forecast(trainer)
    assert estimate is not None
    assert estimate.weights == held(trainer.model.parameters())
    assert sorted(measured) == ["estimate_update", "measure_rates", "optimizer_bytes_per_parameter"]
    [line] = [line for line in capsys.readouterr().out.splitlines() if line.startswith("Estimate per device")]
    text = describe(estimate, torch.device("cpu"), torch.float32, trainer.sizes.num_total_batches)
    assert line.partition("; at least")[0] == text.partition("; at least")[0]
    assert " s an update, " in line
    make_trainer(disable_tqdm=True, total_episodes=8).train()
    assert "Estimate" not in capsys.readouterr().out


def noting(function: Callable[..., Any], called: list[str]) -> Callable[..., Any]:
    def noted(*args: Any, **kwargs: Any) -> Any:
        called.append(function.__name__)
        return function(*args, **kwargs)

    return noted


@pytest.mark.parametrize(("precision", "dtype"), [
    ("no", torch.float64), ("bf16", torch.bfloat16), ("fp16", torch.float16),
])  # fmt: skip
def test_rates_are_measured_in_the_precision_of_the_products(precision: str, dtype: torch.dtype) -> None:
    source: Any = SimpleNamespace(mixed_precision=precision)
    assert multiplied_dtype(source, tiny_policy().double()) == dtype


def test_activations_count_as_training_will_keep_them(make_trainer: Callable[..., PPOTrainer]) -> None:
    """Trainer switches checkpointing on in `train`, after the line."""
    kept = forecast(make_trainer())
    trainer = make_trainer(gradient_checkpointing=True)
    recomputed = forecast(trainer)
    assert kept is not None and recomputed is not None and recomputed.learning < 0.6 * kept.learning
    models = (trainer.policy_model, trainer.value_model)
    assert not any(getattr(module, "gradient_checkpointing", False) for model in models for module in model.modules())
    trainer.train()
    length = round(sum(len(row["input_ids"]) for row in trainer.train_dataset) / 32) + 8
    kept_bytes = [count_pass(model, 4, length).saved_bytes for model in models]
    for model in models:
        model.eval()  # nothing is recomputed
    of_blocks = [count_pass(model, 4, length).saved_bytes // 2 for model in models]
    in_head = 4 * 4 * 8 * 32 + 4 * 32 * 32
    of_policy = kept_bytes[0] + max(of_blocks[0], in_head)
    assert recomputed.learning == max(of_policy, kept_bytes[1] + of_blocks[1])


def test_both_models_activations_count_where_they_do_not_learn_in_turn(
    make_trainer: Callable[..., PPOTrainer],
) -> None:
    class AtOnce(PPOTrainer):
        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            return super().compute_loss(*args, **kwargs)

    in_turn, at_once = forecast(make_trainer()), forecast(make_trainer(AtOnce))
    assert in_turn is not None and at_once is not None
    in_head = 4 * 4 * 8 * 32 + 4 * 32 * 32
    assert at_once.learning - in_turn.learning == pytest.approx(in_turn.learning - in_head, rel=0.05)


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

    monkeypatch.setattr(f"rlhf_ppo.estimate.run.{step}", fails)
    warnings: list[str] = []
    monkeypatch.setattr("rlhf_ppo.estimate.run.logger.warning", warnings.append)
    make_trainer(disable_tqdm=False, total_episodes=8).train()
    assert "Estimate" not in capsys.readouterr().out
    assert warnings == ["No estimate of memory and time: RuntimeError: no such kernel"]


def test_a_model_that_is_taken_apart_counts_as_it_was_made() -> None:
    """What it shares with another model stays the other's; nothing is allocated."""
    policy, scorer = tiny_policy(), tiny_scorer()
    scorer.model.embed_tokens.weight = policy.model.embed_tokens.weight
    copied = copy_without_storage(scorer, policy.parameters())
    expected = count_pass(scorer, 2, 9), held(set(scorer.parameters()) - set(policy.parameters()))
    scorer.to("meta")  # as good as gone

    assert copied.model.embed_tokens.weight is policy.model.embed_tokens.weight
    own: Any = set(copied.parameters()) - set(policy.parameters())
    assert (count_pass(copied, 2, 9), stored_bytes(own)) == expected
    assert all(type(value).__name__ == "FakeTensor" for value in (part.data for part in own))
