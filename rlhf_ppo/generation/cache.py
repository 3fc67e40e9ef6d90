"""A key-value cache with room: a token is written into it, where transformers' copies all that is there for each."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, GenerationMixin
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

_BLOCK = 128
"""Tokens by which the room grows."""


class Room:
    """Memory for keys or values `(B, heads, capacity, D)`, of which a stretch is in use.

    Attributes:
        view: The stretch, as it was handed out last; None before the first.
    """

    def __init__(self) -> None:
        self.memory, self.start, self.end = torch.empty(0), 0, 0
        self.view: Tensor | None = None

    def extended(self, kept: Tensor | None, new: Tensor) -> Tensor:
        """Return what is kept with new states behind it, `(B, heads, n, D)`.

        Args:
            kept: What is kept: `view`, or something else that someone has put in its place; None at first.
            new: The new states.
        """
        num_kept, num_new = 0 if kept is None else kept.shape[-2], new.shape[-2]
        if kept is None or kept is not self.view or self.end + num_new > self.memory.shape[-2]:
            shape = (*new.shape[:-2], num_kept + num_new + _BLOCK, new.shape[-1])
            memory = new.new_empty(shape)
            if kept is not None:
                memory[..., :num_kept, :].copy_(kept)
            self.memory, self.start, self.end = memory, 0, num_kept
        self.memory[..., self.end : self.end + num_new, :].copy_(new)
        self.end += num_new
        return self.memory[..., self.start : self.end, :]

    def keep(self, num_last: int | None = None) -> Tensor:
        """Keep the last states only, all if None, and return them."""
        if num_last is not None:
            self.start = max(self.start, self.end - num_last)
        self.view = self.memory[..., self.start : self.end, :]
        return self.view


class RoomyLayer(DynamicLayer):
    """One layer's keys and values, in the type that attention computes in."""

    def __init__(self) -> None:
        super().__init__()
        self.rooms = Room(), Room()

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append keys and values `(B, heads, n, D)`; return all of them."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        whole = _extended(self, self.rooms, key_states, value_states)
        self.keys, self.values = (room.keep() for room in self.rooms)
        return whole


class RoomySlidingLayer(DynamicSlidingWindowLayer):
    """The same for attention to the last tokens only."""

    def __init__(self, sliding_window: int) -> None:
        super().__init__(sliding_window=sliding_window)
        self.rooms = Room(), Room()

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append keys and values `(B, heads, n, D)`; return those that the new tokens may attend to."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self.cumulative_length += key_states.shape[-2]
        whole = _extended(self, self.rooms, key_states, value_states)
        self.keys, self.values = (room.keep(self.sliding_window - 1) for room in self.rooms)
        return whole


def _extended(layer: Any, rooms: tuple[Room, Room], keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    has_some = layer.keys is not None and layer.keys.numel() > 0
    kept = (layer.keys, layer.values) if has_some else (None, None)
    device = keys.device.type
    if torch.is_autocast_enabled(device):  # attention would cast all of them, at each token anew
        dtypes = (torch.get_autocast_dtype(device),) * 2
    else:
        dtypes = keys.dtype, torch.promote_types(keys.dtype, values.dtype)
    parts = zip(rooms, kept, (keys.to(dtypes[0]), values.to(dtypes[1])), strict=True)
    whole = [room.extended(own, new) for room, own, new in parts]
    return whole[0], whole[1]


def roomy_cache(model: Any) -> DynamicCache | None:
    """Make the cache that `generate` would, with room in its layers of attention; None where it would make another.

    Args:
        model: A transformers model.
    """
    name = "_prepare_cache_for_generation"
    if (
        getattr(type(model), name, None) is not getattr(GenerationMixin, name)
        or not model._supports_default_dynamic_cache()
    ):
        return None
    cache = DynamicCache(config=model.config.get_text_config(decoder=True))
    if cache.layer_class_to_replicate is DynamicLayer:
        cache.layer_class_to_replicate = RoomyLayer
    for index, layer in enumerate(cache.layers):
        if type(layer) is DynamicLayer:
            cache.layers[index] = RoomyLayer()
        elif type(layer) is DynamicSlidingWindowLayer:
            cache.layers[index] = RoomySlidingLayer(layer.sliding_window)
    return cache
