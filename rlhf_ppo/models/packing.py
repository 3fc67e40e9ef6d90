"""Hidden states of a backbone, over packed or padded rows.

Packed rows are a single sequence of all real tokens, which attention alone separates: embeddings, projections and
feed-forward layers compute nothing for padding.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from rlhf_ppo.data.rollout import PackedIndices
from rlhf_ppo.models.unwrapping import (
    autocast_dtype,
    backbone,
    in_eval_mode,
    is_in_16_bits,
    is_sharded,
    probe_rows,
    text_config,
    transformers_model,
)

PACKS, PROOF = "rows_are_packed", "proof_of_packing"
"""Attributes of a backbone: the attention with which it can pack rows, and a check postponed to its first pass."""


@functools.lru_cache(maxsize=32)
def _takes(model_class: type, argument: str) -> bool:
    return argument in inspect.signature(model_class.forward).parameters  # pyright: ignore


def position_ids(attention_mask: Tensor) -> Tensor:
    """Number the real tokens of each row from 0: `position_t = sum_{s<=t} mask_s - 1`.

    Args:
        attention_mask: True on real tokens, `(B, L)`.

    Returns:
        Positions, long `(B, L)`; 0 on left padding.
    """
    return (attention_mask.long().cumsum(dim=1) - 1).clamp(min=0)


def hidden_states(
    model: nn.Module, input_ids: Tensor, attention_mask: Tensor, places: PackedIndices | None = None
) -> Tensor:
    """Run the backbone once and return its last hidden states.

    Rows are packed where `pack_rows` has checked that the model can, now or earlier. Elsewhere rows are padded on the
    right with id 0: a padding id outside the vocabulary, or equal to EOS, changes nothing.

    Args:
        model: Any transformers model with a backbone, or a `PeftModel` around one.
        input_ids: Token ids, long `(B, L)`.
        attention_mask: True on real tokens, bool `(B, L)`.
        places: Indices of these; None reads them from the device.

    Returns:
        Hidden states `(B, L, H)` in the model's dtype, 0 where the mask is False.
    """
    body = backbone(model)
    if (prove := vars(body).pop(PROOF, None)) is not None:
        prove(body)
    run = run_packed if packs_rows(body) else run_padded
    places = PackedIndices.of(attention_mask) if places is None else places
    states = run(body, input_ids, places)
    scattered = states.new_zeros(attention_mask.numel(), states.shape[-1]).index_copy(0, places.tokens, states)
    return scattered.unflatten(0, attention_mask.shape)


def attention_of(body: nn.Module) -> str | None:
    """Return the name of a backbone's current attention."""
    config = transformers_model(body).config
    return config._attn_implementation


def packs_rows(body: nn.Module) -> bool:
    """Return whether the check has found that a backbone separates packed rows with its current attention."""
    return vars(body).get(PACKS, "") == attention_of(body)


def uses_flash_attention(body: nn.Module) -> bool:
    """Return whether a backbone's attention is flash attention, which runs on accelerators."""
    return str(attention_of(body)).startswith("flash_attention")


def run_packed(body: nn.Module, input_ids: Tensor, places: PackedIndices) -> Tensor:
    """Return the hidden states of all `N` real tokens, `(N, H)`, from a single sequence.

    Args:
        body: A backbone for which `packs_rows` is true.
        input_ids: Token ids, long `(B, L)`.
        places: Indices of the real tokens.
    """
    # A mask of four dimensions keeps transformers from making an unused mask (N, N).
    unused_mask = input_ids.new_ones(1, 1, 1, 1, dtype=torch.bool)
    own = {"attention_mask": unused_mask, "squeezed_places": places.squeezed}
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


def run_padded(body: nn.Module, input_ids: Tensor, places: PackedIndices) -> Tensor:
    """Return the hidden states of all `N` real tokens, `(N, H)`, from rows padded to the longest row.

    Args:
        body: Any backbone.
        input_ids: Token ids, long `(B, L)`.
        places: Indices of the real tokens.
    """
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


# ---- Variable-length flash attention ----

_TAKES = frozenset(inspect.signature(varlen_attn).parameters)
"""Arguments of this PyTorch's function: in 2.10 no windows, scales or grouped heads."""

_OTHERS = ("position_bias", "softcap", "s_aux", "cache")
"""Arguments of transformers' attention functions that the kernels lack."""


def attend_varlen(
    states: tuple[Tensor, Tensor, Tensor],
    starts: Tensor,
    longest: int,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> Tensor | None:
    """Attend causally within each row, without padding, if PyTorch and the device can.

    Args:
        states: Queries `(1, heads, N, D)`, keys and values `(1, key heads, N, D)` of `N` tokens.
        starts: First token of each of `B` rows and end of the last, int32 `(B + 1,)`.
        longest: Tokens of the longest row.
        scaling: Factor of the scores; None: `D ** -0.5`.
        sliding_window: Number of tokens that a token attends to, with itself; None: all before it.
        kwargs: Other arguments of transformers' attention functions.

    Returns:
        Attended values `(1, N, heads, D)`; None if the kernels cannot.
    """
    if kwargs.get("dropout") or any(kwargs.get(name) is not None for name in _OTHERS):
        return None
    if (dtype := autocast_dtype(states[0].device.type)) is not None:  # autocast casts only for `sdpa`
        states = states[0].to(dtype), states[1].to(dtype), states[2].to(dtype)
    window = None if sliding_window is None or longest <= sliding_window else sliding_window
    options = _options(states, scaling, window)
    if not options.keys() <= _TAKES or not _flash_can(*states):
        return None
    query, key, value = (part[0].transpose(0, 1) for part in states)
    attended: Any = varlen_attn(query, key, value, starts, starts, longest, longest, **options)
    return attended[None]


def _options(states: tuple[Tensor, Tensor, Tensor], scaling: float | None, window: int | None) -> dict[str, Any]:
    """Return the arguments that differ from the function's defaults."""
    query, key, _ = states
    options: dict[str, Any] = {"window_size": (-1 if window is None else window - 1, 0)}
    if window is None and "window_size" not in _TAKES:
        options = {"is_causal": True}
    if scaling is not None and not math.isclose(scaling, query.shape[-1] ** -0.5):
        options["scale"] = scaling
    if query.shape[1] != key.shape[1]:
        options["enable_gqa"] = True
    return options


def _flash_can(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Return whether PyTorch's flash attention takes these heads; only `sdpa` pads heads of odd sizes."""
    if query.device.type != "cuda" or torch.version.hip is not None or query.shape[-1] % 8:
        return False
    grouped = query.shape[1] != key.shape[1]
    return torch.backends.cuda.can_use_flash_attention(
        torch.backends.cuda.SDPAParams(query, key, value, None, 0.0, True, grouped)
    )


# ---- Packed attention ----

PACKED = "packed_sdpa"
"""Name of the attention of models with packed rows; all other calls run `sdpa`."""

_LENGTHS = (5, 9, 6)
"""Tokens of the rows of a check."""


def packed_sdpa(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    cu_seq_lens_q: Tensor | None = None,
    max_length_q: int | None = None,
    squeezed_places: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Attend causally within each row of a packed sequence, with transformers' attention-function signature.

    Args:
        module: The attention layer.
        query: Queries of `N` tokens, `(1, heads, N, D)`.
        key: Keys, `(1, key heads, N, D)`.
        value: Values, as the keys.
        attention_mask: Read only if rows are not packed.
        cu_seq_lens_q: First token of each of `B` rows and end of the last, int32 `(B + 1,)`; None if not packed.
        max_length_q: Tokens of the longest row.
        squeezed_places: Indices of the tokens in rows padded on the right to the longest, long `(N,)`.
        kwargs: Other arguments of `sdpa_attention_forward`, and `sliding_window`.

    Returns:
        Attended values `(1, N, heads, D)`, and None.
    """
    if cu_seq_lens_q is None or max_length_q is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
    attended = attend_varlen((query, key, value), cu_seq_lens_q, max_length_q, **kwargs)
    if attended is not None:
        return attended, None
    rows = PackedRows(cu_seq_lens_q, max_length_q, squeezed_places)
    attend = _attend_row_by_row if query.device.type == "cpu" else _attend_padded
    return attend(module, (query, key, value), rows, **kwargs), None


class PackedRows(NamedTuple):
    """Rows of a packed sequence.

    Attributes:
        starts: First token of each of `B` rows and end of the last, int32 `(B + 1,)`.
        longest: Tokens of the longest row.
        squeezed: Indices of the `N` tokens in rows padded to the longest, long `(N,)`; None: computed from `starts`.
    """

    starts: Tensor
    longest: int
    squeezed: Tensor | None

    def padded_places(self, num_tokens: int) -> Tensor:
        """Return the indices of `N` tokens in rows padded to the longest, long `(N,)`."""
        if self.squeezed is not None:
            return self.squeezed
        starts = self.starts
        first_places = torch.arange(len(starts) - 1, device=starts.device) * self.longest - starts[:-1]
        places = first_places.repeat_interleave(starts.diff(), output_size=num_tokens)
        return places + torch.arange(num_tokens, device=starts.device)


def _attend_row_by_row(
    module: nn.Module, states: tuple[Tensor, Tensor, Tensor], packed: PackedRows, **kwargs: Any
) -> Tensor:
    lengths = packed.starts.diff().tolist()
    rows = zip(*(part.split(lengths, dim=2) for part in states), strict=True)
    return torch.cat([_attend(module, row, **kwargs) for row in rows], dim=1)


def _attend_padded(
    module: nn.Module, states: tuple[Tensor, Tensor, Tensor], packed: PackedRows, **kwargs: Any
) -> Tensor:
    """Attend in a single call for all rows, padded on the right: causal attention hides the padding."""
    num_rows, longest = len(packed.starts) - 1, packed.longest
    places = packed.padded_places(states[0].shape[2])

    def pad(part: Tensor) -> Tensor:
        tokens = part[0].transpose(0, 1)
        padded = tokens.new_zeros(num_rows * longest, *tokens.shape[1:]).index_copy(0, places, tokens)
        return padded.unflatten(0, (num_rows, longest)).transpose(1, 2)

    query, key, value = map(pad, states)
    return _attend(module, (query, key, value), **kwargs).flatten(0, 1).index_select(0, places)[None]


def _attend(module: nn.Module, states: tuple[Tensor, ...], sliding_window: int | None = None, **kwargs: Any) -> Tensor:
    query, key, value = states
    length, mask = query.shape[2], None
    if sliding_window is not None and length > sliding_window:
        distance = torch.arange(length, device=query.device)
        distance = distance[:, None] - distance
        mask = ((distance >= 0) & (distance < sliding_window))[None, None]
    options: dict[str, Any] = kwargs | {"is_causal": True}
    return sdpa_attention_forward(module, query, key, value, mask, **options)[0]


AttentionInterface.register(PACKED, packed_sdpa)
AttentionMaskInterface.register(PACKED, sdpa_mask)


def pack_rows(model: nn.Module) -> None:
    """Enable packing in `hidden_states`, after a check that each row's states are those of the row alone.

    The check runs causal models with `sdpa` or flash attention on a few tokens: convolutions and state-space layers
    would carry a row's end into the next row. Other models keep padded rows. Flash attention, and models that ZeRO-3
    has sharded, cannot run yet and are checked in their first pass.

    Args:
        model: A transformers model with a backbone, or a `PeftModel` around one.
    """
    base, body = transformers_model(model), backbone(model)
    is_flash = uses_flash_attention(body)
    if not _attends_causally(base) or not (is_flash or base.config._attn_implementation == "sdpa"):
        return
    if not is_flash:
        base.set_attn_implementation(PACKED)
    if is_flash or is_sharded(model):
        setattr(body, PROOF, _check_packing)
    else:
        _check_packing(body)


@torch.no_grad()
def _check_packing(body: Any) -> None:
    """Pack the rows of a backbone from now on, if their states do not depend on the other rows."""
    ids, mask = probe_rows(body, _LENGTHS)
    others = ids.clone()
    others[::2] = (ids[::2] + 1) % text_config(body).vocab_size  # the middle row stays
    middle, places = slice(_LENGTHS[0], sum(_LENGTHS[:2])), PackedIndices.of(mask)
    with in_eval_mode(body):
        padded = run_padded(body, ids, places)
        try:
            packed, beside_others = run_packed(body, ids, places), run_packed(body, others, places)
        except (RuntimeError, TypeError, ValueError):  # the model refuses, or does not know the arguments
            packed = beside_others = torch.full_like(padded, torch.nan)
    # The same kernels on as many tokens, and other kernels, over many layers.
    leak, rounding = (2e-2, 1e-1) if is_in_16_bits(padded) else (1e-4, 1e-2)
    proven = _are_alike(packed[middle], beside_others[middle], leak) and _are_alike(packed, padded, rounding)
    setattr(body, PACKS, body.config._attn_implementation if proven else "")
    if not proven and body.config._attn_implementation == PACKED:
        body.set_attn_implementation("sdpa")


@contextmanager
def unpacked(model: Any) -> Iterator[None]:
    """Restore `sdpa` inside a context, for code that knows transformers' own attentions only.

    Args:
        model: A transformers model.
    """
    packs = model.config._attn_implementation == PACKED
    if packs:
        model.set_attn_implementation("sdpa")
    try:
        yield
    finally:
        if packs:
            model.set_attn_implementation(PACKED)


def _are_alike(states: Tensor, expected: Tensor, tolerance: float) -> bool:
    """Compare each token's state `(N, H)`."""
    difference = (states - expected).float().norm(dim=1)
    return bool((difference <= tolerance * expected.float().norm(dim=1)).all())


def _attends_causally(base: Any) -> bool:
    config = base.config
    kinds = set(getattr(config, "layer_types", None) or ())
    return (
        base._can_set_attn_implementation()
        and config.get_text_config() is config
        and kinds <= {"full_attention", "sliding_attention"}
        and all(getattr(module, "is_causal", True) for module in base.modules())
    )
