"""Teach a small chat model when to call a calculator, from scratch, in about two minutes on one core.

    pip install rlhf-ppo
    python examples/agent_calculator.py             # products that the model does not know: calls pay
    python examples/agent_calculator.py --price 0.3 # products of digits, which it knows: each call costs

The model is made by `calculator_model.py` beside this file. Nothing is downloaded.
"""

from __future__ import annotations

import argparse
import json
import re
import time
from functools import partial
from typing import Any

import torch
from calculator_model import make_model, make_tokenizer, problems, row_of
from transformers import PreTrainedTokenizerFast

from rlhf_ppo import PPOConfig, PPOTrainer


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
    """Return 1 for each conversation whose last message is the answer, else 0."""
    pairs = zip(completions, answer, strict=True)
    return [float((messages[-1].get("content") or "").strip() == wanted) for messages, wanted in pairs]


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
        "seed": options.seed,
        "price": options.price,
        "before": before,
        "after": figures(trainer),
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
    options, tool = parser.parse_args(), Calculator.calculate
    tokenizer = make_tokenizer(tool)
    print(json.dumps(train(options, tokenizer, make_model(tokenizer, tool, options.seed, options.share))))


if __name__ == "__main__":
    main()
