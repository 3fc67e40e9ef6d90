"""What is saved is what was trained: each kind of policy and value model, reloaded in a new process as the docs say.

All kinds are saved into one directory, one after the other: nothing of an earlier kind remains.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from tests.conftest import save_models, tiny_policy, tiny_scorer
from tests.models.test_one_base import mean_id
from tests.models.test_peft import lora
from tests.runs import QUICK, MakeTrainer

peft = pytest.importorskip("peft")


RUN = QUICK | {"learning_rate": 0.05, "reward_funcs": mean_id}
IDS = torch.arange(3, 15)[None]
MASK = torch.ones_like(IDS, dtype=torch.bool)
ONE_BODY: dict[str, Any] = {"value_model": "policy"}
CRITIC: dict[str, Any] = {"value_model": None, "save_critic": True}
ONE_BASE = CRITIC | {"share_base_model": True}


def language_lora(**overrides: Any) -> Any:
    return lora(task_type="CAUSAL_LM", **overrides)


def two_adapters(folder: Path) -> Any:
    policy = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(folder / "base"), folder / "adapter")
    policy.add_adapter("policy", language_lora(init_lora_weights=False))
    return policy


KINDS: dict[str, Callable[[Path], dict[str, Any]]] = {
    "full": lambda _: CRITIC,
    "LoRA": lambda _: {"peft_config": language_lora()},
    "one body": lambda _: ONE_BODY,
    "an adapter trained further": lambda folder: {"model": str(folder / "adapter"), **CRITIC},
    "one body under LoRA": lambda _: {"peft_config": language_lora(), **ONE_BODY},
    "full beside a critic's adapter": lambda _: {"value_peft_config": lora(), **CRITIC},
    "LoRA and a trained head": lambda _: {"peft_config": language_lora(modules_to_save=["lm_head"])},
    "one base": lambda _: {"peft_config": language_lora(), **ONE_BASE},
    "one base under an adapter trained further": lambda folder: {"model": str(folder / "adapter"), **ONE_BASE},
    "full without a critic": lambda _: {},
    "a named adapter of two": lambda folder: {"model": two_adapters(folder), "model_adapter_name": "policy", **CRITIC},
    "DoRA": lambda _: {"peft_config": language_lora(use_dora=True), **ONE_BASE},
    "full again": lambda _: CRITIC,
}


def results(trainer: Any) -> tuple[Tensor, Tensor]:
    """Logits and values of one row."""
    with torch.no_grad():
        values = trainer.model.eval()(IDS, MASK, MASK[:, 6:]).values
        return trainer.policy_model.eval()(IDS).logits, values


def files_of(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file() and path.name != "README.md"}


def test_the_saved_models_are_the_trained_ones_whatever_the_directory_held(
    make_trainer: MakeTrainer, tmp_path: Path
) -> None:
    save_models(tmp_path, base=tiny_policy())
    adapted = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(tmp_path / "base"), language_lora(r=3))
    for name, weight in adapted.named_parameters():
        if ".lora_B." in name:
            torch.nn.init.normal_(weight, std=0.3)
    adapted.save_pretrained(tmp_path / "adapter")
    expected = {}
    for number, (kind, arguments) in enumerate(KINDS.items()):
        run = RUN | {"model": str(tmp_path / "base")} | arguments(tmp_path)
        trainer = make_trainer(output_dir=str(tmp_path / f"run{number}"), **run)
        start = results(trainer)[0]
        trainer.train()
        trained = results(trainer)
        assert (trained[0] - start).abs().max() > 0.1, kind
        expected[kind] = trained
        trainer.save_model(str(tmp_path / "out"))
        trainer.save_model(str(tmp_path / f"fresh{number}"))
        files = files_of(tmp_path / "out")
        assert files == files_of(tmp_path / f"fresh{number}"), kind
        of_policy = (
            "adapter_model.safetensors" if hasattr(trainer.policy_model, "peft_config") else "model.safetensors"
        )
        assert {name for name in files if "safetensors" in name and "critic/" not in name} == {of_policy}, kind
        shutil.copytree(tmp_path / "out", tmp_path / "kept" / kind)
    torch.save(expected, tmp_path / "expected.pt")
    code = "import sys; from tests.models.test_round_trip import reload; reload(sys.argv[1])"
    ran = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr


@pytest.mark.parametrize(
    ("role", "what"),
    [
        ("peft_config", "the base of the trained adapter"),
        ("value_peft_config", "the model that the run starts from"),
        (None, "the model that the run starts from"),
    ],
)
def test_nothing_is_saved_over_what_the_run_starts_from(
    role: str | None, what: str, make_trainer: MakeTrainer, tmp_path: Path
) -> None:
    """A resumed run loads it again: as the base, and as the reference."""
    save_models(tmp_path, base=tiny_policy())
    place, adapter = str(tmp_path / "base"), {role: lora()} if role else {}
    with pytest.raises(ValueError, match=rf"saving there would replace '.*base', {what}"):
        make_trainer(model=place, value_model=None, output_dir=place, **adapter)


@pytest.mark.parametrize(("argument", "model"), [("reward_model", tiny_scorer), ("ref_model", tiny_policy)])
def test_nothing_is_saved_over_a_frozen_model(
    argument: str, model: Callable[[], Any], make_trainer: MakeTrainer, tmp_path: Path
) -> None:
    save_models(tmp_path, frozen=model())
    place = str(tmp_path / "frozen")
    with pytest.raises(ValueError, match=r"saving there would replace '.*frozen', the model that the run starts from"):
        make_trainer(**{argument: place}, output_dir=place)


def test_save_model_names_no_directory_that_the_run_starts_from(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    save_models(tmp_path, frozen=tiny_scorer())
    trainer, before = make_trainer(reward_model=str(tmp_path / "frozen")), files_of(tmp_path / "frozen")
    with pytest.raises(ValueError, match=r"saving there would replace '.*frozen', the model that the run starts from"):
        trainer.save_model(str(tmp_path / "frozen"))
    assert files_of(tmp_path / "frozen") == before


def test_nothing_is_saved_over_a_value_head(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    make_trainer(value_model="policy").save_model(str(tmp_path / "run"))
    head = str(tmp_path / "run" / "critic")
    with pytest.raises(ValueError, match=r"would replace '.*critic', the value head that the run starts from"):
        make_trainer(value_model=head, output_dir=str(tmp_path / "run"))


@pytest.mark.parametrize("argument", ["model", "reward_model"])
def test_nothing_is_saved_over_an_adapter_that_the_run_starts_from(
    argument: str, make_trainer: MakeTrainer, tmp_path: Path
) -> None:
    """A trained one stays an adapter, that of a reward model is merged."""
    is_policy = argument == "model"
    save_models(tmp_path, base=tiny_policy() if is_policy else tiny_scorer())
    auto_class = AutoModelForCausalLM if is_policy else AutoModelForSequenceClassification
    base = auto_class.from_pretrained(tmp_path / "base")
    adapted = peft.get_peft_model(base, lora(task_type="CAUSAL_LM" if is_policy else "SEQ_CLS"))
    adapted.save_pretrained(tmp_path / "adapter")
    place = str(tmp_path / "adapter")
    with pytest.raises(ValueError, match=r"saving there would replace '.*adapter', the adapter that the run starts"):
        make_trainer(**{argument: place}, output_dir=place)


def reload(folder: str) -> None:
    """Compare each saved policy and critic with the trained ones; in a new process."""
    from rlhf_ppo import PPOConfig, PPOTrainer

    for kind, (logits, values) in torch.load(Path(folder, "expected.pt")).items():
        saved = Path(folder, "kept", kind)
        is_adapter = (saved / "adapter_model.safetensors").is_file()
        load: Any = peft.AutoPeftModelForCausalLM if is_adapter else AutoModelForCausalLM
        with torch.no_grad():
            assert torch.equal(load.from_pretrained(saved).eval()(IDS).logits, logits), kind
        critic = saved / "critic"
        args = PPOConfig(str(Path(folder, "again")), response_length=4, max_steps=1, report_to="none")
        trainer = PPOTrainer(args, None, str(saved), value_model=critic if critic.is_dir() else None)
        again, its_values = results(trainer)
        assert torch.equal(again, logits), kind
        if critic.is_dir():  # an adapter is merged, which rounds
            torch.testing.assert_close(its_values, values, atol=1e-5, rtol=0, msg=lambda text, kind=kind: kind + text)
        assert torch.unique(values).numel() > 3, kind
