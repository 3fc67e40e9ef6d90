"""Pushing to a hub on this machine, and the model card that goes with it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
import transformers.utils.hub
from huggingface_hub import ModelCard
from transformers import AutoModelForCausalLM

from tests.conftest import count_w4, tiny_policy, tiny_scorer
from tests.reporting.local_hub import LocalHub, local_hub
from tests.runs import QUICK


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalHub]:
    """A hub that is asked as the real one is, by HTTP; `HF_ENDPOINT` and `HF_HUB_OFFLINE` are read at import."""
    with local_hub() as hub:
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", hub.endpoint)
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setattr(huggingface_hub.hf_api.api, "endpoint", hub.endpoint)
        monkeypatch.setattr(transformers.utils.hub, "_hf_api", None, raising=False)
        monkeypatch.setenv("HF_TOKEN", "of the environment")
        huggingface_hub.close_session()
        yield hub
    huggingface_hub.close_session()


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


def test_a_push_uploads_the_policy_with_its_card_and_no_responses_and_no_secrets(make_trainer, hub, tmp_path):
    trainer = make_trainer(
        **QUICK, num_sample_generations=1, save_strategy="steps", save_steps=2, hub_model_id="some-org/tiny-ppo",
        hub_token="hf_secret", hub_private_repo=True,
    )  # fmt: skip
    trainer.train()

    trainer.push_to_hub(commit_message="Three updates", revision="v2", license="mit")

    [made], [commit] = hub.made, hub.commits
    assert (made["organization"], made["name"], made["token"]) == ("some-org", "tiny-ppo", "hf_secret")
    assert (commit.repository, commit.revision, commit.message) == ("some-org/tiny-ppo", "v2", "Three updates")
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


def test_checkpoints_are_pushed_in_the_background_with_a_card_of_that_moment(make_trainer, hub):
    trainer = make_trainer(
        **QUICK, save_strategy="steps", save_steps=2, push_to_hub=True, hub_always_push=True,
        hub_strategy="checkpoint",
    )  # fmt: skip

    trainer.train()

    by_message = {commit.message: commit.files for commit in hub.commits}
    assert by_message.keys() == {
        f"Training in progress, step {step}{part}" for step in (2, 3) for part in ("", ", checkpoint")
    }
    assert {"README.md", "model.safetensors"} <= by_message["Training in progress, step 2"].keys()
    whole = by_message["Training in progress, step 3, checkpoint"]
    assert {"last-checkpoint/optimizer.pt", "last-checkpoint/trainer_state.json"} <= whole.keys()


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
    for row in ("| kl_coef | 0.125 |", "| total_episodes | 6 |", "schulman2017proximal", "PPO"):
        assert row in card.text


def test_an_adapter_s_card_says_so(make_trainer, hub):
    peft = pytest.importorskip("peft")
    trainer = make_trainer(
        model=named(tiny_policy(), "some-org/tiny-sft"), peft_config=peft.LoraConfig(target_modules=["q_proj"])
    )

    trainer.push_to_hub()

    data = card_of(trainer).data
    assert (data.library_name, data.base_model) == ("peft", "some-org/tiny-sft")
    assert "adapter_model.safetensors" in hub.commits[0].files
    assert "model.safetensors" not in hub.commits[0].files
