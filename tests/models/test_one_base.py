"""Policy, value model and reward model as adapters over one base: one copy of its weights, and the same numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from rlhf_ppo.models.packing import hidden_states
from tests.conftest import tiny_policy, tiny_scorer
from tests.models.test_peft import IDS, first, logits, lora, two_adapters
from tests.runs import QUICK, MakeTrainer

peft = pytest.importorskip("peft")


def mean_id(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """A reward that no two responses are likely to share."""
    return [sum(ids) / len(ids) for ids in completion_ids]


@pytest.fixture
def make_shared(make_trainer: MakeTrainer) -> MakeTrainer:
    """Factory of trainers that hold one base; the value model is made unless it is given."""

    def make(**given: Any) -> Any:
        adapter = {} if "model" in given else {"peft_config": lora()}
        reward = {} if "reward_model" in given else {"reward_funcs": mean_id}
        return make_trainer(**{"share_base_model": True, "value_model": None, **adapter, **reward, **QUICK, **given})

    return make


def storages(*models: nn.Module) -> dict[int, int]:
    """Bytes by address of all that the models hold."""
    found = [parameter.untyped_storage() for model in models for parameter in model.parameters()]
    return {storage.data_ptr(): storage.nbytes() for storage in found}


def num_bytes(model: nn.Module, part: str = "") -> int:
    return sum(value.nbytes for name, value in model.named_parameters() if part in name)


def reward_adapter(folder: Path) -> str:
    """A directory with an adapter and head over a base in another one, as RewardTrainer leaves them."""
    tiny_policy().save_pretrained(folder / "base")
    torch.manual_seed(7)
    over = AutoModelForSequenceClassification.from_pretrained(folder / "base", num_labels=1)
    scorer = peft.get_peft_model(over, lora(task_type="SEQ_CLS", init_lora_weights=False))
    scorer.save_pretrained(folder / "reward")
    return str(folder / "reward")


# ---- What is held ----


def test_the_memory_of_one_model_holds_four(make_shared: MakeTrainer, tmp_path: Path):
    trainer = make_shared(reward_model=reward_adapter(tmp_path))

    base = num_bytes(tiny_policy())
    models = (trainer.policy_model, trainer.value_model, trainer.reward_model)
    assert trainer.reference.model is None
    own = sum(num_bytes(model, ".lora_") for model in models)
    heads = sum(num_bytes(model, "score.") for model in models)
    assert sum(storages(*models).values()) == base + own + heads < 1.35 * base


# ---- The same numbers ----


def test_the_value_model_starts_as_the_adapted_policy_with_a_zero_head(make_shared: MakeTrainer):
    trainer = make_shared(model=two_adapters(), model_adapter_name="policy", ref_adapter_name="sft")

    states = [
        hidden_states(model, IDS, torch.ones_like(IDS).bool()) for model in (trainer.policy_model, trainer.value_model)
    ]
    assert torch.equal(states[1], states[0])
    assert not logits(trainer.value_model).any()
    assert num_bytes(trainer.value_model, ".lora_") == num_bytes(trainer.policy_model, ".policy.")
    assert list(trainer.value_model.peft_config) == ["default"]


def test_a_reward_adapter_scores_as_it_does_merged(make_shared: MakeTrainer, tmp_path: Path):
    path = reward_adapter(tmp_path)
    shared, merged = (
        make_shared(reward_model=path, share_base_model=share, value_model=tiny_scorer(seed=2) if not share else None)
        for share in (True, False)
    )

    expected = logits(peft.AutoPeftModelForSequenceClassification.from_pretrained(path, num_labels=1))
    assert torch.equal(logits(shared.reward_model), expected) and expected.abs().max() > 0.1
    torch.testing.assert_close(logits(merged.reward_model), expected, atol=1e-5, rtol=0)
    shared.train(), merged.train()
    assert first(shared, "objective/scores") == pytest.approx(first(merged, "objective/scores"), abs=1e-5)


def test_a_value_model_over_equal_weights_is_put_over_the_one_base(make_shared: MakeTrainer, tmp_path: Path):
    whole = AutoModelForSequenceClassification.from_pretrained(_saved(tmp_path), num_labels=1)
    values = logits(whole)
    trainer = make_shared(value_model=whole)
    assert torch.equal(logits(trainer.value_model), values)
    own = num_bytes(trainer.value_model, ".lora_") + num_bytes(trainer.value_model, "score.")
    both = storages(trainer.policy_model, trainer.value_model)
    assert sum(both.values()) == num_bytes(trainer.policy_model) + own


def _saved(folder: Path) -> Path:
    tiny_policy().save_pretrained(folder / "base")
    return folder / "base"


# ---- Saving and resuming ----


def test_checkpoints_hold_adapters_alone_which_load_and_merge(make_shared: MakeTrainer, tmp_path: Path):
    base = AutoModelForCausalLM.from_pretrained(_saved(tmp_path))
    trainer = make_shared(model=base, peft_config=lora(), save_strategy="steps", save_steps=1, learning_rate=0.05)
    trainer.train()

    checkpoint = Path(trainer.args.output_dir) / "checkpoint-3"
    files = {str(path.relative_to(checkpoint)) for path in checkpoint.rglob("*.safetensors")}
    assert files == {"adapter_model.safetensors", "value_model/adapter_model.safetensors"}
    assert sum((checkpoint / name).stat().st_size for name in files) < num_bytes(base) / 3
    critic = peft.AutoPeftModelForSequenceClassification.from_pretrained(checkpoint / "value_model", num_labels=1)
    assert torch.equal(logits(critic), logits(trainer.value_model)) and logits(critic).abs().max() > 0
    torch.testing.assert_close(logits(critic.merge_and_unload()), logits(trainer.value_model), atol=1e-5, rtol=0)


# ---- What is accepted, and what cannot work ----


def test_a_base_in_16_bits_stays_so_below_adapters_and_head_in_32(make_shared: MakeTrainer):
    trainer = make_shared(model=tiny_policy().bfloat16(), peft_config=lora(), learning_rate=0.05, response_length=8)
    trainer.train()

    dtypes = {name: value.dtype for name, value in trainer.value_model.named_parameters()}
    assert {value for name, value in dtypes.items() if ".lora_" in name or "score" in name} == {torch.float32}
    assert {value for name, value in dtypes.items() if "base_layer" in name} == {torch.bfloat16}
    assert abs(first(trainer, "val/ratio") - 1.0) < 1e-6 and first(trainer, "objective/kl") == 0.0


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (lambda: {"model": tiny_policy()}, "all weights of model are trained; pass peft_config"),
        (lambda: {"value_model": tiny_scorer()}, r"value_model has a different base from model: \S+ is not the same"),
        (
            lambda: {"peft_config": lora(init_lora_weights="pissa"), "ref_model": tiny_policy()},
            "changes the weights of the base.*leave share_base_model=False",
        ),
    ],
    ids=["no adapter", "other weights", "pissa"],
)
def test_what_cannot_share_a_base(make_shared: MakeTrainer, given: Any, message: str):
    with pytest.raises(ValueError, match=message):
        make_shared(**given())
