"""Learning without randomness: what samples, learns and evaluates computes the same from the same tokens.

Dropout, jitter and random routing happen in modules whose `training` is True: the policy that sampled and the policy
of the first optimizer step would differ, and the importance ratio would not start at 1. So modules stay in eval mode
while the models learn, but for those whose activations are recomputed, which transformers does in training mode alone;
these go over to eval mode inside the recomputed function.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer

from rlhf_ppo.models.unwrapping import transformers_model

_CHECKPOINT = "_gradient_checkpointing_func"
"""Where transformers keeps the function that recomputes a module's activations."""


def set_learning(model: nn.Module) -> None:
    """Put all modules of a model in eval mode, but for those that recompute their activations."""
    for module in model.modules():
        module.training = getattr(module, "gradient_checkpointing", False) and not _leaves_it_to_layers(module)


def _leaves_it_to_layers(module: nn.Module) -> bool:
    """Tell whether a module that can recompute is a stack of layers that do it themselves."""
    return any(isinstance(part, GradientCheckpointingLayer) for part in module.modules() if part is not module)


def recompute_in_eval_mode(model: nn.Module) -> None:
    """Let modules whose activations are recomputed, which is done in training mode alone, compute in eval mode.

    Args:
        model: A model whose `gradient_checkpointing_enable` has just been called.
    """
    for module in model.modules():
        checkpoint = vars(module).get(_CHECKPOINT)
        if checkpoint is not None and getattr(checkpoint, "func", None) is not _checkpointed:
            setattr(module, _CHECKPOINT, functools.partial(_checkpointed, checkpoint, module))


def _checkpointed(checkpoint: Callable[..., Any], module: nn.Module, function: Callable[..., Any], *args: Any) -> Any:
    def in_eval_mode(*args: Any) -> Any:
        was_training, module.training = module.training, False
        try:
            return function(*args)
        finally:
            module.training = was_training

    return checkpoint(in_eval_mode, *args)


@contextmanager
def in_eval_mode(model: nn.Module) -> Iterator[None]:
    """Have a model in eval mode while a context lasts, and each module in its own mode after it."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


@contextmanager
def as_in_learning(
    checkpointing: bool, checkpointing_kwargs: Mapping[str, Any] | None, *models: nn.Module
) -> Iterator[None]:
    """Have models compute as they will while they learn, which `Trainer.train` sees to; restore their modes after it.

    Args:
        checkpointing: Whether activations are to be recomputed: `args.gradient_checkpointing`.
        checkpointing_kwargs: How: `args.gradient_checkpointing_kwargs`.
        *models: Transformers models, or `PeftModel`s around them.

    Raises:
        ValueError: Activations are to be recomputed, and an architecture cannot.
    """
    bases: list[Any] = [transformers_model(model) for model in models] if checkpointing else []
    given = dict(checkpointing_kwargs or {})
    cut = {name: given.pop(name) for name in ("every_n_layers", "offload") if name in given}
    # Renamed after 5.17; there the old name warns.
    kind = "activation" if all(hasattr(base, "activation_checkpointing_enable") for base in bases) else "gradient"
    with ExitStack() as stack:
        for model in models:
            stack.enter_context(in_eval_mode(model))
        for base in bases:
            getattr(base, f"{kind}_checkpointing_enable")(given or None, **cut)
            stack.callback(getattr(base, f"{kind}_checkpointing_disable"))
            recompute_in_eval_mode(base)
        for model in models:
            set_learning(model)
        yield
