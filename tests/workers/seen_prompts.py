"""Started on two ranks: writes which prompts this rank saw in two epochs."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from datasets import Dataset

from rlhf_ppo import PPOConfig, PPOTrainer
from tests.conftest import count_w4, make_tokenizer, tiny_policy, tiny_scorer


class SeenPrompts(PPOTrainer):
    """Keeps the first token of every prompt."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.seen: list[int] = []
        super().__init__(*args, **kwargs)

    def collect_rollout(self, model: Any, prompts: Any) -> Any:
        self.seen += prompts.input_ids[:, -1].tolist()
        return super().collect_rollout(model, prompts)


def main(output_dir: str, strategy: str) -> None:
    """Run eight updates on 16 prompts of one token each."""
    args = PPOConfig(
        output_dir=output_dir, per_device_train_batch_size=2, gradient_accumulation_steps=1, num_ppo_epochs=1,
        response_length=2, total_episodes=32, save_strategy="no", report_to="none", disable_tqdm=True, use_cpu=True,
        gradient_checkpointing=False, num_sample_generations=0, train_sampling_strategy=strategy,
    )  # fmt: skip
    trainer = SeenPrompts(
        args, make_tokenizer(), tiny_policy(), value_model=tiny_scorer(), reward_funcs=count_w4,
        train_dataset=Dataset.from_dict({"input_ids": [[token] for token in range(3, 19)]}),
    )  # fmt: skip
    trainer.train()
    Path(output_dir, f"seen-{args.process_index}.json").write_text(json.dumps(trainer.seen))


if __name__ == "__main__":
    main(*sys.argv[1:])
