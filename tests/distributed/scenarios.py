"""What the processes of the distributed tests do. Every scenario reports how it was launched, and tests check that."""

from __future__ import annotations

from typing import Any

import torch
from datasets import Dataset

from rlhf_ppo import PPOConfig, PPOTrainer
from rlhf_ppo.batch import Prompts, Responses
from rlhf_ppo.generation.sequences import join_responses
from tests import conftest


def launched_as(trainer: PPOTrainer) -> dict[str, Any]:
    """Number of processes, launcher and ZeRO stage, as seen from inside."""
    plugin = trainer.accelerator.state.deepspeed_plugin
    return {
        "num_processes": trainer.accelerator.num_processes,
        "distributed_type": trainer.accelerator.distributed_type.value,
        "zero_stage": None if plugin is None else plugin.zero_stage,
    }


class FixedResponses(PPOTrainer):
    """Answers each prompt with ids drawn from a generator that the prompt alone seeds."""

    def generate_responses(self, policy: Any, prompts: Prompts, config: Any) -> Responses:
        rows = []
        for ids, real in zip(prompts.input_ids, prompts.attention_mask, strict=True):
            generator = torch.Generator().manual_seed(int((ids[real] * torch.arange(1, int(real.sum()) + 1)).sum()))
            rows.append(torch.randint(1, 12, (self.args.response_length,), generator=generator))
        return join_responses(prompts, torch.stack(rows), self.tokens.stop, self.tokens.pad)


def make_trainer(
    output_dir: str, models: str, trainer_class: type[PPOTrainer] = PPOTrainer, num_prompts: int = 32, **overrides: Any
) -> PPOTrainer:
    """A tiny trainer for a few updates, on the models in the directories `policy` and `value_model`."""
    values: dict[str, Any] = {
        "output_dir": output_dir, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2,
        "num_ppo_epochs": 2, "num_mini_batches": 2, "max_steps": 3, "response_length": 8, "stop_token": "eos",
        "learning_rate": 1e-3, "logging_steps": 1, "save_strategy": "no", "report_to": "none", "disable_tqdm": True,
        "bf16": False, "gradient_checkpointing": False, "num_sample_generations": 0, "seed": 3, "ddp_backend": "gloo",
    }  # fmt: skip
    return trainer_class(
        args=PPOConfig(**{**values, **overrides}),
        processing_class=conftest.make_tokenizer(),
        model=f"{models}/policy",
        value_model=f"{models}/value_model",
        train_dataset=Dataset.from_list(conftest.prompt_rows(num_prompts)),
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


def one_step(output_dir: str, models: str, local_batch_size: int) -> dict[str, Any]:
    """Take one SGD step of rate 1 on responses that do not depend on the ranks; return all parameters."""
    trainer = make_trainer(
        output_dir, models, FixedResponses, num_prompts=8, gradient_accumulation_steps=local_batch_size // 2,
        num_ppo_epochs=1, num_mini_batches=1, max_steps=1, optim="sgd", learning_rate=1.0, max_grad_norm=0.0,
        whiten_rewards=True, missing_eos_penalty=1.0,
    )  # fmt: skip
    trainer.train()
    state = trainer.accelerator.get_state_dict(trainer.model_wrapped) or {}
    parameters = {name: value.float().cpu().numpy() for name, value in state.items()}
    return {**launched_as(trainer), "log": trainer.state.log_history, "parameters": parameters}
