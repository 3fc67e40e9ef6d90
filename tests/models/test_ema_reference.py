"""A reference that follows the policy: the recursion over the policies that were, and which references can."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import TrainerCallback

from rlhf_ppo import PPOTrainer
from rlhf_ppo.models.reference import MOVED_NAME
from tests.conftest import prompt_rows, tiny_policy, tiny_scorer
from tests.runs import QUICK

MakeTrainer = Callable[..., PPOTrainer]
DECAY = 0.75
RUN: dict[str, Any] = QUICK | {"learning_rate": 1e-2, "reference_ema": DECAY}


class KeepPolicies(TrainerCallback):
    """Keeps the policy's weights after each update, in float64."""

    def __init__(self) -> None:
        self.kept: list[dict[str, Tensor]] = []

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self.kept.append(weights(model.policy))


def weights(model: Any) -> dict[str, Tensor]:
    return {name: value.detach().double().clone() for name, value in model.named_parameters()}


def reference_of(trainer: PPOTrainer) -> Any:
    assert trainer.reference is not None
    return trainer.reference.own_policy


def moved(start: dict[str, Tensor], policies: list[dict[str, Tensor]], decay: float) -> dict[str, Tensor]:
    for policy in policies:
        start = {name: decay * value + (1 - decay) * policy[name] for name, value in start.items()}
    return start


def half_frozen() -> Any:
    policy = tiny_policy()
    policy.model.layers[0].requires_grad_(False)
    return policy


CASES: dict[str, dict[str, Any]] = {
    "a copy": {},
    "a given one": {"ref_model": tiny_policy(seed=5)},
    "tied": {"model": tiny_policy(tie_word_embeddings=True)},
    "16-bit products": {"bf16": True},
    "frozen layers": {"model": half_frozen()},
}


@pytest.mark.parametrize("case", CASES)
def test_after_each_update_it_is_the_recursion_over_the_policies(case: str, make_trainer: MakeTrainer) -> None:
    """From the second update on the KL is to the reference that has moved."""
    policies = KeepPolicies()
    trainer = make_trainer(**RUN | copy.deepcopy(CASES[case]), callbacks=[policies])
    start = weights(reference_of(trainer))
    trainer.train()
    assert len(policies.kept) == 3
    expected = moved(start, policies.kept, DECAY)
    for name, value in weights(reference_of(trainer)).items():
        torch.testing.assert_close(value, expected[name], rtol=1e-6, atol=1e-7, msg=name)
        is_frozen = case == "frozen layers" and ".layers.0." in name
        assert torch.equal(value, start[name]) == is_frozen, name
    assert {value.dtype for value in reference_of(trainer).parameters()} == {torch.float32}
    plain = make_trainer(**RUN | copy.deepcopy(CASES[case]) | {"reference_ema": None})
    plain.train()
    ours, theirs = ([entry["objective/kl"] for entry in each.state.log_history[:3]] for each in (trainer, plain))
    assert ours[0] == theirs[0] and ours[1] != theirs[1]


def test_small_steps_are_not_lost_beside_weights_in_16_bits(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    """Passes read the moved weights rounded to bfloat16; a checkpoint has them in float32."""
    policies = KeepPolicies()
    given = {"model": tiny_policy().bfloat16(), "callbacks": [policies], "total_episodes": 24, "learning_rate": 1e-3}
    trainer = make_trainer(
        **RUN | given | {"reference_ema": 0.99, "save_strategy": "steps", "save_steps": 12}, output_dir=str(tmp_path)
    )
    start = weights(reference_of(trainer))
    trainer.train()
    expected = moved(start, policies.kept, 0.99)
    exact = load_file(tmp_path / "checkpoint-12" / MOVED_NAME)
    for name, value in weights(reference_of(trainer)).items():
        torch.testing.assert_close(exact[name].double(), expected[name], rtol=1e-6, atol=1e-7, msg=name)
        assert torch.equal(value, exact[name].bfloat16().double())
    assert not (tmp_path / MOVED_NAME).exists(), "it belongs to checkpoints"


def test_a_checkpoint_without_one_or_with_another_one(
    make_trainer: MakeTrainer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    saving: dict[str, Any] = {"save_strategy": "steps", "save_steps": 1, "output_dir": str(tmp_path)}
    trainer = make_trainer(**RUN | saving | {"reference_ema": None})
    trainer.train()
    assert not list(tmp_path.rglob(MOVED_NAME))
    checkpoint = tmp_path / "checkpoint-3"
    again = make_trainer(**RUN | saving)
    reference: Any = again.reference
    reference.resume(str(checkpoint), again.model)
    assert f"checkpoint-3 has no {MOVED_NAME}" in caplog.text
    save_file({"lm_head.weight": torch.zeros(2, 2)}, checkpoint / MOVED_NAME)
    with pytest.raises(ValueError, match=rf"the {MOVED_NAME} in .*checkpoint-3 is not a reference of this policy"):
        reference.resume(str(checkpoint), again.model)
    still: Any = trainer.reference
    still.resume(str(checkpoint), trainer.model)
    assert "has a reference that had moved, but reference_ema=None" in caplog.text


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"peft_config": LoraConfig()}, r"reference_ema=0\.75 .* but here an adapter is trained; train all weights"),
        ({"peft_config": LoraConfig(), "ref_model": tiny_policy()}, "but here an adapter is trained"),
        ({"kl_coef": 0.0}, "moves the reference, but there is none; set kl_coef above 0, or log_kl=True"),
        ({"ref_model": tiny_policy(num_hidden_layers=1)}, r"different parameters \(the first is model\.layers\.1"),
        ({"ref_model": tiny_policy(intermediate_size=48)}, r"different parameters \(the first is model\.layers\.0"),
    ],
)
def test_references_that_cannot_move(given: dict[str, Any], message: str, make_trainer: MakeTrainer) -> None:
    with pytest.raises(ValueError, match=message):
        make_trainer(**RUN | given)


def test_a_search_would_start_from_where_a_trial_has_moved_it(make_trainer: MakeTrainer) -> None:
    given = {"model": lambda: tiny_policy(), "value_model": lambda: tiny_scorer(), "ref_model": tiny_policy()}
    trainer = make_trainer(**RUN, **given, eval_dataset=Dataset.from_list(prompt_rows(4)))
    with pytest.raises(ValueError, match="ref_model is a LlamaForCausalLM, but each trial"):
        trainer.hyperparameter_search(lambda trial: {}, n_trials=1)
