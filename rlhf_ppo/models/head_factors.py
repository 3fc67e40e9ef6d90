"""What a language-model head multiplies: its own weight, and those of the adapters on it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from rlhf_ppo.models.float32_head import Float32Linear, is_in_float32
from rlhf_ppo.models.sharded import is_zero_hook
from rlhf_ppo.models.stored_linear import StoredLinear

T = TypeVar("T")


class HeadFactors(NamedTuple):
    """A head taken apart: `logits = sum_i states_i @ weight_i^T + bias`.

    Attributes:
        states: The hidden states `(N, H)`, and for each adapter its inner activations `(N, r)`.
        weights: The head's weight `(V, H)`, and for each adapter its outer weight `(V, r)`.
        bias: The head's bias `(V,)`, or None.
        in_float32: Whether the products are in float32 whatever autocast says.
    """

    states: tuple[Tensor, ...]
    weights: tuple[Tensor, ...]
    bias: Tensor | None
    in_float32: bool = False


class HeadLayers(NamedTuple):
    """The linear layers that make up a head: `logits = sum_i layer_i(states_i)`; only the first may have a bias.

    Attributes:
        states: The hidden states `(N, H)`, and for each adapter its inner activations `(N, r)`.
        layers: The head's own layer, and for each adapter its outer one.
    """

    states: tuple[Tensor, ...]
    layers: tuple[nn.Linear, ...]

    def apply(self, function: Callable[[HeadFactors], T]) -> T:
        """Call a function with the factors, within one forward pass of each layer.

        ZeRO-3's hooks then gather each weight once before the function, and once more before its backward pass, as
        they do for the layer itself.

        Args:
            function: Returns what is differentiable as a tensor or a tuple of tensors.

        Returns:
            What the function returned.
        """

        def run(*states: Tensor) -> T:
            weights = tuple(layer.weight for layer in self.layers)
            return function(HeadFactors(states, weights, self.layers[0].bias, is_in_float32(self.layers[0])))

        for layer in self.layers:
            run = _within_pass_of(layer, run)
        return run(*self.states)


def head_layers(head: nn.Module, states: Tensor) -> HeadLayers | None:
    """Take a head apart, if it is a linear layer with at most plain LoRA adapters.

    Args:
        head: The language-model head.
        states: The hidden states that it reads `(N, H)`.

    Returns:
        The layers; None for any other head (quantized, DoRA, a layer that an engine other than ZeRO-3 still has to put
        together, or with hooks that may read or change its output): call it instead.
    """
    kind = _peft_kind(head)
    if kind == "ModulesToSaveWrapper":
        return head_layers(_active_copy(head), states)
    if kind == "LoraLinear":
        return _lora_layers(head, states)
    # Not `head.weight`: outside the layer's own forward pass ZeRO-3 would gather it, for the whole model's.
    weight = next(head.parameters(recurse=False), None)
    if (
        not isinstance(head, nn.Linear)
        or type(head) not in (nn.Linear, StoredLinear, Float32Linear)
        or _is_observed(head)
        or isinstance(weight, DTensor)
    ):
        return None
    return HeadLayers((states,), (head,))


def _within_pass_of(layer: nn.Module, function: Callable[..., T]) -> Callable[..., T]:
    """Let a layer with hooks run the function in place of its own forward pass, on the same inputs."""

    def run(*states: Tensor) -> T:
        layer.forward = function
        try:
            return layer(*states)
        finally:
            del layer.forward

    return run if layer._forward_pre_hooks else function


def _is_observed(head: nn.Module) -> bool:
    """Tell whether a call does more than multiply, apart from ZeRO-3's hooks, which only gather what is multiplied."""
    hooks = (*head._forward_pre_hooks.values(), *head._forward_hooks.values())
    return not all(map(is_zero_hook, hooks)) or "forward" in vars(head)


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


def _lora_layers(head: Any, states: Tensor) -> HeadLayers | None:
    base = head_layers(head.base_layer, states)
    if base is None or (head.disable_adapters and head.merged):
        return None
    active = [] if head.disable_adapters or head.merged else [n for n in head.active_adapters if n in head.lora_A]
    if any(name in head.lora_variant or head.lora_B[name].bias is not None for name in active):
        return None
    inner = [
        head.lora_A[name](head.lora_dropout[name](states.to(next(head.lora_A[name].parameters()).dtype)))
        * head.scaling[name]
        for name in active
    ]
    return HeadLayers((*base.states, *inner), (*base.layers, *(head.lora_B[name] for name in active)))
