"""The two trained models on disk: the policy at the root, in checkpoints the value model below it."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import nn

from rlhf_ppo.checkpoints.fits import check_fits, is_saved_under_other_names, load_under_other_names
from rlhf_ppo.checkpoints.whole import VALUE_MODEL_DIR
from rlhf_ppo.models.adapters import load_adapter_weights
from rlhf_ppo.models.policy_and_value import PolicyAndValue
from rlhf_ppo.models.unwrapping import active_adapter, is_peft_model
from rlhf_ppo.terminal.quiet import no_bars_of_models, quiet_calls


def save_models(
    models: PolicyAndValue, directory: str, state_dict: Mapping[str, Any] | None, with_value_model: bool
) -> None:
    """Write the models, or their adapters, loadable with `from_pretrained`.

    Args:
        models: Both models.
        directory: The policy's; the value model has one in it.
        state_dict: The weights of both, where an engine has gathered them.
        with_value_model: Whether to write the value model too.
    """
    parts = [("policy", models.policy, directory)]
    if with_value_model:
        parts.append(("value_model", models.value_model, os.path.join(directory, VALUE_MODEL_DIR)))
    for prefix, part, part_directory in parts:
        part_state = None if state_dict is None else _with_prefix(state_dict, f"{prefix}.")
        adapters = {"selected_adapters": [active_adapter(part)]} if is_peft_model(part) else {}
        with no_bars_of_models():
            cast(Any, part).save_pretrained(part_directory, state_dict=part_state, **adapters)


def load_models(models: PolicyAndValue, checkpoint: str, load: Callable[[str, nn.Module], None]) -> None:
    """Load both models from a checkpoint.

    Args:
        models: Both models.
        checkpoint: Its directory.
        load: Loads a whole model's weights from a directory, as Trainer does.

    Raises:
        ValueError: The checkpoint is of other models.
    """
    value_directory = os.path.join(checkpoint, VALUE_MODEL_DIR)
    parts = ((models.policy, checkpoint), (models.value_model, value_directory))
    for part, directory in parts:
        check_fits(part, directory)
    for part, directory in parts:
        if is_peft_model(part):
            load_adapter_weights(part, directory)
        elif is_saved_under_other_names(part):
            load_under_other_names(part, directory)
        else:
            with quiet_calls():
                load(directory, part)


@contextmanager
def without_frozen(engine: nn.Module, models: PolicyAndValue, is_deepspeed: bool) -> Iterator[None]:
    """Let DeepSpeed leave the frozen base of adapters out of what it saves; Trainer sees no PeftModel in two models.

    Args:
        engine: What trains the models.
        models: Both models.
        is_deepspeed: Whether that is DeepSpeed's engine.
    """
    if not is_deepspeed or not any(is_peft_model(part) for part in (models.policy, models.value_model)):
        yield
        return
    saving = cast(Any, engine)
    saving.save_checkpoint = functools.partial(saving.save_checkpoint, exclude_frozen_parameters=True)
    hook = models.register_state_dict_post_hook(_drop_frozen)
    try:
        yield
    finally:
        hook.remove()
        del saving.save_checkpoint


def _drop_frozen(model: torch.nn.Module, state_dict: dict[str, Any], prefix: str, metadata: Any) -> None:
    """Leave out what is frozen by all its names; DeepSpeed knows but one of a parameter that is shared or tied."""
    for name, parameter in model.named_parameters(prefix.rstrip("."), remove_duplicate=False):
        if not parameter.requires_grad:
            state_dict.pop(name, None)


def _with_prefix(state_dict: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    return {name.removeprefix(prefix): value for name, value in state_dict.items() if name.startswith(prefix)}
