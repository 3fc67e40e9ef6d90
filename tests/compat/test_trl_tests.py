"""What TRL 1.12 tests of its PPO trainer, with our import: training, training with PEFT, generation in batches.

The tests of `tests/experimental/test_ppo_trainer.py` in huggingface/trl (Apache-2.0) retold: the same classes,
arguments and claims. Their models and data come from the hub; here a fixture writes tiny ones of the same kind
(Qwen2, with a "[PAD]" in the tokenizer that the models do not embed) into a directory and loads them from there.
"""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from datasets import Dataset
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    GenerationConfig,
    Qwen2Config,
)

from rlhf_ppo import PPOConfig, PPOTrainer
from rlhf_ppo.compat.trl import batch_generation
from tests.conftest import make_tokenizer

CHAT = "{% for m in messages %}{{ m.role }} {{ m.content }} {% endfor %}{% if add_generation_prompt %}w9 {% endif %}"
LINES = ["w1 w2 w3", "w4", "w5 w6 w7 w8 w9", "w2 w2", "w3 w1 w4 w1 w5", "w6 w7", "w8 w8 w8"]


@pytest.fixture
def hub(tmp_path: Path) -> SimpleNamespace:
    """The two models and the tokenizer that TRL's tests download, as directories."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = Qwen2Config(vocab_size=32, num_key_value_heads=2, eos_token_id=1, initializer_range=0.2, **sizes)
    tokenizer = make_tokenizer(pad_token=None)
    tokenizer.chat_template = CHAT
    for name, auto_class in (("lm", AutoModelForCausalLM), ("rm", AutoModelForSequenceClassification)):
        config.num_labels = 1
        auto_class.from_config(config).save_pretrained(tmp_path / name)
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    return SimpleNamespace(**{name: str(tmp_path / name) for name in ("lm", "rm", "tokenizer", "output")})


def weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in model.named_parameters()}


class TestPPOTrainer:
    """Rows of `input_ids` and `attention_mask`, each with an EOS appended; only four arguments are given."""

    @pytest.fixture(autouse=True)
    def made(self, hub: SimpleNamespace) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(hub.lm, dtype="float32")
        self.ref_model = AutoModelForCausalLM.from_pretrained(hub.lm)
        self.tokenizer = AutoTokenizer.from_pretrained(hub.tokenizer, padding_side="left")
        self.tokenizer.add_special_tokens({"pad_token": "[PAD]"})
        self.value_model = AutoModelForSequenceClassification.from_pretrained(hub.rm, num_labels=1)
        self.reward_model = AutoModelForSequenceClassification.from_pretrained(hub.rm, num_labels=1)

        def tokenize(row: dict[str, str]) -> dict[str, list[int]]:
            ids = [*self.tokenizer(text=row["prompt"])["input_ids"], self.tokenizer.eos_token_id]
            assert len(ids) > 1
            return {"input_ids": ids, "attention_mask": [1] * len(ids)}

        raw = Dataset.from_dict({"prompt": LINES})
        self.dataset = raw.map(tokenize, remove_columns="prompt")
        self.before = weights(self.model), weights(self.value_model)
        self.args = PPOConfig(
            output_dir=hub.output,
            per_device_train_batch_size=4,
            per_device_eval_batch_size=2,
            num_ppo_epochs=2,
            report_to="none",
        )

    def trained(self, **given: Any) -> PPOTrainer:
        values: dict[str, Any] = {"ref_model": self.ref_model, **given}
        trainer = PPOTrainer(
            args=self.args,
            processing_class=self.tokenizer,
            model=self.model,
            reward_model=self.reward_model,
            value_model=self.value_model,
            train_dataset=self.dataset,
            eval_dataset=self.dataset.select(range(2)),
            **values,
        )
        trainer.train()
        return trainer

    def test_basic_training(self, caplog: pytest.LogCaptureFixture) -> None:
        with caplog.at_level(logging.WARNING):
            trainer = self.trained()
        for part, before in zip((trainer.model.policy, trainer.model.value_model), self.before, strict=True):
            assert any(not torch.equal(value, before[name]) for name, value in part.named_parameters())
        warnings = [record.getMessage() for record in caplog.records if "EOS token (1)" in record.getMessage()]
        assert [text.split(" end in")[0] for text in warnings] == [
            "train_dataset: the input_ids of 7 of 7 prompts",
            "eval_dataset: the input_ids of 2 of 2 prompts",
        ]

    def test_peft_training(self) -> None:
        peft = pytest.importorskip("peft")
        lora = peft.LoraConfig(r=32, lora_alpha=16, lora_dropout=0.05, bias="none", task_type="CAUSAL_LM")
        trainer = self.trained(ref_model=None, peft_config=lora)
        critic = dict(trainer.model.value_model.named_parameters())
        assert any(not torch.equal(critic[name], value) for name, value in self.before[1].items())
        trained = [value for name, value in trainer.model.policy.named_parameters() if "lora_B" in name]
        assert trained and any(bool(value.any()) for value in trained)  # they start at 0


class TestBatchGeneration:
    @pytest.mark.parametrize("rows_per_part", [3, len(LINES)], ids=["mini batches", "one batch"])
    def test_shapes(self, rows_per_part: int, hub: SimpleNamespace) -> None:
        model = AutoModelForCausalLM.from_pretrained(hub.lm, dtype="float32")
        tokenizer = AutoTokenizer.from_pretrained(hub.tokenizer, padding_side="left")
        tokenizer.pad_token = "w0"
        config = GenerationConfig(
            max_new_tokens=128, temperature=0.5, do_sample=True, top_k=0, pad_token_id=tokenizer.pad_token_id
        )
        talks = [[{"role": "w10", "content": line}, {"role": "w11", "content": "w12"}] for line in LINES]
        texts = [
            tokenizer.apply_chat_template(talk[:-1], add_generation_prompt=True, tokenize=False) for talk in talks
        ]
        queries = tokenizer(texts, padding=True, return_tensors="pt")["input_ids"]

        sequences, logits = batch_generation(model, queries, rows_per_part, tokenizer.pad_token_id, config)

        assert sequences.shape[0] == len(LINES) and sequences.shape[1] > queries.shape[1]
        assert logits.shape == (len(LINES), sequences.shape[1] - queries.shape[1], model.config.vocab_size)
