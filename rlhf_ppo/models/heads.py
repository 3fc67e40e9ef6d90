"""Heads: values of tokens, scores of texts, and linear layers that multiply in float32."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Self
from weakref import WeakKeyDictionary

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from rlhf_ppo.data.images import RowImages, model_inputs
from rlhf_ppo.data.rollout import PackedIndices
from rlhf_ppo.models.packing import hidden_states
from rlhf_ppo.models.unwrapping import (
    autocast_dtype,
    autocast_if_stored_in_16_bits,
    backbone,
    in_eval_mode,
    is_sharded,
    output_layer,
    text_config,
    transformers_model,
    without_wrapper,
)
from rlhf_ppo.ranks.processes import get_logger

logger = get_logger(__name__)

# ---- Finding and applying a head ----


def scalar_head(model: nn.Module) -> nn.Module | None:
    """Return the linear layer that maps a hidden state to one number, or None."""
    base = transformers_model(model)
    if isinstance(head := getattr(base, "score", None), nn.Module):
        return head
    body = backbone(model)
    linear = [part for part in base.children() if part is not body and getattr(part, "out_features", None) == 1]
    return linear[0] if len(linear) == 1 else None


def multiply_scores_in_float32(model: nn.Module) -> None:
    """Make a model's scalar head, if it has one, multiply in float32, whatever the type of its weights."""
    if (head := scalar_head(model)) is not None:
        multiply_in_float32(head)


@torch.no_grad()
def reads_last_token(model: nn.Module) -> bool:
    """Return whether the model's score is its head applied to the last token's hidden state.

    True for causal models (`score(h_last)`), False for encoders that pool (BERT's `classifier(pooler(h_0))`). Runs the
    model on three tokens. The head's name decides for a sharded model, which cannot run yet, and non-finite scores.
    """
    if (is_known := _READ_LAST.get(model)) is not None:
        return is_known
    if scalar_head(model) is None:
        return False
    base = transformers_model(model)
    if getattr(base, "reads_last_token", False):  # made here
        return True
    by_name = isinstance(getattr(base, "score", None), nn.Module)
    if is_sharded(model):
        return by_name
    pads = {getattr(config, "pad_token_id", None) for config in (base.config, text_config(base))}  # would end the text
    ids = torch.tensor([[id for id in range(1, 6) if id not in pads][:3]], device=next(model.parameters()).device)
    mask = torch.ones_like(ids, dtype=torch.bool)
    with in_eval_mode(model):
        ours = last_token_score(model, ids, mask)
        with autocast_if_stored_in_16_bits(base):
            theirs = base(input_ids=ids, attention_mask=mask.long()).logits.float()[:, 0]
    are_finite = bool(ours.isfinite().all() and theirs.isfinite().all())
    _READ_LAST[model] = torch.allclose(ours, theirs, rtol=1e-2, atol=1e-3) if are_finite else by_name
    return _READ_LAST[model]


_READ_LAST: WeakKeyDictionary[nn.Module, bool] = WeakKeyDictionary()
"""What `reads_last_token` has found, so that it runs each model once."""


def token_values(
    model: nn.Module,
    input_ids: Tensor,
    attention_mask: Tensor,
    last: int,
    places: PackedIndices | None = None,
    states: Tensor | None = None,
) -> Tensor:
    """Apply the value model's head to the last `last` positions.

    Args:
        model: A model with a per-token head.
        input_ids: Token ids, long `(B, L)`.
        attention_mask: True on real tokens, bool `(B, L)`.
        last: Number of positions, counted from the right.
        places: Indices of the real tokens; None reads them from the device.
        states: Hidden states of all positions, `(B, L, H)`; None runs the model's body.

    Returns:
        One value per position, float32 `(B, last)`.
    """
    states = hidden_states(model, input_ids, attention_mask, places) if states is None else states
    return _apply_head(model, states[:, -last:]).squeeze(-1)


def last_token_score(
    model: nn.Module, input_ids: Tensor, attention_mask: Tensor, images: Sequence[RowImages] | None = None
) -> Tensor:
    """Apply the scalar head to each row's last real token, found from the mask, never from ids.

    Args:
        model: A model with a per-token scalar head.
        input_ids: Token ids, long `(B, L)`, padded on either side or both.
        attention_mask: True on real tokens, bool `(B, L)`.
        images: The images of each row, or None.

    Returns:
        One score per row, float32 `(B,)`.
    """
    places = dataclasses.replace(PackedIndices.of(input_ids, attention_mask), images=images)
    states = hidden_states(model, input_ids, attention_mask, places)
    last = states[torch.arange(len(states), device=states.device), last_real(attention_mask)]
    return _apply_head(model, last).squeeze(-1)


def last_real(mask: Tensor) -> Tensor:
    """Return the column of the last True of each row of a bool `(B, L)` mask, long `(B,)`."""
    return mask.shape[1] - 1 - mask.flip(1).to(torch.int8).argmax(dim=1)


def pooled_score(
    model: nn.Module, input_ids: Tensor, attention_mask: Tensor, images: Sequence[RowImages] | None = None
) -> Tensor:
    """Compute the model's own score, with the real tokens moved to the left: encoders read the first token (CLS).

    Args:
        model: A sequence-classification model with one label.
        input_ids: Token ids, long `(B, L)`, padded on either side or both.
        attention_mask: True on real tokens, bool `(B, L)`.
        images: The images of each row, or None.

    Returns:
        One score per row, float32 `(B,)`.
    """
    order = (~attention_mask).to(torch.int8).argsort(dim=1, stable=True)
    mask = attention_mask.gather(1, order)
    config = text_config(model)
    pad = getattr(config, "pad_token_id", None)  # ModernBERT's decoder ends a text before it
    ids = input_ids.gather(1, order).masked_fill(~mask, pad if pad is not None and 0 <= pad < config.vocab_size else 0)
    fields = {} if images is None else model_inputs(images, mask.long())
    return model(input_ids=ids, attention_mask=mask.long(), **fields).logits[:, 0].float()


def _apply_head(model: nn.Module, states: Tensor) -> Tensor:
    head: Any = scalar_head(model)
    if not is_in_float32(head):
        states = states.to(next(head.parameters(), states).dtype)  # a base in 16 bits may be below a head in 32
    with torch.autocast(states.device.type, enabled=False):  # at values near 5 bfloat16's steps are .03
        return head(states).float()


# ---- Float32 products ----


class Float32Linear(nn.Linear):
    """A linear layer that multiplies in float32, whatever autocast and the type of its weights."""

    def forward(self, input: Tensor) -> Tensor:
        """Multiply `(..., in_features)` by the weight, into float32."""
        with torch.autocast(input.device.type, enabled=False):
            bias = None if self.bias is None else self.bias.float()
            return nn.functional.linear(input.float(), self.weight.float(), bias)


LINEAR_KINDS = nn.Linear, Float32Linear


class ValueHead(nn.Module):
    """The value model that has no body: two layers on the policy's last hidden states, whose values start at 0.

        v_t = w . gelu(A stop_gradient(h_t) + b)

    A is `(H, H)` and random at the start, w is 0. Two layers learned more than one, `w . stop_gradient(h_t)`
    (benchmarks/learning/README.md).

    Args:
        policy: A causal language model, or a `PeftModel` around one.
    """

    reads_last_token = True

    def __init__(self, policy: nn.Module) -> None:
        super().__init__()
        width: Any = without_wrapper(output_layer(policy)).in_features
        where = {"device": next(policy.parameters()).device, "dtype": torch.float32}
        last = Float32Linear(width, 1, bias=False, **where)
        nn.init.zeros_(last.weight)
        self.score = nn.Sequential(Float32Linear(width, width, **where), nn.GELU(), last)

    def save_pretrained(
        self, directory: str | os.PathLike[str], *, state_dict: Mapping[str, Tensor] | None = None
    ) -> None:
        """Write `value_head.safetensors` into a directory."""
        os.makedirs(directory, exist_ok=True)
        state = self.state_dict() if state_dict is None else state_dict
        save_file({name: value.contiguous() for name, value in state.items()}, os.path.join(directory, _VALUE_HEAD))

    def load(self, directory: str | os.PathLike[str]) -> Self:
        """Read what `save_pretrained` wrote."""
        self.load_state_dict(load_file(os.path.join(directory, _VALUE_HEAD)))
        return self


_VALUE_HEAD = "value_head.safetensors"
"""Not in the policy's own directory, where vLLM reads all files of weights."""


def is_head_of_policy(value_model: object) -> bool:
    """Return whether an argument asks for a `ValueHead`: "policy", or a directory that holds a saved head."""
    is_path = isinstance(value_model, str | os.PathLike)
    return value_model == "policy" or (is_path and os.path.isfile(os.path.join(value_model, _VALUE_HEAD)))


def multiply_in_float32(head: nn.Module, on: bool = True) -> None:
    """Make the linear layers of a head and of its adapters multiply in float32, or again in the type of their weights.

        z = float32(W) float32(h) + float32(b)

    16-bit arithmetic rounds logits, values and scores to 16 bits: near 5, bfloat16 has steps of 1/32, near 20 of 1/8.
    The kernels of sampling and of learning then disagree about a token's probability. MiniMax-M1, 2506.13585; ScaleRL,
    2510.13786. States and weights that are stored in 16 bits stay as exact as they are, and engines store all trained
    weights in 16 bits.

    Args:
        head: A head; its layers are changed in place.
        on: False undoes an earlier call.
    """
    for layer in head.modules():
        if type(layer) in LINEAR_KINDS:
            layer.__class__ = Float32Linear if on else nn.Linear


def is_in_float32(head: nn.Module) -> bool:
    """Return whether a head, which may have adapters, multiplies in float32."""
    return any(type(layer) is Float32Linear for layer in head.modules())


# ---- A head's type while the policy generates ----


@contextmanager
def frozen_head_cast(policy: nn.Module) -> Iterator[None]:
    """Store a frozen head in the type that autocast casts it to; products stay the same to the bit.

    Autocast caches its casts of trained weights, and casts frozen weights again for each token; the head is the
    largest.

    Args:
        policy: A causal language model, or a `PeftModel` around one.
    """
    head = transformers_model(policy).get_output_embeddings()
    layer: Any = getattr(head, "base_layer", head)
    dtype = None
    if type(layer) is nn.Linear and layer.weight.dtype == torch.float32 and not layer.weight.requires_grad:
        dtype = autocast_dtype(layer.weight.device.type)
    with _weights_stored([layer] if dtype is not None else [], dtype or torch.float32):
        yield


@contextmanager
def float32_head_apart(policy: nn.Module) -> Iterator[None]:
    """Give a head that multiplies in float32 its own float32 weights, separate from a tied embedding.

    `Float32Linear` would convert 16-bit weights for each token.

    Args:
        policy: A causal language model, or a `PeftModel` around one.
    """
    head = transformers_model(policy).get_output_embeddings()
    layers = [] if head is None else [layer for layer in head.modules() if isinstance(layer, Float32Linear)]
    with _weights_stored(layers, torch.float32):
        yield


@contextmanager
def _weights_stored(layers: Sequence[nn.Linear], dtype: torch.dtype) -> Iterator[None]:
    """Store the weights of unsharded layers in another type inside a context, separate from tied weights."""
    before = [
        (layer, layer.weight)
        for layer in layers
        if type(layer.weight) is nn.Parameter and not hasattr(layer.weight, "ds_id")
    ]
    for layer, weight in before:
        layer.weight = nn.Parameter(weight.detach().to(dtype), requires_grad=False)
    try:
        yield
    finally:
        for layer, weight in before:
            layer.weight = weight
