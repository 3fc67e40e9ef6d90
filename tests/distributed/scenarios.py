"""What the processes of the distributed tests do. Every scenario reports how it was launched, and tests check that."""

from __future__ import annotations

from typing import Any

from datasets import Dataset

from rlhf_ppo import PPOConfig, PPOTrainer
from tests import conftest


def launched_as(trainer: PPOTrainer) -> dict[str, Any]:
    """Number of processes, launcher and ZeRO stage, as seen from inside."""
    plugin = trainer.accelerator.state.deepspeed_plugin
    return {
        "num_processes": trainer.accelerator.num_processes,
        "distributed_type": trainer.accelerator.distributed_type.value,
        "zero_stage": None if plugin is None else plugin.zero_stage,
    }


def make_trainer(output_dir: str, models: str, **overrides: Any) -> PPOTrainer:
    """A tiny trainer for a few updates, on the models in the directories `policy` and `value_model`."""
    values: dict[str, Any] = {
        "output_dir": output_dir, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2,
        "num_ppo_epochs": 2, "num_mini_batches": 2, "max_steps": 3, "response_length": 8, "stop_token": "eos",
        "learning_rate": 1e-3, "logging_steps": 1, "save_strategy": "no", "report_to": "none", "disable_tqdm": True,
        "bf16": False, "gradient_checkpointing": False, "num_sample_generations": 0, "seed": 3, "ddp_backend": "gloo",
    }  # fmt: skip
    return PPOTrainer(
        args=PPOConfig(**{**values, **overrides}),
        processing_class=conftest.make_tokenizer(),
        model=f"{models}/policy",
        value_model=f"{models}/value_model",
        train_dataset=Dataset.from_list(conftest.prompt_rows(32)),
        eval_dataset=Dataset.from_list(conftest.prompt_rows(6, seed=1)),
        reward_funcs=conftest.count_w4,
    )


def train(output_dir: str, models: str, **overrides: Any) -> dict[str, Any]:
    """Train, save the policy, and return how it was launched, the logged metrics and the policy's whole parameters."""
    trainer = make_trainer(output_dir, models, **overrides)
    trainer.train()
    trainer.save_model(f"{output_dir}/policy")
    state = trainer.accelerator.get_state_dict(trainer.model_wrapped) or {}
    policy = {name: value.float().cpu().numpy() for name, value in state.items() if name.startswith("policy.")}
    return {**launched_as(trainer), "log": trainer.state.log_history, "policy": policy}
