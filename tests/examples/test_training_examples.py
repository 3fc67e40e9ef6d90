"""`examples/sft.py` and `examples/reward_modeling.py`, with the command lines of their docstrings, which are TRL's.

Models and data lie in folders that are called as on the hub. Behind the options stand those that make a run short;
`--push_to_hub` is left out.
"""

from __future__ import annotations

import ast
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from tests.conftest import make_tokenizer, tiny_policy
from tests.examples.test_ppo_example import EXAMPLES, Run, run, save_splits

__all__ = ["run"]
pytestmark = pytest.mark.slow

TEMPLATE = "{% for message in messages %}{{ message['role'] }} {{ message['content'] }} <|im_end|> {% endfor %}"
SHORT = "--max_steps 2 --logging_steps 1 --eval_steps 1 --use_cpu --bf16 False --report_to none --disable_tqdm True"


def commands(script: str) -> list[str]:
    """The options of the commands in a script's docstring."""
    text = ast.get_docstring(ast.parse((EXAMPLES / script).read_text())) or ""
    found = re.findall(rf"^python examples/{script} (.*?)\n\n", text.replace("\\\n", " "), re.DOTALL | re.MULTILINE)
    return [re.sub(r" --push_to_hub\b", "", command) for command in found]


def chat_model(folder: Path) -> None:
    """A model with a chat template, in whose vocabulary is the template's end token."""
    tokenizer = make_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_end|>"]})
    tokenizer.chat_template = TEMPLATE
    tiny_policy(vocab_size=len(tokenizer), max_position_embeddings=2048).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def chat(answer: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": "w3 w5"}, {"role": "assistant", "content": answer}]


def value(command: str, option: str) -> str:
    words = shlex.split(command)
    return words[words.index(option) + 1]


def checked(command: str, script: str, run: Run) -> Any:
    trainer = run(f"{command} {SHORT}", script=script)
    assert trainer.state.global_step == 2 and "eval_loss" in {key for log in trainer.state.log_history for key in log}
    assert float(value(command, "--learning_rate")) == trainer.args.learning_rate
    resumed = run(f"{command} {SHORT} --max_steps 3 --resume_from_checkpoint True", script=script)
    assert resumed.state.global_step == 3 and resumed._initial_global_step == 2
    return trainer


@pytest.mark.parametrize("number", [0, 1], ids=["whole", "LoRA"])
def test_the_commands_of_sft_py(number: int, run: Run, tmp_path: Path) -> None:
    command = commands("sft.py")[number]
    chat_model(tmp_path / "Qwen/Qwen2-0.5B")
    rows = Dataset.from_list([{"messages": chat(f"w{index % 9} w7")} for index in range(64)])
    save_splits(tmp_path / "trl-lib/Capybara", train=rows, test=rows.select(range(8)))

    trainer = checked(command, "sft.py", run)

    assert trainer.args.packing and trainer.args.gradient_accumulation_steps == 8
    assert AutoTokenizer.from_pretrained("Qwen2-0.5B-SFT").eos_token == "<|im_end|>"
    before = AutoModelForCausalLM.from_pretrained("Qwen/Qwen2-0.5B")
    after = AutoModelForCausalLM.from_pretrained("Qwen2-0.5B-SFT")
    assert bool(number) == Path("Qwen2-0.5B-SFT/adapter_config.json").is_file()
    ids = torch.tensor([[5, 6, 7]])
    assert not torch.equal(before(ids).logits, after(ids).logits)


@pytest.mark.parametrize("number", [0, 1], ids=["whole", "LoRA"])
def test_the_commands_of_reward_modeling_py(number: int, run: Run, tmp_path: Path) -> None:
    command = commands("reward_modeling.py")[number]
    chat_model(tmp_path / "Qwen/Qwen2-0.5B-Instruct")
    pairs = Dataset.from_list([{"chosen": chat(f"w{index % 9}"), "rejected": chat("w7")} for index in range(64)])
    save_splits(tmp_path / "trl-lib/ultrafeedback_binarized", train=pairs, test=pairs.select(range(8)))

    trainer = checked(command, "reward_modeling.py", run)

    assert trainer.args.max_length == 2048 and trainer.args.per_device_train_batch_size == 8
    folder = value(command, "--output_dir")
    assert isinstance(trainer.model, PeftModel) == bool(number) == Path(folder, "adapter_config.json").is_file()
    if number == 0:
        assert AutoModelForSequenceClassification.from_pretrained(folder).config.num_labels == 1
