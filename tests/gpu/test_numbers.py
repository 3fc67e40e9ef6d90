"""Kernels that only a GPU has: their results equal float64's, and learning starts from these."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from rlhf_ppo.algorithm.advantages import gae
from rlhf_ppo.models.heads import multiply_in_float32
from rlhf_ppo.models.policy_and_value import token_logprobs
from tests.gpu.conftest import MakeTrainer, small_policy
from tests.runs import QUICK, train_and_record


@pytest.mark.parametrize(
    "attention", ["sdpa", pytest.param("flash_attention_2", marks=pytest.mark.needs("cuda", "flash"))]
)
def test_rows_stay_packed_in_bf16_and_the_ratio_starts_at_1(make_device_trainer: MakeTrainer, attention: str) -> None:
    trainer = make_device_trainer(
        **QUICK | {"total_episodes": None}, model=small_policy(attn_implementation=attention)
    )
    trainer.train()
    first = trainer.state.log_history[0]
    assert trainer.model.packs_rows
    assert first["objective/kl"] == pytest.approx(0, abs=1e-6)
    assert first["val/ratio"] == pytest.approx(1, abs=1e-3)


@pytest.mark.parametrize("in_float32", [False, True], ids=["bf16", "lm_head_float32"])
def test_the_fused_head_under_autocast_is_that_of_float64(device: str, in_float32: bool) -> None:
    """Log-probabilities, and the gradient of the head, within the rounding of inputs to bf16, or of float32."""
    policy = small_policy(vocab_size=4096).to(device)
    head = policy.lm_head
    if in_float32:
        multiply_in_float32(head)
    generator = torch.Generator().manual_seed(0)
    states = torch.randn(96, 128, generator=generator).bfloat16().float().to(device).requires_grad_()
    targets = torch.randint(4096, (96,), generator=generator).to(device)
    with torch.no_grad():
        head.weight.copy_(torch.randn(4096, 128, generator=generator).bfloat16())  # nothing rounds but the products
    with torch.autocast(device, torch.bfloat16):
        logprobs, _ = token_logprobs(policy, states, targets, temperature=1.0)
    logprobs.sum().backward()

    exact = states.detach().double().requires_grad_()
    weight = head.weight.detach().double().requires_grad_()
    expected = (exact @ weight.T).log_softmax(dim=-1).gather(1, targets[:, None]).squeeze(1)
    expected.sum().backward()
    assert logprobs.dtype == torch.float32
    for ours, theirs, bound in (
        (logprobs, expected, 2**-8), (states.grad, exact.grad, 2**-6), (head.weight.grad, weight.grad, 2**-6),
    ):  # fmt: skip
        assert ours is not None and theirs is not None
        bound = 1e-5 if in_float32 else bound
        assert (ours.double() - theirs).norm() <= bound * theirs.norm()


def test_log_probabilities_and_values_of_a_rollout_are_float32(make_device_trainer: MakeTrainer) -> None:
    trainer = make_device_trainer(max_steps=1)
    rollouts = train_and_record(trainer)
    for name in ("logprobs", "ref_logprobs", "values"):
        values = getattr(rollouts[0], name)
        numbers = values[values != 0].cpu().numpy()
        assert values.dtype == torch.float32
        assert ((numbers.view("uint32") & 0xFFFF) != 0).mean() > 0.9, f"{name}: more than 8 bits of mantissa"


@pytest.mark.needs("cuda")
def test_fp16_scales_its_losses(make_device_trainer: MakeTrainer) -> None:
    trainer = make_device_trainer(bf16=False, fp16=True, max_steps=4)
    trainer.train()
    scaler: Any = trainer.accelerator.scaler
    assert scaler.get_scale() > 1
    assert all(torch.isfinite(weight).all() for weight in trainer.model.parameters())


def test_full_determinism_gives_the_same_bits_with_every_sampling_option(
    make_device_trainer: MakeTrainer, determinism_restored: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`top_p` needs `cumsum`, which has no deterministic version on a GPU."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    ends = []
    for _ in range(2):
        trainer = make_device_trainer(full_determinism=True, top_k=20, top_p=0.9, max_steps=1)
        trainer.train()
        ends.append([weight.detach().clone() for weight in trainer.model.parameters()])
    assert all(torch.equal(one, other) for one, other in zip(*ends, strict=True))


def test_advantages_are_summed_up_on_the_host(device: str) -> None:
    """A loop over tokens on the device would launch kernels of a few numbers each, in turn."""

    class OnDevice(TorchDispatchMode):
        count = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **(kwargs or {}))
            self.count += not func.is_view and isinstance(result, torch.Tensor) and result.device.type == "cuda"
            return result

    counts = []
    for length in (20, 400):
        rewards, values = torch.randn(2, 3, length)
        mask = torch.arange(length) < torch.tensor([[length], [7], [1]])
        with OnDevice() as operations:
            ours = gae(rewards.to(device), values.to(device), mask.to(device), gamma=0.9, lam=0.9)
        counts.append(operations.count)
        expected = gae(rewards, values, mask, gamma=0.9, lam=0.9)
        assert all(torch.allclose(one.cpu(), other, atol=1e-5) for one, other in zip(ours, expected, strict=True))
    assert counts[0] == counts[1]
