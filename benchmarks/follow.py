"""Train SmolLM2-135M-Instruct by examples/follow_instructions.py, by PPO and its alternatives.

    make chat-model
    python benchmarks/follow.py one-body --seed 1 --max_steps 40 --dataset_name FILE

All arms have the example's prompts, rewards, episodes, sampling and optimizer steps; further arguments are the
example's. A stopped run resumes with `--resume_from_checkpoint True`. The result is a line of `--results`; with
`--minutes 5 10 20` there is one after each of these CPU minutes of training, and the run ends after the last; if
`--max_steps` ends it before, the last row is of its end. Greedy answers to all held-out prompts are measured at each
mark; sampled ones, with their score and KL, at the end only.

start: the model before training. one-body: the example as it is. critic: the value model is an adapter of its own
over the same base. no-critic: the Reinforce of docs/research.md. group: one-body with the mean of a question's other
answers as a further baseline. grpo: TRL's GRPO, 8 responses a prompt. trl-ppo: TRL 1.12's PPO (follow_trl.py), which
`pip install --no-deps --target trl-1.12.0 trl==1.12.0` and `PYTHONPATH=trl-1.12.0` give; it cannot resume.

The rows of follow.jsonl are of an earlier example: 16 episodes an update, `lam` 0.95, temperature 0.7. linear-head is
the head of one layer that one-body had first; rows named after a preset, full weights or 60 updates are critic or
one-body with other `arguments`.
"""

from __future__ import annotations

import argparse
import copy
import json
import random
import resource
import runpy
import sys
import time
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from follow_trl import make_trainer
from transformers import TrainerCallback

import rlhf_ppo
from rlhf_ppo import PPOTrainer

EXAMPLE = Path(__file__).parents[1] / "examples" / "follow_instructions.py"
NO_TABLE = pd.DataFrame({name: [] for name in ("query", "model response", "strict", "constraints")})


class TimeIsUp(Exception):
    """Ends a trainer that does not obey `control.should_training_stop`."""


class Clock(TrainerCallback):
    """Counts the CPU seconds of training, without those of measuring; writes a row after each mark.

    The seconds at each checkpoint are in `seconds.json` in the output directory: a resumed run continues from them.

    Args:
        arm: The name in the rows.
        minutes: Marks in CPU minutes of training, of which the last ends the run; none: one row after training.
        results: The file of rows.
        arguments: Those of the example, for the rows.
        decays: Whether the learning rates fall in a line to 0 at the last mark, whatever their scheduler says.
    """

    def __init__(
        self, arm: str, minutes: list[float], results: Path, arguments: list[str], decays: bool = False
    ) -> None:
        self.arm, self.marks, self.results, self.arguments = arm, sorted(minutes), results, arguments
        self.end = self.marks[-1] * 60 if decays else float("inf")
        self.before, self.began = 0.0, time.process_time()
        self.trainer: Any = None
        """Has `table_of_answers()`, `evaluate()` and `obeys`: whether a callback can end it."""

    def seconds(self) -> float:
        """Return the CPU seconds of training so far."""
        return self.before + time.process_time() - self.began

    def decay(self, optimizer: Any) -> None:
        """Set the learning rates by the seconds of training so far."""
        for group in optimizer.param_groups if self.end < float("inf") else ():
            group["lr"] = group["initial_lr"] * max(0.0, 1 - self.seconds() / self.end)

    def on_train_begin(self, args: Any, state: Any, control: Any, optimizer: Any = None, **_: Any) -> None:
        """Continue from the seconds of the checkpoint, whose marks have rows."""
        if state.global_step:
            seconds = json.loads(Path(args.output_dir, "seconds.json").read_text())
            self.before = seconds[str(state.global_step)]
            self.marks = [mark for mark in self.marks if mark * 60 > self.before]
        self.began = time.process_time()
        self.decay(optimizer)

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Write the seconds of a checkpoint."""
        path = Path(args.output_dir, "seconds.json")
        seconds = json.loads(path.read_text()) if path.exists() else {}
        path.write_text(json.dumps(seconds | {str(state.global_step): self.seconds()}))

    def on_step_end(self, args: Any, state: Any, control: Any, optimizer: Any = None, **_: Any) -> None:
        """Write a row if the next mark has passed; end the run after the last mark."""
        self.decay(optimizer)
        if self.marks and self.seconds() >= self.marks[0] * 60:
            mark = self.marks.pop(0)
            self.record(args, state.global_step, mark, samples=not self.marks)
            control.should_training_stop = not self.marks
            if control.should_training_stop and not self.trainer.obeys:
                raise TimeIsUp

    def record(self, args: Any, steps: int, mark: float | None = None, samples: bool = True) -> None:
        """Measure, while the clock stands still, and append a row; `samples`: evaluate sampled answers, too."""
        self.before = self.seconds()
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
        torch_state, numpy_state, python_state = torch.get_rng_state(), np.random.get_state(), random.getstate()
        table = self.trainer.table_of_answers()
        evaluation = self.trainer.evaluate() if samples else {}
        torch.set_rng_state(torch_state)
        np.random.set_state(numpy_state)
        random.setstate(python_state)
        by_kind = table.groupby("constraints")["strict"].mean().to_dict()
        kinds = runpy.run_path(str(EXAMPLE))
        row = {
            "arm": self.arm, "seed": args.seed, "minutes": mark, "steps": steps, "updates": args.max_steps,
            "learning_rate": args.learning_rate,
            "single": np.mean([by_kind[name] for name in kinds["WORDINGS"]]),
            "pairs": np.mean([by_kind["+".join(pair)] for pair in kinds["HELD_OUT_PAIRS"]]),
            "by_kind": by_kind, "evaluation": {key.removeprefix("eval_"): value for key, value in evaluation.items()},
            "cpu_seconds": round(self.before), "peak_mb": peak, "arguments": self.arguments,
        }  # fmt: skip
        name = f"{self.arm}-{args.seed}{f'-{mark:g}' if mark else ''}.jsonl".replace(" ", "_")
        table.to_json(self.results.with_name(name), orient="records", lines=True)
        with self.results.open("a", encoding="utf-8") as results:
            results.write(json.dumps(row) + "\n")
        print(row, flush=True)
        self.began = time.process_time()


class Measured(PPOTrainer):
    """Makes a table when the clock asks, not before training as the example would."""

    clock: Clock
    obeys = True
    table = NO_TABLE
    value: str | None = "policy"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs | {"value_model": self.value})
        self.clock.trainer = self
        self.add_callback(self.clock)

    def generate_completions(self, *args: Any, **kwargs: Any) -> Any:
        """Return the last table."""
        return self.table

    def table_of_answers(self) -> Any:
        """Return greedy answers to all held-out prompts."""
        self.table = super().generate_completions()
        return self.table


class OwnCritic(Measured):
    """Trains a value model of its own."""

    value = None


class Start(Measured):
    """Does not train."""

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


class Group(Measured):
    """Subtracts the mean total reward of the other answers to a question from an answer's last reward."""

    def compute_advantages(self, rollout: Any, rewards: Any) -> Any:
        """Compute advantages and returns with GAE, of rewards less the group's."""
        mask, count = rollout.response_mask, self.args.num_generations
        rewards = rewards.masked_fill(~mask, 0.0)
        totals = rewards.sum(dim=1).view(-1, count)
        others = (totals.sum(dim=1, keepdim=True) - totals) / (count - 1)
        last = mask.shape[1] - 1 - mask.flip(1).float().argmax(dim=1)
        rewards[torch.arange(len(rewards)), last] -= others.flatten()
        return super().compute_advantages(rollout, rewards)


class Theirs:
    """TRL's trainer behind what the example calls of PPOTrainer, which measures a copy of its policy."""

    clock: Clock

    def __init__(
        self,
        args: Any,
        tokenizer: Any,
        model: Any,
        reward_funcs: Any,
        peft_config: Any,
        make: Any,
        obeys: bool,
        value_model: str,
        **rows: Any,
    ) -> None:
        measures = partial(PPOTrainer, value_model=value_model, ref_model=model.name_or_path)
        self.measures = partial(measures, args, tokenizer, reward_funcs=reward_funcs, **rows)
        self.trainer = make(args, tokenizer, model, reward_funcs, peft_config, rows["train_dataset"])
        self.is_world_process_zero = self.trainer.is_world_process_zero
        self.save_model, self.table, self.obeys = self.trainer.save_model, NO_TABLE, obeys
        self.clock.trainer = self
        self.trainer.add_callback(self.clock)

    @property
    def state(self) -> Any:
        """Return Trainer's state, which training replaces."""
        return self.trainer.state

    def generate_completions(self) -> Any:
        """Return the last table."""
        return self.table

    def copied(self) -> Any:
        """Return a trainer of ours that has a copy of the policy."""
        trained = self.trainer.accelerator.unwrap_model(self.trainer.model)
        policy = copy.deepcopy(getattr(trained, "policy", trained))
        for module in policy.modules():  # a wrapper would run the original
            vars(module).pop("forward", None)
        return self.measures(policy)

    def table_of_answers(self) -> Any:
        """Return greedy answers to all held-out prompts."""
        self.table = self.copied().generate_completions()
        return self.table

    def evaluate(self) -> Any:
        """Return the metrics of sampled answers to all held-out prompts."""
        return self.copied().evaluate()

    def train(self, resume_from_checkpoint: Any = None) -> None:
        """Train until the end or the last mark."""
        from_last = {"True": True}.get(resume_from_checkpoint, resume_from_checkpoint)
        with suppress(TimeIsUp):
            self.trainer.train(*([from_last] if from_last else []))


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


ARMS = {
    "start": Start, "critic": OwnCritic, "one-body": Measured, "no-critic": Reinforce, "group": Group, "grpo": Theirs,
    "trl-ppo": Theirs,
}  # fmt: skip


def main() -> None:
    """Train, and measure at the marks or at the end."""
    parser = argparse.ArgumentParser(allow_abbrev=False, description=str(__doc__).partition("\n")[0])
    parser.add_argument("arm", choices=ARMS)
    parser.add_argument("--beta", type=float, default=0.02, help="of GRPO")
    parser.add_argument("--minutes", type=float, nargs="+", default=[], help="of training on a CPU, for a row each")
    parser.add_argument(
        "--decay", action="store_true", help="the learning rates fall in a line to 0 at the last minute"
    )
    parser.add_argument("--label", help="in the rows, in place of the arm")
    parser.add_argument("--results", type=Path, default=Path("follow.jsonl"))
    options, others = parser.parse_known_args()
    torch.set_num_threads(1)
    if options.decay and not options.minutes:
        parser.error("--decay needs --minutes")
    clock = Clock(options.label or options.arm, options.minutes, options.results, others, options.decay)
    ARMS[options.arm].clock = clock
    how: dict[str, Any] = {
        "grpo": {"make": partial(grpo, beta=options.beta), "obeys": True},
        "trl-ppo": {"make": make_trainer, "obeys": False},
    }.get(options.arm, {})
    if options.arm == "critic":
        others.append("--share_base_model=True")
    rlhf_ppo.PPOTrainer = partial(ARMS[options.arm], **how)  # pyright: ignore
    sys.argv = [str(EXAMPLE), *others]
    ran = runpy.run_path(str(EXAMPLE), run_name="__main__")
    if clock.marks or not options.minutes:
        clock.record(ran["args"], clock.trainer.state.global_step, clock.marks[-1] if clock.marks else None)


if __name__ == "__main__":
    main()
