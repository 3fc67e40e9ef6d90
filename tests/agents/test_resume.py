"""A resumed run of episodes equals the uninterrupted one, bit for bit."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from rlhf_ppo import PPOTrainer
from tests.agents.chat import ppo_config
from tests.agents.games import Talk, player, tokenizer_of_words
from tests.runs import assert_identical, history, parameters

OPTIONS = {
    **{"per_device_train_batch_size": 8, "num_generations": 1, "response_length": 40, "max_steps": 3},
    **{"num_ppo_epochs": 2, "num_mini_batches": 2, "learning_rate": 0.01, "gae_level": "turn"},
    **{"save_strategy": "steps", "save_steps": 1},
}


class Seeded(Talk):
    """Takes the trainer's seed."""

    def reset(self, seed: int, **row: Any) -> str:  # pyright: ignore[reportIncompatibleMethodOverride]
        return super().reset(seed, "board", 3)


def run(directory: Path, resume: Any = None) -> dict[str, Any]:
    trainer = PPOTrainer(
        ppo_config(directory, **OPTIONS, overwrite_output_dir=not resume),
        tokenizer_of_words(),
        player(),
        environment_factory=Seeded,
    )
    trainer.train(resume_from_checkpoint=resume)
    log = [{key: value for key, value in entry.items() if "latency" not in key} for entry in history(trainer)]
    return {"weights": parameters(trainer), "log": log}


def test_a_run_resumed_after_an_update_is_the_undisturbed_one(tmp_path: Path) -> None:
    undisturbed = run(tmp_path / "run")
    logs = [log for log in undisturbed["log"] if "episode/turns_mean" in log]
    assert len(logs) == 3 and all(log["val/first_logratio"] == 0 for log in logs)
    assert logs[0]["episode/turns_mean"] > 1.2

    shutil.copytree(tmp_path / "run" / "checkpoint-1", tmp_path / "again" / "checkpoint-1")
    assert_identical(run(tmp_path / "again", True), undisturbed)
