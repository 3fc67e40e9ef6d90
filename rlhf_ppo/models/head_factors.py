"""What a language-model head multiplies: its own weight, and those of the adapters on it."""

from __future__ import annotations

from typing import Any, NamedTuple, cast

from torch import Tensor, nn
from torch.distributed.tensor import DTensor


class HeadFactors(NamedTuple):
    """A head taken apart: `logits = sum_i states_i @ weight_i^T + bias`.

    Attributes:
        states: The hidden states `(N, H)`, and for each adapter its inner activations `(N, r)`.
        weights: The head's weight `(V, H)`, and for each adapter its outer weight `(V, r)`.
        bias: The head's bias `(V,)`, or None.
    """

    states: tuple[Tensor, ...]
    weights: tuple[Tensor, ...]
    bias: Tensor | None


def head_factors(head: nn.Module, states: Tensor) -> HeadFactors | None:
    """Take a head apart, if it is a linear layer with at most plain LoRA adapters.

    Args:
        head: The language-model head.
        states: The hidden states that it reads `(N, H)`.

    Returns:
        The factors; None for any other head (quantized, sharded over a mesh, DoRA, with hooks): call it instead.
    """
    kind = _peft_kind(head)
    if kind == "ModulesToSaveWrapper":
        return head_factors(_active_copy(head), states)
    if kind == "LoraLinear":
        return _lora_factors(cast(Any, head), states)
    if type(head) is not nn.Linear or _is_observed(head) or isinstance(head.weight, DTensor):
        return None
    return HeadFactors((states,), (head.weight,), head.bias)


def _is_observed(head: nn.Module) -> bool:
    """Tell whether more than its forward happens at a call, as under ZeRO-3, whose hooks gather the weight."""
    return bool(head._forward_hooks or head._forward_pre_hooks or "forward" in vars(head))


def _peft_kind(head: nn.Module) -> str | None:
    if not type(head).__module__.startswith("peft."):
        return None
    from peft.tuners.lora import Linear
    from peft.utils import ModulesToSaveWrapper

    if isinstance(head, ModulesToSaveWrapper):
        return "ModulesToSaveWrapper"
    return "LoraLinear" if type(head) is Linear else None


def _active_copy(wrapper: Any) -> nn.Module:
    active = [] if wrapper.disable_adapters else [name for name in wrapper.active_adapters if name]
    return (
        wrapper.modules_to_save[active[0]]
        if active[:1] and active[0] in wrapper.modules_to_save
        else (wrapper.original_module)
    )


def _lora_factors(head: Any, states: Tensor) -> HeadFactors | None:
    base = head_factors(head.base_layer, states)
    if base is None or (head.disable_adapters and head.merged):
        return None
    active = [] if head.disable_adapters or head.merged else [n for n in head.active_adapters if n in head.lora_A]
    if any(name in head.lora_variant or head.lora_B[name].bias is not None for name in active):
        return None
    inner = [
        head.lora_A[name](head.lora_dropout[name](states.to(head.lora_A[name].weight.dtype))) * head.scaling[name]
        for name in active
    ]
    return HeadFactors(
        (*base.states, *inner), (*base.weights, *(head.lora_B[name].weight for name in active)), base.bias
    )
