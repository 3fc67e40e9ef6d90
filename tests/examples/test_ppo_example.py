"""The example scripts, started with TRL's documented command lines on models and data of this machine's own."""

from __future__ import annotations

import runpy
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
)

from tests.conftest import make_tokenizer, tiny_policy, tiny_scorer

EXAMPLES = Path(__file__).parents[2] / "examples"
PYTHIA = "EleutherAI/pythia-1b-deduped"
SFT, REWARD = "cleanrl/EleutherAI_pythia-1b-deduped__sft__tldr", "cleanrl/EleutherAI_pythia-1b-deduped__reward__tldr"
SENTIMENT = "trl-internal-testing/descriptiveness-sentiment-trl-style"

# As they stand in TRL 1.12's documentation; a launcher before them is left out.
SINGLE_GPU = f"""
    --dataset_name {SENTIMENT} --dataset_train_split descriptiveness --learning_rate 3e-6
    --output_dir pythia-1b-deduped-descriptiveness-sentiment-trl-style-ppo --per_device_train_batch_size 64
    --gradient_accumulation_steps 1 --total_episodes 10000 --model_name_or_path {PYTHIA} --sft_model_path {PYTHIA}
    --reward_model_path {PYTHIA} --missing_eos_penalty 1.0
"""
TLDR = f"""
    --dataset_name trl-lib/tldr --dataset_test_split validation --learning_rate 3e-6
    --output_dir pythia-1b-deduped-tldr-preference-sft-trl-style-ppo --per_device_train_batch_size 1
    --gradient_accumulation_steps 64 --total_episodes 30000 --model_name_or_path {PYTHIA} --sft_model_path {SFT}
    --reward_model_path {REWARD} --missing_eos_penalty 1.0 --stop_token eos --response_length 53
    --eval_strategy steps --eval_steps 100
"""

Run = Callable[..., Any]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, plain_runs: None) -> Run:
    """Run a script in an empty folder as `python script options` does, and return its trainer."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")

    def start(options: str, script: str = "ppo.py") -> Any:
        monkeypatch.setattr("sys.argv", [script, *shlex.split(options)])
        return runpy.run_path(str(EXAMPLES / script), run_name="__main__")["trainer"]

    return start


def pythia(**overrides: Any) -> GPTNeoXForCausalLM:
    """A model of Pythia's shape and of no size."""
    torch.manual_seed(0)
    values = {
        "vocab_size": 32,
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "max_position_embeddings": 1024,
        "bos_token_id": 2,
        "eos_token_id": 1,
        "initializer_range": 0.2,
    }
    return GPTNeoXForCausalLM(GPTNeoXConfig(**{**values, **overrides}))


def save_splits(folder: Path, **splits: Dataset) -> None:
    """Write a data set as repositories on the hub have it."""
    (folder / "data").mkdir(parents=True, exist_ok=True)
    for name, rows in splits.items():
        rows.to_parquet(folder / "data" / f"{name}-00000-of-00001.parquet")


def prompts(count: int, length: int = 3) -> Dataset:
    return Dataset.from_list([{"prompt": " ".join([f"w{index % 29}"] * length)} for index in range(count)])


def save(model: Any, folder: str | Path) -> str:
    """Write a model and a tokenizer, which like Pythia's has no PAD."""
    model.save_pretrained(folder)
    make_tokenizer(pad_token=None).save_pretrained(folder)
    return str(folder)


@pytest.fixture
def local(tmp_path: Path) -> str:
    """The options that every run needs, with a Llama, a reward model and a file in local folders."""
    policy, scorer = save(tiny_policy(), tmp_path / "sft"), save(tiny_scorer(), tmp_path / "reward")
    prompts(24).to_json(tmp_path / "prompts.jsonl")
    return (
        f"--dataset_name prompts.jsonl --model_name_or_path {policy} --sft_model_path {policy} "
        f"--reward_model_path {scorer} --output_dir out --per_device_train_batch_size 4 --total_episodes 8 "
        "--response_length 4 --num_sample_generations 0 --use_cpu --learning_rate 1e-2"
    )


# ---- The documented command lines ----


def test_the_documented_command_of_ppo_py(run, tmp_path, capsys):
    save(pythia(), tmp_path / PYTHIA)
    save_splits(tmp_path / SENTIMENT, descriptiveness=prompts(150), sentiment=prompts(9))

    trainer = run(f"{SINGLE_GPU} --total_episodes 128 --response_length 4 --num_sample_generations 1")

    args = trainer.args
    assert (args.batch_size, args.learning_rate, args.missing_eos_penalty) == (64, 3e-6, 1.0)
    assert trainer.state.global_step == 2 and trainer.state.episode == 128
    assert (len(trainer.train_dataset), len(trainer.eval_dataset)) == (135, 15)
    assert trainer.eval_dataset[0]["prompt"] == prompts(150)[135]["prompt"]
    assert trainer.tokens.stop == trainer.processing_class.eos_token_id == 1
    assert len(trainer.processing_class) == 32  # no token was added that the models have no embedding for
    assert "model response" in capsys.readouterr().out
    assert_saved_policy_is_the_trained_one(trainer, tmp_path / args.output_dir)


def test_the_documented_command_of_ppo_tldr_py(run, tmp_path):
    for name in (PYTHIA, SFT):
        save(pythia(), tmp_path / name)
    save(AutoModelForSequenceClassification.from_config(pythia(num_labels=1).config), tmp_path / REWARD)
    posts = Dataset.from_list([*prompts(63), *prompts(1, length=512), *prompts(7, length=513)])
    save_splits(tmp_path / "trl-lib/tldr", train=posts, validation=prompts(3), test=prompts(5))

    trainer = run(
        f"{TLDR} --total_episodes 64 --response_length 2 --num_ppo_epochs 1 --eval_steps 1", script="ppo_tldr.py"
    )

    assert trainer.args.batch_size == 64 and trainer.state.global_step == 1
    assert (len(trainer.train_dataset), len(trainer.eval_dataset)) == (64, 3)
    assert [entry["step"] for entry in trainer.state.log_history if "eval_score" in entry] == [1]
    assert_saved_policy_is_the_trained_one(trainer, tmp_path / trainer.args.output_dir)


def assert_saved_policy_is_the_trained_one(trainer: Any, folder: Path) -> None:
    ids = torch.arange(3, 11)[None]
    saved = AutoModelForCausalLM.from_pretrained(folder)

    assert torch.equal(saved(ids).logits, trainer.policy_model.eval()(ids).logits)
    assert (
        AutoTokenizer.from_pretrained(folder)("w5 w6")["input_ids"] == trainer.processing_class("w5 w6")["input_ids"]
    )
    assert not (folder / "value_model").exists()


# ---- Options ----


def test_fewer_than_ten_rows_are_all_trained_on(run, local):
    prompts(9).to_json("prompts.jsonl")
    trainer = run(local)
    assert (len(trainer.train_dataset), trainer.eval_dataset) == (9, None)


def test_reward_functions_take_the_place_of_the_reward_model(run, local):
    trainer = run(f"{local} --reward_funcs length")
    assert trainer.scorer.names == ["length"] and trainer.reward_model is None


def test_a_missing_data_set_is_one_sentence(run, capsys):
    with pytest.raises(SystemExit, match="2"):
        run("--sft_model_path nowhere --output_dir out --use_cpu")
    assert capsys.readouterr().err.splitlines()[-1].startswith("ppo.py: error: dataset_name is not set: give a file")


def test_the_value_model_is_trained_in_32_bits_whatever_the_others_are_loaded_in(run, local):
    trainer = run(f"{local} --dtype bfloat16 --use_peft")

    assert {parameter.dtype for parameter in trainer.value_model.parameters()} == {torch.float32}
    assert trainer.policy_model.get_base_model().dtype == trainer.reward_model.dtype == torch.bfloat16
