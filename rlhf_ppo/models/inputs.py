"""What every forward pass shares: the bare transformers model, its backbone, masked ids and explicit positions."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from rlhf_ppo.places import Places

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


PACKS, PROOF = "rows_are_packed", "proof_of_packing"
"""Attributes of a backbone: the attention that packed rows are proven with, and the proof left to its first pass."""


def is_peft_model(model: nn.Module) -> bool:
    """Tell whether `model` is a `peft.PeftModel` (False where PEFT is not installed)."""
    try:
        from peft import PeftModel
    except ImportError:
        return False
    return isinstance(model, PeftModel)


def transformers_model(model: nn.Module) -> PreTrainedModel:
    """Return the transformers model inside a `PeftModel` (adapters stay injected), or `model` itself."""
    return cast(PreTrainedModel, cast(Any, model).get_base_model() if is_peft_model(model) else model)


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


@functools.lru_cache(maxsize=32)
def _takes(model_class: type, argument: str) -> bool:
    return argument in inspect.signature(model_class.forward).parameters  # pyright: ignore


def position_ids(attention_mask: Tensor) -> Tensor:
    """Number the real tokens of each row from 0, whatever the padding: `position_t = sum_{s<=t} mask_s - 1`.

    Args:
        attention_mask: True on real tokens, `(B, L)`.

    Returns:
        Positions, long `(B, L)`; 0 on left padding.
    """
    return (attention_mask.long().cumsum(dim=1) - 1).clamp(min=0)


def hidden_states(model: nn.Module, input_ids: Tensor, attention_mask: Tensor, places: Places | None = None) -> Tensor:
    """Run the backbone once and return its last hidden states.

    Rows are packed where `packing.pack_rows` has proven that the model can do so, or a proof that it put off now does;
    elsewhere padding is squeezed out and what is left, behind shorter rows, has id 0. A padding id outside the
    vocabulary, or equal to EOS, changes nothing.

    Args:
        model: Any transformers model with a backbone, or a `PeftModel` around one.
        input_ids: Token ids, long `(B, L)`.
        attention_mask: True on real tokens, bool `(B, L)`.
        places: Where these are; None reads them from the device.

    Returns:
        Hidden states `(B, L, H)` in the model's dtype, 0 where the mask is False.
    """
    body = backbone(model)
    if (prove := vars(body).pop(PROOF, None)) is not None:
        prove(body)
    run = run_packed if packs_rows(body) else run_padded
    places = Places.of(attention_mask) if places is None else places
    states = run(body, input_ids, attention_mask, places)
    scattered = states.new_zeros(attention_mask.numel(), states.shape[-1]).index_copy(0, places.tokens, states)
    return scattered.unflatten(0, attention_mask.shape)


def packs_rows(body: nn.Module) -> bool:
    """Tell whether a backbone was seen to keep packed rows apart, under the attention that it has now."""
    return vars(body).get(PACKS, "") == cast(Any, body).config._attn_implementation


def uses_flash_attention(body: nn.Module) -> bool:
    """Tell whether a backbone's attention is one of the flash kind, which runs on accelerators."""
    return str(cast(Any, body).config._attn_implementation).startswith("flash_attention")


def run_packed(body: nn.Module, input_ids: Tensor, attention_mask: Tensor, places: Places | None = None) -> Tensor:
    """Return the hidden states of all `N` real tokens, `(N, H)`, from one sequence of them.

    Args:
        body: A backbone for which `packs_rows` is true.
        input_ids: Token ids, long `(B, L)`.
        attention_mask: True on real tokens, bool `(B, L)`.
        places: Where these are; None reads them from the device.
    """
    places = Places.of(attention_mask) if places is None else places
    # Four dimensions: transformers takes it for a finished mask and makes none of (N, N), which nobody would read.
    own = {"attention_mask": attention_mask.new_ones(1, 1, 1, 1), "squeezed_places": places.squeezed}
    output = body(
        input_ids=input_ids.flatten()[places.tokens][None],
        position_ids=places.positions[None],
        cu_seq_lens_q=places.starts,
        cu_seq_lens_k=places.starts,
        max_length_q=places.longest,
        max_length_k=places.longest,
        use_cache=False,
        return_dict=True,
        **({"attention_mask": None} if uses_flash_attention(body) else own),
    )
    return output.last_hidden_state[0]


def run_padded(body: nn.Module, input_ids: Tensor, attention_mask: Tensor, places: Places | None = None) -> Tensor:
    """Return the hidden states of all `N` real tokens, `(N, H)`, from rows padded to the longest one's tokens.

    Args:
        body: Any backbone.
        input_ids: Token ids, long `(B, L)`.
        attention_mask: True on real tokens, bool `(B, L)`.
        places: Where these are; None reads them from the device.
    """
    places = Places.of(attention_mask) if places is None else places
    mask = places.squeezed_mask
    positions = {"position_ids": position_ids(mask)} if _takes(type(body), "position_ids") else {}
    output = body(
        input_ids=places.squeeze(input_ids),
        attention_mask=mask.long(),
        use_cache=False,
        return_dict=True,
        **positions,
    )
    return output.last_hidden_state.flatten(0, 1).index_select(0, places.squeezed)


def no_split_modules(*models: nn.Module) -> list[str]:
    """Name the classes of the blocks that FSDP wraps one by one."""
    return sorted({name for model in models for name in transformers_model(model)._no_split_modules or ()})


def is_managed(model: nn.Module) -> bool:
    """Tell whether DeepSpeed ZeRO-3 takes the parameters apart, which at this moment may all be whole."""
    return any(hasattr(parameter, "ds_id") for parameter in model.parameters())


def gathers_in_passes(model: nn.Module) -> bool:
    """Tell whether ZeRO-3's hooks gather the parameters in each forward pass, which all ranks then make together."""
    return any(is_zero_hook(hook) for module in model.modules() for hook in module._forward_pre_hooks.values())


def is_zero_hook(hook: object) -> bool:
    """Tell whether a module's hook is one of those with which DeepSpeed gathers and releases parameters."""
    return str(getattr(hook, "__module__", "")).startswith("deepspeed")


def is_sharded(model: nn.Module) -> bool:
    """Tell whether DeepSpeed ZeRO-3 has taken the parameters apart, so that they are empty outside its hooks."""
    return any(hasattr(parameter, "ds_id") and parameter.numel() == 0 for parameter in model.parameters())


def gathered(parameters: Iterable[nn.Parameter], modify: bool = False) -> AbstractContextManager[None]:
    """Make parameters that ZeRO-3 has sharded whole while a context lasts; every rank enters it.

    Args:
        parameters: Sharded or not.
        modify: Whether what rank 0 has written into them stays.
    """
    sharded = [parameter for parameter in parameters if hasattr(parameter, "ds_id")]
    if not sharded:
        return nullcontext()
    import deepspeed

    return deepspeed.zero.GatheredParameters(sharded, modifier_rank=0 if modify else None)


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
