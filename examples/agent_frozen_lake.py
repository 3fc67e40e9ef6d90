"""Teach a small language model to cross Gymnasium's FrozenLake through text, from scratch, in half a minute.

    pip install rlhf-ppo gymnasium
    python examples/agent_frozen_lake.py
    python examples/agent_frozen_lake.py --size 8 --moves 40 --updates 23 --progress  # rewards of turns

The model is made here: it first learns the format (a word and a stop token) from random play, then PPO trains it with
a reward of 1 at the goal. One update plays 128 episodes of at most 20 moves. Nothing is downloaded.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from functools import partial
from typing import Any

import gymnasium
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from rlhf_ppo import PPOConfig, PPOTrainer

MOVES = {"left": 0, "down": 1, "right": 2, "up": 3}
WORDS = ["<pad>", "</s>", *MOVES, "what", "?", *map(str, range(64))]


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Make a tokenizer of a few words."""
    core = Tokenizer(models.WordLevel({word: index for index, word in enumerate(WORDS)}, unk_token="<pad>"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()  # pyright: ignore[reportAttributeAccessIssue]
    return PreTrainedTokenizerFast(tokenizer_object=core, pad_token="<pad>", eos_token="</s>")


def make_player(tokenizer: PreTrainedTokenizerFast, size: int, seed: int, steps: int = 120) -> LlamaForCausalLM:
    """Make a model that plays at random: it learns the format from random moves and random places."""
    torch.manual_seed(seed)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    ends = {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": None}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=len(WORDS), max_position_embeddings=512, **sizes, **ends))
    optimizer, dice = torch.optim.AdamW(model.parameters(), 1e-3), random.Random(seed)
    words = {word: index for index, word in enumerate(WORDS)}
    for _ in range(steps):
        rows, labels = [], []
        for _ in range(32):
            row, label = list[int](), list[int]()
            for _ in range(8):
                place = words[str(dice.randrange(size * size))]
                turn = [words[dice.choice([*MOVES])], words["</s>"]]
                row += [place, *turn]
                label += [-100, *turn]
            rows.append(row)
            labels.append(label)
        loss: Any = model(input_ids=torch.tensor(rows), labels=torch.tensor(labels)).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model


class Lake:
    """Gymnasium's FrozenLake through text: each message of the policy is a move, each answer a field's number.

    Args:
        options: `size`, `moves` (the limit), `slippery` with `rate`, and `progress`: whether each step to the goal
            is paid, 0.6 for the whole way; a fall costs nothing.
    """

    takes_messages = True

    def __init__(self, options: argparse.Namespace) -> None:
        slips: dict[str, Any] = {"success_rate": options.rate} if options.slippery else {}
        how = {"is_slippery": options.slippery, "max_episode_steps": options.moves, **slips}
        self.game: Any = gymnasium.make("FrozenLake-v1", map_name=f"{options.size}x{options.size}", **how)
        self.last, self.pay = options.size - 1, 0.6 if options.progress else 0.0

    def reset(self, seed: int, **row: Any) -> str:
        """Begin a game."""
        self.turn_rewards: list[float] = []
        self.done = self.truncated = False
        self.field, _ = self.game.reset(seed=seed)
        return str(self.field)

    def respond(self, text: str) -> str:
        """Make a move, or ask again."""
        if text.strip() not in MOVES:
            return f"what ? {self.field}"
        before = self.progress
        self.field, reward, self.done, self.truncated, _ = self.game.step(MOVES[text.strip()])
        has_fallen = self.done and self.progress < 1
        self.turn_rewards.append(float(reward) + self.pay * (0.0 if has_fallen else self.progress - before))
        return str(self.field)

    @property
    def progress(self) -> float:
        """Share of the way, 1 at the goal."""
        return sum(divmod(int(self.field), self.last + 1)) / (2 * self.last)


def won(environments: list[Any], **columns: Any) -> list[float]:
    """Return 1 for each game that was won, else 0."""
    return [float(environment.progress == 1) for environment in environments]


def train(options: argparse.Namespace) -> dict[str, Any]:
    """Train a player; return the curve and the share of held-out episodes that it wins."""
    torch.set_num_threads(1)
    tokenizer = make_tokenizer()
    settings = dict[str, Any](
        max_steps=options.updates,
        per_device_train_batch_size=128,
        per_device_eval_batch_size=125,
        response_length=options.moves * 3 + 8,
        local_rollout_forward_batch_size=128,
        stop_token="eos",
        temperature=1.0,
        gae_level="turn",
        reward_weights={"won": 0.0},
        gamma=0.99,
        learning_rate=1e-3,
        lr_scheduler_type="cosine",
        kl_coef=0.01,
        vf_coef=0.5,
        num_ppo_epochs=2,
        num_mini_batches=4,
        gradient_checkpointing=False,
        num_sample_generations=0,
        save_strategy="no",
        logging_steps=1,
        seed=options.seed,
        use_cpu=True,
    )
    args = PPOConfig(options.output_dir, **(settings | json.loads(options.options)))
    trainer = PPOTrainer(
        args,
        tokenizer,
        make_player(tokenizer, options.size, options.seed),
        eval_dataset=[{"prompt": ""}] * options.held_out,
        reward_funcs=[won],
        environment_factory=partial(Lake, options),
    )
    start = time.process_time()
    trainer.train()
    seconds = time.process_time() - start
    held_out = trainer.evaluate()["eval_rewards/won/mean"]
    curve = [log["rewards/won/mean"] for log in trainer.state.log_history if "rewards/won/mean" in log]
    reached = next((index + 1 for index, share in enumerate(curve) if share >= 0.9), None)
    return {
        "seed": options.seed,
        "held_out": round(held_out, 3),
        "episodes_to_0.9": None if reached is None else reached * 128,
        "cpu_seconds": round(seconds),
        "curve": [round(share, 2) for share in curve],
    }


def command_line(words: list[str] | None = None) -> argparse.Namespace:
    """Read the options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--size", type=int, default=4, choices=(4, 8))
    parser.add_argument("--moves", type=int, default=20, help="limit of moves")
    parser.add_argument("--updates", type=int, default=31, help="updates of 128 episodes")
    parser.add_argument("--slippery", action="store_true")
    parser.add_argument("--rate", type=float, default=1 / 3, help="success_rate with --slippery")
    parser.add_argument("--progress", action="store_true", help="pay each step towards the goal")
    parser.add_argument("--held_out", type=int, default=500, help="episodes of the last evaluation")
    parser.add_argument("--options", default="{}", help="further options of PPOConfig, as JSON")
    parser.add_argument("--output_dir", default="frozen_lake")
    return parser.parse_args(words)


def main() -> None:
    """Train a player and print what it has learned."""
    print(json.dumps(train(command_line())))


if __name__ == "__main__":
    main()
