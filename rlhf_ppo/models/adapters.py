"""Adapters over policy and value model: new ones, trained ones, and what must hold for the base as the reference."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from rlhf_ppo.models.adapter_checks import (
    PROMPT_LEARNING,
    adapter_kind,
    agree,
    check_adapter,
    probe,
    probe_tokens,
)
from rlhf_ppo.models.heads import scalar_head
from rlhf_ppo.models.passes import hidden_states
from rlhf_ppo.models.sharded import is_sharded
from rlhf_ppo.models.unwrapping import (
    active_adapter,
    backbone,
    is_peft_model,
    probe_ids,
    transformers_model,
    with_adapters,
)
from rlhf_ppo.terminal.quiet import quiet_calls


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

    return PeftModel.from_pretrained(base, os.fspath(path), is_trainable=True)


def adapter_directory(policy: nn.Module, directory: str) -> str:
    """Return where PEFT saves the active adapter: in `directory` itself, or in a folder of the adapter's name.

    Args:
        policy: A `PeftModel`.
        directory: The directory given to `save_pretrained`.
    """
    name = active_adapter(policy)
    return directory if name == "default" else os.path.join(directory, name)


def add_adapter(policy: nn.Module, peft_config: Any, name: str | None, base_serves_others: bool) -> nn.Module:
    """Put a new adapter over the policy.

    Args:
        policy: A causal language model.
        peft_config: A `peft.PeftConfig`.
        name: The adapter's name; PEFT's `"default"` when None.
        base_serves_others: Whether the policy without the adapter will be the reference, or the base of other models.

    Returns:
        The policy as a `PeftModel`.

    Raises:
        TypeError: `peft_config` is no `PeftConfig`.
        ValueError: There already is an adapter, the method is unsuitable, or the base would change.
    """
    from peft import get_peft_model

    _check_config(policy, peft_config, "model", "peft_config")
    before = None if is_sharded(policy) else probe(policy, probe_ids(policy))
    with _naming("peft_config"), quiet_calls():
        adapted = get_peft_model(policy, peft_config, adapter_name=name or "default")
    check_adapter(adapted, "model")
    if base_serves_others:
        _check_base_stays(adapted, peft_config, before)
    return adapted


def add_value_adapter(value_model: nn.Module, peft_config: Any) -> nn.Module:
    """Put a new adapter over the value model, and train its head along with it.

    Args:
        value_model: A model with a per-token scalar head.
        peft_config: A `peft.PeftConfig`; the head is added to its `modules_to_save`.

    Returns:
        The value model as a `PeftModel`.

    Raises:
        TypeError: `peft_config` is no `PeftConfig`.
        ValueError: There already is an adapter, or the method is unsuitable.
    """
    from peft import get_peft_model

    _check_config(value_model, peft_config, "value_model", "value_peft_config")
    head = scalar_head(value_model)
    name = next(name for name, module in value_model.named_modules() if module is head)
    modules = {name, *(getattr(peft_config, "modules_to_save", None) or ())}
    config = dataclasses.replace(peft_config, modules_to_save=sorted(modules), task_type="SEQ_CLS")
    with _naming("value_peft_config"), quiet_calls():
        adapted = get_peft_model(value_model, config)
    check_adapter(adapted, "value_model")
    return adapted


@contextmanager
def base_kept(model: nn.Module) -> Iterator[None]:
    """Put the weights below adapters back, bit for bit, after a context that merges the adapters and takes them out.

    Adding and subtracting rounds: in bfloat16 a base that is merged into at every update drifts, by percents in some
    dozens of updates, and with it all that shares the base. They are kept in the host's memory: a GPU that also holds
    vLLM has no room for them twice.

    Args:
        model: A model with adapters or without.
    """
    below = [
        weight
        for name, weight in model.named_parameters()
        if ".base_layer." in name and weight.is_floating_point() and weight.numel()
    ]
    before = [_on_host(weight) for weight in below]
    try:
        yield
    finally:
        for weight, kept in zip(below, before, strict=True):
            weight.data.copy_(kept, non_blocking=True)


def _on_host(weight: Tensor) -> Tensor:
    """Copy a weight to the host's memory, in its device's turn: the host does not wait for it."""
    copy = torch.empty_like(weight, device="cpu", pin_memory=weight.is_cuda, requires_grad=False)
    return copy.copy_(weight.detach(), non_blocking=True)


def copy_adapter(source: nn.Module, target: nn.Module) -> None:
    """Copy the active adapter's weights below the heads from one `PeftModel` into another's of the same kind.

    Args:
        source: Its backbone has at least the adapter's parameters of `target`.
        target: Receives them.

    Raises:
        ValueError: The backbones still give other hidden states.
    """
    from peft import set_peft_model_state_dict

    place, new_place = (f"{_name_in(model, backbone(model))}." for model in (source, target))
    heads = f"{_name_in(source, transformers_model(source))}."
    state = adapter_state(target)  # with what the head has of its own
    for name, value in adapter_state(source).items():
        if name.startswith(place):
            state[name.replace(place, new_place, 1)] = value
        elif not name.startswith(heads):  # what all layers have in common
            state[name] = value
    set_peft_model_state_dict(target, state, adapter_name=active_adapter(target))
    tokens = probe_tokens(source)
    if not agree(_states(target, tokens), _states(source, tokens)):
        raise ValueError(
            f"an adapter of the kind {adapter_kind(source)} cannot be copied from one model over a base to another; "
            "pass value_peft_config for a new one"
        )


def adapter_state(model: nn.Module) -> dict[str, Tensor]:
    """Return the weights and buffers of a `PeftModel`'s active adapter by their names without the adapter's."""
    from peft import get_peft_model_state_dict

    name = active_adapter(model)
    return get_peft_model_state_dict(model, adapter_name=name, save_embedding_layers=False)


@torch.no_grad()
def _states(model: nn.Module, ids: Tensor) -> Tensor:
    was_training = model.training
    states = hidden_states(model.eval(), ids, torch.ones_like(ids, dtype=torch.bool))
    model.train(was_training)
    return states


def _name_in(model: nn.Module, part: nn.Module) -> str:
    return next(name for name, module in model.named_modules() if module is part)


def load_adapter_weights(model: nn.Module, directory: str) -> None:
    """Read the active adapter's weights, as `save_pretrained` wrote them, into a `PeftModel`.

    Args:
        model: The `PeftModel`.
        directory: The directory that was given to `save_pretrained`.
    """
    from peft import load_peft_weights, set_peft_model_state_dict

    weights = load_peft_weights(adapter_directory(model, directory), device="cpu")
    set_peft_model_state_dict(model, weights, adapter_name=active_adapter(model))


def activate_adapter(policy: nn.Module, name: str | None) -> None:
    """Choose the adapter to train and make its parameters trainable.

    Args:
        policy: A `PeftModel`.
        name: The adapter's name; the active one when None.

    Raises:
        ValueError: There is no such adapter.
    """
    adapted = with_adapters(policy)
    adapters = list(adapted.peft_config)
    if name is not None and name not in adapters:
        raise ValueError(f"model_adapter_name={name!r} is no adapter of the policy, which has {adapters}")
    adapted.set_adapter(active_adapter(policy) if name is None else name)


def _check_config(model: nn.Module, peft_config: Any, role: str, argument: str) -> None:
    from peft import PeftConfig

    if not isinstance(peft_config, PeftConfig):
        raise TypeError(f"{argument} must be a peft.PeftConfig such as LoraConfig, got {type(peft_config).__name__}")
    if is_peft_model(model):
        raise ValueError(
            f"{role} is already a PeftModel and {argument} is given too; call {role}.merge_and_unload() first, or "
            f"leave {argument} out to go on training the adapter"
        )
    if peft_config.is_prompt_learning:
        raise ValueError(f"{argument} is a {type(peft_config).__name__}: {PROMPT_LEARNING}")
    if argument == "peft_config" and peft_config.task_type not in (None, "CAUSAL_LM"):
        raise ValueError(
            f"peft_config has task_type={str(peft_config.task_type)!r}, as which the policy would be saved; leave it "
            "out, or set 'CAUSAL_LM'"
        )
    if argument == "value_peft_config" and not hasattr(peft_config, "modules_to_save"):
        raise ValueError(
            f"{argument} is a {type(peft_config).__name__}, which has no modules_to_save, so that the head would not "
            "be trained; pass a config such as LoraConfig"
        )


@contextmanager
def _naming(argument: str) -> Iterator[None]:
    """Name the argument in what PEFT says of a configuration that does not fit the model."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{argument} does not fit the model: {error}") from error


def _check_base_stays(adapted: Any, peft_config: Any, before: Tensor | None) -> None:
    """Check that switching the adapter off gives the model that was handed over, now and after training."""
    fix = (
        "which is the reference's too, and with share_base_model=True the value model's: choose another setting, or "
        "pass ref_model and leave share_base_model=False"
    )
    bias = getattr(peft_config, "bias", "none")
    if bias != "none":
        raise ValueError(f"peft_config has bias={bias!r}, which trains biases of the base, {fix}")
    if before is None:
        return
    with adapted.disable_adapter():
        after = probe(adapted, probe_ids(adapted))
    if not agree(after, before):
        how = getattr(peft_config, "init_lora_weights", None)
        raise ValueError(f"peft_config (init_lora_weights={how!r}) changes the weights of the base, {fix}")
