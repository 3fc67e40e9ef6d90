"""Sums of two numbers, paid by a rule: 1 for the right digits, else 0, with gamma = lam = 1 and no KL penalty.

`prepare` trains a language model of digits from random weights, first on right answers, then on answers of which most
are wrong: each digit is replaced with a probability of `ERROR_RATE`. It knows the sums and errs as its texts do; PPO
has to find out that only right digits pay. Answers begin with the last digit, as `37+48=58`.
The judge is the same rule on sums that neither training has seen.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from itertools import product
from pathlib import Path

import torch
from task import Task
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, set_seed

SYMBOLS = "0123456789+="
LARGEST = 49
ERROR_RATE = 0.4
NUM_HELD_OUT = 256
NUM_STEPS = 1200
"""Of which the last third has errors."""
BATCH_SIZE = 128
LEARNING_RATE = 3e-3


def prompt_of(first: int, second: int) -> str:
    """Return a problem, such as `37+48=`."""
    return f"{first:02d}+{second:02d}="


def answer_of(prompt: str) -> str:
    """Return the right digits of a problem, the last one first."""
    first, second = prompt.rstrip("=").split("+")
    return f"{int(first) + int(second):02d}"[::-1]


def is_right(prompts: Sequence[str], completions: Sequence[str]) -> list[float]:
    """Score 1 for the right answer, else 0."""
    pairs = zip(prompts, completions, strict=True)
    return [float("".join(said.split()) == answer_of("".join(asked.split()))) for asked, said in pairs]


def with_errors(answer: str, error_rate: float, rng: random.Random) -> str:
    """Return an answer in which each digit is another one with a probability."""
    return "".join(
        rng.choice([other for other in SYMBOLS[:10] if other != digit]) if rng.random() < error_rate else digit
        for digit in answer
    )


def problems() -> tuple[list[str], list[str]]:
    """Return the problems of training and those that are held out."""
    every = [prompt_of(*pair) for pair in product(range(LARGEST + 1), repeat=2)]
    random.Random(0).shuffle(every)
    return every[NUM_HELD_OUT:], every[:NUM_HELD_OUT]


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer with a token for each symbol."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    words = {word: index for index, word in enumerate(["<pad>", "<eos>", *SYMBOLS])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer.decoder = decoders.Fuse()  # pyright: ignore[reportAttributeAccessIssue]
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", padding_side="left"
    )


def prepare(data: Path, folder: Path, hidden_size: int = 64) -> None:
    """Train the language model, where there is none yet."""
    if (folder / "policy/config.json").exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer, rng = make_tokenizer(), random.Random(1)
    asked, _ = problems()
    set_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=hidden_size,
        intermediate_size=3 * hidden_size,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=32,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=1,
    )
    model = LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, LEARNING_RATE, total_steps=NUM_STEPS + 1)
    losses = []
    for step in range(NUM_STEPS):
        some = rng.choices(asked, k=BATCH_SIZE)
        error_rate = ERROR_RATE if 3 * step >= 2 * NUM_STEPS else 0.0
        texts = [f"{prompt}{with_errors(answer_of(prompt), error_rate, rng)}<eos>" for prompt in some]
        ids = torch.tensor(tokenizer(texts)["input_ids"])
        labels = ids.clone()
        labels[:, : len(some[0])] = -100
        loss = model(input_ids=ids, labels=labels).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        losses.append(loss.item())
    (folder / "losses.json").write_text(json.dumps(losses))
    tokenizer.save_pretrained(folder / "policy")
    model.save_pretrained(folder / "policy")


def load(data: Path, folder: Path) -> Task:
    """Return the task."""
    prompts, held_out = problems()
    return Task(
        tokenizer=AutoTokenizer.from_pretrained(folder / "policy", padding_side="left"),
        policy=folder / "policy",
        reward=is_right,
        judge=is_right,
        prompts=prompts,
        held_out=held_out,
        arguments={
            "per_device_train_batch_size": 128,
            "response_length": 3,
            "temperature": 1.0,
            "kl_coef": 0.0,
            "gamma": 1.0,
            "lam": 1.0,
            "learning_rate": 3e-4,
            "num_ppo_epochs": 4,
        },
        num_updates=40,
        num_final=8192,
    )
