"""The most likely tokens whose probabilities sum to p, with the same bits at every run on an accelerator."""

from __future__ import annotations

from typing import Any

import torch
from transformers import LogitsProcessor

from rlhf_ppo.algorithm.masked import exact_type

_UNIT = 2**52
"""What a probability of 1 is in integers: a double's digits, and sums of a vocabulary's roundings stay below 2^63."""


class NucleusInIntegers(LogitsProcessor):
    """Masks what transformers' `TopPLogitsWarper` does, from sums of integers, which no order of additions changes.

        S_v = sum_{w: p_w <= p_v} round(2^52 p_w),    v stays where S_v > 2^52 (1 - p), and the likeliest in any case

    A GPU adds floats up in an order that differs from run to run. Nucleus sampling: Holtzman et al., 1904.09751.

    Args:
        top_p: Probability that stays, 0 to 1.
    """

    def __init__(self, top_p: float) -> None:
        self.top_p = top_p

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        """Set the logits of unlikely tokens, `(B, V)`, to minus infinity."""
        ascending, tokens = scores.sort(dim=-1, stable=True)
        shares = ascending.softmax(dim=-1, dtype=exact_type(scores.device)).mul_(_UNIT).round_().long()
        is_unlikely = shares.cumsum(dim=-1) <= round((1 - self.top_p) * _UNIT)
        is_unlikely[:, -1] = False
        return scores.masked_fill(is_unlikely.gather(1, tokens.argsort(dim=-1)), -torch.inf)
