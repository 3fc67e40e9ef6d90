"""Train SmolLM2-135M-Instruct by examples/follow_instructions.py, by PPO and its alternatives.

    make chat-model
    python benchmarks/follow.py one-body --seed 1 --max_steps 40 --dataset_name FILE

All arms have the example's prompts, rewards, episodes, sampling and optimizer steps; further arguments are the
example's. A stopped run resumes with `--resume_from_checkpoint True`. The result is a line of `--results`.

start: the model before training. critic: the example as it is. one-body: the value is a head on the policy's states
(linear-head in the rows: the head of one layer that it had first). no-critic: the Reinforce of docs/research.md. grpo:
TRL's GRPO, 8 responses a prompt. trl-ppo: TRL 1.12's PPO (follow_trl.py), which `pip install --no-deps --target
trl-1.12.0 trl==1.12.0` and `PYTHONPATH=trl-1.12.0` give; it cannot resume. Rows named after a preset, full weights or
60 updates are critic or one-body with other `arguments`.
"""

from __future__ import annotations

import argparse
import json
import resource
import runpy
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from follow_trl import make_trainer

import rlhf_ppo
from rlhf_ppo import PPOTrainer

EXAMPLE = Path(__file__).parents[1] / "examples" / "follow_instructions.py"


class Measured(PPOTrainer):
    """Skips the first table, which is the same for all arms, and takes the time of training."""

    seconds, table = 0.0, pd.DataFrame({name: [] for name in ("query", "model response", "strict", "constraints")})

    def generate_completions(self, *args: Any, **kwargs: Any) -> Any:
        """Make the table after training."""
        if self.state.global_step:
            self.table = super().generate_completions(*args, **kwargs)
        return self.table

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Train; count the CPU seconds."""
        began = time.process_time()
        result = super().train(*args, **kwargs)
        self.seconds = time.process_time() - began
        return result


class Start(PPOTrainer):
    """Does not train."""

    seconds, table = 0.0, None

    def generate_completions(self, *args: Any, **kwargs: Any) -> Any:
        """Make the table once."""
        if self.table is None:
            self.table = super().generate_completions(*args, **kwargs)
        return self.table

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Do nothing."""

    def save_model(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing."""


class Reinforce(Measured):
    """A token's advantage is the reward to come, minus the mean total reward of the batch."""

    def compute_advantages(self, rollout: Any, rewards: Any) -> Any:
        """Compute advantages without a critic."""
        mask = rollout.loss_mask
        rewards = rewards.masked_fill(~mask, 0.0)
        to_come = rewards.flip(1).cumsum(dim=1).flip(1)
        advantages = to_come - rewards.sum(dim=1).mean()
        return advantages.masked_fill(~mask, 0.0), to_come.masked_fill(~mask, 0.0)


class Theirs:
    """TRL's trainer behind what the example calls of PPOTrainer, which measures its policy."""

    def __init__(
        self, args: Any, tokenizer: Any, model: Any, reward_funcs: Any, peft_config: Any, make: Any, **given: Any
    ) -> None:
        measures = partial(PPOTrainer, value_model="policy", ref_model=model.name_or_path)
        self._own = partial(measures, args, tokenizer, reward_funcs=reward_funcs, **given)
        self.trainer = make(args, tokenizer, model, reward_funcs, peft_config, given["train_dataset"])
        self.is_world_process_zero = self.trainer.is_world_process_zero
        self.save_model, self.seconds, self.table = self.trainer.save_model, 0.0, Measured.table

    def generate_completions(self) -> Any:
        """Make the table after training."""
        if self.seconds:
            trained = self.trainer.accelerator.unwrap_model(self.trainer.model)
            measures = self._own(getattr(trained, "policy", trained))
            self.table, self.evaluate = measures.generate_completions(), measures.evaluate
        return self.table

    def train(self, resume_from_checkpoint: Any = None) -> None:
        """Train; count the CPU seconds."""
        began = time.process_time()
        self.trainer.train(*([resume_from_checkpoint] if resume_from_checkpoint else []))
        self.seconds = time.process_time() - began


def grpo(args: Any, tokenizer: Any, model: Any, reward_funcs: Any, peft_config: Any, rows: Any, *, beta: float) -> Any:
    """Make TRL's GRPOTrainer."""
    from datasets import Dataset
    from trl.trainer.grpo_config import GRPOConfig
    from trl.trainer.grpo_trainer import GRPOTrainer

    size = args.per_device_train_batch_size
    config = GRPOConfig(
        output_dir=args.output_dir, seed=args.seed, learning_rate=args.learning_rate, use_cpu=args.use_cpu,
        max_steps=args.max_steps * args.num_ppo_epochs * args.num_mini_batches, temperature=args.temperature,
        per_device_train_batch_size=size // args.num_mini_batches, steps_per_generation=args.num_mini_batches,
        num_iterations=args.num_ppo_epochs, num_generations=8, max_completion_length=args.response_length,
        beta=beta, reward_weights=[*args.reward_weights, args.missing_eos_penalty], bf16=False,
        lr_scheduler_type=args.lr_scheduler_type, warmup_steps=args.warmup_steps, max_grad_norm=args.max_grad_norm,
        gradient_checkpointing=False, save_steps=40, save_total_limit=1, report_to="none", disable_tqdm=True,
        logging_steps=8,
    )  # fmt: skip

    def ended(completion_ids: Any, **_: Any) -> Any:
        return [float(ids[-1] == tokenizer.eos_token_id) - 1 for ids in completion_ids]

    return GRPOTrainer(
        model, [*reward_funcs, ended], config, Dataset.from_list(rows), processing_class=tokenizer,
        peft_config=peft_config,
    )  # fmt: skip


def arm(name: str, beta: float) -> Any:
    """Return what stands for `PPOTrainer` in the example."""
    arms = {
        "start": partial(Start, value_model="policy"),
        "critic": Measured,
        "one-body": partial(Measured, value_model="policy"),
        "no-critic": partial(Reinforce, value_model="policy"),
        "grpo": partial(Theirs, make=partial(grpo, beta=beta)),
        "trl-ppo": partial(Theirs, make=make_trainer),
    }
    return arms[name]


def main() -> None:
    """Train, measure, and append a line to the results."""
    parser = argparse.ArgumentParser(allow_abbrev=False, description=str(__doc__).partition("\n")[0])
    parser.add_argument("arm", choices=("start", "critic", "one-body", "no-critic", "grpo", "trl-ppo"))
    parser.add_argument("--beta", type=float, default=0.02, help="of GRPO")
    parser.add_argument("--results", type=Path, default=Path("follow.jsonl"))
    given, others = parser.parse_known_args()
    torch.set_num_threads(1)
    rlhf_ppo.PPOTrainer = arm(given.arm, given.beta)  # pyright: ignore
    sys.argv = [str(EXAMPLE), *others]
    ran = runpy.run_path(str(EXAMPLE), run_name="__main__")
    trainer, args = ran["trainer"], ran["args"]
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    table = trainer.table
    evaluation = {key.removeprefix("eval_"): value for key, value in trainer.evaluate().items()}
    by_kind = table.groupby("constraints")["strict"].mean().to_dict()
    row = {
        "arm": given.arm, "seed": args.seed, "updates": args.max_steps, "learning_rate": args.learning_rate,
        "single": sum(by_kind[name] for name in ran["WORDINGS"]) / len(ran["WORDINGS"]),
        "pairs": sum(by_kind["+".join(pair)] for pair in ran["HELD_OUT_PAIRS"]) / len(ran["HELD_OUT_PAIRS"]),
        "by_kind": by_kind, "evaluation": evaluation, "cpu_seconds": round(trainer.seconds), "peak_mb": peak,
        "arguments": others,
    }  # fmt: skip
    table.to_json(given.results.with_name(f"{given.arm}-{args.seed}.jsonl"), orient="records", lines=True)
    with given.results.open("a", encoding="utf-8") as results:
        results.write(json.dumps(row) + "\n")
    print(row)


if __name__ == "__main__":
    main()
