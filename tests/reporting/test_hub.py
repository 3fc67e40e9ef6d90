"""Pushing to the hub, without a network, and the model card that goes with it."""

from __future__ import annotations

import math
import runpy
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from datasets import Dataset
from huggingface_hub import ModelCard
from transformers import AutoModelForCausalLM

from tests.conftest import count_w4, make_tokenizer, tiny_policy, tiny_scorer
from tests.runs import QUICK


class Hub:
    """Stands in for the hub: keeps the arguments of every call, and what the uploaded folder held."""

    def __init__(self) -> None:
        self.repos: list[dict[str, Any]] = []
        self.uploads: list[dict[str, Any]] = []

    def create_repo(self, repo_id: str, **kwargs: Any) -> Any:
        self.repos.append({"repo_id": repo_id, **kwargs})
        return SimpleNamespace(repo_id=f"some-org/{repo_id.split('/')[-1]}")

    def upload_folder(self, *, folder_path: Any, **kwargs: Any) -> Any:
        files = {str(path.relative_to(folder_path)) for path in Path(folder_path).rglob("*") if path.is_file()}
        self.uploads.append({"folder_path": str(folder_path), "files": files, **kwargs})
        return SimpleNamespace(done=lambda: True, oid=len(self.uploads))


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Hub:
    hub = Hub()
    monkeypatch.setattr("huggingface_hub.HfApi.create_repo", lambda api, *a, **kwargs: hub.create_repo(*a, **kwargs))
    monkeypatch.setattr("huggingface_hub.HfApi.upload_folder", lambda api, **kwargs: hub.upload_folder(**kwargs))
    return hub


def named(model: Any, name: str) -> Any:
    """The model as if it had been loaded from there."""
    model.config._name_or_path = name
    return model


@pytest.fixture
def trained(make_trainer) -> Any:
    """A trainer after three updates with a reward model and a reward function."""
    trainer = make_trainer(
        model=named(tiny_policy(), "some-org/tiny-sft"),
        reward_model=named(tiny_scorer(), "some-org/tiny-reward"),
        reward_funcs=[count_w4],
        hub_model_id="some-org/tiny-ppo",
        kl_coef=0.125,
        **QUICK,
    )
    trainer.train()
    return trainer


def card_of(trainer: Any) -> ModelCard:
    return ModelCard.load(Path(trainer.args.output_dir, "README.md"))


# ---- push_to_hub ----


def test_every_argument_of_push_to_hub_arrives(trained, hub):
    result = trained.push_to_hub(
        commit_message="Three updates", blocking=False, token="secret", revision="v2", license="mit"
    )

    assert [(repo["repo_id"], repo["token"]) for repo in hub.repos] == [("some-org/tiny-ppo", "secret")]
    (upload,) = hub.uploads
    assert upload["repo_id"] == "some-org/tiny-ppo" and upload["folder_path"] == trained.args.output_dir
    assert (upload["commit_message"], upload["token"], upload["revision"]) == ("Three updates", "secret", "v2")
    assert upload["run_as_future"] is True
    assert result.oid == 1
    assert card_of(trained).data.license == "mit"


def test_by_default_the_push_blocks_and_uses_the_arguments_token_and_revision(make_trainer, hub):
    trainer = make_trainer(hub_token="of the arguments", hub_revision="main", hub_private_repo=True)

    trainer.push_to_hub()

    assert (hub.repos[0]["token"], hub.repos[0]["private"]) == ("of the arguments", True)
    (upload,) = hub.uploads
    assert (upload["token"], upload["revision"]) == ("of the arguments", "main")
    assert (upload["commit_message"], upload["run_as_future"]) == ("End of training", False)


def test_the_pushed_folder_is_the_policy_with_its_card_and_nothing_of_the_training(trained, hub):
    trained.push_to_hub()

    (upload,) = hub.uploads
    assert {"README.md", "config.json", "model.safetensors", "tokenizer.json"} <= upload["files"]
    assert not any("value_model" in name or "optimizer" in name for name in upload["files"])
    ids = torch.arange(3, 9)[None]
    pushed = AutoModelForCausalLM.from_pretrained(upload["folder_path"])
    assert torch.equal(pushed(ids).logits, trained.policy_model.eval()(ids).logits)


def test_checkpoints_are_not_pushed_with_the_model(make_trainer, hub):
    trainer = make_trainer(**QUICK, save_strategy="steps", save_steps=1)
    trainer.train()

    trainer.push_to_hub()

    assert any(name.startswith("checkpoint-3") for name in hub.uploads[0]["files"])  # they lie in the folder
    assert "checkpoint-*" in hub.uploads[0]["ignore_patterns"]


def test_a_push_at_every_checkpoint_has_a_card_of_that_moment(make_trainer, hub):
    trainer = make_trainer(**QUICK, save_strategy="steps", save_steps=2, push_to_hub=True, hub_always_push=True)

    trainer.train()

    pushed = [upload for upload in hub.uploads if "checkpoint" not in upload["folder_path"]]
    assert [upload["commit_message"] for upload in pushed][:1] == ["Training in progress, step 2"]
    assert {"README.md", "model.safetensors"} <= pushed[0]["files"]


def test_the_example_names_its_prompts(make_trainer, hub, tmp_path, monkeypatch):
    for model, name in ((tiny_policy(), "sft"), (tiny_scorer(), "reward")):
        model.save_pretrained(tmp_path / name)
        make_tokenizer().save_pretrained(tmp_path / name)
    Dataset.from_dict({"prompt": ["w1 w2"] * 8}).to_json(tmp_path / "prompts.jsonl")
    monkeypatch.chdir(tmp_path)
    options = (
        "--dataset_name prompts.jsonl --sft_model_path sft --reward_model_path reward --output_dir out --push_to_hub "
        "--per_device_train_batch_size 2 --total_episodes 2 --response_length 2 --num_sample_generations 0 --use_cpu"
    )
    monkeypatch.setattr("sys.argv", ["ppo.py", *options.split()])

    runpy.run_path(str(Path(__file__).parents[2] / "examples" / "ppo.py"), run_name="__main__")

    assert hub.repos[0]["repo_id"] == "out"
    assert hub.uploads[-1]["commit_message"] == "End of training"
    card = ModelCard.load(tmp_path / "out" / "README.md")
    assert "on the prompts of `prompts.jsonl`" in card.text and "trained from `sft`" in card.text


# ---- The card ----


def test_the_card_names_what_made_the_policy(trained, hub):
    trained.push_to_hub(dataset_name="some-org/prompts", tags="tiny", language="en")

    card = card_of(trained)
    assert card.data.base_model == "some-org/tiny-sft" and card.data.datasets == "some-org/prompts"
    assert card.data.model_name == "tiny-ppo" and card.data.library_name == "transformers"
    assert set(card.data.tags) >= {"rlhf_ppo", "ppo", "generated_from_trainer", "tiny"}
    assert card.data.language == "en"
    for reward in ("- `some-org/tiny-reward`", "- `count_w4`"):
        assert reward in card.text
    for row in ("| kl_coef | 0.125 |", "| total_episodes | 6 |", f"| transformers | {version('transformers')} |"):
        assert row in card.text
    assert "arXiv:1707.06347" in card.text and "arXiv:1909.08593" in card.text


def test_the_card_gives_the_last_value_of_each_metric(trained):
    trained.create_model_card()

    logged = [entry["objective/scores"] for entry in trained.state.log_history if "objective/scores" in entry]
    rows = dict(
        line.strip("| ").split(" | ") for line in card_of(trained).text.splitlines() if line.startswith("| objective/")
    )
    assert len(logged) == 3 and len({f"{value:.4g}" for value in logged}) == 3
    assert math.isclose(float(rows["objective/scores"]), logged[-1], rel_tol=1e-3)
    assert {"objective/kl", "objective/rlhf_reward"} <= rows.keys()


def test_the_card_s_arguments_stand_in_trl_s_order_and_have_trainer_s_names_too(trained):
    trained.create_model_card("a name", "some-org/prompts", "a-tag")
    by_position = card_of(trained)
    trained.create_model_card(
        model_name="a name", dataset="some-org/prompts", tags=["a-tag"], finetuned_from="some-org/other", license="mit"
    )
    by_name = card_of(trained)

    assert by_position.data.model_name == by_name.data.model_name == "a name"
    assert by_position.data.datasets == by_name.data.datasets == "some-org/prompts"
    assert "a-tag" in by_position.data.tags and "a-tag" in by_name.data.tags
    assert (by_position.data.base_model, by_name.data.base_model) == ("some-org/tiny-sft", "some-org/other")


def test_an_adapter_s_card_says_so(make_trainer, hub):
    peft = pytest.importorskip("peft")
    trainer = make_trainer(
        model=named(tiny_policy(), "some-org/tiny-sft"), peft_config=peft.LoraConfig(target_modules=["q_proj"])
    )

    trainer.push_to_hub()

    data = card_of(trainer).data
    assert (data.library_name, data.base_model) == ("peft", "some-org/tiny-sft")
    assert "adapter_model.safetensors" in hub.uploads[0]["files"]
    assert "model.safetensors" not in hub.uploads[0]["files"]


def test_models_made_in_memory_have_no_name_to_give(make_trainer):
    trainer = make_trainer(reward_model=tiny_scorer(), hub_model_id=None)

    trainer.create_model_card()

    card = card_of(trainer)
    assert card.data.base_model is None and card.data.model_name == "run"
    assert "- `reward_model`" in card.text


def test_only_the_main_process_writes(make_trainer, monkeypatch):
    trainer = make_trainer()
    monkeypatch.setattr(trainer, "is_world_process_zero", lambda: False)

    trainer.create_model_card()

    assert not Path(trainer.args.output_dir, "README.md").exists()
