"""The transformers model inside its wrappers: parts, configuration, modes of learning, ZeRO-3 shards and copies.

Modules stay in eval mode while models learn. Dropout, jitter and random routing happen where `training` is True: the
importance ratio would not start at 1. Only modules that recompute activations, which transformers does in training
mode alone, are in training mode; they switch to eval mode inside the recomputed function.
"""

from __future__ import annotations

import copy
import functools
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import ActivationWrapper
from torch.distributed.tensor import DTensor
from transformers import GenerationConfig, PreTrainedConfig, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.utils.generic import ModelOutput

from rlhf_ppo.ranks.processes import get_logger, mixed_precision_dtype

if TYPE_CHECKING:
    from accelerate import Accelerator
    from peft import PeftModel
    from typing_extensions import TypeIs

logger = get_logger(__name__)

T = TypeVar("T")

CACHE = "cache" if hasattr(ModelOutput, "past_key_values") else "past_key_values"
"""Name of the key-value cache in arguments and outputs; transformers 5.24 renamed it, and warns of the old name."""


def is_peft_model(model: nn.Module) -> TypeIs[PeftModel]:
    """Return whether `model` is a `peft.PeftModel` (False where PEFT is not installed)."""
    try:
        from peft import PeftModel
    except ImportError:
        return False
    return isinstance(model, PeftModel)


def transformers_model(model: nn.Module) -> PreTrainedModel:
    """Return the transformers model inside a `PeftModel` (adapters stay injected), or `model` itself."""
    # No isinstance: tests and checks pass other classes.
    return cast(PreTrainedModel, model.get_base_model() if is_peft_model(model) else model)


def as_module(model: Any) -> nn.Module:
    """Return a model as a `torch.nn.Module`, which Trainer's types do not state."""
    return model


def with_adapters(model: nn.Module) -> PeftModel:
    """Return a model as the `peft.PeftModel` that it is."""
    return cast("PeftModel", model)


def active_adapter(model: nn.Module) -> str:
    """Return the name of a `PeftModel`'s active adapter."""
    return str(with_adapters(model).active_adapter)


def output_layer(policy: nn.Module) -> nn.Module:
    """Return a language model's head."""
    return cast(nn.Module, transformers_model(policy).get_output_embeddings())


def without_wrapper(module: nn.Module) -> nn.Module:
    """Return the module inside PEFT's wrapper: the layer under adapters, or the original of a fully trained module."""
    for name in ("base_layer", "original_module", "token_adapter"):
        if (inner := module._modules.get(name)) is not None:
            return without_wrapper(inner)
    return module


def backbone(model: nn.Module) -> nn.Module:
    """Return the part of a model below its head, which computes hidden states."""
    base = transformers_model(model)
    body = base.base_model
    if body is not base:
        return body
    # Some classes declare a prefix other than the name of their backbone (Llama4).
    parts = [child for child in base.children() if isinstance(child, PreTrainedModel)]
    if len(parts) > 1 and base.get_output_embeddings() is not None:  # Llama4 with vision
        return base.get_decoder()
    return parts[0] if len(parts) == 1 else base


def text_config(model: nn.Module) -> PreTrainedConfig:
    """Return the configuration of the language model, also inside a model with vision (Gemma 3)."""
    return transformers_model(model).config.get_text_config()


@contextmanager
def configuration_kept(model: nn.Module, name: str) -> Iterator[None]:
    """Restore an entry of a model's configuration, which is saved with the model, after a context."""
    config = transformers_model(model).config
    was_there, value = hasattr(config, name), getattr(config, name, None)
    try:
        yield
    finally:
        if was_there:
            setattr(config, name, value)
        elif hasattr(config, name):
            delattr(config, name)


_FLAGS: dict[str, bool | None] = {
    "return_dict": True,
    **dict.fromkeys(("output_router_logits", "_output_attentions", "output_hidden_states"), False),
}
"""Entries of configurations that change what a forward pass returns, and the values that this package needs."""

_ORIGINAL_FLAGS = "original_flags"


def fix_outputs(model: nn.Module) -> None:
    """Make forward passes return what this package reads, whatever the configuration says; see `original_outputs`.

    Args:
        model: A transformers model, or a `PeftModel` around one; its configurations are changed in place.
    """
    base = transformers_model(model)
    original: dict[tuple[str, str], Any] = vars(base).setdefault(_ORIGINAL_FLAGS, {})
    for part, config in _configurations(base):
        for name, value in _FLAGS.items():
            if getattr(config, name, value) not in (value, None):
                original[part, name] = getattr(config, name)
                setattr(config, name, value)
    generation_config = getattr(base, "generation_config", None)
    for name in ("output_attentions", "output_hidden_states"):
        if getattr(generation_config, name, None):  # copied from the configuration
            setattr(generation_config, name, None)


@contextmanager
def original_outputs(model: nn.Module) -> Iterator[None]:
    """Restore inside a context, in which the model is saved, what `fix_outputs` has changed in the configurations."""
    original: dict[tuple[str, str], Any] = getattr(transformers_model(model), _ORIGINAL_FLAGS, {})
    configs = dict(_configurations(transformers_model(model))) if original else {}
    for (part, name), value in original.items():
        setattr(configs[part], name, value)
    try:
        yield
    finally:
        for part, name in original:
            setattr(configs[part], name, _FLAGS[name])


def _configurations(base: PreTrainedModel) -> list[tuple[str, Any]]:
    """Return a model's configuration, and those of its parts, by name."""
    parts = [(name, getattr(base.config, name, None)) for name in base.config.sub_configs]
    return [("", base.config), *((name, part) for name, part in parts if part is not None)]


def no_split_modules(*models: nn.Module) -> list[str]:
    """Name the classes of the blocks that FSDP wraps one by one."""
    classes = {type(part).__name__.removeprefix("FSDP") for model in models for part in model.modules()}
    named = {name for model in models for name in transformers_model(model)._no_split_modules or ()}
    return sorted(named & classes)  # a vision tower's names those of its text model too


def settle_special_tokens(model: nn.Module, given_eos: int | list[int] | None) -> None:
    """Undo some of Trainer's changes of special tokens: those that layers read, added stops, and foreign padding.

    Trainer copies the tokenizer's special tokens into the saved configurations. Some layers read those with which they
    were made, which the configuration keeps: Qwen4-Exp hashes EOS, and the positions of XGLM depend on the embedding's
    padding. The `generation_config` has the tokenizer's, except EOS: a second run on the same model would stop at both
    EOS tokens. Most architectures cannot be loaded with an added "[PAD]" beyond the vocabulary.

    Args:
        model: A transformers model, or a `PeftModel` around one.
        given_eos: The EOS tokens of its `generation_config` before Trainer's changes.
    """
    base, config = transformers_model(model), text_config(model)
    for module in base.modules():
        if isinstance(read := vars(module).get("eos_token_id"), int):
            ids = config.eos_token_id
            config.eos_token_id = sorted(ids, key=lambda token: token != read) if isinstance(ids, list) else read
    if (padding := getattr(base.get_input_embeddings(), "padding_idx", None)) is not None:
        config.pad_token_id = padding
    generation_config = getattr(base, "generation_config", None)
    if generation_config is not None:
        generation_config.eos_token_id = given_eos
    for holder in (config, generation_config):
        if holder is not None and (holder.pad_token_id or 0) >= config.vocab_size:
            holder.pad_token_id = None


def drop_ignored_generation_settings(model: nn.Module) -> None:
    """Unset what `generate` ignores in a `generation_config`, such as a temperature without `do_sample`.

    Many published models have such settings, and transformers refuses to save a `generation_config` that holds them
    if anything in it has changed, as Trainer changes its special tokens. The run would end at its first checkpoint.

    Args:
        model: A transformers model, or a `PeftModel` around one.
    """
    config = getattr(transformers_model(model), "generation_config", None)
    try:
        if config is not None:
            config.validate(strict=True)
    except ValueError as error:
        names = re.findall(r"^- `(\w+)`: ", str(error), re.MULTILINE)
        for name in names:
            setattr(config, name, None)
        if names:
            logger.warning(
                f"The model is saved without {', '.join(names)} of its generation_config, which generate() ignores "
                "and transformers refuses to save; to keep a setting for sampling, also set do_sample=True."
            )


@contextmanager
def replaced(holder: Any, **values: object) -> Iterator[None]:
    """Give an object other attributes in the block."""
    before = {name: getattr(holder, name) for name in values}
    for name, value in values.items():
        setattr(holder, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(holder, name, value)


@contextmanager
def default_generation_config(policy: nn.Module) -> Iterator[Any]:
    """Replace the model's generation_config, from which `generate` fills unset fields, by transformers' default.

    With a stored repetition penalty or list of EOS tokens, `generate` would sample from a distribution that the
    log-probabilities do not describe.

    Args:
        policy: A causal language model, or a `PeftModel` around one.

    Yields:
        The transformers model to call `generate` on.
    """
    model = transformers_model(policy)
    with replaced(model, generation_config=GenerationConfig()):
        yield model


# ---- Precision ----


def autocast_dtype(device: str) -> torch.dtype | None:
    """Return the type to which autocast casts on a type of device, or None without autocast."""
    is_on = torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)
    return torch.get_autocast_dtype(device) if is_on else None


def multiplied_dtype(accelerator: Accelerator, policy: nn.Module) -> torch.dtype:
    """Return the type of a policy's matrix products: that of mixed precision, or else that of its weights."""
    return mixed_precision_dtype(accelerator) or next(
        weight.dtype for weight in policy.parameters() if weight.is_floating_point()
    )


def advice_by_type(model: nn.Module, otherwise: str) -> str:
    """Return what to do about numbers that are not finite: load weights in float16 in another type, or `otherwise`."""
    if all(weight.dtype != torch.float16 for weight in model.parameters()):
        return otherwise
    return (
        "There are weights in float16, in which numbers above 65,504 are infinite and those below 6e-8 are 0: load "
        "the models with dtype=torch.float32; bf16=True computes in 16 bits"
    )


def is_in_16_bits(states: Tensor) -> bool:
    """Return whether states were computed in 16 bits, by their type or under autocast."""
    return states.dtype.itemsize == 2 or autocast_dtype(states.device.type) is not None


def rounding(states: Tensor) -> float:
    """Return the deviation that other kernels or batch shapes may cause, which is large in 16 bits."""
    return 0.3 if is_in_16_bits(states) else 1e-3


def autocast_if_stored_in_16_bits(model: nn.Module) -> torch.autocast:
    """Return a context in which a model with weights in 16 bits may have a head in 32 bits."""
    weight = next(model.parameters())
    is_in_16_bits = weight.dtype in (torch.bfloat16, torch.float16)
    return torch.autocast(weight.device.type, weight.dtype if is_in_16_bits else None, enabled=is_in_16_bits)


# ---- Learning without randomness ----

_CHECKPOINT = "_gradient_checkpointing_func"
"""Attribute in which transformers keeps the function that recomputes a module's activations."""


def set_learning(model: nn.Module) -> None:
    """Put all modules of a model in eval mode, except those that recompute their activations."""
    for module in model.modules():
        # A stack of layers that recompute by themselves does not recompute.
        module.training = getattr(module, "gradient_checkpointing", False) and not any(
            isinstance(part, GradientCheckpointingLayer) for part in module.modules() if part is not module
        )


def recompute_in_eval_mode(model: nn.Module) -> None:
    """Let modules that recompute activations, and are in training mode for it, compute in eval mode.

    Args:
        model: A model whose `gradient_checkpointing_enable` has just been called.
    """
    for module in model.modules():
        checkpoint = vars(module).get(_CHECKPOINT)
        if checkpoint is not None and getattr(checkpoint, "func", None) is not _checkpointed:
            setattr(module, _CHECKPOINT, functools.partial(_checkpointed, checkpoint, module))


def _checkpointed(
    checkpoint: Callable[..., T], module: nn.Module, function: Callable[..., object], *args: object
) -> T:
    def in_eval_mode(*args: object) -> object:
        was_training, module.training = module.training, False
        try:
            return function(*args)
        finally:
            module.training = was_training

    return checkpoint(in_eval_mode, *args)


@contextmanager
def lent_type(parameters: Iterable[nn.Parameter], dtype: torch.dtype | None) -> Iterator[None]:
    """Store parameters in another type inside a context; None: in their own."""
    stored = [] if dtype is None else [(parameter, parameter.data) for parameter in parameters]
    try:
        for parameter, data in stored:
            parameter.data = data.to(dtype)
        yield
    finally:
        for parameter, data in stored:
            parameter.data = data


@contextmanager
def in_eval_mode(model: nn.Module) -> Iterator[None]:
    """Put a model in eval mode inside a context; restore each module's mode after it."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


@contextmanager
def without_activation_wrappers(model: nn.Module) -> Iterator[None]:
    """Take out FSDP's wrappers of layers that recompute activations; put them back after the context.

    They add to the names of modules, not to those of a state dict.
    """
    wrappers = [
        (parent, name, part)
        for parent in model.modules()
        for name, part in parent.named_children()
        if isinstance(part, ActivationWrapper)
    ]
    for parent, name, wrapper in reversed(wrappers):  # a wrapper may be in another one, which offloads
        setattr(parent, name, next(wrapper.children()))
    try:
        yield
    finally:
        for parent, name, wrapper in wrappers:
            setattr(parent, name, wrapper)


# ---- Sharded parameters ----


def is_managed(model: nn.Module) -> bool:
    """Return whether DeepSpeed ZeRO-3 shards the parameters, which may be gathered now."""
    return any(hasattr(parameter, "ds_id") for parameter in model.parameters())


def gathers_in_passes(model: nn.Module) -> bool:
    """Return whether ZeRO-3's hooks gather the parameters in each forward pass, which then takes all ranks."""
    return any(is_zero_hook(hook) for module in model.modules() for hook in module._forward_pre_hooks.values())


def is_zero_hook(hook: object) -> bool:
    """Return whether a module's hook is DeepSpeed's, which gathers or releases parameters."""
    return str(getattr(hook, "__module__", "")).startswith("deepspeed")


def is_sharded(model: nn.Module) -> bool:
    """Return whether DeepSpeed ZeRO-3 has sharded the parameters: they are empty outside its hooks."""
    return any(hasattr(parameter, "ds_id") and parameter.numel() == 0 for parameter in model.parameters())


def share_of_rank(parameter: Tensor) -> Tensor:
    """Return this rank's share of a parameter that ZeRO-3 or FSDP2 may have sharded: its own memory, no gradient."""
    if (shard := getattr(parameter, "ds_tensor", None)) is not None:
        return shard
    whole = parameter.detach()
    return whole.to_local() if isinstance(whole, DTensor) else whole


def gathered(parameters: Iterable[Tensor], modify: bool = False) -> AbstractContextManager[None]:
    """Gather parameters that ZeRO-3 has sharded inside a context, which every rank enters.

    Args:
        parameters: Sharded or not.
        modify: Keep the values that rank 0 writes.
    """
    sharded = [parameter for parameter in parameters if hasattr(parameter, "ds_id")]
    if not sharded:
        return nullcontext()
    import deepspeed

    return deepspeed.zero.GatheredParameters(sharded, modifier_rank=0 if modify else None)


# ---- Copies ----


def copy_model(model: nn.Module) -> nn.Module:
    """Copy a model.

    The copy of a sharded model is sharded too, and a rank holds at most one whole parameter.
    """
    if not is_sharded(model):
        return copy.deepcopy(model)
    original = transformers_model(model)
    twin = type(original)._from_config(copy.deepcopy(original.config))
    copy_weights(original, twin)
    return twin.train(original.training)


@torch.no_grad()
def copy_weights(source: nn.Module, target: nn.Module) -> None:
    """Copy parameters and buffers by name, one at a time.

    Args:
        source: Has at least the parameters and buffers of `target`.
        target: Receives them.
    """
    for name, parameter in target.named_parameters():
        original = source.get_parameter(name)
        with gathered([original, parameter], modify=True):
            parameter.copy_(original)
    for name, buffer in target.named_buffers():
        buffer.copy_(source.get_buffer(name))
