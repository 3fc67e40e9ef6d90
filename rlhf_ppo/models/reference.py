"""How the reference policy of the KL penalty is made; `policy_and_value.py` runs it."""

from __future__ import annotations

import copy
import itertools
from typing import TYPE_CHECKING

from torch import nn

from rlhf_ppo.config import PPOConfig
from rlhf_ppo.models.adapters import (
    adapter_kind,
    adapter_state,
    config_of_another,
    trained_in_base,
    trained_weights_kept,
)
from rlhf_ppo.models.loading import check_no_scorer, low_precision_parameters
from rlhf_ppo.models.policy_and_value import FrozenPolicy, Reference
from rlhf_ppo.models.unwrapping import active_adapter, copy_model, is_peft_model
from rlhf_ppo.ranks.processes import get_logger

if TYPE_CHECKING:
    from peft import PeftModel

logger = get_logger(__name__)

INITIAL_ADAPTER = "ref"
"""Name of the frozen copy of an adapter that was trained before the run; "ref2" for the model's second trainer."""

_ONE_AT_A_TIME = ("ADALORA", "ADAPTION_PROMPT")
"""Kinds of adapters of which a model holds only one, or that share state outside of PyTorch's parameters."""


def asks_for_reference(args: PPOConfig) -> bool:
    """Return whether the arguments need a reference: for a KL penalty, or by its adapter."""
    return args.kl_coef > 0 or args.ref_adapter_name is not None


def make_reference(
    policy: nn.Module,
    ref_model: nn.Module | None,
    ref_adapter_name: str | None,
    adapter_is_new: bool,
    temperature: float,
) -> Reference:
    """Choose the reference.

    Args:
        policy: The policy, possibly a `PeftModel`.
        ref_model: The model that the user gave, or None.
        ref_adapter_name: The adapter of `policy` that the user named, or None.
        adapter_is_new: Whether the adapter was made just now, so that switching it off gives the initial policy.
        temperature: Sampling temperature that divides the logits.

    Returns:
        The user's model, frozen; else the named adapter; else, for a `PeftModel`, the base weights when the adapter is
        new and a frozen copy of the adapter when it was already trained, so that KL starts at 0 (a copy of the whole
        policy for the kinds of adapters that a model holds one of); else a frozen copy.

    Raises:
        ValueError: `ref_adapter_name` is given without such an adapter, with `ref_model`, or for a reward model's
            adapter; or the reference would be trained along.
    """
    model = adapter = None
    if ref_adapter_name is not None:
        _check_adapter(policy, ref_model, ref_adapter_name)
        adapter = ref_adapter_name
    elif ref_model is not None:
        _check_separate_weights(policy, ref_model)
        model = ref_model
    elif not is_peft_model(policy):
        model = copy_model(policy)
    elif not adapter_is_new and can_hold_two(policy):
        adapter = _copy_active_adapter(policy)
    elif not adapter_is_new:
        model = _whole_copy(policy)
    return Reference(None if model is None else FrozenPolicy(model, temperature), adapter)


def _check_adapter(policy: nn.Module, ref_model: nn.Module | None, ref_adapter_name: str) -> None:
    if ref_model is not None:
        raise ValueError(f"ref_adapter_name={ref_adapter_name!r} and ref_model are both given; pass one of them")
    adapters = policy.peft_config if is_peft_model(policy) else {}
    others = [name for name in adapters if name != active_adapter(policy)]
    if ref_adapter_name not in others:
        raise ValueError(
            f"ref_adapter_name={ref_adapter_name!r} is not an adapter of the policy other than the "
            f"trained one; there are {others}"
        )
    check_no_scorer(adapters[ref_adapter_name], "ref_model", f"ref_adapter_name={ref_adapter_name!r} is")


def _check_separate_weights(policy: nn.Module, ref_model: nn.Module) -> None:
    trained = {id(parameter): name for name, parameter in policy.named_parameters() if parameter.requires_grad}
    shared = [trained[id(parameter)] for parameter in ref_model.parameters() if id(parameter) in trained]
    if shared:
        raise ValueError(
            f"ref_model holds parameters that the policy trains (the first is {shared[0]}): PEFT puts adapters into "
            "the model that it is given; load ref_model again, or leave it out"
        )


def can_hold_two(policy: nn.Module) -> bool:
    """Return whether the policy can have a second adapter of this kind that shares no trainable parameter."""
    return adapter_kind(policy) not in _ONE_AT_A_TIME and trained_in_base(policy) is None


def _whole_copy(policy: nn.Module) -> nn.Module:
    weight, kind = trained_in_base(policy), adapter_kind(policy)
    why = f"PEFT holds one adapter of the kind {kind} at a time" if weight is None else f"model trains {weight}"
    logger.warning(f"{why}: the reference is a copy of the whole policy, and takes as much memory.")
    return copy.deepcopy(policy)


def _copy_active_adapter(policy: PeftModel) -> str:
    """Add a frozen copy of the active adapter under a new name, and return the name."""
    from peft import set_peft_model_state_dict

    active = active_adapter(policy)
    others = (f"{INITIAL_ADAPTER}{number}" for number in itertools.count(2))
    name = next(name for name in itertools.chain([INITIAL_ADAPTER], others) if name not in policy.peft_config)
    with trained_weights_kept(policy), config_of_another(policy) as config:
        policy.add_adapter(name, config, autocast_adapter_dtype=not low_precision_parameters(policy))
        set_peft_model_state_dict(policy, adapter_state(policy), adapter_name=name)
        policy.set_adapter(active)
    return name
