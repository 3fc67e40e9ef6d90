"""Teach a small chat model when to call a calculator, from nothing, in about two minutes on one core.

    pip install rlhf-ppo
    python examples/agent_calculator.py             # products that it cannot do in its head: calls pay
    python examples/agent_calculator.py --price 0.3 # products of digits, which it can: each call costs

The model is made here, with the chat template of Qwen2.5 that TRL ships. It first learns to copy digits, and is then
fine-tuned on a few hundred conversations: some with a call, some with an answer from its head. Nothing is downloaded.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import trl
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM
from transformers.utils.chat_template_utils import get_json_schema
from trl.chat_template_utils import get_training_chat_template

from rlhf_ppo import PPOConfig, PPOTrainer

MARKERS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>")
Pair = tuple[int, int]


class Calculator:
    """A calculator that the policy may call; each call costs `price`."""

    def __init__(self, price: float = 0.0) -> None:
        self.price = price

    def reset(self, **row: Any) -> None:
        """Begin an episode."""
        self.turn_rewards: list[float] = []

    def calculate(self, expression: str) -> str:
        """Compute a product.

        Args:
            expression: Two numbers, such as 12*34.
        """
        self.turn_rewards.append(-self.price)
        factors = re.fullmatch(r"\s*(\d{1,9})\s*\*\s*(\d{1,9})\s*", expression)
        if factors is None:
            raise ValueError("write two numbers with * between them")
        return str(int(factors[1]) * int(factors[2]))


def right(completions: list[Any], answer: list[str], **columns: Any) -> list[float]:
    """Score 1 for a conversation whose last message is the answer."""
    pairs = zip(completions, answer, strict=True)
    return [float((messages[-1].get("content") or "").strip() == wanted) for messages, wanted in pairs]


def row_of(pair: Pair) -> dict[str, Any]:
    """Return a data set's row."""
    left, other = pair
    return {"prompt": [{"role": "user", "content": f"{left}*{other}"}], "answer": str(left * other)}


def conversation(pair: Pair, has_call: bool, answer: str | None = None) -> list[dict[str, Any]]:
    """Return a conversation that ends with the right answer, or with another one that the tool gives."""
    row: dict[str, Any] = row_of(pair) | ({} if answer is None else {"answer": answer})
    messages: list[dict[str, Any]] = list(row["prompt"])
    if has_call:
        call = {"name": "calculate", "arguments": {"expression": messages[0]["content"]}}
        messages.append({"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": call}]})
        messages.append({"role": "tool", "name": "calculate", "content": row["answer"]})
    return [*messages, {"role": "assistant", "content": row["answer"]}]


def problems(seed: int) -> tuple[list[Pair], list[Pair], list[Pair]]:
    """Return products of digits, and products of two-digit numbers to train on and to hold out."""
    dice = random.Random(seed)
    easy = [(left, other) for left in range(2, 10) for other in range(2, 10)]
    hard = [(left, other) for left in range(12, 99) for other in range(12, 99)]
    dice.shuffle(hard)
    return easy, hard[500:], hard[:500]


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Make a tokenizer whose digits are single tokens, and whose template takes few tokens."""
    template = Path(trl.__file__).parent.joinpath("chat_templates", "qwen2_5.jinja").read_text()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE()))
    tokenizer.chat_template = template
    easy, hard, _ = problems(0)
    texts = [rendered(tokenizer, conversation(pair, True)) for pair in (*easy[:20], *hard[:20])]
    split = re.compile("|".join(map(re.escape, MARKERS)))
    core: Any = Tokenizer(models.BPE())
    digits = pre_tokenizers.Digits(individual_digits=True)
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [digits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=2000, special_tokens=list(MARKERS), initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    core.train_from_iterator([part for text in texts for part in split.split(text)], trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, pad_token=MARKERS[0], eos_token=MARKERS[2])
    tokenizer.chat_template, tokenizer.padding_side = template, "left"
    return tokenizer


def rendered(tokenizer: Any, messages: Sequence[Any], **how: Any) -> Any:
    """Render a conversation with the calculator shown to the model."""
    schema = get_json_schema(Calculator.calculate)
    return tokenizer.apply_chat_template(list(messages), tools=[schema], **({"tokenize": False} | how))


def make_model(tokenizer: PreTrainedTokenizerFast, seed: int, share: float) -> Qwen2ForCausalLM:
    """Make a chat model: a small one that copies digits, fine-tuned on a few hundred conversations.

    Args:
        tokenizer: The tokenizer.
        seed: Seed of weights and data.
        share: Share of the conversations with a call.
    """
    torch.manual_seed(seed)
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4}
    ends = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id, "bos_token_id": None}
    places = {"num_key_value_heads": 4, "max_position_embeddings": 512}
    model = Qwen2ForCausalLM(Qwen2Config(vocab_size=len(tokenizer), **sizes, **places, **ends))
    dice = random.Random(seed)
    easy, hard, _ = problems(0)
    chosen = [dice.choice(easy) if number % 4 else hard[number] for number in range(800)]
    numbers = [str(dice.randrange(10 ** dice.randint(1, 4))) for _ in range(6400)]
    pairs = [(dice.randrange(100), dice.randrange(100)) for _ in numbers]
    copies = [conversation(pair, True, number) for pair, number in zip(pairs, numbers, strict=True)]
    imitate(model, tokenizer, copies, epochs=2, dice=dice)
    imitate(model, tokenizer, [conversation(pair, dice.random() < share) for pair in chosen], epochs=26, dice=dice)
    return model


def imitate(
    model: Any, tokenizer: PreTrainedTokenizerFast, texts: list[Any], epochs: int, dice: random.Random
) -> None:
    """Teach a model the assistant's turns of conversations."""
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    template = get_training_chat_template(tokenizer)
    how = {"tokenize": True, "return_dict": True, "return_assistant_tokens_mask": True, "chat_template": template}
    encoded = [rendered(tokenizer, messages, **how) for messages in texts]
    for _ in range(epochs):
        dice.shuffle(encoded)
        for start in range(0, len(encoded), 32):
            rows = encoded[start : start + 32]
            width = max(len(row["input_ids"]) for row in rows)
            ids = torch.tensor([row["input_ids"] + [0] * (width - len(row["input_ids"])) for row in rows])
            own = torch.tensor([row["assistant_masks"] + [0] * (width - len(row["input_ids"])) for row in rows])
            loss: Any = model(input_ids=ids, labels=ids.masked_fill(own == 0, -100)).loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


def train(options: argparse.Namespace, tokenizer: PreTrainedTokenizerFast, model: Any) -> dict[str, Any]:
    """Train; return accuracy and calls per episode on held-out problems, before and after."""
    start = time.process_time()
    easy, hard, held_out = problems(0)
    pairs, tested = (easy, easy * 4) if options.price else (hard[400:], held_out)
    args = PPOConfig(
        options.output_dir,
        max_steps=options.updates,
        per_device_train_batch_size=64,
        per_device_eval_batch_size=125,
        local_rollout_forward_batch_size=64,
        response_length=60,
        stop_token="eos",
        temperature=1.0,
        gae_level="turn",
        learning_rate=3e-4,
        kl_coef=0.01,
        num_ppo_epochs=2,
        num_mini_batches=2,
        gradient_checkpointing=False,
        num_sample_generations=0,
        save_strategy="no",
        logging_steps=1,
        seed=options.seed,
        use_cpu=True,
    )
    trainer = PPOTrainer(
        args,
        tokenizer,
        model,
        train_dataset=[row_of(pair) for pair in pairs],
        eval_dataset=[row_of(pair) for pair in tested],
        reward_funcs=[right],
        environment_factory=partial(Calculator, options.price),
    )
    before = figures(trainer)
    trainer.train()
    logs = [log for log in trainer.state.log_history if "rewards/right/mean" in log]
    return {
        **{"seed": options.seed, "price": options.price, "before": before, "after": figures(trainer)},
        "cpu_seconds": round(time.process_time() - start),
        "curve": [round(log["rewards/right/mean"], 2) for log in logs],
        "calls": [round(log["tools/call_frequency"], 2) for log in logs],
    }


def figures(trainer: PPOTrainer) -> dict[str, float]:
    """Return held-out accuracy and calls per episode."""
    found = trainer.evaluate()
    return {"right": round(found["eval_rewards/right/mean"], 3), "calls": round(found["eval_tools/call_frequency"], 3)}


def main() -> None:
    """Train and print what has been learned."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--updates", type=int, default=20, help="updates of 64 episodes")
    parser.add_argument("--price", type=float, default=0.0, help="cost of a call; with one, the problems are easy")
    parser.add_argument("--share", type=float, default=0.3, help="share of conversations with a call")
    parser.add_argument("--output_dir", default="calculator")
    torch.set_num_threads(1)
    options, tokenizer = parser.parse_args(), make_tokenizer()
    print(json.dumps(train(options, tokenizer, make_model(tokenizer, options.seed, options.share))))


if __name__ == "__main__":
    main()
