"""A training run for a process of its own, which the test kills; started again it goes on from its last checkpoint."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from datasets import Dataset

from rlhf_ppo import PPOConfig, PPOTrainer
from rlhf_ppo.checkpoints import last_whole_checkpoint
from tests.conftest import count_w4, make_tokenizer, prompt_rows, tiny_policy, tiny_scorer
from tests.runs import end_of_run


class SamplesToFile(PPOTrainer):
    """Appends every sample table to a file, as a tracker would."""

    def generate_completions(self, sampling: bool = False) -> pd.DataFrame | None:
        table = super().generate_completions(sampling)
        assert table is not None
        with Path(self.args.output_dir, "samples.jsonl").open("a") as file:
            # The line break comes first, in case a kill cut the line before.
            file.write("\n" + json.dumps({"step": self.state.global_step, "table": table.to_dict("list")}))
        return table


def train(output_dir: str) -> None:
    """Start or resume a run of ten updates in two and a half epochs, and write `end.pt` when it is through."""
    torch.set_num_threads(1)
    args = PPOConfig(
        output_dir=output_dir,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        num_ppo_epochs=2,
        num_mini_batches=2,
        total_episodes=40,
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
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        seed=5,
    )
    trainer = SamplesToFile(
        args,
        make_tokenizer(),
        tiny_policy(),
        value_model=tiny_scorer(seed=2),
        train_dataset=Dataset.from_list(prompt_rows(16)),
        eval_dataset=Dataset.from_list(prompt_rows(5, seed=1)),
        reward_funcs=count_w4,
    )
    checkpoint = last_whole_checkpoint(output_dir)
    with Path(output_dir, "starts.txt").open("a") as file:
        file.write(f"{None if checkpoint is None else Path(checkpoint).name}\n")
    trainer.train(resume_from_checkpoint=checkpoint is not None)
    torch.save(end_of_run(trainer), Path(output_dir, "end.pt"))


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
