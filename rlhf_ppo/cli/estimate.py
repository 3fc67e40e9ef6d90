"""`rlhf-ppo estimate`: memory and time of `rlhf-ppo train`, from configurations alone."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import torch
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.utils.deepspeed import HfDeepSpeedConfig  # needs no DeepSpeed
from rich.console import Console
from rich.table import Table
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification
from transformers.trainer_utils import has_length
from trl.trainer.model_config import ModelConfig
from trl.trainer.utils import get_peft_config
from yaml import YAMLError

from rlhf_ppo.cli.arguments import PPOScriptArguments
from rlhf_ppo.cli.training import has_reward_model, loading_settings, policy_tokenizer
from rlhf_ppo.config import PPOConfig
from rlhf_ppo.config.inherited import reduces_once
from rlhf_ppo.config.ppo_config import Sizes
from rlhf_ppo.config.validation import AtLeastOne, Interval, check_ranges, option, ranges_of
from rlhf_ppo.estimate.run import (
    MEMORY_NOT_COUNTED,
    NOT_COUNTED,
    describe_fit,
    describe_processes,
    duration,
    mean_prompt_length,
    measure_rates,
    rate,
    size,
)
from rlhf_ppo.estimate.update import Estimate, NoStorage, Sharding
from rlhf_ppo.models.adapters import adapter_config, base_of_adapter, is_adapter_directory
from rlhf_ppo.models.capabilities import position_limit, vocabulary_of
from rlhf_ppo.models.heads import multiply_head_in_float32
from rlhf_ppo.models.loading import load_pretrained
from rlhf_ppo.models.reference import INITIAL_ADAPTER, asks_for_reference, can_hold_two
from rlhf_ppo.processes.distributed import mixed_precision_dtype
from rlhf_ppo.rewards.reward_model import shares_tokens, tokenizer_beside
from rlhf_ppo.terminal import cell, hide_library_warnings, print_text
from rlhf_ppo.training.datasets import PromptPreparation
from rlhf_ppo.training.episodes import EpisodeRollouts

PURPOSES = {
    "weights": "policy and value model",
    "frozen": "reference and reward models",
    "gradients": "of the trained weights, with DDP's buckets",
    "optimizer": "its state, with DeepSpeed's float32 weights",
    "generation": "cache and logits of one call, policy cast or gathered",
    "learning": "activations of one micro-batch, weights cast or gathered, head",
}
"""Purposes of memory: attributes of `Estimate`, in the order of the table."""


_Rate = Annotated[float, Interval(1, math.inf)]


@dataclass
class EstimateArguments(PPOScriptArguments):
    """The options of `rlhf-ppo train`, and the devices that a run would have.

    Raises:
        ValueError: A number is not positive.
    """

    num_devices: AtLeastOne | None = option(None, "Devices; default: those of accelerate_config, or 1.")
    accelerate_config: str | None = option(
        None, "Configuration file of `accelerate launch`; its engine divides memory between devices."
    )
    device_flops: _Rate | None = option(None, "FLOP/s of a device, such as 4e14; default: measured on this machine.")
    device_bandwidth: _Rate | None = option(
        None, "Memory bandwidth of a device in bytes/s, such as 3e12; default: measured on this machine."
    )
    device_memory: _Rate | None = option(
        None, "Memory of a device in bytes, such as 8e10; prints the largest micro-batch that fits."
    )

    def __post_init__(self) -> None:
        """Check the numbers."""
        check_ranges(self, ranges_of(EstimateArguments))


@dataclass(frozen=True)
class Devices:
    """The devices of a run.

    Attributes:
        count: Number of devices.
        engine: Name of the engine that divides memory between them.
        sharding: Parts of memory that it divides.
    """

    count: int
    engine: str
    sharding: Sharding


def devices_of(script_args: EstimateArguments, args: PPOConfig) -> Devices:
    """Return the devices of the options; without an accelerate file, `--deepspeed` and `--fsdp` name the engine.

    Raises:
        ValueError: The accelerate configuration cannot be read, or names no number of processes.
    """
    path, count = script_args.accelerate_config, script_args.num_devices
    stage, is_fsdp = getattr(args.deepspeed_plugin, "zero_stage", None), bool(args.fsdp)
    if path is not None:
        try:
            config: Any = load_config_from_file(path)
            stage, is_fsdp = _zero_stage(config.deepspeed_config or {}), bool(config.fsdp_config)
        except (OSError, ValueError, TypeError, KeyError, AttributeError, YAMLError) as error:  # of an empty one
            raise ValueError(f"accelerate_config={path!r} is not a configuration of accelerate: {error}") from error
        count = count or config.num_processes or 0
        if count < 1:  # accelerate's -1: the launcher is told the number
            raise ValueError(f"accelerate_config={path!r} has no num_processes: give num_devices")
    count = count or 1
    engine = "FSDP" if is_fsdp else f"DeepSpeed ZeRO-{stage}" if stage else "DDP" if count > 1 else ""
    sharding = Sharding.of(stage, is_fsdp, count, mixed_precision_dtype(args), reduces_once(args))
    return Devices(count, engine, sharding)


def _zero_stage(settings: Mapping[str, Any]) -> int | None:
    """Return the stage in the DeepSpeed settings of accelerate, or in the file that they name."""
    if (path := settings.get("deepspeed_config_file")) is None:
        return settings.get("zero_stage")
    return HfDeepSpeedConfig(path).get_value("zero_optimization.stage")


def models_without_weights(
    script_args: PPOScriptArguments, args: PPOConfig, model_args: ModelConfig
) -> tuple[nn.Module, nn.Module, list[nn.Module]]:
    """Make the models of a run from their configurations: their parameters have shapes and no storage.

    Args:
        script_args: Gives `trust_remote_code`, `reward_funcs` and `value_model_path`.
        args: Gives the other paths.
        model_args: How models are loaded, and the policy's adapter.

    Returns:
        Policy and value model in training mode, and the frozen models, the reference first.

    Raises:
        ValueError: There is no such model, or it is quantized, or shares its base.
    """
    if args.share_base_model:
        raise ValueError(
            "share_base_model=True cannot be estimated without weights: leave it out here; the estimate at the start "
            "of the run counts the base once"
        )
    settings = loading_settings(script_args.trust_remote_code, model_args)
    peft_config = get_peft_config(model_args)
    is_trained = is_adapter_directory(args.sft_model_path)
    if is_trained:
        peft_config = adapter_config(args.sft_model_path)
        peft_config.inference_mode = False

    def make(auto: Any, path: str, argument: str, **changes: Any) -> nn.Module:
        return without_weights(auto, path, argument, args.device, settings | changes)

    of_policy = args.sft_model_path, "sft_model_path"
    of_reward = args.reward_model_path, "reward_model_path"
    policy = make(AutoModelForCausalLM, *of_policy)
    frozen = [] if peft_config or not asks_for_reference(args) else [make(AutoModelForCausalLM, *of_policy)]
    of_value = of_policy
    if has_reward_model(script_args, args):
        frozen.append(make(AutoModelForSequenceClassification, *of_reward))
        if _can_be_value_model(frozen[-1], script_args, args, model_args):
            of_value = of_reward
    if script_args.value_model_path is not None:
        of_value = script_args.value_model_path, "value_model_path"
    value_model = make(AutoModelForSequenceClassification, *of_value, dtype=torch.float32, num_labels=1)
    if peft_config is not None:
        from peft import get_peft_model

        with hide_library_warnings():
            policy = get_peft_model(policy, peft_config)
            if is_trained and asks_for_reference(args) and can_hold_two(policy):
                policy.add_adapter(INITIAL_ADAPTER, peft_config)
    multiply_head_in_float32(policy, args.lm_head_float32)
    for model in frozen:
        model.requires_grad_(False).eval()
    return policy.train(), value_model.train(), frozen


def _can_be_value_model(
    reward: nn.Module, script_args: PPOScriptArguments, args: PPOConfig, model_args: ModelConfig
) -> bool:
    """Return whether a reward model reads the policy's tokens and scores the last token."""
    own = tokenizer_beside(args.reward_model_path, script_args.trust_remote_code)
    reads_tokens = own is None or shares_tokens(policy_tokenizer(script_args, args, model_args), own)
    return reads_tokens and isinstance(getattr(reward, "score", None), nn.Module)


def without_weights(auto: Any, path: str, argument: str, device: torch.device, settings: dict[str, Any]) -> nn.Module:
    """Make a model from its configuration: its parameters have shapes and no storage.

    Args:
        auto: A class such as `AutoModelForCausalLM`.
        path: Directory or hub name of the model; of an adapter, its base is made.
        argument: The option that gave the path, for the error message.
        device: The device of the parameters.
        settings: Those of `loading_settings`; `num_labels` of a classifier, 1 by default.

    Raises:
        ValueError: There is no such model, or it is quantized.
    """
    if "quantization_config" in settings:
        raise ValueError("load_in_4bit and load_in_8bit cannot be estimated: leave them out")
    loading = {name: settings[name] for name in ("revision", "trust_remote_code")}
    labels = {"num_labels": settings.get("num_labels", 1)} if auto is AutoModelForSequenceClassification else {}
    source = base_of_adapter(path) if is_adapter_directory(path) else path
    config = load_pretrained(AutoConfig, source, argument, **loading, **labels)
    dtype = settings["dtype"] if isinstance(settings["dtype"], torch.dtype) else config.dtype or torch.float32
    with NoStorage(), device:
        return auto.from_config(
            config,
            dtype=dtype,
            attn_implementation=settings["attn_implementation"],
            trust_remote_code=settings["trust_remote_code"],
        )


def prompts_of(
    args: PPOConfig, policy: nn.Module, load: Callable[[], tuple[Any, Any]], episodes: EpisodeRollouts | None = None
) -> tuple[int, int | None]:
    """Return the length of a prompt in tokens and the number of prompts, None if it is not needed.

    Args:
        args: Prompts have the length `max_prompt_length` if it is set, otherwise the mean length of the data set.
        policy: The policy.
        load: Loads its tokenizer and the data set; called only if one of them is needed.
        episodes: Renders prompts with the descriptions of tools; the text of `reset` does not count.

    Raises:
        ValueError: The data set is wrong, or a stream without known lengths.
    """
    if args.max_prompt_length is not None and (args.max_steps > 0 or args.total_episodes is not None):
        return args.max_prompt_length, None
    tokenizer, dataset = load()
    if episodes is not None:
        dataset = episodes.prepare(tokenizer, dataset)
    encoder = None if episodes is None else episodes.encoder
    preparation = PromptPreparation(tokenizer, args, vocabulary_of(policy), position_limit(policy), encoder=encoder)
    rows = preparation.prepared(dataset, "train_dataset")
    if not has_length(rows):
        raise ValueError(
            "dataset_streaming=True: number and length of the prompts are unknown; set max_prompt_length, and "
            "max_steps or total_episodes"
        )
    return args.max_prompt_length or mean_prompt_length(rows), len(rows)


def show(
    estimate: Estimate,
    args: PPOConfig,
    sizes: Sizes,
    devices: Devices,
    prompt_length: int,
    rates: Sequence[float | None],
    dtype: torch.dtype,
    memory: float | None,
) -> None:
    """Print an estimate.

    Args:
        estimate: The estimate of one device.
        args: The arguments.
        sizes: Sizes that follow from them.
        devices: The devices.
        prompt_length: Tokens of a prompt.
        rates: FLOP/s and bytes/s of a device; None: measured on this machine.
        dtype: The type of matrix products.
        memory: Bytes of a device; None: unknown.
    """
    devices_text = f"{devices.count} device{'s' * (devices.count > 1)}" + f", {devices.engine}" * bool(devices.engine)
    table = Table(
        "memory per device", "", "for", "divided by", title=cell(f"PPO of {args.sft_model_path} on {devices_text}")
    )
    of_weights = {"frozen": "weights"}
    for name, purpose in PURPOSES.items():
        parts = getattr(devices.sharding, of_weights.get(name, name), 1)
        table.add_row(name, size(getattr(estimate, name)), purpose, str(parts) if parts > 1 else "")
    table.add_row("peak", size(estimate.peak), "all, and generation or learning", "", style="bold")
    measured = measure_rates(args.device, dtype) if None in rates else (0, 0)
    flops, bandwidth = (given or own for given, own in zip(rates, measured, strict=True))
    seconds, num_updates = estimate.seconds(flops, bandwidth), sizes.num_total_batches
    episodes = num_updates * sizes.batch_size  # every update has a full batch
    Console().print(table)
    print_text(f"Not counted in memory: {MEMORY_NOT_COUNTED}.")
    print_text(
        f"One update: {sizes.batch_size} episodes of {prompt_length} + {args.response_length} tokens; on each device "
        f"{rate(estimate.flops)}FLOP and {rate(estimate.decoded)}B read in generation: at least {seconds:.2g} s at "
        f"{rate(flops)}FLOP/s and {rate(bandwidth)}B/s. Not counted in time: {NOT_COUNTED}.\n"
        f"All {num_updates} updates, {episodes} episodes: {duration(seconds * num_updates)} or more."
    )
    if besides := describe_processes(estimate, seconds, memory):
        print_text(besides)
    if memory is not None:
        print_text(describe_fit(estimate, memory))
