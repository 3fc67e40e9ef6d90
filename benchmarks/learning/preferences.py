"""Preferences of people about short texts, with a gold judge that training never sees (Gao et al., 2210.10760).

`data` holds `ethics_util/train_pairs.jsonl`, the pairs of `examples/human_text.py`. `prepare` divides them as that
does and trains, by `rlhf-ppo pipeline`, a language model from random weights, a reward model on one half of the pairs
and the judge on the other half, as `examples/human_text.yaml` says.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
import yaml
from task import Scores, Task
from transformers import AutoModelForSequenceClassification, AutoTokenizer

ROOT = Path(__file__).parents[2]
STEPS = ("sft", "reward", "judge_reward")


def prepare(data: Path, folder: Path) -> None:
    """Divide the pairs and train the three models, where they are missing; resume an interrupted training.

    Raises:
        FileNotFoundError: There are no pairs.
        CalledProcessError: A step has failed.
    """
    pairs = data / "ethics_util/train_pairs.jsonl"
    if not pairs.exists():
        raise FileNotFoundError(f"{pairs} is not there; --data names the folder that holds ethics_util")
    folder.mkdir(parents=True, exist_ok=True)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    if not (folder / "human_text/base/config.json").exists():
        script = [sys.executable, str(ROOT / "examples/human_text.py"), str(pairs.resolve()), "human_text"]
        subprocess.run(script, cwd=folder, env=environment, check=True)
    said = yaml.safe_load((ROOT / "examples/human_text.yaml").read_text(encoding="utf-8"))
    file = folder / "models.yaml"
    file.write_text(yaml.safe_dump({name: said[name] for name in ("output_dir", "common", *STEPS)}))
    command = [sys.executable, "-m", "rlhf_ppo", "pipeline", file.name]
    subprocess.run(command, cwd=folder, env=environment, check=True)


def scores_of(model: Path) -> Scores:
    """Make a function of a reward model, which reads prompt, response and EOS."""
    scorer = AutoModelForSequenceClassification.from_pretrained(model).eval()
    tokenizer = AutoTokenizer.from_pretrained(model, padding_side="right")

    @torch.no_grad()
    def score(prompts: Sequence[str], completions: Sequence[str]) -> list[float]:
        texts = [prompt + text + tokenizer.eos_token for prompt, text in zip(prompts, completions, strict=True)]
        inputs = tokenizer(texts, return_tensors="pt", padding=True, return_token_type_ids=False)
        return scorer(**inputs).logits[:, 0].tolist()

    return score


def prompts_of(file: Path) -> list[str]:
    """Return the prompts of a file."""
    return [json.loads(line)["prompt"] for line in file.read_text(encoding="utf-8").splitlines()]


def load(data: Path, folder: Path) -> Task:
    """Return the task."""
    models, parts = folder / "runs/human_text", folder / "human_text"
    return Task(
        tokenizer=AutoTokenizer.from_pretrained(models / "sft", padding_side="left"),
        policy=models / "sft",
        reward=models / "reward",
        judge=scores_of(models / "judge_reward"),
        prompts=prompts_of(parts / "prompts.jsonl"),
        held_out=prompts_of(parts / "held_out.jsonl"),
        arguments={
            "per_device_train_batch_size": 64,
            "response_length": 20,
            "temperature": 0.7,
            "kl_coef": 0.1,
            "missing_eos_penalty": 1.0,
            "learning_rate": 3e-4,
            "num_ppo_epochs": 4,
        },
        num_updates=30,
        texts=parts / "texts.jsonl",
    )
