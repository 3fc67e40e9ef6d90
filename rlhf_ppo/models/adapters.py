"""Adapters over the policy: a new one, a trained one, and what must hold for the base to be the reference."""

from __future__ import annotations

import os
from typing import Any, cast

import torch
from torch import Tensor, nn

from rlhf_ppo.models.inputs import is_peft_model, is_sharded, probe_ids


def is_adapter_directory(path: str | os.PathLike[str]) -> bool:
    """Tell whether a directory holds an adapter, as `save_model` writes it for a LoRA policy."""
    return os.path.isfile(os.path.join(path, "adapter_config.json"))


def base_of_adapter(path: str | os.PathLike[str]) -> str:
    """Return the directory or hub name of the model that a saved adapter belongs to."""
    from peft import PeftConfig

    return str(PeftConfig.from_pretrained(os.fspath(path)).base_model_name_or_path)


def load_adapter(base: nn.Module, path: str | os.PathLike[str]) -> nn.Module:
    """Put a saved adapter over its base, ready to be trained further."""
    from peft import PeftModel

    return PeftModel.from_pretrained(cast(Any, base), os.fspath(path), is_trainable=True)


def adapter_directory(policy: nn.Module, directory: str) -> str:
    """Return where PEFT saves the active adapter: in `directory` itself, or in a folder of the adapter's name.

    Args:
        policy: A `PeftModel`.
        directory: The directory given to `save_pretrained`.
    """
    name = cast(Any, policy).active_adapter
    return directory if name == "default" else os.path.join(directory, name)


def add_adapter(policy: nn.Module, peft_config: Any, name: str | None, base_is_reference: bool) -> nn.Module:
    """Put a new adapter over the policy.

    Args:
        policy: A causal language model.
        peft_config: A `peft.PeftConfig`.
        name: The adapter's name; PEFT's `"default"` when None.
        base_is_reference: Whether the policy without the adapter will be the reference.

    Returns:
        The policy as a `PeftModel`.

    Raises:
        TypeError: `peft_config` is no `PeftConfig`.
        ValueError: There already is an adapter, the method is unsuitable, or the base would change.
    """
    from peft import PeftConfig, get_peft_model

    if not isinstance(peft_config, PeftConfig):
        raise TypeError(f"peft_config must be a peft.PeftConfig such as LoraConfig, got {type(peft_config).__name__}")
    if is_peft_model(policy):
        raise ValueError(
            "model is already a PeftModel and peft_config is given too; call model.merge_and_unload() first, or leave "
            "peft_config out to go on training the adapter"
        )
    if peft_config.is_prompt_learning:
        raise ValueError(
            f"peft_config is a {type(peft_config).__name__}; prompt learning changes the sequence itself; use "
            "a method like LoRA"
        )
    before = None if is_sharded(policy) else _probe(policy)
    adapted = get_peft_model(cast(Any, policy), peft_config, adapter_name=name or "default")
    if base_is_reference:
        _check_base_stays(adapted, peft_config, before)
    return adapted


def activate_adapter(policy: nn.Module, name: str | None) -> None:
    """Choose the adapter to train and make its parameters trainable.

    Args:
        policy: A `PeftModel`.
        name: The adapter's name; the active one when None.

    Raises:
        ValueError: There is no such adapter.
    """
    adapters = list(cast(Any, policy).peft_config)
    if name is not None and name not in adapters:
        raise ValueError(f"model_adapter_name={name!r} is no adapter of the policy, which has {adapters}")
    cast(Any, policy).set_adapter(cast(Any, policy).active_adapter if name is None else name)


def _check_base_stays(adapted: Any, peft_config: Any, before: Tensor | None) -> None:
    """Check that switching the adapter off gives the model that was handed over, now and after training."""
    fix = "so the reference would not be the initial policy: choose another setting, or pass ref_model"
    bias = getattr(peft_config, "bias", "none")
    if bias != "none":
        raise ValueError(f"peft_config has bias={bias!r}, which trains biases of the base, {fix}")
    if before is None:
        return
    with adapted.disable_adapter():
        after = _probe(adapted)
    if not torch.allclose(after, before, rtol=1e-3, atol=1e-3 * float(before.abs().max())):
        how = getattr(peft_config, "init_lora_weights", None)
        raise ValueError(f"peft_config (init_lora_weights={how!r}) changes the weights of the base, {fix}")


@torch.no_grad()
def _probe(model: nn.Module) -> Tensor:
    was_training = model.training
    logits = model.eval()(input_ids=probe_ids(model), use_cache=False).logits.float()
    model.train(was_training)
    return logits
