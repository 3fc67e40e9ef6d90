"""Adapters on the command line: what is read beside them, what they start, what they are merged into and called."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    GenerationConfig,
)

from rlhf_ppo.cli.training_commands import reward, sft, train
from rlhf_ppo.reporting.judgements import RewardAccuracy
from tests.cli.test_remote_code import with_code
from tests.conftest import WORDS, make_tokenizer, save_models, tiny_policy, tiny_scorer, write_rows

QUICK = (
    "--max_steps 2 --per_device_train_batch_size 2 --report_to none --save_strategy no --learning_rate 1e-2 "
    "--use_cpu true --bf16 false"
).split()
LORA = "--use_peft --lora_r 2 --lora_target_modules q_proj v_proj".split()
PPO = ["--dataset_name", "texts.jsonl", "--response_length", "4", "--num_sample_generations", "0", *QUICK]
BY_LENGTH = ["--reward_funcs", "length", "--value_model_path", "policy"]


@pytest.fixture(autouse=True)
def workshop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A base, texts and pairs in the working directory."""
    monkeypatch.chdir(tmp_path)
    save_models(base=tiny_policy())
    write_rows("texts.jsonl", [{"prompt": f"w{i % 9} w{i % 20}", "completion": " w6"} for i in range(40)])
    write_rows("pairs.jsonl", [{"prompt": f"w{i % 9} w4", "chosen": " w4 w5", "rejected": " w7"} for i in range(40)])


def train_reward(*options: str) -> None:
    reward(["--model_name_or_path", "base", "--dataset_name", "pairs.jsonl", *QUICK, *options])


def settings_of(directory: str) -> dict[str, Any]:
    return json.loads(Path(directory, "ppo_settings.json").read_text())


def test_a_reward_adapter_reads_with_its_own_template() -> None:
    """Not with that of its base."""
    template = "{%% for m in messages %%}%s {{ m['content'] }} {%% endfor %%}"
    tokenizer = make_tokenizer()
    tokenizer.chat_template = template % "w20"
    tokenizer.save_pretrained("base")
    train_reward(*LORA, "--output_dir", "scorer")
    tokenizer.chat_template = template % "w22"
    tokenizer.save_pretrained("scorer")
    trainer = train(["--sft_model_path", "base", "--reward_model_path", "scorer", *PPO, "--output_dir", "ppo"])
    assert trainer.scorer.sources["reward_model"].template.chat_template == template % "w22"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("words", "origin"), [(WORDS, "scorer"), (WORDS[::-1], "base")], ids=["same", "other tokens"])
def test_the_value_model_starts_from_a_reward_model_that_reads_the_policys_tokens(
    dtype: str, words: list[str], origin: str
) -> None:
    save_models(scorer=tiny_scorer())
    make_tokenizer(words=words).save_pretrained("scorer")
    options = ["--sft_model_path", "base", "--reward_model_path", "scorer", "--dtype", dtype, *LORA]
    train([*options, *PPO, "--output_dir", "ppo"])
    assert settings_of("ppo")["made_of"]["value_model"] == origin


@pytest.mark.parametrize("options", [[], [*LORA, "--merge_adapter"]], ids=["whole", "merged"])
def test_a_model_keeps_the_special_tokens_of_its_training(options: list[str]) -> None:
    save_models(base=tiny_policy(pad_token_id=None))
    sft(["--model_name_or_path", "base", "--dataset_name", "texts.jsonl", "--eos_token", "w9", *QUICK, *options,
         "--output_dir", "tuned"])  # fmt: skip
    end = AutoTokenizer.from_pretrained("base").convert_tokens_to_ids("w9")
    ends: Any = GenerationConfig.from_pretrained("tuned").eos_token_id
    assert end in (ends if isinstance(ends, list) else [ends])

    train_reward(*options, "--output_dir", "scorer")
    assert AutoConfig.from_pretrained("scorer").pad_token_id == 0
    scorer = AutoModelForSequenceClassification.from_pretrained("scorer", num_labels=1)
    assert scorer(torch.tensor([[4, 5], [6, 7]])).logits.shape == (2, 1)


def hub_with(monkeypatch: pytest.MonkeyPatch, name: str, **models: Any) -> Path:
    """Put a repository into the hub's cache, with a branch for each model; return its folder."""
    root = Path("hub").absolute()
    repository = root / f"models--me--{name}"
    (repository / "refs").mkdir(parents=True)
    commits = {branch: 40 * letter for branch, letter in zip(models, "ab", strict=False)}
    for branch, commit in commits.items():
        (repository / "refs" / branch).write_text(commit)
    save_models(str(repository / "snapshots"), **{commits[branch]: model for branch, model in models.items()})
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(root))
    return repository


def test_an_adapter_is_merged_into_the_revision_that_it_was_trained_over(monkeypatch: pytest.MonkeyPatch) -> None:
    hub = hub_with(monkeypatch, "base", main=tiny_policy(0), v2=tiny_policy(1))
    train(["--sft_model_path", "me/base", "--model_revision", "v2", *BY_LENGTH, *LORA, *PPO, "--learning_rate", "0",
           "--merge_adapter", "--output_dir", "out"])  # fmt: skip
    merged, base = (AutoModelForCausalLM.from_pretrained(path) for path in ("out", hub / "snapshots" / (40 * "b")))
    assert torch.equal(merged.lm_head.weight, base.lm_head.weight)


@pytest.mark.parametrize("command", ["sft", "train"])
def test_the_tokenizer_is_read_from_the_revision_of_the_model(monkeypatch: pytest.MonkeyPatch, command: str) -> None:
    """The reward model's repository has no such branch."""
    hub = hub_with(monkeypatch, "base", main=tiny_policy(), v2=tiny_policy())
    make_tokenizer(words=WORDS[::-1]).save_pretrained(hub / "snapshots" / (40 * "b"))
    hub_with(monkeypatch, "scorer", main=tiny_scorer())
    if command == "sft":
        sft(["--model_name_or_path", "me/base", "--model_revision", "v2", "--dataset_name", "texts.jsonl", *QUICK,
             "--output_dir", "out"])  # fmt: skip
    else:
        train(["--sft_model_path", "me/base", "--reward_model_path", "me/scorer", "--model_revision", "v2", *LORA,
               *PPO, "--output_dir", "out"])  # fmt: skip
    trained, main, v2 = (
        AutoTokenizer.from_pretrained(path).get_vocab()
        for path in ("out", *(hub / "snapshots" / (40 * letter) for letter in "ab"))
    )
    assert trained == v2 != main


def test_a_merged_policy_with_code_has_a_card_without_peft() -> None:
    save_models(own=tiny_policy())
    with_code(Path("own"))
    train(["--sft_model_path", "own", "--trust_remote_code", "true", *BY_LENGTH, *LORA, *PPO, "--merge_adapter",
           "--output_dir", "out"])  # fmt: skip
    assert not Path("out/adapter_config.json").exists()
    assert "library_name: transformers" in Path("out/README.md").read_text()


def test_a_reward_adapter_is_called_by_its_directory_where_its_accuracy_is() -> None:
    train_reward(*LORA, "--output_dir", "scorer")
    RewardAccuracy.of(0.5, 4).save("scorer")
    train(["--sft_model_path", "base", "--reward_model_path", "scorer", *PPO, "--output_dir", "ppo"])
    found = settings_of("ppo")
    assert found["made_of"]["rewards"] == ["scorer"]
    assert "too few pairs" in found["health"]["reward_accuracy"]
