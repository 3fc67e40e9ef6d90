"""Two passes over the same tokens agree to the bit while a model learns, whatever in it is random in training mode."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import GenerationConfig

from rlhf_ppo.models.packing import hidden_states
from rlhf_ppo.models.policy_and_value import PolicyAndValue
from tests.conftest import save_models, tiny_policy, tiny_scorer
from tests.models.architectures import tiny_model
from tests.runs import MakeTrainer

RATES: dict[str, dict[str, Any]] = {
    "llama": {"attention_dropout": 0.5},
    "gpt2": {"resid_pdrop": 0.5, "embd_pdrop": 0.5, "attn_pdrop": 0.5},
    "opt": {"dropout": 0.5, "attention_dropout": 0.5, "layerdrop": 0.5},
    "bloom": {"hidden_dropout": 0.5, "attention_dropout": 0.5},
    "falcon": {"hidden_dropout": 0.5, "attention_dropout": 0.5},  # read from the configuration in each pass
    "persimmon": {"hidden_dropout": 0.5, "attention_dropout": 0.5},
    "mixtral": {"router_jitter_noise": 0.5},
    "phimoe": {"router_jitter_noise": 0.5},  # how far from the best expert it may route at random: .01 by default
}
IDS = torch.arange(32).view(2, 16)
MASK = torch.ones_like(IDS, dtype=torch.bool)


def states(model: Any) -> Tensor:
    return hidden_states(model, IDS, MASK).detach()


def random_model(family: str) -> Any:
    model = tiny_model(family, **RATES[family])
    model.train()
    assert not torch.equal(states(model), states(model)), "the model has nothing random to begin with"
    return model


@pytest.mark.parametrize("checkpointing", [False, True], ids=["", "recomputing"])
@pytest.mark.parametrize("family", RATES)
def test_passes_while_learning_and_evaluating_agree_to_the_bit(family: str, checkpointing: bool) -> None:
    policy = random_model(family)
    whole = PolicyAndValue(policy, tiny_scorer(), 1.0)
    if checkpointing:
        whole.gradient_checkpointing_enable()
    expected = states(policy.eval())
    whole.train()
    assert whole.training
    for _ in range(2):
        assert torch.equal(states(policy), expected)


@pytest.mark.parametrize("kwargs", [{"use_reentrant": False}, {"use_reentrant": True}], ids=str)
@pytest.mark.parametrize("family", ["phimoe", "opt"])
def test_recomputed_gradients_are_those_of_kept_activations(family: str, kwargs: dict[str, Any]) -> None:
    gradients = []
    for checkpointing in (False, True):
        model = random_model(family)
        model.get_input_embeddings().register_forward_hook(lambda *given: given[2].requires_grad_())
        recomputed: list[int] = []
        whole = PolicyAndValue(model, tiny_scorer(), 1.0)
        if checkpointing:
            whole.gradient_checkpointing_enable(gradient_checkpointing_kwargs=kwargs)
        whole.train()
        count_calls(model, recomputed)
        hidden_states(model, IDS, MASK).square().sum().backward()
        assert len(recomputed) == 1 + checkpointing
        gradients.append({name: value.grad for name, value in model.named_parameters() if value.grad is not None})
    assert gradients[0].keys() == gradients[1].keys() and len(gradients[0]) > 10
    for name, value in gradients[0].items():
        assert torch.equal(value, gradients[1][name]), name


def count_calls(model: Any, calls: list[int]) -> None:
    """Count the passes through the first block's first projection."""
    projection = next(module for name, module in model.named_modules() if name.endswith("q_proj"))
    projection.register_forward_hook(lambda *_: calls.append(1))


def test_a_generation_config_with_ignored_settings_is_saved_without_them(
    tmp_path: Path, make_trained: MakeTrainer
) -> None:
    """Llama 2 was published with a temperature and without `do_sample`; the first checkpoint ended the run."""
    save_models(tmp_path, sft=tiny_policy())
    odd = {"temperature": 0.6, "top_p": 0.9, "repetition_penalty": 1.1, "bos_token_id": 2, "eos_token_id": 1}
    (tmp_path / "sft/generation_config.json").write_text(json.dumps(odd))
    trainer = make_trained(model=str(tmp_path / "sft"), total_episodes=8, save_strategy="steps", save_steps=1)

    trainer.save_model()

    for folder in (trainer.args.output_dir, f"{trainer.args.output_dir}/checkpoint-1"):
        saved = GenerationConfig.from_pretrained(folder)
        saved.validate(strict=True)
        assert saved.temperature is None and saved.repetition_penalty == 1.1
