"""Runs on one device: compiled, in constant memory, without needless waiting, to a reward."""

from __future__ import annotations

import gc
import warnings

import pytest
import torch
from peft import LoraConfig
from transformers import AutoModelForCausalLM

from tests.conftest import count_w4
from tests.gpu.conftest import IS_FAST, MakeTrainer, small_policy


def test_memory_stays_what_it_is(make_device_trainer: MakeTrainer, device: str) -> None:
    """From the third update on: 50 on a GPU, 6 on a CPU, where tensors are looked for instead."""
    held: list[int] = []

    def bytes_in_use() -> int:
        if device == "cuda":
            return torch.cuda.memory_allocated()
        gc.collect()
        return sum(value.nbytes for value in gc.get_objects() if isinstance(value, torch.Tensor))

    trainer = make_device_trainer(max_steps=50 if IS_FAST else 6, response_length=8)
    learn = trainer.learn
    trainer.learn = lambda *given: (held.append(bytes_in_use()), learn(*given))[1]  # type: ignore
    trainer.train()
    assert max(held[3:]) <= held[2] * 1.02 + 100_000


@pytest.mark.needs("cuda", "compiler")
def test_a_compiled_run_learns_what_a_plain_one_does(make_device_trainer: MakeTrainer) -> None:
    """On a CPU compiling takes minutes."""
    plain, compiled = (make_device_trainer(bf16=False, max_steps=1, torch_compile=given) for given in (False, True))
    for trainer in (plain, compiled):
        trainer.train()
    ours, theirs = (trainer.state.log_history[0] for trainer in (compiled, plain))
    for name in ("objective/scores", "val/ratio", "loss/policy_avg", "loss/value_avg"):
        assert ours[name] == pytest.approx(theirs[name], rel=1e-3, abs=1e-4), name


def test_shared_prefixes_change_no_number(make_device_trainer: MakeTrainer) -> None:
    logs: list[dict[str, float]] = []
    for shared in (False, True):
        trainer = make_device_trainer(
            share_prefixes=shared, bf16=False, max_steps=1, num_generations=4, per_device_train_batch_size=4,
            num_mini_batches=1, train_dataset=[{"input_ids": list(range(3, 25 + size))} for size in (1, 5)],
        )  # fmt: skip
        trainer.train()
        logs.append(trainer.state.log_history[0])
    theirs, ours = logs
    assert theirs["batch/shared_frac"] == 0 and ours["batch/shared_frac"] > 0.3
    for name in ("objective/scores", "val/ratio", "loss/policy_avg", "loss/value_avg", "policy/grad_norm"):
        assert ours[name] == pytest.approx(theirs[name], rel=1e-3, abs=1e-4), name


def test_a_run_reaches_its_reward(make_device_trainer: MakeTrainer) -> None:
    """Share of one token in the responses, from 1/32; a CPU makes two updates."""
    trainer = make_device_trainer(
        max_steps=60 if IS_FAST else 2, learning_rate=3e-4, per_device_train_batch_size=16, kl_coef=0.01,
        gradient_accumulation_steps=2, num_ppo_epochs=4 if IS_FAST else 1, num_mini_batches=1, response_length=12,
        reward_funcs=count_w4,
    )  # fmt: skip
    trainer.train()
    scores = [entry["objective/scores"] for entry in trainer.state.log_history if "objective/scores" in entry]
    assert len(scores) == trainer.args.max_steps
    assert not IS_FAST or sum(scores[-5:]) / 5 > 0.5


@pytest.mark.needs("cuda")
def test_the_host_waits_at_most_twice_for_a_micro_batch(make_device_trainer: MakeTrainer) -> None:
    trainer = make_device_trainer(num_ppo_epochs=1, num_mini_batches=1, max_steps=2)
    learn, policy_loss, waits, parts = trainer.learn, trainer.policy_loss, [], []

    def noting(*given):  # type: ignore
        parts.append(1)
        return policy_loss(*given)

    def counted(*given):  # type: ignore
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            try:
                return learn(*given)
            finally:
                torch.cuda.set_sync_debug_mode("default")
                waits.append(sum("synchroniz" in str(each.message) for each in caught))

    trainer.learn, trainer.policy_loss = counted, noting  # type: ignore
    trainer.train()
    assert parts and sum(waits[1:]) <= 2 * len(parts)


def test_frozen_models_come_and_go(make_device_trainer: MakeTrainer, device: str) -> None:
    """`offload_frozen` keeps the reference on the CPU between its passes; it gives the same numbers."""
    logs = []
    for offload in (False, True):
        trainer = make_device_trainer(offload_frozen=offload, max_steps=1)
        trainer.train()
        logs.append(trainer.state.log_history[0]["objective/kl"])
        reference = next(trainer.reference.model.parameters())
        assert reference.device.type == ("cpu" if offload else device)
    assert logs[0] == logs[1]


@pytest.mark.needs("cuda", "bitsandbytes")
@pytest.mark.parametrize("bits", [4, 8])
def test_an_adapter_learns_over_a_quantized_base(make_device_trainer: MakeTrainer, tmp_path, bits: int) -> None:  # type: ignore
    from transformers import BitsAndBytesConfig

    small_policy().save_pretrained(tmp_path / "base")
    quantized = AutoModelForCausalLM.from_pretrained(
        tmp_path / "base", quantization_config=BitsAndBytesConfig(**{f"load_in_{bits}bit": True}), device_map={"": 0}
    )
    trainer = make_device_trainer(model=quantized, peft_config=LoraConfig(r=4, target_modules="all-linear"))
    trainer.train()
    first = trainer.state.log_history[0]
    assert first["objective/kl"] == pytest.approx(0, abs=1e-6) and first["val/ratio"] == pytest.approx(1, abs=2e-2)
    assert any(weight.any() for name, weight in trainer.model.named_parameters() if "lora_B" in name)
