"""LoRA policies: what trains, what the reference is, what is saved, and that a run resumes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from rlhf_ppo.models.reference import Reference
from tests.conftest import tiny_policy, tiny_scorer
from tests.runs import QUICK, die_and_resume

peft = pytest.importorskip("peft")

MakeTrainer = Callable[..., Any]
IDS = torch.arange(3, 15)[None]


def lora(**overrides: Any) -> Any:
    return peft.LoraConfig(**{"r": 4, "target_modules": ["q_proj", "v_proj"], **overrides})


def trained_adapter(policy: nn.Module | None = None, name: str = "default", seed: int = 5) -> Any:
    """A PeftModel whose adapter changes the base clearly, as one does that SFT has trained."""
    torch.manual_seed(seed)
    return peft.get_peft_model(policy or tiny_policy(), lora(init_lora_weights=False), adapter_name=name)


def weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in model.named_parameters()}


def changed(before: dict[str, Tensor], model: nn.Module) -> set[str]:
    return {name for name, value in model.named_parameters() if not torch.equal(before[name], value)}


def logits(model: nn.Module) -> Tensor:
    with torch.no_grad():
        return model.eval()(IDS).logits


def first(trainer: Any, metric: str) -> float:
    return next(entry[metric] for entry in trainer.state.log_history if metric in entry)


def test_a_new_adapter_follows_the_seed_whatever_was_drawn_before(make_trainer: MakeTrainer) -> None:
    drawn = []
    for seed, before in ((0, 1), (0, 2), (1, 1)):
        torch.manual_seed(before)
        policy = make_trainer(**QUICK, seed=seed, peft_config=lora()).policy_model
        drawn.append(torch.cat([value.flatten() for name, value in weights(policy).items() if "lora_A" in name]))

    assert torch.equal(drawn[0], drawn[1]) and not torch.equal(drawn[0], drawn[2])


# ---- A new adapter ----


@pytest.mark.parametrize(
    ("options", "num_saved"),
    [({}, 1), ({"learning_rate": 0.0, "bf16": True}, 3)],
    ids=["in float32", "in bf16, while nothing is learned"],
)
def test_a_new_adapter_is_its_own_reference_until_it_moves(
    make_trainer: MakeTrainer, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], num_saved: int
):
    """The same numbers and weights to the bit, with a pass less in each update that nothing was learned before."""

    def train() -> tuple[int, list[dict[str, float]], dict[str, Tensor]]:
        trainer, calls = make_trainer(peft_config=lora(target_modules="all-linear"), **QUICK, **options), []
        trainer.policy_model.get_base_model().model.register_forward_hook(lambda *_: calls.append(1))
        trainer.train()
        logs = [
            {name: value for name, value in log.items() if "/" in name and not name.startswith("time/")}
            for log in trainer.state.log_history
        ]
        return len(calls), logs, weights(trainer.policy_model)

    num_passes, logs, trained = train()
    monkeypatch.setattr(Reference, "is_policy", lambda *_: False)
    num_all_passes, expected_logs, expected = train()
    assert num_all_passes - num_passes == num_saved
    assert logs == expected_logs
    assert all(torch.equal(trained[name], weight) for name, weight in expected.items())


def test_modules_to_save_train_whole_and_leave_the_reference_alone(make_trainer: MakeTrainer, tmp_path: Path):
    initial = logits(tiny_policy())
    trainer = make_trainer(peft_config=lora(modules_to_save=["lm_head"]), **QUICK)
    before = weights(trainer.policy_model)

    trainer.train()
    trainer.save_model(str(tmp_path / "saved"))

    assert {name for name in changed(before, trainer.policy_model) if "lora" not in name} == {
        "base_model.model.lm_head.modules_to_save.default.weight"
    }
    assert first(trainer, "objective/kl") == 0.0
    with trainer.policy_model.disable_adapter():
        assert torch.equal(logits(trainer.policy_model), initial)
    saved = peft.PeftModel.from_pretrained(tiny_policy(), tmp_path / "saved")
    assert torch.equal(logits(saved), logits(trainer.policy_model))


# ---- An adapter that is already trained ----


def save_adapter(folder: Path) -> Any:
    """Write a base and a trained adapter over it; return the PeftModel."""
    tiny_policy().save_pretrained(folder / "base")
    policy = trained_adapter(AutoModelForCausalLM.from_pretrained(folder / "base"))
    policy.save_pretrained(folder / "adapter")
    return policy


@pytest.mark.parametrize("given", ["directory", "loaded for inference"])
def test_a_saved_adapter_is_trained_further(given: str, make_trainer: MakeTrainer, tmp_path: Path):
    start, adapter = logits(save_adapter(tmp_path)), tmp_path / "adapter"
    model = str(adapter) if given == "directory" else peft.PeftModel.from_pretrained(tiny_policy(), adapter)
    trainer = make_trainer(model=model, **QUICK)
    before = weights(trainer.policy_model)
    assert torch.equal(logits(trainer.policy_model), start)

    trainer.train()

    assert first(trainer, "objective/kl") == 0.0
    moved = changed(before, trainer.policy_model)
    assert moved and all(".lora_" in name and ".default." in name for name in moved)


def two_adapters() -> Any:
    """A base with the adapters "sft" and "policy", two different ones."""
    policy = trained_adapter(name="sft", seed=5)
    torch.manual_seed(6)
    policy.add_adapter("policy", lora(init_lora_weights=False))
    return policy


def test_a_named_adapter_is_saved_where_it_is_looked_for(make_trainer: MakeTrainer, tmp_path: Path):
    trainer = make_trainer(model=two_adapters(), model_adapter_name="policy", ref_adapter_name="sft", **QUICK)
    trainer.train()

    trainer.save_model(str(tmp_path))

    saved = peft.PeftModel.from_pretrained(tiny_policy(), tmp_path)
    assert torch.equal(logits(saved), logits(trainer.policy_model))
    assert not [path for path in tmp_path.iterdir() if path.is_dir() and path.name != "run"]


# ---- A value model with an adapter ----


def test_of_the_value_model_only_adapter_and_head_train(make_trainer: MakeTrainer):
    trainer = make_trainer(value_peft_config=lora(), **QUICK)
    before = weights(trainer.value_model)

    trainer.train()

    moved = changed(before, trainer.value_model)
    assert moved == {name for name in before if ".lora_" in name or "modules_to_save" in name}
    assert len(moved) == 9 and any(name.endswith("score.modules_to_save.default.weight") for name in moved)


# ---- Saving and resuming ----


def test_what_is_saved_is_an_adapter_that_loads_and_merges(make_trainer: MakeTrainer, tmp_path: Path):
    tiny_policy().save_pretrained(tmp_path / "base")
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    trainer = make_trainer(model=base, peft_config=lora(), **QUICK)
    trainer.train()
    trained = logits(trainer.policy_model)

    trainer.save_model(str(tmp_path / "saved"))

    assert {path.name for path in (tmp_path / "saved").glob("*.safetensors")} == {"adapter_model.safetensors"}
    config = json.loads((tmp_path / "saved" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(tmp_path / "base")
    onto_base = peft.PeftModel.from_pretrained(tiny_policy(), tmp_path / "saved")
    assert torch.equal(logits(onto_base), trained)
    assert torch.equal(logits(peft.AutoPeftModelForCausalLM.from_pretrained(tmp_path / "saved")), trained)

    onto_base.merge_and_unload().save_pretrained(tmp_path / "merged")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    torch.testing.assert_close(logits(merged), trained, atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    "policy",
    [
        lambda: {"peft_config": lora(init_lora_weights=False, modules_to_save=["lm_head"])},
        lambda: {"model": two_adapters(), "model_adapter_name": "policy", "ref_adapter_name": "sft"},
        lambda: {"peft_config": lora(), "value_peft_config": lora()},
        lambda: {"model": trained_adapter(), "share_base_model": True, "value_model": None},
    ],
    ids=["new adapter", "named adapters", "both adapters", "one base"],
)
def test_resuming_equals_a_run_that_was_never_stopped(make_trainer: MakeTrainer, tmp_path: Path, policy: Any):
    def arguments() -> Any:
        torch.manual_seed(11)
        return policy()

    resumed, whole = die_and_resume(make_trainer, tmp_path, arguments)
    assert torch.equal(logits(resumed.policy_model), logits(whole.policy_model))


def test_each_trainer_of_a_model_compares_with_the_adapter_as_it_was_at_its_start(
    make_trainer: MakeTrainer, tmp_path: Path
) -> None:
    policy = trained_adapter()
    for number in range(2):
        start = logits(policy)
        trainer = make_trainer(model=policy, learning_rate=0.01, output_dir=str(tmp_path / str(number)), **QUICK)
        trainer.train()
        assert first(trainer, "objective/kl") == 0.0 and not torch.equal(logits(policy), start)
        with trainer.reference.generating(trainer.model, trainer.policy_model) as reference:
            assert torch.equal(logits(reference.policy), start)


# ---- What cannot work ----

VALUE_ADAPTER: dict[str, Any] = {"value_model": None, "value_peft_config": lora()}


def adapted_scorer() -> Any:
    return peft.get_peft_model(tiny_scorer(), lora(task_type="SEQ_CLS"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (lambda: {"model": trained_adapter(), "model_adapter_name": "other"}, "'other' is not an adapter"),
        (lambda: {"ref_adapter_name": "sft"}, "'sft' is not an adapter"),
        (lambda: {"peft_config": lora(init_lora_weights="pissa")}, "pass ref_model"),
        (lambda: {"model": tiny_policy(attention_bias=True), "peft_config": lora(bias="all")}, "pass ref_model"),
        (lambda: {"model": tiny_policy().requires_grad_(False)}, "model has no trainable parameter"),
        (
            lambda: {"model": trained_adapter(), "peft_config": lora()},
            r"^model starts from an adapter.* merge_and_unl",
        ),
        (lambda: {"model": trained_adapter(), **VALUE_ADAPTER}, "value_model starts from an adapter"),
        (lambda: {"reward_model": adapted_scorer(), **VALUE_ADAPTER}, "value_model starts from an adapter"),
    ],
    ids=["no such", "no reference", "changed base", "biases", "frozen", "second", "value from policy", "from reward"],
)
def test_what_cannot_work(make_trainer: MakeTrainer, arguments: Any, message: str):
    with pytest.raises(ValueError, match=message):
        make_trainer(**arguments())


def test_an_adapter_that_transformers_has_loaded_is_refused(make_trainer: MakeTrainer, tmp_path: Path):
    """Such a model is not a PeftModel: nothing of it would train, and the reference could not be told from it."""
    save_adapter(tmp_path)

    with pytest.raises(ValueError, match=r"model holds an adapter.*is_trainable=True"):
        make_trainer(model=AutoModelForCausalLM.from_pretrained(tmp_path / "adapter"))
