"""Pushing to a hub that records what it receives, and the model card that goes with it."""

from __future__ import annotations

import fnmatch
import re
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
import torch
import transformers.trainer
from huggingface_hub import ModelCard
from huggingface_hub.utils import filter_repo_objects
from peft import LoraConfig
from transformers import AutoModelForCausalLM

from rlhf_ppo.cli.trainers import train_and_save
from tests.conftest import count_w4, tiny_policy, tiny_scorer
from tests.generation.test_stopping import byte_level
from tests.runs import QUICK
from tests.vision import image_rows, make_model, make_processor


class Hub:
    """Takes the place of the hub: what it was asked for, and the files of each commit."""

    def __init__(self) -> None:
        self.made, self.commits = [], []

    def create_repo(self, repo_id: str, **asked: Any) -> Any:
        self.made.append((repo_id, asked["token"]))
        return SimpleNamespace(repo_id=repo_id)

    def upload_folder(self, *, folder_path: str, ignore_patterns: Any = None, path_in_repo: Any = None, **asked: Any):
        found = [path.relative_to(folder_path) for path in Path(folder_path).rglob("*") if path.is_file()]
        paths = filter_repo_objects(map(str, found), ignore_patterns=ignore_patterns)
        files = {str(Path(path_in_repo or "", path)): Path(folder_path, path).read_bytes() for path in paths}
        self.commits.append(SimpleNamespace(**asked, files=files))
        job: Future[None] = Future()
        job.set_result(None)
        return job


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Hub:
    hub = Hub()
    for name in ("create_repo", "upload_folder"):
        monkeypatch.setattr(
            huggingface_hub.HfApi, name, lambda _, *given, name=name, **asked: getattr(hub, name)(*given, **asked)
        )
        monkeypatch.setattr(transformers.trainer, name, getattr(hub, name), raising=False)  # before 5.0
    return hub


def named(model: Any, name: str) -> Any:
    """The model as if it had been loaded from there."""
    model.config._name_or_path = name
    return model


@pytest.fixture
def trained(make_trained) -> Any:
    """A trainer after three updates with a reward model and a reward function."""
    return make_trained(
        model=named(tiny_policy(), "some-org/tiny-sft"),
        reward_model=named(tiny_scorer(), "some-org/tiny-reward"),
        reward_funcs=[count_w4],
        hub_model_id="some-org/tiny-ppo",
        kl_coef=0.125,
        **QUICK,
    )


def card_of(trainer: Any) -> ModelCard:
    return ModelCard.load(Path(trainer.args.output_dir, "README.md"))


# ---- push_to_hub ----


def test_a_push_uploads_the_policy_with_its_card_and_no_responses_and_no_secrets(make_trained, hub, tmp_path):
    trainer = make_trained(
        **QUICK, num_sample_generations=1, save_strategy="steps", save_steps=2, hub_model_id="some-org/tiny-ppo",
        hub_token="hf_secret", hub_private_repo=True,
    )  # fmt: skip

    trainer.push_to_hub(commit_message="Three updates", revision="v2", license="mit")

    [made], [commit] = hub.made, hub.commits
    assert made == ("some-org/tiny-ppo", "hf_secret")
    assert (commit.repo_id, commit.revision, commit.commit_message) == ("some-org/tiny-ppo", "v2", "Three updates")
    assert {"README.md", "config.json", "model.safetensors", "tokenizer.json", "curves.png"} <= commit.files.keys()
    assert not [name for name in commit.files if name.startswith(("_", "checkpoint-"))]
    assert not [name for name, content in commit.files.items() if b"hf_secret" in content]
    for name in ("config.json", "model.safetensors", "README.md"):
        (tmp_path / name).write_bytes(commit.files[name])
    ids = torch.arange(3, 9)[None]
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(model(ids).logits, trainer.policy_model.eval()(ids).logits)
    card = ModelCard.load(tmp_path / "README.md")
    assert card.data.license == "mit" and "![Curves of the training](curves.png)" in card.text


UPLOADING: dict[str, Any] = QUICK | {"save_strategy": "steps", "save_steps": 3, "push_to_hub": True}


def test_a_merged_policy_replaces_the_adapter_of_the_last_checkpoint(make_trainer, hub, tmp_path):
    tiny_policy().save_pretrained(tmp_path / "base")
    adapter = LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"])
    given = {"model": str(tmp_path / "base"), "peft_config": adapter, "hub_revision": "v2"}
    trainer = make_trainer(**UPLOADING, hub_model_id="me/ppo", **given)

    train_and_save(trainer, None, merge=True)

    before, after = hub.commits
    assert before.revision == after.revision == "v2"
    deleted = {name for pattern in after.delete_patterns for name in fnmatch.filter(before.files, pattern)}
    assert deleted == {"adapter_config.json", "adapter_model.safetensors"}
    assert "model.safetensors" in after.files and not deleted & after.files.keys()


@pytest.mark.parametrize("value_model", ["policy", None])
def test_an_upload_of_a_checkpoint_replaces_earlier_models(value_model, make_trainer, hub):
    trainer = make_trainer(**UPLOADING | {"value_model": value_model, "save_critic": True}, hub_model_id="me/ppo")
    directory = Path(trainer.args.output_dir)
    (directory / "critic").mkdir(parents=True)
    for name in ("adapter_config.json", "adapter_model.safetensors", "critic/adapter_config.json"):
        (directory / name).write_text("{}")

    trainer.train()

    [commit] = hub.commits
    trainer.save_model()
    saved = {str(path.relative_to(directory)) for path in directory.rglob("*.*")}
    of_the_end = {name for name in saved if re.match("_|checkpoint-|curves|trainer_state", name)}
    assert commit.files.keys() == saved - of_the_end and "critic/adapter_config.json" not in saved


def test_an_upload_of_a_checkpoint_holds_the_processor(make_trained, hub):
    processor = make_processor("llava")
    policy = {"model": make_model("llava", processor), "value_model": None, "processing_class": processor}
    make_trained(**UPLOADING | policy, hub_model_id="me/ppo", train_dataset=image_rows((1, 0, 1, 2)))

    assert {"processor_config.json", "tokenizer.json", "model.safetensors"} <= hub.commits[0].files.keys()


# ---- The card ----


def test_the_card_names_what_made_the_policy(trained, hub):
    trained.push_to_hub(dataset_name="some-org/prompts", tags="tiny", language="en")

    card = card_of(trained)
    assert card.data.base_model == "some-org/tiny-sft" and card.data.datasets == "some-org/prompts"
    assert card.data.model_name == "tiny-ppo" and card.data.library_name == "transformers"
    assert set(card.data.tags) >= {"rlhf_ppo", "ppo", "generated_from_trainer", "tiny"}
    assert card.data.language == "en" and card.data.pipeline_tag == "text-generation"
    links = "[some-org/tiny-sft](https://huggingface.co/some-org/tiny-sft) on the [some-org/prompts](https://huggingface.co/"
    assert f"fine-tuned version of {links}datasets/some-org/prompts) dataset" in card.text
    assert 'model="some-org/tiny-ppo"' in card.text
    for reward in ("- `some-org/tiny-reward`", "- `count_w4`"):
        assert reward in card.text
    for row in ("| kl_coef | 0.125 |", "| total_episodes | 6 |", "schulman2017proximal", "PPO"):
        assert row in card.text


@pytest.mark.parametrize("template", [None, "{% for message in messages %}{{ message.content }}{% endfor %}"])
def test_the_cards_own_lines_generate_with_stop_strings(
    template: str | None, make_trained: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    tokenizer = byte_level()
    tokenizer.chat_template = template
    models = {"model": tiny_policy(vocab_size=310), "value_model": None, "processing_class": tokenizer}
    trainer = make_trained(**QUICK | models, stop_strings=["."])
    trainer.save_model()
    trainer.create_model_card()
    directory = str(trainer.args.output_dir)
    lines = card_of(trainer).text.partition("```python\n")[2].partition("```")[0]
    lines = re.sub(r'model="[^"]*", device_map="auto"', f"model={directory!r}, device='cpu'", lines)

    exec(lines, {})

    assert capsys.readouterr().out
