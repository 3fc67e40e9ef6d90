"""Weights that are NaN or infinite."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


def check_finite(model: nn.Module, argument: str) -> None:
    """Check that a model holds no weight that is NaN or infinite, of this rank's share where it is sharded.

    Reads every weight once, at the speed of memory.

    Args:
        model: Any model; quantized weights are not checked.
        argument: What the caller's argument is called, for the error message.

    Raises:
        ValueError: It holds one; names the first parameter.
    """
    if found := weights_not_finite(model):
        name, count = next(iter(found.items()))
        others = f" and in {len(found) - 1} other parameters" if len(found) > 1 else ""
        raise ValueError(
            f"{argument} has weights that are NaN or infinite ({count} in {name}{others}), so that nothing can be "
            "computed with it; load an earlier or undamaged copy of the model; where 16-bit weights have overflowed, "
            "convert it again from float32 weights"
        )


def weights_not_finite(model: nn.Module) -> dict[str, float]:
    """Find the weights that are not finite, of this rank's share where an engine has taken them apart.

    Args:
        model: Any model; quantized weights are passed over.

    Returns:
        By parameter name, how many of its numbers are not finite.
    """
    shares = {name: _own_share(parameter) for name, parameter in model.named_parameters()}
    floats = {
        name: share
        for name, share in shares.items()
        if share.is_floating_point() and share.element_size() > 1 and share.numel() > 0 and not share.is_meta
    }
    if not floats or bool(torch.stack([_is_finite(share) for share in floats.values()]).all()):
        return {}
    return {name: int((~share.isfinite()).sum()) for name, share in floats.items() if not _is_finite(share)}


def _is_finite(share: Tensor) -> Tensor:
    """Tell whether all numbers are finite; `isfinite` takes 50 times as long on a CPU."""
    lowest, highest = share.aminmax()  # NaN if one number is
    return lowest.isfinite() & highest.isfinite()


def _own_share(parameter: Any) -> Tensor:
    """Return what this rank holds of a parameter that ZeRO-3 or FSDP2 has taken apart."""
    if hasattr(parameter, "to_local"):
        return parameter.detach().to_local()
    return parameter.ds_tensor if parameter.numel() == 0 and hasattr(parameter, "ds_tensor") else parameter.detach()
