"""One forward pass of a backbone, over packed or padded rows."""

from __future__ import annotations

import functools
import inspect
from typing import TYPE_CHECKING

from torch import Tensor, nn

from rlhf_ppo.data.places import Places

if TYPE_CHECKING:
    pass
from rlhf_ppo.models.unwrapping import backbone, transformers_model

PACKS, PROOF = "rows_are_packed", "proof_of_packing"
"""Attributes of a backbone: the attention that packed rows are proven with, and the proof left to its first pass."""


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


def attention_of(body: nn.Module) -> str | None:
    """Return the name of the attention that a backbone computes with now."""
    config = transformers_model(body).config
    return config._attn_implementation


def packs_rows(body: nn.Module) -> bool:
    """Tell whether a backbone was seen to keep packed rows apart, under the attention that it has now."""
    return vars(body).get(PACKS, "") == attention_of(body)


def uses_flash_attention(body: nn.Module) -> bool:
    """Tell whether a backbone's attention is one of the flash kind, which runs on accelerators."""
    return str(attention_of(body)).startswith("flash_attention")


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
