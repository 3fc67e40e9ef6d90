"""What the masks of responses must be, checked on the host where they are copied to anyway."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rlhf_ppo.data.places import HostMasks


def check_bool(**masks: Tensor) -> None:
    """Check the dtype of masks.

    Raises:
        TypeError: One is not bool; says which.
    """
    for name, mask in masks.items():
        if mask.dtype != torch.bool:
            raise TypeError(f"{name} has dtype {mask.dtype}, expected torch.bool; convert it with {name}.bool()")


def check_masks(masks: HostMasks) -> None:
    """Check that each row is a left-padded prompt and a right-padded response, in which the policy wrote something.

    Args:
        masks: Attention `(B, C + T)` and response `(B, T)`.

    Raises:
        ValueError: A row is not; names the first such row.
    """
    attention, written = masks.attention, masks.response
    context = attention.shape[1] - written.shape[1]
    prompt, response = attention[:, :context], attention[:, context:]
    wrong = {
        f"attention_mask is False at the end of the prompt, column {context - 1}: prompts are padded on the left, and "
        "none is empty": ~prompt[:, -1],
        "attention_mask has a hole in the prompt: move its padding to the left": _falls(prompt),
        "attention_mask has a hole in the response: mark tokens of tools and environments too, which are False in "
        "response_mask alone, and move padding to the right": _falls(~response),
        "response_mask is True where attention_mask is False: the policy cannot have written padding": (
            written & ~response
        ).any(axis=1),
        "response_mask has no real token: every response needs at least one that the policy wrote, the stop token if "
        "nothing else": ~written.any(axis=1),
    }
    for what, rows in wrong.items():
        if rows.any():
            raise ValueError(f"row {int(rows.argmax())}: {what}")


def _falls(mask: Any) -> Any:
    """Tell in which rows True is followed by False."""
    return (mask[:, :-1] & ~mask[:, 1:]).any(axis=1)
