"""A judge is PPO's own reward if it is the same model or function, wherever it is and whatever its name."""

from __future__ import annotations

import copy
import json
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model

from rlhf_ppo import PPOTrainer
from rlhf_ppo.algorithm.advantages import AdaptiveKLController
from rlhf_ppo.generation.transformers_engine import TransformersEngine
from rlhf_ppo.models.loading import load_classifier
from rlhf_ppo.reporting.model_card import names_of_parts
from rlhf_ppo.reporting.run_log import RunSettings
from rlhf_ppo.rewards.identity import function_identities, judge_identities, model_identity
from rlhf_ppo.rewards.judges import ChatJudge, PreferenceReward, RewardModelJudge, as_judge
from rlhf_ppo.rewards.resolve import resolve_reward
from tests.conftest import make_tokenizer, save_models, tiny_policy, tiny_scorer
from tests.fuzz.recording import squared
from tests.runs import QUICK


def test_a_reward_model_is_its_merged_copy_and_its_half_precision_copy_and_no_other_training(tmp_path: Path) -> None:
    save_models(tmp_path, base=tiny_scorer())
    adapted: Any = get_peft_model(tiny_scorer(), LoraConfig(task_type="SEQ_CLS", target_modules=["q_proj"]))
    with torch.no_grad():
        adapted.base_model.model.score.modules_to_save["default"].weight.mul_(1.5)
        adapted.peft_config["default"].base_model_name_or_path = str(tmp_path / "base")
    adapted.save_pretrained(tmp_path / "adapter")
    merged = copy.deepcopy(adapted).merge_and_unload()
    save_models(tmp_path, merged=merged, half=copy.deepcopy(merged).bfloat16())
    other = copy.deepcopy(merged)
    other.score.weight.data.mul_(1.01)

    identity = model_identity(adapted)
    assert identity == model_identity(load_classifier(tmp_path / "adapter", "reward_model"))
    for name in ("merged", "half", "adapter"):
        make_tokenizer().save_pretrained(tmp_path / name)
        judge = RewardModelJudge(str(tmp_path / name))
        assert judge_identities(judge) == function_identities(PreferenceReward(judge)) == [identity]
    assert identity not in (model_identity(other), model_identity(tiny_scorer()))


FILE = "def length(completions, **kwargs):\n    return [len(text) for text in completions]\n"


def test_a_function_is_itself_by_any_path_and_in_a_copy_and_no_other_of_its_name(
    tmp_path: Path, make_trained: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("rewards.py").write_text(FILE)
    trainer = make_trained(**QUICK, reward_funcs="rewards.py:length")
    made_of = json.loads(Path(str(trainer.args.output_dir), "ppo_settings.json").read_text())["made_of"]
    own = {*made_of["reward_identities"]}

    shutil.copy("rewards.py", "copy.py")
    Path("link.py").symlink_to("rewards.py")
    Path("edited.py").write_text(FILE.replace("len(text)", "-len(text)"))
    for place in (str(tmp_path / "rewards.py"), "copy.py", "link.py"):
        assert own & {*judge_identities(as_judge(resolve_reward(f"{place}:length")))}, place
    for spec in ("edited.py:length", "length"):
        assert not own & {*judge_identities(as_judge(resolve_reward(spec)))}, spec
    one, other = ({*function_identities(resolve_reward(f"http://{host}/f"))} for host in ("one", "two"))
    assert one.isdisjoint(other)


def test_runs_are_grouped_by_what_their_reward_does_wherever_its_file_is(tmp_path: Path) -> None:
    settings = []
    for place, text in (("one", FILE), ("two", FILE), ("edited", FILE.replace("len(text)", "-len(text)"))):
        (tmp_path / place).mkdir()
        (tmp_path / place / "rewards.py").write_text(text)
        function = f"{tmp_path / place}/rewards.py:length"
        made_of = names_of_parts(tiny_policy(), None, [], {"length": 1.0}, function, None)
        settings.append(RunSettings({"gamma": 1.0}, made_of=made_of).without_seed())
    assert settings[0] == settings[1] != settings[2]


def test_runs_that_train_other_weights_are_not_grouped(make_trained: Any, tmp_path: Path) -> None:
    lora = [LoraConfig(r=rank, target_modules=["q_proj"]) for rank in (2, 2, 4)]
    kinds = [{"peft_config": config} for config in lora] + [
        {},
        {"value_model": "policy"},
        {"model": tiny_policy().bfloat16()},
    ]
    runs = [
        make_trained(**QUICK | {"model": tiny_policy()} | kind, output_dir=str(tmp_path / f"run{seed}"), seed=seed)
        for seed, kind in enumerate(kinds)
    ]
    keys = [RunSettings.load(str(run.args.output_dir)).without_seed() for run in runs]
    assert keys[0] == keys[1] and len({*keys}) == 5


class Reinforce(PPOTrainer):
    """Another algorithm, as far as its name tells."""


def test_runs_of_other_algorithms_are_not_grouped(make_trained: Any, tmp_path: Path) -> None:
    parts = {
        "kl_controller": AdaptiveKLController(0.05, 6.0, 1000),
        "engine": TransformersEngine(rows_per_call=2),
        "policy_loss": squared,
    }
    kinds = [
        PPOTrainer,
        PPOTrainer,
        Reinforce,
        Reinforce,
        *(partial(PPOTrainer, **{name: parts[name]}) for name in parts),
    ]
    runs = [
        make_trained(kind, **QUICK, output_dir=str(tmp_path / f"run{seed}"), seed=seed)
        for seed, kind in enumerate(kinds)
    ]
    keys = [RunSettings.load(str(run.args.output_dir)).without_seed() for run in runs]
    assert keys[0] == keys[1] and keys[2] == keys[3] and len({*keys}) == 5


def test_a_preference_is_its_judge(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-key")
    one, other = (ChatJudge(name) for name in ("one", "other"))
    paid = {*function_identities(PreferenceReward(one))}
    assert paid & {*judge_identities(one)} and not paid & {*judge_identities(other)}
