"""A small chat model that can call a calculator, made from scratch in a minute on one core, for `agent_calculator.py`.

It has the chat template of Qwen2.5 that TRL ships. It first learns to copy digits, and is then fine-tuned on a few
hundred conversations: some with a call, some with an answer at once.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import trl
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM
from transformers.utils.chat_template_utils import get_json_schema
from trl.chat_template_utils import get_training_chat_template

MARKERS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>")
Pair = tuple[int, int]


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


def make_tokenizer(tool: Callable[..., Any]) -> PreTrainedTokenizerFast:
    """Make a tokenizer whose digits are single tokens, and whose template takes few tokens."""
    template = Path(trl.__file__).parent.joinpath("chat_templates", "qwen2_5.jinja").read_text()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE()))
    tokenizer.chat_template = template
    easy, hard, _ = problems(0)
    texts = [rendered(tokenizer, tool, conversation(pair, True)) for pair in (*easy[:20], *hard[:20])]
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


def rendered(tokenizer: Any, tool: Callable[..., Any], messages: Sequence[Any], **how: Any) -> Any:
    """Render a conversation with a tool shown to the model."""
    return tokenizer.apply_chat_template(list(messages), tools=[get_json_schema(tool)], **({"tokenize": False} | how))


def make_model(
    tokenizer: PreTrainedTokenizerFast, tool: Callable[..., Any], seed: int, share: float
) -> Qwen2ForCausalLM:
    """Make a chat model: a small one that copies digits, fine-tuned on a few hundred conversations.

    Args:
        tokenizer: The tokenizer.
        tool: The calculator.
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
    imitate(model, tokenizer, tool, copies, epochs=2, dice=dice)
    imitate(
        model, tokenizer, tool, [conversation(pair, dice.random() < share) for pair in chosen], epochs=26, dice=dice
    )
    return model


def imitate(
    model: Any,
    tokenizer: PreTrainedTokenizerFast,
    tool: Callable[..., Any],
    texts: list[Any],
    epochs: int,
    dice: random.Random,
) -> None:
    """Teach a model the assistant's turns of conversations."""
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    template = get_training_chat_template(tokenizer)
    how = {"tokenize": True, "return_dict": True, "return_assistant_tokens_mask": True, "chat_template": template}
    encoded = [rendered(tokenizer, tool, messages, **how) for messages in texts]
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
