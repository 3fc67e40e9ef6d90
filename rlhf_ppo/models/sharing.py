"""One base under several models: its frozen parameters exist once, and each model has adapters of its own over them.

Every model keeps its own modules; only the parameters inside them are the same objects. So no adapter is switched
between a forward pass and its backward pass, where activations may be computed again.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from rlhf_ppo.models.adapter_checks import adapter_kind
from rlhf_ppo.models.adapters import add_value_adapter, copy_adapter
from rlhf_ppo.models.heads import head_of_scorer
from rlhf_ppo.models.loading import empty_classifier
from rlhf_ppo.models.unwrapping import backbone, is_peft_model, transformers_model, with_adapters


def value_model_over(policy: nn.Module, value_model: nn.Module | None, peft_config: Any) -> nn.Module:
    """Put a value model over the policy's base.

    Args:
        policy: A `PeftModel`.
        value_model: A value model whose weights below the head are those of the base, or None to make one with a zero
            head.
        peft_config: The `peft.PeftConfig` of the value model's adapter. None leaves it the one that it comes with, or
            takes the policy's; of a value model that is made here the adapter is then a copy of the policy's.

    Returns:
        The value model as a `PeftModel`; its adapter and its head are its own.

    Raises:
        ValueError: The policy has no adapter, trains its base, or has another base than the value model.
    """
    _check_base_is_frozen(policy)
    critic = _scorer_with_zero_head(policy) if value_model is None else value_model
    if peft_config is not None:
        critic = add_value_adapter(critic, peft_config)
    elif not is_peft_model(critic):
        config = with_adapters(policy).active_peft_config
        critic = _with_adapter_like(config, critic)
        if value_model is None:
            copy_adapter(policy, critic)
    if (difference := share_base(critic, policy)) is not None:
        raise ValueError(
            f"share_base_model=True, but value_model has another base than model: {difference}; pass an adapter over "
            "the policy's base, or value_model=None to have one made"
        )
    return critic


@torch.no_grad()
def share_base(model: nn.Module, policy: nn.Module) -> str | None:
    """Let a model hold the very parameters of the policy's base in place of equal ones of its own.

    Equal means in the precision of the policy. Adapters, and heads, stay the model's own.

    Args:
        model: A `PeftModel`, which is changed in place.
        policy: Another one.

    Returns:
        None, or what differs between the two bases; then nothing has been changed.
    """
    own, base = (dict(_bare_modules(backbone(part))) for part in (model, policy))
    found = {name: module._parameters for name, module in own.items() if module._parameters}
    shared = {name: module._parameters for name, module in base.items() if module._parameters}
    if missing := sorted(shared.keys() ^ found.keys()):
        return f"only one of them has {missing[0]}"
    for name, parameters in found.items():
        for key, value in parameters.items():
            if not _equal(value, shared[name].get(key)):
                return f"{name}.{key} is not the same"
    for name, parameters in found.items():
        parameters.update(shared[name])
    return None


def shares_parameters(model: nn.Module, other: nn.Module) -> bool:
    """Tell whether two models hold a parameter in common."""
    return not {id(value) for value in model.parameters()}.isdisjoint(id(value) for value in other.parameters())


def _scorer_with_zero_head(policy: nn.Module) -> nn.Module:
    """Make a sequence classifier over the policy's base, without the policy's adapters."""
    original = transformers_model(policy)
    device = next(original.parameters()).device
    with torch.device("meta"):
        scorer = empty_classifier(original)
    shared = {id(value): value for value in backbone(policy).parameters()}
    body = copy.deepcopy(backbone(policy), shared)
    _strip_adapters(body)
    setattr(scorer, transformers_model(scorer).base_model_prefix, body)
    head = head_of_scorer(scorer).to_empty(device=device)
    for parameter in head.parameters():
        nn.init.zeros_(parameter)
    for name in ("is_quantized", "hf_quantizer", "quantization_method", "is_loaded_in_4bit", "is_loaded_in_8bit"):
        if hasattr(original, name):  # PEFT and Trainer treat quantized models as their own kind
            setattr(scorer, name, getattr(original, name))
    return scorer.train()


def _with_adapter_like(config: Any, model: nn.Module) -> nn.Module:
    """Give a model without a language-model head an adapter that is configured as the policy's."""
    names = [name for name, _ in backbone(model).named_modules()]

    def is_there(name: str) -> bool:
        return any(full == name or full.endswith(f".{name}") for full in names)

    changed = copy.deepcopy(config)
    changed.inference_mode = False
    if getattr(config, "modules_to_save", None):
        changed.modules_to_save = [name for name in config.modules_to_save if is_there(name)] or None
    if isinstance(tokens := getattr(config, "trainable_token_indices", None), dict):
        changed.trainable_token_indices = {name: ids for name, ids in tokens.items() if is_there(name)}
    try:
        return add_value_adapter(model, changed)
    except ValueError as error:
        raise ValueError(
            "share_base_model=True gives the value model an adapter like the policy's, which it cannot have; pass "
            f"value_peft_config for one of another kind: {error}"
        ) from error


def _check_base_is_frozen(policy: nn.Module) -> None:
    if not is_peft_model(policy):
        raise ValueError("share_base_model=True, but all weights of model are trained; pass peft_config")
    for name, module in _bare_modules(backbone(policy)):
        for key, value in module._parameters.items():
            if value is not None and value.requires_grad:
                raise ValueError(
                    f"share_base_model=True, but the policy's adapter, of the kind {adapter_kind(policy)}, trains "
                    f"{name}.{key} of the base, which every model would follow; set bias='none' in peft_config, or "
                    "choose a kind such as LoRA"
                )


def _bare_modules(module: nn.Module, name: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules that were there before adapters, with the names that they had."""
    yield name, module
    for child_name, child in module.named_children():
        yield from _bare_modules(_without_wrapper(child), f"{name}.{child_name}".lstrip("."))


def _strip_adapters(module: nn.Module) -> None:
    for name, child in list(module.named_children()):
        setattr(module, name, _without_wrapper(child))
        _strip_adapters(getattr(module, name))


def _without_wrapper(module: nn.Module) -> nn.Module:
    """Return what PEFT has wrapped: the layer under adapters, or the original of a module that is trained whole."""
    for name in ("base_layer", "original_module", "token_adapter"):
        if (inner := module._modules.get(name)) is not None:
            return _without_wrapper(inner)
    return module


def _equal(own: torch.Tensor | None, shared: torch.Tensor | None) -> bool:
    if own is None or shared is None:
        return own is shared
    return own is shared or (own.shape == shared.shape and torch.equal(own.to(shared), shared))
