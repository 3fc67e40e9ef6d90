"""The bare transformers model inside what is given, its parts and its configuration."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedConfig
    from typing_extensions import TypeIs


def is_peft_model(model: nn.Module) -> TypeIs[PeftModel]:
    """Tell whether `model` is a `peft.PeftModel` (False where PEFT is not installed)."""
    try:
        from peft import PeftModel
    except ImportError:
        return False
    return isinstance(model, PeftModel)


def transformers_model(model: nn.Module) -> PreTrainedModel:
    """Return the transformers model inside a `PeftModel` (adapters stay injected), or `model` itself."""
    # No isinstance: what takes parts of a model apart for a check has classes of its own.
    return cast(PreTrainedModel, model.get_base_model() if is_peft_model(model) else model)


def as_module(model: object) -> nn.Module:
    """Return what an engine runs, a module that Trainer's types do not know as one; a `TypeError` if it is none."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"a model must be a torch.nn.Module, not {type(model).__name__}")
    return model


def with_adapters(model: nn.Module) -> PeftModel:
    """Return a model that is known to be a `peft.PeftModel`, as one; a `TypeError` if it is none."""
    if not is_peft_model(model):
        raise TypeError(f"{type(model).__name__} has no adapters of PEFT")
    return model


def active_adapter(model: nn.Module) -> str:
    """Return the name of a `PeftModel`'s active adapter; a `TypeError` if it has none, or several at once."""
    name = with_adapters(model).active_adapter
    if not isinstance(name, str):
        raise TypeError(f"one adapter must be active, not {name!r}")
    return name


def weight_of(layer: nn.Module) -> Tensor:
    """Return a layer's weight, also where an adapter's layer stands around it; a `TypeError` if it has none."""
    weight = layer.weight
    if not isinstance(weight, Tensor):
        raise TypeError(f"{type(layer).__name__} has no weight")
    return weight


def output_layer(policy: nn.Module) -> nn.Module:
    """Return a language model's head; a `TypeError` if it has none."""
    head = transformers_model(policy).get_output_embeddings()
    if head is None:
        raise TypeError(f"{type(policy).__name__} has no language-model head")
    return head


def backbone(model: nn.Module) -> nn.Module:
    """Return the part of `model` below its head, the one that produces hidden states."""
    base = transformers_model(model)
    body = base.base_model
    if body is not base:
        return body
    # Some classes name their part by another prefix than the one they declare (Llama4).
    parts = [child for child in base.children() if isinstance(child, PreTrainedModel)]
    return parts[0] if len(parts) == 1 else base


def text_config(model: nn.Module) -> PreTrainedConfig:
    """Return the configuration of the language model, also where it is one part of several (Gemma 3 with vision)."""
    return transformers_model(model).config.get_text_config()


@contextmanager
def configuration_kept(model: nn.Module, name: str) -> Iterator[None]:
    """Put back what a context does to one entry of a model's configuration, which is saved with it."""
    config = transformers_model(model).config
    was_there, value = hasattr(config, name), getattr(config, name, None)
    try:
        yield
    finally:
        if was_there:
            setattr(config, name, value)
        elif hasattr(config, name):
            delattr(config, name)


def no_split_modules(*models: nn.Module) -> list[str]:
    """Name the classes of the blocks that FSDP wraps one by one."""
    return sorted({name for model in models for name in transformers_model(model)._no_split_modules or ()})


def probe_ids(model: nn.Module) -> Tensor:
    """Return a tiny valid input for one-off checks of a model, long `(1, 3)`."""
    device = next(model.parameters()).device
    return torch.tensor([[1, 2, 3]], device=device) % text_config(model).vocab_size


def drop_foreign_padding(model: nn.Module) -> None:
    """Unset a `pad_token_id` that the model has no embedding for.

    Trainer copies the tokenizer's special tokens into the configurations that are saved with the model; with an added
    "[PAD]" beyond the vocabulary most architectures could not be loaded again.

    Args:
        model: A transformers model, or a `PeftModel` around one.
    """
    generation_config = getattr(transformers_model(model), "generation_config", None)
    for config in (text_config(model), generation_config):
        if config is not None and (config.pad_token_id or 0) >= text_config(model).vocab_size:
            config.pad_token_id = None
