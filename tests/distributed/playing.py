"""What two processes play: episodes of very different lengths, with tools that hang and environments that fail."""

from __future__ import annotations

import copy
import time
from typing import Any

import torch
from accelerate.utils import gather
from datasets import Dataset

from rlhf_ppo.data.rollout import selected
from rlhf_ppo.generation.protocol import Sampled
from rlhf_ppo.generation.transformers_engine import TransformersEngine
from tests import conftest
from tests.distributed.scenarios import make_trainer, report, whole_parameters
from tests.runs import train_and_record

EOS = 1


class Walk:
    """As many turns as the row says; answer `hangs` never returns, and `fails` names what fails."""

    takes_messages = True

    def reset(self, turns: int, hangs: int, fails: str, **row: Any) -> str:
        if fails == "reset":
            raise ValueError("no board")
        self.turns, self.hangs, self.fails, self.steps = turns, hangs, fails, 0
        self.turn_rewards: list[float] = []
        self.done = False
        return "w5"

    def respond(self, text: str) -> str:
        self.steps += 1
        if self.steps == self.hangs:
            time.sleep(1e6)
        self.done = self.steps >= self.turns
        self.turn_rewards.append(float("nan") if self.fails == "step" and self.steps == 3 else self.steps / 10)
        return "w8 w9 w10"[: 2 + self.steps]


class Speaking:
    """transformers' `generate` with some of its passes, whose words are replaced by others that the context gives."""

    reads_sharded = False

    def __init__(self) -> None:
        self.calls: list[int] = []

    def sample(self, policy: Any, prompts: Any, config: Any) -> Sampled:
        self.calls.append(len(prompts))
        of_all_ranks: Any = gather
        inner = TransformersEngine(2, None, of_all_ranks)
        passes = copy.deepcopy(config)
        passes.max_new_tokens = min(3, config.max_new_tokens)
        inner.sample(policy, prompts, passes)
        rows = []
        for ids in selected(prompts.input_ids, prompts.attention_mask):
            generator = torch.Generator().manual_seed(sum(place * token for place, token in enumerate(ids, 1)))
            length = int(torch.randint(0, 3, (), generator=generator))
            rows.append([*torch.randint(3, 32, (length,), generator=generator).tolist(), EOS][: config.max_new_tokens])
        lengths = torch.tensor([len(row) for row in rows])
        padded = torch.tensor([row + [0] * (int(lengths.max()) - len(row)) for row in rows])
        return Sampled(padded, None, lengths)

    def policy_changed(self) -> None: ...


ROWS = [{"prompt": f"w{row} w1", "turns": 1 if row < 4 else 9} for row in range(8)]


def play(
    output_dir: str,
    models: str,
    local_batch_size: int = 4,
    changes: dict[int, dict[str, Any]] | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Take one SGD step of rate 1 on episodes of 1 turn (the first rank's) and of 9 (the second's).

    PAD is not in the models' vocabulary.
    """
    engine, tokenizer = Speaking(), conftest.make_tokenizer()
    tokenizer.add_special_tokens({"pad_token": "[PAD]"})
    rows = [{"hangs": 0, "fails": "", **row, **(changes or {}).get(number, {})} for number, row in enumerate(ROWS)]
    arguments = {
        "train_dataset": Dataset.from_list(rows), "eval_dataset": None, "engine": engine,
        "processing_class": tokenizer, "environment_factory": Walk, "reward_funcs": conftest.count_w4,
    }  # fmt: skip
    trainer = make_trainer(
        output_dir, models, given=arguments,
        **{
            "gradient_accumulation_steps": local_batch_size // 2, "response_length": 60, "num_ppo_epochs": 1,
            "num_mini_batches": 1, "max_steps": 1, "optim": "sgd", "learning_rate": 1.0, "max_grad_norm": 0.0,
            "train_sampling_strategy": "sequential", "gae_level": "turn", "bootstrap_truncated": True,
            "tool_timeout": 0.7, **options,
        },
    )  # fmt: skip
    rollouts = train_and_record(trainer)
    mask = rollouts[0].response_mask
    starts = mask[:, 1:] & ~mask[:, :-1]
    turns = (starts.sum(dim=1) + mask[:, 0]).tolist()
    return report(trainer, parameters=whole_parameters(trainer), turns=turns, calls=engine.calls)
