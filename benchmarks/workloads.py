"""The workloads: small random models, prompts and hyper-parameters, the same for both trainers.

This file imports neither trainer, so it runs in both environments.

On a CPU both trainers compute in the models' own dtype, with `bf16=False`, except in *ragged-bf16*. On a GPU they do
what users get: float32 weights and bf16 arithmetic. TRL 1.12's PPO makes its own Accelerator, which under
transformers 5 does not see `bf16=True`; both see `ACCELERATE_MIXED_PRECISION=bf16`, which `compare.py` sets.

The *pythia* workloads have models stored in bfloat16 instead, without autocast. (Only speed and memory are compared:
so stored, most of an update is rounded away at a small learning rate, and our trainer warns of that.)
"""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
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
        num_mini_batches: Optimizer steps of a pass.
        rollout_batch_size: Episodes generated and scored at a time; None for all of them.
        dtype: What the models' weights are stored and multiplied in.
        lora_rank: Rank of the policy's adapter on all linear layers below the head; None trains its weights. The value
            model's are always trained.
        autocast: Whether products are computed in bfloat16.
        scorer: Arguments of the configuration of value and reward model, where it is another one than the policy's.
        copies: Rows of each prompt.
        chats: Whether prompts are questions in the chat model's own template, whose system text begins all of them.
    """

    model: dict[str, Any]
    prompt_lengths: tuple[int, int]
    response_length: int
    mean_length: int | None = None
    batch_size: int = 16
    micro_batch_size: int = 8
    num_ppo_epochs: int = 2
    num_mini_batches: int = 1
    rollout_batch_size: int | None = None
    dtype: torch.dtype = torch.float32
    lora_rank: int | None = None
    autocast: bool = False
    scorer: dict[str, Any] | None = None
    copies: int = 1
    chats: bool = False


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


def grouped(layers: int, width: int, heads: int, inner: int, vocabulary: int = 50304) -> dict[str, Any]:
    """Describe a Llama with four query heads for each head of keys and values."""
    sizes = {"num_attention_heads": heads, "num_key_value_heads": heads // 4, "intermediate_size": inner}
    return {**llama(layers, width, vocabulary), **sizes, "max_position_embeddings": 2048}


def pythia(layers: int, width: int, heads: int, vocabulary: int = 50304) -> dict[str, Any]:
    """Describe a GPT-NeoX as EleutherAI's Pythia models are, but for the ids of the special tokens."""
    return {
        "model_type": "gpt_neox",
        "num_hidden_layers": layers,
        "hidden_size": width,
        "intermediate_size": 4 * width,
        "num_attention_heads": heads,
        "vocab_size": vocabulary,
        "max_position_embeddings": 2048,
        "rotary_pct": 0.25,
        "use_parallel_residual": True,
        "pad_token_id": 0,
        "eos_token_id": STOP,
        "tie_word_embeddings": False,
    }


def tldr(model: dict[str, Any]) -> Workload:
    """Ask of a model in bfloat16 what *long-prompt* asks: the lengths of TL;DR; batches as in TRL's example of it."""
    return Workload(model, (200, 400), 53, 30, batch_size=64, micro_batch_size=16, dtype=torch.bfloat16)


def as_users_run(model: dict[str, Any], **changes: Any) -> Workload:
    """Ask what *long-prompt* asks of float32 weights with products in bfloat16."""
    return replace(tldr(model), dtype=torch.float32, autocast=True, **changes)


SMOLLM2_135M = {
    **llama(30, 576, 49152),
    "intermediate_size": 1536,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "tie_word_embeddings": True,
}
CHATS = Workload(SMOLLM2_135M, (24, 72), 32, batch_size=8, num_ppo_epochs=1)
RAGGED = Workload(llama(6, 256, 4096), (8, 96), 96, mean_length=40)
ON_CPU = {
    "smollm2-135m": CHATS,
    "smollm2-135m-lora": replace(CHATS, lora_rank=16, batch_size=16, num_ppo_epochs=2, num_mini_batches=2),
    "vocab-heavy": Workload(llama(6, 128, 50304), (16, 16), 48),
    "ragged": RAGGED,
    "ragged-lora": replace(RAGGED, lora_rank=16),
    "ragged-bf16": replace(RAGGED, autocast=True),
    "long-prompt": Workload(llama(6, 256, 4096), (200, 400), 53, mean_length=30),
    "long-prompt-50k": Workload(llama(6, 128, 50304), (200, 400), 53, mean_length=30),
}
LLAMA_1B = grouped(16, 2048, 32, 5632)
SHARED = {
    "smollm2-135m-chats": replace(
        CHATS, chats=True, batch_size=16, micro_batch_size=16, lora_rank=16, num_ppo_epochs=2
    ),
    "smollm2-135m-groups": replace(
        CHATS, prompt_lengths=(160, 200), copies=8, batch_size=16, lora_rank=16, num_ppo_epochs=2
    ),
}
"""Rows that begin alike: `make chat-model` makes the tokenizer of the first."""
ON_GPU = {
    "llama-160m": as_users_run(grouped(12, 768, 12, 2048)),
    "llama-410m": as_users_run(grouped(24, 1024, 16, 2816)),
    "llama-1b": as_users_run(LLAMA_1B, micro_batch_size=8),
    "llama-8b-lora": replace(
        tldr(grouped(32, 4096, 32, 14336, 128256)), autocast=True, lora_rank=16, micro_batch_size=4, scorer=LLAMA_1B
    ),
}
IN_BF16 = {
    "pythia-160m": tldr(pythia(12, 768, 12)),
    "pythia-410m": tldr(pythia(24, 1024, 16)),
    "pythia-410m-512": replace(tldr(pythia(24, 1024, 16)), batch_size=512, rollout_batch_size=64),
    "pythia-1b": tldr(pythia(16, 2048, 8)),
    "pythia-1b-lora": replace(tldr(pythia(16, 2048, 8)), lora_rank=16),
}
TINY = Workload(llama(1, 32, 64), (2, 6), 8, mean_length=4, batch_size=4, micro_batch_size=2, num_ppo_epochs=1)
LORA_GROUPS = replace(TINY, copies=8, batch_size=16, micro_batch_size=8, num_ppo_epochs=2, lora_rank=4)
TINY_PYTHIA = replace(TINY, model=pythia(1, 32, 2, vocabulary=64), dtype=torch.bfloat16)
WORKLOADS = {
    **ON_CPU,
    **SHARED,
    **ON_GPU,
    **IN_BF16,
    "tiny": TINY,
    "tiny-pythia": TINY_PYTHIA,
    "tiny-lora": replace(TINY_PYTHIA, lora_rank=4),
    "tiny-llama": replace(TINY, model=grouped(1, 32, 4, 48, 64), autocast=True),
    "tiny-8b-lora": replace(
        TINY,
        model=grouped(1, 32, 4, 48, 64),
        dtype=torch.bfloat16,
        autocast=True,
        lora_rank=4,
        scorer=grouped(1, 16, 4, 24, 64),
    ),
}
DEFAULTS = {"cpu": list(ON_CPU), "cuda": list(ON_GPU)}
"""The workloads that are measured on a device where none are named."""


def make_models(workload: Workload, device: str = "cpu") -> dict[str, Any]:
    """Build policy, reference, value and reward model from fixed seeds.

    Args:
        workload: Says which.
        device: Where their weights are drawn, `cpu` or `cuda`; a seed gives others on each.

    Returns:
        The models by the trainers' names for them. With an adapter there is its configuration and no reference model:
        the policy without the adapter is the reference.
    """
    config = AutoConfig.for_model(**workload.model)
    scorers = {}
    with torch.device(device):
        torch.manual_seed(0)
        policy = AutoModelForCausalLM.from_config(config, dtype=workload.dtype)
        if workload.mean_length is not None:
            make_stops_likely(policy, workload.mean_length)
        for seed, name in enumerate(("value_model", "reward_model"), start=1):
            torch.manual_seed(seed)
            scorers[name] = AutoModelForSequenceClassification.from_config(
                AutoConfig.for_model(**(workload.scorer or workload.model), num_labels=1), dtype=workload.dtype
            )
    if workload.lora_rank is not None:
        return {"model": policy, "ref_model": None, "peft_config": adapter(workload.lora_rank), **scorers}
    return {"model": policy, "ref_model": copy.deepcopy(policy), **scorers}


@torch.no_grad()
def make_stops_likely(policy: Any, mean_length: int) -> None:
    """Give the stop token the probability `1 / mean_length` by its bias: random weights would hardly ever sample it.

    The bias is `T log(V / mean_length)`, above the mean of the `V` logits. In a GPT-NeoX it also makes up for their
    variance `s^2`, by which their exponentials sum to `V exp(s^2 / (2 T^2))`, and the token's own weights are 0: in a
    model as wide as Pythia they would say more than the bias. The narrow Llamas are left as they have been measured.
    """
    config, head = policy.config, policy.get_output_embeddings()
    bias = TEMPERATURE * math.log(config.vocab_size / mean_length)
    if config.model_type == "gpt_neox":
        head.weight[STOP] = 0.0
        variance = config.initializer_range**2 * config.hidden_size  # the last norm leaves numbers of variance 1
        bias += variance / (2 * TEMPERATURE)
    head.bias = nn.Parameter(torch.zeros_like(head.weight[:, 0]))
    head.bias[STOP] = bias


def adapter(rank: int) -> Any:
    """Configure LoRA on all linear layers below the head."""
    from peft import LoraConfig

    return LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear", task_type="CAUSAL_LM")


def make_prompts(workload: Workload, count: int) -> Dataset:
    """Draw prompts of random tokens from a fixed seed, or ask questions of the chat model."""
    if workload.chats:
        return Dataset.from_list([{"input_ids": ids} for ids in chats(count)])
    generator = torch.Generator().manual_seed(0)
    shortest, longest = workload.prompt_lengths
    lengths = torch.randint(shortest, longest + 1, (count // workload.copies,), generator=generator).tolist()
    vocabulary = workload.model["vocab_size"]
    prompts = [torch.randint(2, vocabulary, (length,), generator=generator).tolist() for length in lengths]
    return Dataset.from_list([{"input_ids": ids} for ids in prompts for _ in range(workload.copies)])


def chats(count: int) -> list[list[int]]:
    """Return the tokens of questions about topics, in the template of `chat-model/`."""
    tokenizer = AutoTokenizer.from_pretrained(Path(__file__).parents[1] / "chat-model")
    forms = "Tell me about {}.", "What do you think of {}?", "Describe {}.", "Why do people like {}?"
    topics = "bread winter trains coffee gardens bicycles music mountains letters markets dreams rivers honey".split()
    asked = [form.format(topic) for topic in topics for form in forms][:count]
    messages = [[{"role": "user", "content": question}] for question in asked]
    return tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"]


def make_tokenizer(workload: Workload) -> PreTrainedTokenizerFast:
    """Make a tokenizer of as many words as the model has; it only pads."""
    words = {f"w{index}": index for index in range(workload.model["vocab_size"])}
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="w2")),
        pad_token="w0",
        eos_token="w1",
        padding_side="left",
    )


def hyper_parameters(workload: Workload, num_updates: int, output_dir: str, device: str = "cpu") -> dict[str, Any]:
    """Give the arguments that both PPOConfigs know; `bf16` on a CPU, where TRL refuses it, is for ours alone."""
    return {
        "output_dir": output_dir,
        "per_device_train_batch_size": workload.micro_batch_size,
        "gradient_accumulation_steps": workload.batch_size // workload.micro_batch_size,
        "num_mini_batches": workload.num_mini_batches,
        "num_ppo_epochs": workload.num_ppo_epochs,
        "total_episodes": num_updates * workload.batch_size,
        "response_length": workload.response_length,
        "stop_token": "eos",
        "temperature": TEMPERATURE,
        "learning_rate": 1e-6,
        "local_rollout_forward_batch_size": workload.rollout_batch_size or workload.batch_size,
        "num_sample_generations": 0,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": device == "cpu",
        "bf16": workload.autocast,
        "gradient_checkpointing": False,
        "seed": 1,
    }
