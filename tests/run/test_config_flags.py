"""Entries of a model's configuration that change what its `forward` returns change nothing in a run."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForSequenceClassification

from rlhf_ppo.models.loading import load_policy
from tests.conftest import tiny_policy, tiny_scorer
from tests.models.architectures import tiny_model
from tests.runs import QUICK, MakeTrainer, assert_identical, end_of_run

RUN: dict[str, Any] = {**QUICK, "total_episodes": 4, "learning_rate": 0.01}
FLAGS: dict[str, Any] = {"return_dict": False, "output_hidden_states": True, "output_attentions": True}
ROLES: dict[str, Callable[[], dict[str, Any]]] = {
    "policy": lambda: {"model": tiny_policy()},
    "one body": lambda: {"model": tiny_policy(), "value_model": "policy"},
    "value_model": lambda: {"value_model": tiny_scorer()},
    "ref_model": lambda: {"ref_model": tiny_policy(3)},
    "reward_model": lambda: {"reward_model": tiny_scorer()},
    "encoder": lambda: {"reward_model": tiny_model("bert", AutoModelForSequenceClassification, vocab_size=32)},
}
EXPERTS = ["mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "gpt_oss", "granitemoe", "phimoe", "jamba"]


def assert_changes_nothing(make_trained: MakeTrainer, models: Callable[[], dict[str, Any]], **flags: Any) -> Any:
    ends, trainer = [], None
    for is_set in (False, True):
        made = models()
        for model in (each for each in made.values() if not isinstance(each, str)):
            if "output_attentions" in flags:
                model.set_attn_implementation("eager")  # which alone has them
            for name, value in flags.items() if is_set else ():
                setattr(model.config, name, value)
                if name.startswith("output") and getattr(model, "generation_config", None) is not None:
                    setattr(model.generation_config, name, value)  # as transformers copies it
        trainer = make_trained(**RUN, **made)
        ends.append(end_of_run(trainer))
    assert_identical(*ends)
    return trainer


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("flag", FLAGS)
def test_a_flag_of_a_model_changes_nothing(role: str, flag: str, make_trained: MakeTrainer) -> None:
    assert_changes_nothing(make_trained, ROLES[role], **{flag: FLAGS[flag]})


@pytest.mark.parametrize("family", EXPERTS)
def test_the_flag_of_trl_s_sft_changes_nothing_and_is_saved(
    family: str, make_trained: MakeTrainer, tmp_path: Path
) -> None:
    trainer = assert_changes_nothing(
        make_trained, lambda: {"model": tiny_model(family, vocab_size=32)}, output_router_logits=True
    )
    trainer.save_model(str(tmp_path))
    assert json.loads((tmp_path / "config.json").read_text())["output_router_logits"] is True
    assert trainer.policy_model.config.output_router_logits is False
    again = load_policy(tmp_path, "model")
    assert again.config.to_dict()["output_router_logits"] is False


def test_each_saved_model_keeps_its_own_flags(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    """Also a policy whose files are in bf16, whose configuration is written twice."""
    for name, model in {"policy": tiny_policy().bfloat16(), "critic": tiny_scorer()}.items():
        model.config.return_dict, model.config.output_hidden_states = False, name == "policy"
        model.save_pretrained(tmp_path / name)
    given = {"model": str(tmp_path / "policy"), "value_model": str(tmp_path / "critic"), "save_critic": True}
    make_trainer(**RUN, **given).save_model(str(tmp_path / "saved"))
    for directory, has_states in {"saved": True, "saved/critic": False}.items():
        config = json.loads((tmp_path / directory / "config.json").read_text())
        assert (config["return_dict"], config.get("output_hidden_states", False)) == (False, has_states)
