"""The workloads: small random models, prompts and hyper-parameters, the same for both trainers.

Imports nothing of either, so that it runs in both environments.
"""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass
from typing import Any

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PreTrainedTokenizerFast,
)

TEMPERATURE = 0.7
STOP = 1
"""Id of the stop token."""


@dataclass(frozen=True)
class Workload:
    """What one update does.

    Attributes:
        model: Arguments of the models' configuration.
        prompt_lengths: Shortest and longest prompt, tokens.
        response_length: Limit, tokens.
        mean_length: Tokens after which a response ends on average; None if none ends early.
        batch_size: Episodes of one update.
        micro_batch_size: Episodes of one forward and backward pass.
        num_ppo_epochs: Passes over them.
    """

    model: dict[str, Any]
    prompt_lengths: tuple[int, int]
    response_length: int
    mean_length: int | None = None
    batch_size: int = 16
    micro_batch_size: int = 8
    num_ppo_epochs: int = 2


def llama(layers: int, width: int, vocabulary: int) -> dict[str, Any]:
    """Describe a Llama with heads of 32 numbers."""
    return {
        "model_type": "llama",
        "num_hidden_layers": layers,
        "hidden_size": width,
        "intermediate_size": 3 * width,
        "num_attention_heads": width // 32,
        "num_key_value_heads": width // 32,
        "vocab_size": vocabulary,
        "max_position_embeddings": 1024,
        "pad_token_id": 0,
        "eos_token_id": STOP,
        "tie_word_embeddings": False,
    }


WORKLOADS = {
    "vocab-heavy": Workload(llama(6, 128, 50304), (16, 16), 48),
    "ragged": Workload(llama(6, 256, 4096), (8, 96), 96, mean_length=40),
    "long-prompt": Workload(llama(6, 256, 4096), (200, 400), 53, mean_length=30),
    "long-prompt-50k": Workload(llama(6, 128, 50304), (200, 400), 53, mean_length=30),
    "tiny": Workload(llama(1, 32, 64), (2, 6), 8, mean_length=4, batch_size=4, micro_batch_size=2, num_ppo_epochs=1),
}


def make_models(workload: Workload) -> dict[str, nn.Module]:
    """Build policy, reference, value and reward model from fixed seeds."""
    config = AutoConfig.for_model(**workload.model)
    torch.manual_seed(0)
    policy = AutoModelForCausalLM.from_config(config)
    if workload.mean_length is not None:
        # Random weights would all but never sample the stop token; its logit gets it the probability 1 / mean_length.
        bias = torch.zeros(config.vocab_size)
        bias[STOP] = TEMPERATURE * math.log(config.vocab_size / workload.mean_length)
        policy.lm_head.bias = nn.Parameter(bias)
    scorers = {}
    for seed, name in enumerate(("value_model", "reward_model"), start=1):
        torch.manual_seed(seed)
        scorers[name] = AutoModelForSequenceClassification.from_config(
            AutoConfig.for_model(**workload.model, num_labels=1)
        )
    return {"model": policy, "ref_model": copy.deepcopy(policy), **scorers}


def make_prompts(workload: Workload, count: int) -> Dataset:
    """Draw prompts of random tokens from a fixed seed."""
    generator = torch.Generator().manual_seed(0)
    shortest, longest = workload.prompt_lengths
    lengths = torch.randint(shortest, longest + 1, (count,), generator=generator).tolist()
    vocabulary = workload.model["vocab_size"]
    return Dataset.from_list(
        [{"input_ids": torch.randint(2, vocabulary, (length,), generator=generator).tolist()} for length in lengths]
    )


def make_tokenizer(workload: Workload) -> PreTrainedTokenizerFast:
    """Make a tokenizer of as many words as the model has; it only pads."""
    words = {f"w{index}": index for index in range(workload.model["vocab_size"])}
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="w2")),
        pad_token="w0",
        eos_token="w1",
        padding_side="left",
    )


def hyper_parameters(workload: Workload, num_updates: int, output_dir: str) -> dict[str, Any]:
    """Give the arguments that both PPOConfigs know."""
    return {
        "output_dir": output_dir,
        "per_device_train_batch_size": workload.micro_batch_size,
        "gradient_accumulation_steps": workload.batch_size // workload.micro_batch_size,
        "num_mini_batches": 1,
        "num_ppo_epochs": workload.num_ppo_epochs,
        "total_episodes": num_updates * workload.batch_size,
        "response_length": workload.response_length,
        "stop_token": "eos",
        "temperature": TEMPERATURE,
        "learning_rate": 1e-6,
        "local_rollout_forward_batch_size": workload.batch_size,
        "num_sample_generations": 0,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "seed": 1,
    }
