"""Rows without padding: their real tokens in one sequence, in which only attention keeps the rows apart.

Embeddings, projections and feed-forward layers, where nearly all the arithmetic is, then run on real tokens alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from rlhf_ppo.models.modes import in_eval_mode
from rlhf_ppo.models.passes import PACKS, PROOF, run_packed, run_padded, uses_flash_attention
from rlhf_ppo.models.sharded import is_sharded
from rlhf_ppo.models.unwrapping import backbone, transformers_model
from rlhf_ppo.models.varlen import attend_varlen

PACKED = "packed_sdpa"
"""Name of the attention under which transformers' models run packed rows; it is `sdpa` for all other calls."""

_LENGTHS = (5, 9, 6)
"""Tokens of the rows of a proof."""


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
        attention_mask: Read only where rows are not packed.
        cu_seq_lens_q: Where each of `B` rows begins and the last ends, int32 `(B + 1,)`; None where none are packed.
        max_length_q: Tokens of the longest row.
        squeezed_places: Places of the tokens in rows padded on the right to the longest, long `(N,)`.
        kwargs: What else `sdpa_attention_forward` takes, and `sliding_window`.

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
    """Where the rows of a packed sequence are.

    Attributes:
        starts: Where each of `B` rows begins and the last ends, int32 `(B + 1,)`.
        longest: Tokens of the longest row.
        squeezed: Places of the `N` tokens in rows padded to the longest, long `(N,)`; None where they were not told.
    """

    starts: Tensor
    longest: int
    squeezed: Tensor | None

    def padded_places(self, num_tokens: int) -> Tensor:
        """Return the places of `N` tokens in rows padded to the longest, long `(N,)`."""
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
    """Make one call for all rows, padded on the right, where causal attention lets no real token see the padding."""
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
    """Let `hidden_states` pack a model's rows, where it is proven that each row's states are then those of it alone.

    Causal models with transformers' `sdpa` attention, or with flash attention, are tried on a few tokens: convolutions
    and state-space layers would carry one row's end into the next row. Models with another attention, encoders and
    others keep padded rows. What cannot run yet is tried in its first pass, where it then runs: flash attention, and
    models that ZeRO-3 has sharded.

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
        setattr(body, PROOF, _prove)
    else:
        _prove(body)


@torch.no_grad()
def _prove(body: Any) -> None:
    """Pack the rows of a backbone from now on, if they are what they are alone, whatever stands beside them."""
    device = next(body.parameters()).device
    vocabulary = body.config.get_text_config().vocab_size
    mask = torch.arange(max(_LENGTHS), device=device) < torch.tensor(_LENGTHS, device=device)[:, None]
    ids = (torch.arange(mask.numel(), device=device).view(mask.shape) * 7 + 1) % vocabulary
    others = ids.clone()
    others[::2] = (ids[::2] + 1) % vocabulary  # the middle row stays
    middle = slice(_LENGTHS[0], sum(_LENGTHS[:2]))
    with in_eval_mode(body):
        padded = run_padded(body, ids, mask)
        try:
            packed, beside_others = run_packed(body, ids, mask), run_packed(body, others, mask)
        except (RuntimeError, TypeError, ValueError):  # it cannot, and knows it, or the arguments are unknown
            packed = beside_others = torch.full_like(padded, torch.nan)
    in_16_bits = padded.dtype.itemsize == 2 or torch.is_autocast_enabled(device.type)
    leak = 2e-2 if in_16_bits else 1e-4  # the same kernels on as many tokens: nearly nothing but a leak
    rounding = 1e-1 if in_16_bits else 1e-2  # other kernels, over many layers
    proven = _are_alike(packed[middle], beside_others[middle], leak) and _are_alike(packed, padded, rounding)
    setattr(body, PACKS, body.config._attn_implementation if proven else "")
    if not proven and body.config._attn_implementation == PACKED:
        body.set_attn_implementation("sdpa")


@contextmanager
def unpacked(model: Any) -> Iterator[None]:
    """Put `sdpa` back while a context lasts, for what knows transformers' own attentions alone.

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
