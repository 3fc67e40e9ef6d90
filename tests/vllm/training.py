"""Runs with real vLLM, and how its samples are compared with the trainer's."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForSequenceClassification

from rlhf_ppo import PPOConfig, PPOTrainer
from rlhf_ppo.data.prompts import PromptCollator
from rlhf_ppo.data.rollout import Prompts
from rlhf_ppo.generation.protocol import Sampled
from rlhf_ppo.generation.sampling import greedy_config, response_mask, sample_with, sampling_config
from rlhf_ppo.generation.transformers_engine import TransformersEngine
from tests.conftest import QUIET, make_tokenizer, prompt_rows
from tests.gpu.conftest import small_config, small_policy

EOS = 1
MOST = 64
"""Tokens that vLLM has room for."""
NEAR = 1e-4
"""Nats between two float32 passes."""


def save_policy(folder: Path) -> Path:
    """Save a small policy with heads of 64, the smallest that vLLM's attention on a CPU takes."""
    small_policy(initializer_range=0.15).save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder


def load_policy(saved: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(saved, dtype=torch.float32)


def value_model() -> Any:
    torch.manual_seed(1)
    return LlamaForSequenceClassification(small_config())


def share_of_even_ids(prompts: Any, completions: Any, completion_ids: list[list[int]], **columns: Any) -> list[float]:
    return [sum(token % 2 == 0 for token in ids) / len(ids) for ids in completion_ids]


def make_vllm_trainer(saved: Path, output_dir: Path, **given: Any) -> PPOTrainer:
    """A trainer over the saved policy that generates with vLLM; keyword arguments of `PPOTrainer` or `PPOConfig`."""
    models: dict[str, Any] = {
        "model": load_policy(saved),
        "value_model": value_model(),
        "train_dataset": Dataset.from_list(prompt_rows(64, longest=12)),
        "eval_dataset": Dataset.from_list(prompt_rows(6, seed=5)),
        "reward_funcs": share_of_even_ids,
    }
    models |= {name: given.pop(name) for name in [*models, "peft_config", "environment_factory"] if name in given}
    options = {
        **QUIET, "output_dir": str(output_dir), "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2,
        "num_ppo_epochs": 2, "num_mini_batches": 2, "total_episodes": 24, "response_length": 12, "stop_token": "eos",
        "learning_rate": 1e-2, "logging_steps": 1, "seed": 3, "generation_engine": "vllm",
    }  # fmt: skip
    if given.get("vllm_mode") != "server":
        options["vllm_max_model_length"] = MOST
    tokenizer = AutoTokenizer.from_pretrained(saved)
    return PPOTrainer(args=PPOConfig(**{**options, **given}), processing_class=tokenizer, **models)


def policy_of(trainer: PPOTrainer) -> Any:
    return trainer.accelerator.unwrap_model(trainer.model).policy


def record_ids(trainer: Any) -> list[list[int]]:
    """Return a list that is given the ids of each response that vLLM samples in this process."""
    llm = trainer.sampler.engine.vllm.llm
    generate, ids = llm.generate, list[list[int]]()

    def recording(*given: Any, **how: Any) -> Any:
        outputs = generate(*given, **how)
        ids.extend(list(answer.token_ids) for output in outputs for answer in output.outputs)
        return outputs

    llm.generate = recording
    return ids


def some_prompts(count: int = 16) -> Prompts:
    rows = prompt_rows(count, seed=9, longest=20)
    return Prompts.from_collated(PromptCollator(0)(rows), torch.device("cpu"))


def greedy_agreement(trainer: PPOTrainer, policy: Any) -> float:
    """Return the share of tokens in which vLLM's likeliest responses are those of a policy."""
    config, prompts = greedy_config(trainer.args, trainer.tokens.stop), some_prompts()
    sampled = sample_with(trainer.sampler.engine, policy_of(trainer), prompts, config).ids
    own = TransformersEngine(8).sample(policy, prompts, config).ids
    width = min(sampled.shape[1], own.shape[1])
    mask = response_mask(own, trainer.tokens.stop)[:, :width]
    return float((sampled[:, :width] == own[:, :width])[mask].float().mean())


def sample_as(trainer: PPOTrainer, suppressed: list[int] | None = None, **options: Any) -> tuple[Sampled, Prompts]:
    """Let vLLM sample with other options than the run's."""
    args = copy.deepcopy(trainer.args)
    for name, value in options.items():
        setattr(args, name, value)
    prompts = some_prompts()
    config = sampling_config(args, trainer.tokens.stop, suppressed)
    return sample_with(trainer.sampler.engine, policy_of(trainer), prompts, config), prompts


@torch.no_grad()
def differences(
    trainer: PPOTrainer,
    sampled: Sampled,
    prompts: Prompts,
    suppressed: list[int] | None = None,
    policy: Any = None,
    **options: Any,
) -> Tensor:
    """Return how far vLLM's log-probabilities of real tokens are from those of the distribution that was asked for."""
    ids = sampled.ids
    mask = torch.cat((prompts.attention_mask, torch.ones_like(ids, dtype=torch.bool)), dim=1)
    positions = (mask.cumsum(dim=1) - 1).clamp(min=0)
    output = (policy or policy_of(trainer))(
        torch.cat((prompts.input_ids, ids), dim=1), attention_mask=mask, position_ids=positions
    )
    logits = output.logits[:, prompts.input_ids.shape[1] - 1 : -1].float() / options.get(
        "temperature", trainer.args.temperature
    )
    if suppressed:
        logits[..., suppressed] = -torch.inf
    if top_k := options.get("top_k", 0):
        logits = logits.masked_fill(logits < logits.topk(top_k, dim=-1).values[..., -1:], -torch.inf)
    if (top_p := options.get("top_p", 1.0)) < 1:
        ascending, order = logits.sort(dim=-1)
        left_out = ascending.softmax(dim=-1).cumsum(dim=-1) <= 1 - top_p
        logits = logits.masked_fill(torch.zeros_like(left_out).scatter(-1, order, left_out), -torch.inf)
    own = logits.log_softmax(dim=-1).gather(-1, ids[..., None]).squeeze(-1)
    assert sampled.logprobs is not None
    return (own - sampled.logprobs).abs()[response_mask(ids, trainer.tokens.stop)]


def first_logs(trainer: PPOTrainer) -> list[dict[str, float]]:
    """Return the logs of the updates."""
    return [entry for entry in trainer.state.log_history if "sampling/importance_sampling_ratio/mean" in entry]
