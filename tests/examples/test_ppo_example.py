"""The example scripts, started with TRL's documented command lines on models and data of this machine's own."""

from __future__ import annotations

import json
import re
import runpy
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset, DatasetDict
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
ZERO3 = f"""
    --dataset_name {SENTIMENT} --dataset_train_split descriptiveness
    --output_dir pythia-1b-deduped-descriptiveness-sentiment-trl-style-ppo --num_ppo_epochs 1 --num_mini_batches 1
    --learning_rate 3e-6 --per_device_train_batch_size 1 --gradient_accumulation_steps 16 --total_episodes 10000
    --model_name_or_path {PYTHIA} --sft_model_path {PYTHIA} --reward_model_path {PYTHIA}
    --local_rollout_forward_batch_size 1 --missing_eos_penalty 1.0
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


def prompts(count: int, length: int = 3) -> Dataset:
    return Dataset.from_list([{"prompt": " ".join([f"w{index % 29}"] * length)} for index in range(count)])


def save(model: Any, folder: str | Path) -> str:
    """Write a model and a tokenizer, which like Pythia's has no PAD."""
    model.save_pretrained(folder)
    make_tokenizer(pad_token=None).save_pretrained(folder)
    return str(folder)


@pytest.fixture
def local(tmp_path: Path) -> str:
    """The options that every run needs, with a Llama, a reward model and a jsonl file in local folders."""
    policy, scorer = save(tiny_policy(), tmp_path / "sft"), save(tiny_scorer(), tmp_path / "reward")
    prompts(24).to_json(tmp_path / "prompts.jsonl")
    return (
        f"--dataset_name prompts.jsonl --model_name_or_path {policy} --sft_model_path {policy} "
        f"--reward_model_path {scorer} --output_dir out --per_device_train_batch_size 4 --total_episodes 8 "
        "--response_length 4 --num_sample_generations 0 --use_cpu --learning_rate 1e-2"
    )


# ---- The documented command lines ----


@pytest.mark.parametrize(("command", "batch_size"), [(SINGLE_GPU, 64), (ZERO3, 16)], ids=["single GPU", "ZeRO-3"])
def test_the_documented_command_of_ppo_py(run, tmp_path, capsys, command, batch_size):
    save(pythia(), tmp_path / PYTHIA)
    DatasetDict({"descriptiveness": prompts(150), "sentiment": prompts(9)}).save_to_disk(tmp_path / SENTIMENT)

    trainer = run(f"{command} --total_episodes {2 * batch_size} --response_length 4 --num_sample_generations 1")

    args = trainer.args
    assert (args.batch_size, args.learning_rate, args.missing_eos_penalty) == (batch_size, 3e-6, 1.0)
    assert trainer.state.global_step == 2 and trainer.state.episode == 2 * batch_size
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
    DatasetDict({"train": posts, "validation": prompts(3), "test": prompts(5)}).save_to_disk(tmp_path / "trl-lib/tldr")

    trainer = run(
        f"{TLDR} --total_episodes 64 --response_length 2 --num_ppo_epochs 1 --eval_steps 1", script="ppo_tldr.py"
    )

    assert trainer.args.batch_size == 64 and trainer.state.global_step == 1
    assert (len(trainer.train_dataset), len(trainer.eval_dataset)) == (64, 3)
    assert [entry["step"] for entry in trainer.state.log_history if "eval_score" in entry] == [1]
    assert_saved_policy_is_the_trained_one(trainer, tmp_path / trainer.args.output_dir)


def test_tldr_without_evaluation_needs_no_evaluation_split_and_shows_training_prompts(run, local, capsys):
    options = local.replace("--num_sample_generations 0", "--num_sample_generations 1")
    trainer = run(f"{options} --dataset_test_split validation --max_prompt_length 40", script="ppo_tldr.py")

    assert trainer.eval_dataset is None and trainer.args.max_prompt_length == 40
    printed = capsys.readouterr().out
    assert printed.count("After update 2: training prompts") == 1  # the script's own would say the same again
    assert printed.strip().splitlines()[-1].startswith("The policy is in out; its curves: ")


def test_a_run_prints_ten_tables_of_samples_without_being_asked(run, local, capsys):
    options = local.replace("--num_sample_generations 0", "").replace("--total_episodes 8", "--total_episodes 80")
    run(f"{options} --num_ppo_epochs 1 --num_mini_batches 1", script="ppo_tldr.py")

    printed = capsys.readouterr().out
    assert len(re.findall(r"query +┃ model response +┃ score", printed)) == 10
    assert re.findall(r"After update (\d+):", printed)[-1] == "20"


def assert_saved_policy_is_the_trained_one(trainer: Any, folder: Path) -> None:
    ids = torch.arange(3, 11)[None]
    saved = AutoModelForCausalLM.from_pretrained(folder)

    assert torch.equal(saved(ids).logits, trainer.policy_model.eval()(ids).logits)
    assert (
        AutoTokenizer.from_pretrained(folder)("w5 w6")["input_ids"] == trainer.processing_class("w5 w6")["input_ids"]
    )
    assert not (folder / "value_model").exists()


# ---- Options ----


def test_lora(run, local, tmp_path):
    peft = pytest.importorskip("peft")
    trainer = run(f"{local} --use_peft --lora_r 8 --lora_alpha 24 --lora_target_modules q_proj v_proj")

    config = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], set(config["target_modules"])) == (8, 24, {"q_proj", "v_proj"})
    assert not (tmp_path / "out" / "model.safetensors").exists()
    ids = torch.arange(3, 11)[None]
    saved = peft.AutoPeftModelForCausalLM.from_pretrained(tmp_path / "out")
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "sft")
    assert torch.equal(saved(ids).logits, trainer.policy_model.eval()(ids).logits)
    assert not torch.allclose(saved(ids).logits, base(ids).logits, atol=1e-4)

    run(f"{local} --use_peft --lora_r 8 --lora_alpha 24 --lora_target_modules q_proj v_proj --output_dir again")
    first, again = ((tmp_path / name / "adapter_model.safetensors").read_bytes() for name in ("out", "again"))
    assert first == again  # the same seed, the same adapter to start from


def test_an_adapter_s_directory_is_a_policy_that_starts_at_its_own_reference(run, local, tmp_path):
    pytest.importorskip("peft")
    run(f"{local} --use_peft --lora_r 2 --output_dir adapter")
    (start,) = [entry for entry in run(f"{local} --sft_model_path adapter").state.log_history if entry["step"] == 1]

    assert start["objective/kl"] == 0
    assert (tmp_path / "out" / "adapter_model.safetensors").exists()


def test_the_value_model_is_trained_in_32_bits_whatever_the_others_are_loaded_in(run, local):
    trainer = run(f"{local} --dtype bfloat16 --use_peft")

    assert {parameter.dtype for parameter in trainer.value_model.parameters()} == {torch.float32}
    assert trainer.policy_model.get_base_model().dtype == trainer.reward_model.dtype == torch.bfloat16


def test_options_from_yaml_and_the_command_line_over_them(run, local, tmp_path):
    (tmp_path / "run.yaml").write_text("kl_coef: 0.25\ngamma: 0.5\nlearning_rate: 1e-4\nstop_token_id: 7\n")

    trainer = run(f"{local} --config run.yaml --gamma 0.75")

    args = trainer.args
    assert (args.kl_coef, args.gamma, args.learning_rate) == (0.25, 0.75, 1e-2)
    assert (args.stop_token, trainer.tokens.stop) == (None, 7)


def test_a_given_pad_token_is_kept(run, local, tmp_path):
    make_tokenizer(pad_token="w9").save_pretrained(tmp_path / "sft")

    assert run(local).processing_class.pad_token == "w9"


def test_the_tokenizer_is_the_sft_model_s_where_no_other_is_named(run, local, tmp_path):
    options = local.replace(f"--model_name_or_path {tmp_path / 'sft'}", "")

    assert "--model_name_or_path" not in options
    assert run(options).processing_class.name_or_path == str(tmp_path / "sft")


def test_a_named_test_split_is_evaluated_on(run, local, tmp_path):
    DatasetDict({"train": prompts(24), "dev": prompts(2)}).save_to_disk(tmp_path / "both")

    trainer = run(f"{local} --dataset_name both --dataset_test_split dev")

    assert (len(trainer.train_dataset), len(trainer.eval_dataset)) == (24, 2)


def test_a_stream(run, local, tmp_path):
    prompts(120).to_json(tmp_path / "many.jsonl")

    trainer = run(f"{local} --dataset_name many.jsonl --dataset_streaming")

    assert trainer.state.global_step == 2 and not hasattr(trainer.train_dataset, "__len__")


# ---- Resuming ----


@pytest.mark.usefixtures("determinism_restored")
def test_a_second_start_resumes_and_ends_like_one_run(run, local, tmp_path):
    options = f"{local} --total_episodes 16 --save_steps 1 --full_determinism"
    whole = run(f"{options} --output_dir whole").policy_model.state_dict()
    run(f"{options} --output_dir stopped")
    for later in (3, 4):
        (tmp_path / "stopped" / f"checkpoint-{later}" / "trainer_state.json").unlink()
    (tmp_path / "stopped" / "model.safetensors").unlink()
    shutil.rmtree(tmp_path / "stopped" / "checkpoint-1")

    resumed = run(f"{options} --output_dir stopped --resume_from_checkpoint True")

    assert resumed.state.global_step == 4
    assert not (tmp_path / "stopped" / "checkpoint-1").exists()  # what was done is not done again
    for name, value in resumed.policy_model.state_dict().items():
        assert torch.equal(value, whole[name]), name


def test_nothing_in_the_output_directory_is_deleted(run, local, tmp_path):
    (tmp_path / "out" / "checkpoint-7").mkdir(parents=True)
    (tmp_path / "out" / "checkpoint-7" / "weights").touch()

    run(local)

    assert (tmp_path / "out" / "checkpoint-7" / "weights").exists()


# ---- Errors ----


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--dataset_name nowhere.jsonl", "dataset_name='nowhere.jsonl': there is no such file or directory"),
        ("--dataset_train_split descriptiveness", r"dataset_train_split='descriptiveness', .* \['train'\]"),
        ("--dataset_test_split dev", r"dataset_test_split='dev', .* \['train'\]"),
        ("--dataset_name other.jsonl", r"columns \['question'\], but none of `prompt`"),
        ("--dataset_name few.jsonl", "the training set has 3 prompts, fewer than the 4"),
    ],
)
def test_bad_data_is_named(run, local, tmp_path, options, message, capsys):
    prompts(24).rename_column("prompt", "question").to_json(tmp_path / "other.jsonl")
    prompts(3).to_json(tmp_path / "few.jsonl")

    with pytest.raises(SystemExit):
        run(f"{local} {options}")
    assert re.search(f"^ppo.py: error: .*{message}", capsys.readouterr().err, re.MULTILINE)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU, so 4 bits may work")
@pytest.mark.parametrize("option", ["load_in_4bit", "load_in_8bit"])
def test_quantization_needs_a_gpu_and_says_so_before_anything_is_loaded(run, option, capsys):
    with pytest.raises(SystemExit):
        run(f"--dataset_name nowhere.jsonl --sft_model_path nowhere --{option} --use_peft")
    assert f"{option}=True quantizes with bitsandbytes, which needs a CUDA GPU" in capsys.readouterr().err


# ---- Code of strangers ----


def test_code_beside_a_model_runs_only_when_trusted(run, local, tmp_path, monkeypatch):
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.syspath_prepend(tmp_path / "modules")
    (tmp_path / "sft" / "modeling_foreign.py").write_text(
        "from pathlib import Path\nfrom transformers import LlamaForCausalLM\n"
        f"Path({str(tmp_path / 'it_ran')!r}).touch()\nclass Foreign(LlamaForCausalLM): pass\n"
    )
    config = json.loads((tmp_path / "sft" / "config.json").read_text())
    config |= {"auto_map": {"AutoModelForCausalLM": "modeling_foreign.Foreign"}}
    (tmp_path / "sft" / "config.json").write_text(json.dumps(config))

    run(local)
    assert not (tmp_path / "it_ran").exists()

    run(f"{local} --trust_remote_code --overwrite_output_dir")
    assert (tmp_path / "it_ran").exists()
