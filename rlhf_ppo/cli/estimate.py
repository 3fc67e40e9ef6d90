"""`rlhf-ppo estimate`: memory of `rlhf-ppo train` by purpose, by arithmetic on the models' configurations."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import torch
from rich.console import Console
from rich.table import Table
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM
from trl.trainer.model_config import ModelConfig

from rlhf_ppo.cli.arguments import PPOScriptArguments, parse
from rlhf_ppo.cli.errors import user_errors
from rlhf_ppo.cli.trainers import has_reward_model, lora_config
from rlhf_ppo.config import PPOConfig
from rlhf_ppo.config.checks import AtLeastOne, Interval, check_ranges, option, ranges_of
from rlhf_ppo.models.adapters import adapter_config, base_of_adapter, is_adapter_directory
from rlhf_ppo.models.heads import ValueHead, is_head_of_policy
from rlhf_ppo.models.loading import load_pretrained
from rlhf_ppo.models.policy_and_value import MAX_CHUNK_ELEMENTS_ON_GPU
from rlhf_ppo.models.reference import asks_for_reference
from rlhf_ppo.models.unwrapping import text_config
from rlhf_ppo.models.value_model import AutoClassifier

PURPOSES = {
    "weights": "policy, value model, reference and reward model; autocast's copies",
    "gradients": "of the trained weights; DDP's buffers",
    "optimizer": "two moments of each trained weight; ZeRO-1's and ZeRO-2's float32 weights",
    "activations": "of one micro-batch",
    "logits": "of one chunk in learning, or of one step of generation",
    "cache": "keys and values of one generation call",
}


@dataclass
class EstimateArguments(PPOScriptArguments):
    """The options of `rlhf-ppo train`, and the devices that a run would have."""

    num_devices: AtLeastOne = option(1, "Devices that train together.")
    zero_stage: Annotated[int, Interval(0, 3)] = option(
        0, "What is sharded over the devices: 0, nothing (DDP); 1 to 3, as in DeepSpeed ZeRO; 3 also for FSDP2."
    )
    prompt_length: AtLeastOne = option(512, "Tokens of a prompt.")


def estimate(argv: Sequence[str] | None = None) -> dict[str, int]:
    """Print the memory that `train` needs on each device with the same options, without loading weights.

    Args:
        argv: The options of `train`, and those of `EstimateArguments`. None takes the program's own.

    Returns:
        Bytes of each of `PURPOSES`.

    Raises:
        SystemExit: An option is wrong, or there is no such model.
    """
    program = "rlhf-ppo estimate"
    script_args, args, model_args = parse((EstimateArguments, PPOConfig, ModelConfig), program, argv)
    with user_errors(program):
        check_ranges(script_args, ranges_of(EstimateArguments))
        num_bytes_by_purpose = estimate_memory(script_args, args, model_args)
    table = Table("memory per device", "GB", "for", title=f"PPO on {script_args.num_devices} device(s)")
    for purpose, num_bytes in num_bytes_by_purpose.items():
        table.add_row(purpose, f"{num_bytes / 1e9:.2f}", PURPOSES[purpose])
    table.add_row(
        "sum", f"{sum(num_bytes_by_purpose.values()) / 1e9:.2f}", "without libraries and fragmentation", style="bold"
    )
    Console().print(table)
    return num_bytes_by_purpose


def estimate_memory(script_args: EstimateArguments, args: PPOConfig, model_args: ModelConfig) -> dict[str, int]:
    """Return the bytes of each of `PURPOSES` on one device.

    Activations of a layer are 34 bytes for each token and hidden unit in 16 bits (arXiv 2205.05198, without attention
    scores); with gradient checkpointing, one layer's, and the input of each layer. In 16 bits autocast keeps copies of
    trained float32 weights until the backward pass; ZeRO-1 and ZeRO-2 store 16-bit weights and shards of float32 ones.
    """
    policy, value_model, frozen = empty_models(script_args, args, model_args)
    stage, devices = script_args.zero_stage, script_args.num_devices
    trained = [weight for model in (policy, value_model) for weight in model.parameters() if weight.requires_grad]
    bits = 4 if model_args.load_in_4bit else 8 if model_args.load_in_8bit else None
    in_16_bits = args.bf16 or args.fp16
    by_autocast, by_deepspeed = in_16_bits and stage == 0, in_16_bits and stage in (1, 2)
    num_trained = sum(weight.numel() for weight in trained)
    stored = 2 * num_trained if by_deepspeed else sum(weight.nbytes for weight in trained)
    copies = sum(2 * weight.numel() for weight in trained if by_autocast and weight.itemsize == 4)
    of_weight = (2 if "8bit" in args.optim else 8) + (4 if by_deepspeed else 0)
    fixed = [weight for model in (policy, *frozen) for weight in model.parameters() if not weight.requires_grad]
    held = sum(weight.numel() * (bits or (16 if by_deepspeed else 8 * weight.itemsize)) // 8 for weight in fixed)
    config, width = text_config(policy), 2 if in_16_bits else 4
    length = (args.max_prompt_length or script_args.prompt_length) + args.response_length
    tokens = args.per_device_train_batch_size * length
    if args.max_tokens_per_micro_batch is not None:
        tokens = max(args.max_tokens_per_micro_batch, length)
    layers, layer = config.num_hidden_layers, 17 * width * tokens * config.hidden_size
    checkpoints = layers * width * tokens * config.hidden_size + layer
    local_batch = args.per_device_train_batch_size * args.gradient_accumulation_steps
    rows = min(args.local_rollout_forward_batch_size, local_batch)
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    head_size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    learned = min(MAX_CHUNK_ELEMENTS_ON_GPU, tokens * config.vocab_size)
    return {
        "weights": (stored + held) // (devices if stage == 3 else 1) + copies,
        "gradients": (8 if stage == 0 and devices > 1 else 4) * num_trained // (devices if stage >= 2 else 1),
        "optimizer": of_weight * num_trained // (devices if stage >= 1 else 1),
        "activations": checkpoints if args.gradient_checkpointing else layers * layer,
        "logits": max((width + 4) * learned, 8 * rows * config.vocab_size),
        "cache": 2 * layers * heads * head_size * width * rows * length,
    }


def empty_models(
    script_args: PPOScriptArguments, args: PPOConfig, model_args: ModelConfig
) -> tuple[nn.Module, nn.Module, list[nn.Module]]:
    """Make policy, value model and frozen models from their configurations, on the device "meta"."""
    trusts = {"trust_remote_code": script_args.trust_remote_code}

    def make(auto: Any, path: str, argument: str, dtype: str | None = model_args.dtype) -> nn.Module:
        revision = model_args.model_revision if argument == "sft_model_path" else "main"
        path = base_of_adapter(path) if is_adapter_directory(path) else path
        labels = {"num_labels": 1} if auto is AutoClassifier else {}
        config = load_pretrained(AutoConfig, path, argument, revision=revision, **trusts, **labels)
        stored = config.dtype or torch.float32 if dtype in ("auto", None) else getattr(torch, dtype)
        with torch.device("meta"):
            return auto.from_config(config, dtype=stored, **trusts)

    of_policy, of_reward = (args.sft_model_path, "sft_model_path"), (args.reward_model_path, "reward_model_path")
    policy = make(AutoModelForCausalLM, *of_policy)
    is_adapted = is_adapter_directory(args.sft_model_path)
    peft_config = adapter_config(args.sft_model_path) if is_adapted else lora_config(model_args)
    scored = has_reward_model(script_args, args)
    of_value = of_reward if scored else of_policy
    if script_args.value_model_path is not None:
        of_value = script_args.value_model_path, "value_model_path"
    is_small = args.share_base_model or is_head_of_policy(script_args.value_model_path)
    value_model = None if is_small else make(AutoClassifier, *of_value, dtype="float32")
    frozen = [] if peft_config or not asks_for_reference(args) else [make(AutoModelForCausalLM, *of_policy)]
    frozen = [] if args.share_base_model else frozen
    if scored and not (args.share_base_model and is_adapter_directory(args.reward_model_path)):
        frozen.append(make(AutoClassifier, *of_reward))
    if peft_config is not None:
        from peft import get_peft_model

        peft_config.inference_mode = False
        policy = get_peft_model(policy, peft_config)  # pyright: ignore[reportArgumentType]
    for model in frozen:
        model.requires_grad_(False)
    if value_model is None:  # a head, or a second adapter over the same base
        value_model = policy if args.share_base_model else ValueHead(policy)
    return policy, value_model, frozen
