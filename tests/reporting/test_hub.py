"""Pushing to a hub on this machine, and the model card that goes with it."""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
import transformers.utils.hub
from huggingface_hub import ModelCard
from transformers import AutoModelForCausalLM, TrainerCallback

from rlhf_ppo.training.publishing import HubError
from tests.conftest import count_w4, tiny_policy, tiny_scorer
from tests.reporting.local_hub import LocalHub, Request, local_hub
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

PRIVATE = ("completions/", "_samples/", "checkpoint-", "report.html", "judged.parquet", "nohup.out", "optimizer.pt")
"""What lies in the run's directory and is not for others."""


def test_a_push_uploads_policy_card_and_curves_and_nothing_of_the_run(make_trainer, hub, tmp_path, monkeypatch):
    """The rule of docs/usage.md, over a run's whole directory; every argument arrives."""
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "run" / "runs"))
    trainer = make_trainer(
        **QUICK, num_sample_generations=1, save_strategy="steps", save_steps=2,
        report_to="tensorboard", hub_model_id="some-org/tiny-ppo", hub_token="hf_secret", hub_private_repo=True,
    )  # fmt: skip
    trainer.train()
    trainer.save_state()
    directory = Path(trainer.args.output_dir)
    for name in ("report.html", "judged.parquet", "nohup.out", "optimizer.pt", "debug.jsonl", "secret.txt"):
        (directory / name).write_text("private")

    done = trainer.push_to_hub(commit_message="Three updates", blocking=False, revision="v2", license="mit")

    assert done.result(timeout=60).oid == f"{1:040x}"
    [made] = hub.made
    assert (made["organization"], made["name"], made["token"]) == ("some-org", "tiny-ppo", "hf_secret")
    assert made.get("visibility") == "private" or made.get("private") is True
    [commit] = hub.commits
    assert (commit.repository, commit.revision, commit.message) == ("some-org/tiny-ppo", "v2", "Three updates")
    assert commit.token == "hf_secret"
    there = {path.relative_to(directory).as_posix() for path in directory.rglob("*") if path.is_file()}
    assert all(any(part in name for name in there) for part in PRIVATE)
    assert any(name.startswith("runs/") for name in there) and "log_history.jsonl" in there
    assert commit.files.keys() == {
        *("README.md", "config.json", "generation_config.json", "model.safetensors", "curves.png"),
        *("tokenizer.json", "tokenizer_config.json", "training_args.bin"),
    }
    assert commit.files["curves.png"].startswith(b"\x89PNG")
    assert not [name for name, content in commit.files.items() if b"hf_secret" in content]
    pushed = tmp_path / "pushed"
    pushed.mkdir()
    for name, content in commit.files.items():
        (pushed / name).write_bytes(content)
    ids = torch.arange(3, 9)[None]
    model = AutoModelForCausalLM.from_pretrained(pushed)
    assert torch.equal(model(ids).logits, trainer.policy_model.eval()(ids).logits)
    card = ModelCard.load(pushed / "README.md")
    assert card.data.license == "mit" and "![Curves of the training](curves.png)" in card.text

    trainer.args.hub_files = ["completions/*"]
    trainer.push_to_hub(token="another")

    more = hub.commits[1].files.keys() - commit.files.keys()
    assert more == {f"completions/completions_{step:05d}.parquet" for step in (1, 2, 3)}
    assert (hub.commits[1].token, hub.commits[1].message) == ("another", "End of training")


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
    assert not any("/" in name for name in by_message["Training in progress, step 2"])
    whole = by_message["Training in progress, step 3, checkpoint"]
    assert {"last-checkpoint/optimizer.pt", "last-checkpoint/trainer_state.json"} <= whole.keys()


def test_no_file_is_overwritten_while_it_is_uploaded(make_trainer, hub, monkeypatch):
    answer = Request.answer

    def answer_slowly(request: Request, *given: Any, **headers: str) -> None:
        """Say only after a while where the large files go, whose hashes were given."""
        time.sleep(0.5 if request.path.endswith("/info/lfs/objects/batch") else 0)
        answer(request, *given, **headers)

    monkeypatch.setattr(Request, "answer", answer_slowly)
    trainer = make_trainer(**QUICK, save_strategy="steps", save_steps=2, push_to_hub=True, hub_always_push=True)
    trainer.train()

    assert [commit.message for commit in hub.commits] == [f"Training in progress, step {step}" for step in (2, 3)]
    assert len(hub.objects) >= 2
    assert all(hashlib.sha256(content).hexdigest() == given for given, content in hub.objects.items())


@pytest.mark.parametrize(
    ("status", "said"),
    [
        (403, "Forbidden.*; log in with `hf auth login`"),
        (500, "500.*; look at the network"),
        (None, "; look at the net"),
    ],
    ids=["refused", "broken", "unreachable"],
)
def test_a_hub_that_gives_no_repository_is_said_before_training(status, said, make_trainer, hub, monkeypatch):
    if status is None:
        monkeypatch.setattr(huggingface_hub.hf_api.api, "endpoint", "http://127.0.0.1:9")
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")
    else:
        hub.refusals["/api/repos/create"] = (status, "You may not use token=hf_secret here")

    with pytest.raises(
        HubError, match=f"^push_to_hub=True, but the hub does not give .*'some-org/mine': .*{said}"
    ) as it:
        make_trainer(push_to_hub=True, hub_model_id="some-org/mine", hub_token="hf_secret")

    assert "hf_secret" not in str(it.value)


def test_a_push_that_fails_loses_nothing(make_trainer, hub, monkeypatch, caplog):
    """The policy is saved before the hub is asked; a push of a checkpoint that fails is told, and the run goes on."""
    hub.refusals["/commit/"] = (403, "Your quota is used up")
    publishing = logging.getLogger("rlhf_ppo.training.publishing")
    monkeypatch.setattr(publishing, "filters", [lambda record: time.sleep(0.3) or True])  # the run's end waits for it
    trainer = make_trainer(
        **QUICK, save_strategy="steps", save_steps=3, push_to_hub=True, hub_model_id="some-org/mine"
    )
    with caplog.at_level("WARNING", logger="rlhf_ppo"):
        trainer.train()
    [warning] = [record.getMessage() for record in caplog.records if "was not uploaded" in record.getMessage()]
    assert "quota is used up" in warning and "the run continues" in warning
    Path(trainer.args.output_dir, "model.safetensors").unlink()

    with pytest.raises(HubError, match=r"the policy is saved in .*run and was not uploaded to 'some-org/mine'"):
        trainer.push_to_hub()

    assert Path(trainer.args.output_dir, "model.safetensors").exists() and hub.commits == []
    hub.refusals.clear()
    trainer.push_to_hub()
    assert "model.safetensors" in hub.commits[0].files


def test_trackio_publishes_its_tables_only_into_a_space_that_is_named(make_trainer, hub):
    seen = []

    class Trackio(TrainerCallback):
        def on_push_begin(self, args, state, control, **kwargs):
            seen.append(args.trackio_static_space_id)

    trainer = make_trainer(callbacks=[Trackio()])
    trainer.push_to_hub()
    trainer.args.trackio_static_space_id = "me/curves"
    trainer.push_to_hub()

    assert seen == [False, "me/curves"]


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
    assert "adapter_model.safetensors" in hub.commits[0].files
    assert "model.safetensors" not in hub.commits[0].files
