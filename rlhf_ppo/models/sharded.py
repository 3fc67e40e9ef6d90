"""Parameters that DeepSpeed ZeRO-3 takes apart."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

from torch import Tensor, nn

if TYPE_CHECKING:
    pass


def is_managed(model: nn.Module) -> bool:
    """Tell whether DeepSpeed ZeRO-3 takes the parameters apart, which at this moment may all be whole."""
    return any(hasattr(parameter, "ds_id") for parameter in model.parameters())


def gathers_in_passes(model: nn.Module) -> bool:
    """Tell whether ZeRO-3's hooks gather the parameters in each forward pass, which all ranks then make together."""
    return any(is_zero_hook(hook) for module in model.modules() for hook in module._forward_pre_hooks.values())


def is_zero_hook(hook: object) -> bool:
    """Tell whether a module's hook is one of those with which DeepSpeed gathers and releases parameters."""
    return str(getattr(hook, "__module__", "")).startswith("deepspeed")


def is_sharded(model: nn.Module) -> bool:
    """Tell whether DeepSpeed ZeRO-3 has taken the parameters apart, so that they are empty outside its hooks."""
    return any(hasattr(parameter, "ds_id") and parameter.numel() == 0 for parameter in model.parameters())


def gathered(parameters: Iterable[Tensor], modify: bool = False) -> AbstractContextManager[None]:
    """Make parameters that ZeRO-3 has sharded whole while a context lasts; every rank enters it.

    Args:
        parameters: Sharded or not.
        modify: Whether what rank 0 has written into them stays.
    """
    sharded = [parameter for parameter in parameters if hasattr(parameter, "ds_id")]
    if not sharded:
        return nullcontext()
    import deepspeed

    return deepspeed.zero.GatheredParameters(sharded, modifier_rank=0 if modify else None)
