"""Count what episodes of several turns cost, without clocks: ours and TRL's GRPOTrainer, with the same episodes.

    python benchmarks/agents.py             # episodes of 3 and of 8 turns
    python benchmarks/agents.py --turns 20

A small model follows a script: its logits are replaced while it generates. Both trainers play the same episodes on
transformers' `generate`. It counts per update

- tokens that the model reads while it generates, per token of the episodes (prompt included): 1 with kept caches;
- calls of the model per round, the first of a round and one for each further token;
- tool calls that run at the same time, without waiting for one another.
"""

from __future__ import annotations

import argparse
import functools
import json
import tempfile
import threading
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from datasets import Dataset

from rlhf_ppo.models.unwrapping import CACHE
from tests.agents.chat import chat_model, chat_tokenizer, ppo_config, turn_text

ROWS = 8
ASKED = [{"role": "user", "content": "Count."}]
RUNNING = threading.Lock()


class Counter:
    """An environment with a slow tool, which counts its calls at a time."""

    at_once = most_at_once = 0

    def reset(self, **row: Any) -> None:
        """Begin."""

    def add(self, number: int) -> str:
        """Add a number.

        Args:
            number: The number.
        """
        with RUNNING:
            Counter.at_once += 1
            Counter.most_at_once = max(Counter.most_at_once, Counter.at_once)
        time.sleep(0.05)
        with RUNNING:
            Counter.at_once -= 1
        return str(number)

    def get_reward(self) -> float:
        """Score every episode alike."""
        return 1.0


@dataclass
class Script:
    """Makes a model say a script while it generates, and counts what it reads.

    Attributes:
        turns: Token ids of each turn.
        answer: The first token of an answer, by which turns are counted.
        num_read: Tokens read, without padding.
        num_calls: Calls of the model.
    """

    turns: Sequence[Sequence[int]]
    answer: int
    num_read: int = 0
    num_calls: int = 0
    turn: int = -1
    place: int = 0

    def install(self, model: Any) -> None:
        """Replace the model's `forward`."""
        forward = model.forward

        @functools.wraps(forward)
        def scripted(input_ids: Any = None, attention_mask: Any = None, **given: Any) -> Any:
            output = forward(input_ids=input_ids, attention_mask=attention_mask, **given)
            if given.get(CACHE) is not None and not torch.is_grad_enabled():
                output.logits[:, -1] = self._logits(output.logits[:, -1], input_ids, attention_mask)
            return output

        model.forward = scripted

    def _logits(self, logits: Any, ids: Any, mask: Any) -> Any:
        width = ids.shape[1]
        real = torch.ones_like(ids, dtype=torch.bool) if mask is None or mask.dim() != 2 else mask[:, -width:].bool()
        self.num_read += int(real.sum())
        self.num_calls += 1
        if width > 1:  # the beginning of a turn
            self.turn = self.turn + 1 if int((ids[0] == self.answer).sum()) else 0
            self.place = 0
        ids_of_turn = self.turns[min(self.turn, len(self.turns) - 1)]
        wanted = ids_of_turn[min(self.place, len(ids_of_turn) - 1)]
        self.place += 1
        return torch.full_like(logits, -1e4).index_fill_(1, torch.tensor([wanted]), 1e4)


def play(trainer_of: Any, num_turns: int) -> dict[str, float]:
    """Play an update's episodes under a trainer, and return the counters."""
    tokenizer = chat_tokenizer()
    call = turn_text(tokenizer, "qwen3", ("add", {"number": 7}))
    ids: list[Any] = [tokenizer(text)["input_ids"] for text in [call] * (num_turns - 1) + ["Done<|im_end|>"]]
    model, script = chat_model(tokenizer), Script(ids, int(tokenizer.convert_tokens_to_ids("<tool_response>")))
    Counter.most_at_once = 0
    rows = Dataset.from_list([{"prompt": ASKED}] * ROWS)
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer, lengths = trainer_of(folder, model, tokenizer, train_dataset=rows, environment_factory=Counter)
        script.install(model)
        trainer.train()
    return {
        "turns": num_turns,
        "tokens read per episode token": round(script.num_read / sum(lengths), 2),
        "model calls per round": round(script.num_calls / num_turns, 1),
        "longest turn, tokens": max(map(len, ids)),
        "tools at once": Counter.most_at_once,
    }


def ours(folder: str, model: Any, tokenizer: Any, **given: Any) -> tuple[Any, list[int]]:
    """Make our trainer, and a list that it fills with the episodes' tokens."""
    from rlhf_ppo import PPOTrainer
    from rlhf_ppo.generation.transformers_engine import continues

    lengths: list[int] = []

    class Measured(PPOTrainer):
        def estimate_advantages(self, rollout: Any) -> Any:
            lengths.extend(rollout.responses.attention_mask.sum(dim=1).tolist())
            return super().estimate_advantages(rollout)

    options = {"per_device_train_batch_size": ROWS, "num_generations": 1, "response_length": 3400}
    trainer = Measured(ppo_config(folder, **options), tokenizer, model, **given)
    continues(model)  # is found out by trial, which the script would disturb
    return trainer, lengths


def trl(folder: str, model: Any, tokenizer: Any, **given: Any) -> tuple[Any, list[int]]:
    """Make TRL's trainer, and a list that it fills with the episodes' tokens."""
    from trl import GRPOConfig, GRPOTrainer

    lengths: list[int] = []

    class Measured(GRPOTrainer):
        def _generate(self, prompts: Any) -> Any:
            result = super()._generate(prompts)
            lengths.extend(len(before) + len(ids) for before, ids in zip(result[0], result[1], strict=True))
            return result

    options: dict[str, Any] = {"per_device_train_batch_size": ROWS, "num_generations": 2, "max_steps": 1}
    options |= {"max_completion_length": 3400, "use_cpu": True, "bf16": False, "report_to": "none"}
    options |= {"save_strategy": "no", "disable_tqdm": True, "gradient_checkpointing": False}
    trainer = Measured(model, args=GRPOConfig(folder, **options), processing_class=tokenizer, **given)
    return trainer, lengths


def main() -> None:
    """Print the counters, a line for each trainer and number of turns."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, nargs="+", default=[3, 8])
    for num_turns in parser.parse_args().turns:
        for name, trainer_of in (("trl", trl), ("ours", ours)):
            print(json.dumps({"trainer": name} | play(trainer_of, num_turns)), flush=True)


if __name__ == "__main__":
    main()
