"""A tiny model of words, and a game of whole messages that depends on its row alone."""

from __future__ import annotations

import random
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

WORDS = ["<pad>", "</s>", "a", "b", "c", "d", *map(str, range(10))]
LONGEST = {"board": 6, "wild": 30}


def tokenizer_of_words() -> PreTrainedTokenizerFast:
    core = Tokenizer(models.WordLevel({word: index for index, word in enumerate(WORDS)}, unk_token="<pad>"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()  # pyright: ignore[reportAttributeAccessIssue]
    return PreTrainedTokenizerFast(tokenizer_object=core, pad_token="<pad>", eos_token="</s>")


def player() -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    ends: dict[str, Any] = {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": None}
    return LlamaForCausalLM(LlamaConfig(vocab_size=len(WORDS), max_position_embeddings=512, **sizes, **ends))


def sharp(model: Any) -> Any:
    """Spread the logits, so that a wrong context shows, and let turns be short."""
    with torch.no_grad():
        model.lm_head.weight.mul_(8.0)
    return model


class Talk:
    """Answers with a text of 5 to 6 words, or of 1 to 30, so many times."""

    takes_messages = True

    def reset(self, seed: int, kind: str, moves: int, **row: Any) -> str:
        self.kind, self.left, self.dice = kind, moves, random.Random(seed)
        self.turn_rewards: list[float] = []
        self.done = False
        return self._words()

    def _words(self) -> str:
        longest = LONGEST[self.kind]
        number = self.dice.randint(longest - 1 if longest == 6 else 1, longest)
        return " ".join(str(self.dice.randrange(10)) for _ in range(number))

    def respond(self, text: str) -> str:
        self.left -= 1
        words = self._words()
        self.turn_rewards.append(self.dice.random())
        self.done = self.left == 0
        return words
