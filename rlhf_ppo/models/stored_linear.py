"""A linear layer whose weights are in 16 bits below activations in 32."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class StoredLinear(nn.Linear):
    """A frozen linear layer with weights in 16 bits, which outside autocast computes in the type of its input."""

    def forward(self, input: Tensor) -> Tensor:
        """Multiply `(..., in_features)` by the weight."""
        if input.dtype == self.weight.dtype or torch.is_autocast_enabled(input.device.type):
            return super().forward(input)
        bias = None if self.bias is None else self.bias.to(input.dtype)
        return nn.functional.linear(input, self.weight.to(input.dtype), bias)
