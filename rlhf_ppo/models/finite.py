"""Weights that are NaN or infinite."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


def weights_not_finite(model: nn.Module) -> dict[str, float]:
    """Find the weights that are not finite, of this rank's share where an engine has taken them apart.

    Args:
        model: Any model; quantized weights are passed over.

    Returns:
        By parameter name, how many of its numbers are not finite.
    """
    shares = {name: _own_share(parameter) for name, parameter in model.named_parameters()}
    floats = {name: share for name, share in shares.items() if share.is_floating_point() and share.element_size() > 1}
    if not floats or bool(torch.stack([share.isfinite().all() for share in floats.values()]).all()):
        return {}
    return {name: int((~share.isfinite()).sum()) for name, share in floats.items() if not share.isfinite().all()}


def _own_share(parameter: Any) -> Tensor:
    """Return what this rank holds of a parameter that ZeRO-3 or FSDP2 has taken apart."""
    if hasattr(parameter, "to_local"):
        return parameter.detach().to_local()
    return parameter.ds_tensor if parameter.numel() == 0 and hasattr(parameter, "ds_tensor") else parameter.detach()
