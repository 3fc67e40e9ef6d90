"""A language-model head that multiplies in float32 under 16-bit arithmetic."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from rlhf_ppo.models.stored_linear import StoredLinear
from rlhf_ppo.models.unwrapping import output_layer, transformers_model


class Float32Linear(nn.Linear):
    """A linear layer that multiplies in float32, whatever autocast says and whatever its weights are stored in."""

    def forward(self, input: Tensor) -> Tensor:
        """Multiply `(..., in_features)` by the weight, into float32."""
        with torch.autocast(input.device.type, enabled=False):
            bias = None if self.bias is None else self.bias.float()
            return nn.functional.linear(input.float(), self.weight.float(), bias)


_KINDS = nn.Linear, StoredLinear, Float32Linear


def multiply_head_in_float32(policy: nn.Module, in_float32: bool) -> None:
    """Let a policy's head, with the adapters on it, multiply in float32, or let it no longer do so.

        z = float32(W) float32(h) + float32(b)

    Under 16-bit arithmetic hidden states, weights and logits are else rounded to 16 bits, in which a logit near 20 has
    steps of 1/8 in bfloat16; sampling and learning, with kernels of their own, then disagree about a token's
    probability. MiniMax-M1, 2506.13585; ScaleRL, 2510.13786. States and weights that are
    themselves stored in 16 bits are not made more exact.

    Args:
        policy: A causal language model, or a `PeftModel` around one; its linear layers are changed in place.
        in_float32: Whether to.

    Raises:
        ValueError: It is to, but its head is no linear layer of torch.
    """
    head = output_layer(policy)
    if in_float32:
        own = _without_adapters(head)
        if type(own) not in _KINDS:
            raise ValueError(
                f"lm_head_float32=True, but the head of {type(transformers_model(policy)).__name__} is a "
                f"{type(own).__name__}, which multiplies in a type of its own; leave it False, or load the model "
                "with its head in 16 or 32 bits (llm_int8_skip_modules=['lm_head'])"
            )
        multiply_in_float32(head)
    else:
        widened: list[nn.Linear] = [layer for layer in head.modules() if isinstance(layer, Float32Linear)]
        for layer in widened:
            layer.__class__ = nn.Linear


def multiply_in_float32(head: nn.Module) -> None:
    """Let the linear layers of a head, those of adapters on it included, multiply in float32; others stay as they are.

    In bfloat16 values and scores near 5 have steps of .03. Engines store all trained weights in 16 bits.
    """
    for layer in [layer for layer in head.modules() if type(layer) in _KINDS]:
        layer.__class__ = Float32Linear


def _without_adapters(head: nn.Module) -> nn.Module:
    inner = getattr(head, "base_layer", getattr(head, "original_module", None))
    return head if inner is None else _without_adapters(inner)


def is_in_float32(head: nn.Module) -> bool:
    """Tell whether a head, which may have adapters, multiplies in float32."""
    return any(type(layer) is Float32Linear for layer in head.modules())
