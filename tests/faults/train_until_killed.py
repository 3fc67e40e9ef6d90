"""A training run for processes of its own, which the test kills; started again it goes on from its last checkpoint."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from datasets import Dataset

from rlhf_ppo import PPOConfig, PPOTrainer
from rlhf_ppo.checkpoints import last_complete_checkpoint
from tests.conftest import count_w4, make_tokenizer, prompt_rows, tiny_policy, tiny_scorer
from tests.runs import end_of_run

PHASES = ("update", "evaluation", "samples", "checkpoint", "final save")


class NotesPhases(PPOTrainer):
    """Writes into `phase.txt` what it is doing, and appends every sample table to a file, as a tracker would."""

    @contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        directory, before = Path(str(self.args.output_dir)), time.monotonic()
        if self.is_world_process_zero():
            (directory / "phase.txt").write_text(name)
        yield
        if self.is_world_process_zero():
            with (directory / "seconds.txt").open("a") as file:
                file.write(f"{name}:{time.monotonic() - before}\n")
            (directory / "phase.txt").write_text("update")

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        with self._phase("evaluation"):
            return super().evaluate(*args, **kwargs)

    def _save_checkpoint(self, *args: Any) -> None:
        with self._phase("checkpoint"):
            super()._save_checkpoint(*args)

    def generate_completions(self, sampling: bool = False) -> pd.DataFrame | None:
        with self._phase("samples"):
            table = super().generate_completions(sampling)
            if table is not None:
                with Path(str(self.args.output_dir), "samples.jsonl").open("a") as file:
                    # The line break comes first, in case a kill cut the line before.
                    sample = {"step": self.state.global_step, "table": table.to_dict("list")}
                    file.write("\n" + json.dumps(sample))
        return table


def train(output_dir: str) -> None:
    """Start or resume a run of ten updates, save the policy, and write each rank's end when it is through.

    One process makes two and a half passes over the prompts, two processes together five.
    """
    torch.set_num_threads(1)
    rank, is_alone = int(os.environ.get("RANK", "0")), "RANK" not in os.environ
    args = PPOConfig(
        output_dir=output_dir,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        num_ppo_epochs=2,
        num_mini_batches=2,
        max_steps=10,
        response_length=4,
        stop_token="eos",
        learning_rate=1e-3,
        logging_steps=3,
        eval_strategy="steps",
        eval_steps=4,
        num_sample_generations=5,
        save_strategy="steps",
        save_steps=1,
        save_total_limit=2,
        whiten_rewards=True,
        report_to="none",
        disable_tqdm=True,
        use_cpu=is_alone,
        ddp_backend=None if is_alone else "gloo",
        bf16=False,
        gradient_checkpointing=False,
        seed=5,
    )
    trainer = NotesPhases(
        args,
        make_tokenizer(),
        tiny_policy(),
        value_model=tiny_scorer(seed=2),
        train_dataset=Dataset.from_list(prompt_rows(16)),
        eval_dataset=Dataset.from_list(prompt_rows(5, seed=1)),
        reward_funcs=count_w4,
    )
    assert trainer.accelerator.num_processes == (1 if is_alone else 2)
    checkpoint = last_complete_checkpoint(output_dir)
    with Path(output_dir, "starts.txt").open("a") as file:
        file.write(f"{None if checkpoint is None else Path(checkpoint).name}\n")
    trainer.train(resume_from_checkpoint=checkpoint is not None)
    with trainer._phase("final save"):
        trainer.save_model(f"{output_dir}/final")
    path = Path(output_dir, f"end-{rank}.pt")
    torch.save(end_of_run(trainer), f"{path}.tmp")
    os.rename(f"{path}.tmp", path)


def samples(output_dir: Path) -> dict[int, Any]:
    """Read the sample tables, by update; a table that a kill cut off or repeated counts once."""
    tables: dict[int, Any] = {}
    for line in (output_dir / "samples.jsonl").read_text().splitlines():
        try:
            sample: dict[str, Any] = json.loads(line)
        except ValueError:
            continue  # blank or cut off
        assert tables.setdefault(sample["step"], sample["table"]) == sample["table"], "a repeated table is the same"
    return tables
