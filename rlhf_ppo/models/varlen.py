"""Attention within packed rows by PyTorch's flash kernels for rows of any lengths, on GPUs that have them."""

from __future__ import annotations

import inspect
import math
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

_TAKES = frozenset(inspect.signature(varlen_attn).parameters)
"""Arguments of this PyTorch's function: 2.10's knows neither windows nor scales nor grouped heads."""

_OTHERS = ("position_bias", "softcap", "s_aux", "cache")
"""What transformers' attention functions may be given that the kernels do not know."""


def attend_varlen(
    states: tuple[Tensor, Tensor, Tensor],
    starts: Tensor,
    longest: int,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> Tensor | None:
    """Attend causally within each row, without padding, where PyTorch and the device can.

    Args:
        states: Queries `(1, heads, N, D)`, keys and values `(1, key heads, N, D)` of `N` tokens.
        starts: Where each of `B` rows begins and the last ends, int32 `(B + 1,)`.
        longest: Tokens of the longest row.
        scaling: Factor of the scores; None: `D ** -0.5`.
        sliding_window: How many tokens one attends to, itself among them; None: all before it.
        kwargs: What else transformers' attention functions are given.

    Returns:
        Attended values `(1, N, heads, D)`; None where another way must be taken.
    """
    if kwargs.get("dropout") or any(kwargs.get(name) is not None for name in _OTHERS):
        return None
    device = states[0].device.type
    if torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device):  # it casts for `sdpa` alone
        dtype = torch.get_autocast_dtype(device)
        states = states[0].to(dtype), states[1].to(dtype), states[2].to(dtype)
    window = None if sliding_window is None or longest <= sliding_window else sliding_window
    options = _options(states, scaling, window)
    if not options.keys() <= _TAKES or not _flash_can(*states):
        return None
    query, key, value = (part[0].transpose(0, 1) for part in states)
    attended: Any = varlen_attn(query, key, value, starts, starts, longest, longest, **options)
    return attended[None]


def _options(states: tuple[Tensor, Tensor, Tensor], scaling: float | None, window: int | None) -> dict[str, Any]:
    """Name what differs from the function's defaults, and causality, which was an argument of its own once."""
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
    """Ask PyTorch for the device, the dtypes and the heads; it would fill up heads of odd sizes for `sdpa` alone."""
    if query.device.type != "cuda" or torch.version.hip is not None or query.shape[-1] % 8:
        return False
    grouped = query.shape[1] != key.shape[1]
    return torch.backends.cuda.can_use_flash_attention(
        torch.backends.cuda.SDPAParams(query, key, value, None, 0.0, True, grouped)
    )
