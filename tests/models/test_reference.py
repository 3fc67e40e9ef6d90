"""The reference policy: what it is, that KL starts at 0, and that training never moves it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from peft import get_peft_model
from torch import Tensor, nn

from rlhf_ppo import PPOTrainer
from rlhf_ppo.models.policy_and_value import PolicyAndValue, Reference, response_logprobs
from rlhf_ppo.models.reference import make_reference
from tests.conftest import tiny_policy, tiny_scorer
from tests.models.test_peft import lora
from tests.runs import At, MakeTrainer, train_and_record

IDS = torch.arange(2, 26).view(3, 8)
MASK = torch.ones(3, 8, dtype=torch.bool)


def trained_adapter(seed: int = 0, **overrides: Any) -> Any:
    """A `PeftModel` whose adapter already does something."""
    torch.manual_seed(seed)
    return get_peft_model(tiny_policy(seed), lora(init_lora_weights=False, **overrides))


def logprobs(model: nn.Module) -> Tensor:
    with torch.no_grad():
        return response_logprobs(model, IDS, MASK, MASK[:, 3:], 1.0).logprobs


def reference_logprobs(reference: Reference, policy: nn.Module) -> Tensor:
    both = PolicyAndValue(policy, tiny_scorer(), 1.0)
    with torch.no_grad(), reference.forward(both, policy) as forward:
        return forward(IDS, MASK, MASK[:, 3:])[0]


def move(model: nn.Module) -> None:
    """Change every trainable parameter, as an optimizer would."""
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data += 0.1


def test_the_users_reference_is_frozen_without_dropout() -> None:
    policy, given = tiny_policy(), tiny_policy(seed=5, attention_dropout=0.5)
    reference = make_reference(policy, given, None, adapter_is_new=False, temperature=1.0)
    assert reference.model.model is given and not given.training
    assert not any(parameter.requires_grad for parameter in given.parameters())
    reference.model.train()
    assert torch.equal(logprobs(given), logprobs(given))


def test_the_temperature_is_that_of_sampling() -> None:
    reference = make_reference(tiny_policy(), None, None, adapter_is_new=False, temperature=0.5)
    with torch.no_grad(), reference.forward(nn.Identity(), nn.Identity()) as forward:
        ours = forward(IDS, MASK, MASK[:, 3:])[0]
        assert torch.equal(ours, response_logprobs(tiny_policy(), IDS, MASK, MASK[:, 3:], 0.5).logprobs)


def test_where_the_adapter_trains_biases_of_the_base_the_whole_policy_is_copied(caplog: Any) -> None:
    Accelerator(cpu=True)  # its loggers want to know the process
    policy = get_peft_model(tiny_policy(attention_bias=True), lora(init_lora_weights=False, bias="all"))
    before = logprobs(policy)
    reference = make_reference(policy, None, None, adapter_is_new=False, temperature=1.0)
    assert "model trains model.layers.0.self_attn.q_proj.bias: the reference is a copy" in caplog.text
    move(policy)
    assert torch.equal(reference_logprobs(reference, policy), before)
    assert not torch.equal(logprobs(policy), before)


def test_an_adapter_in_16_bits_is_copied_bit_for_bit() -> None:
    policy = trained_adapter().bfloat16()
    before = logprobs(policy)
    assert torch.equal(
        reference_logprobs(make_reference(policy, None, None, adapter_is_new=False, temperature=1.0), policy), before
    )


def test_a_reference_that_would_be_trained_along_is_an_error() -> None:
    policy = trained_adapter()
    with pytest.raises(ValueError, match=r"ref_adapter_name='default' is not an adapter of the policy other than"):
        make_reference(policy, None, "default", adapter_is_new=False, temperature=1.0)
    with pytest.raises(ValueError, match=r"ref_model holds parameters that the policy trains .*lora_A"):
        make_reference(policy, policy.get_base_model(), None, adapter_is_new=False, temperature=1.0)


# ---- In training ----


def kl_of_updates(trainer: PPOTrainer) -> list[float]:
    return [log["objective/kl"] for log in trainer.state.log_history if "objective/kl" in log]


SETUPS: dict[str, Callable[[], dict[str, Any]]] = {
    "new adapter": lambda: {"peft_config": lora()},
    "trained adapter": lambda: {"model": trained_adapter()},
}


@pytest.mark.parametrize("setup", SETUPS)
def test_kl_starts_at_zero_and_the_reference_stays_while_the_policy_moves(
    make_trained: MakeTrainer, setup: str
) -> None:
    overrides = SETUPS[setup]()
    before = logprobs(overrides.get("model") or tiny_policy())
    trainer = make_trained(learning_rate=0.05, total_episodes=24, temperature=1.0, **overrides)
    first, *later = kl_of_updates(trainer)
    assert first == pytest.approx(0, abs=1e-6)
    assert len(later) == 2 and all(abs(kl) > 1e-3 for kl in later)
    assert torch.equal(reference_logprobs(trainer.reference, trainer.policy_model), before)
    assert (logprobs(trainer.policy_model) - before).abs().max() > 0.01


@pytest.mark.parametrize("setup", [{}, {"peft_config": lora()}], ids=["separate", "adapter"])
def test_log_probabilities_follow_a_temperature_that_a_callback_changes(
    make_trainer: MakeTrainer, setup: dict[str, Any]
) -> None:
    cools = At("on_step_end", 1, lambda passed: setattr(passed.args, "temperature", 0.2))
    given = {"temperature": 1.0, "kl_coef": 0.1, "learning_rate": 1e-9, "callbacks": [cools], **setup}
    for rollout, temperature in zip(train_and_record(make_trainer(**given)), (1.0, 0.2), strict=False):
        batch, mask = rollout.responses.batch, rollout.response_mask
        expected = response_logprobs(tiny_policy(), *batch, temperature).logprobs[mask]
        torch.testing.assert_close(rollout.logprobs[mask], expected, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(rollout.ref_logprobs[mask], expected, atol=1e-4, rtol=1e-4)
