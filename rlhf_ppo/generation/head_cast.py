"""A policy's head, cast once for all the tokens of a call."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from rlhf_ppo.models.float32_head import Float32Linear
from rlhf_ppo.models.unwrapping import transformers_model


@contextmanager
def frozen_head_cast(policy: nn.Module) -> Iterator[None]:
    """Multiply by the head in the type that autocast would cast it to, with the same bits.

    Autocast keeps what it has cast of trained weights, and casts frozen ones anew for each token. Linear layers are
    stored in that type (`store_frozen`), but not a head that is the embedding too, or that an adapter is saved with.

    Args:
        policy: A causal language model, or a `PeftModel` around one.
    """
    head = transformers_model(policy).get_output_embeddings()
    layer = getattr(head, "base_layer", head)
    if type(layer) is not nn.Linear or not _is_cast_anew(layer.weight):
        yield
        return
    own = layer.weight
    layer.weight = nn.Parameter(own.to(torch.get_autocast_dtype(own.device.type)), requires_grad=False)
    try:
        yield
    finally:
        layer.weight = own


def _is_cast_anew(weight: Tensor) -> bool:
    is_cast = weight.dtype == torch.float32 and torch.is_autocast_enabled(weight.device.type)
    return _is_whole(weight) and is_cast and not weight.requires_grad


def _is_whole(weight: Tensor) -> bool:
    return type(weight) is nn.Parameter and not hasattr(weight, "ds_id")


@contextmanager
def float32_head_apart(policy: nn.Module) -> Iterator[None]:
    """Give a head that multiplies in float32 weights in float32, apart from an embedding that it may share them with.

    `Float32Linear` would widen 16-bit weights for each token.

    Args:
        policy: A causal language model, or a `PeftModel` around one.
    """
    head = transformers_model(policy).get_output_embeddings()
    layers = [] if head is None else [layer for layer in head.modules() if isinstance(layer, Float32Linear)]
    own = [(layer, layer.weight) for layer in layers if _is_whole(layer.weight)]
    for layer, weight in own:
        layer.weight = nn.Parameter(weight.detach().float(), requires_grad=False)
    try:
        yield
    finally:
        for layer, weight in own:
            layer.weight = weight
