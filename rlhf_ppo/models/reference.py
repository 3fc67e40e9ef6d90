"""The reference policy: a frozen copy, or the policy's own weights with another adapter, or none."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

from torch import Tensor, nn
from trl.trainer.utils import use_adapter

from rlhf_ppo.models.copying import copy_model
from rlhf_ppo.models.frozen import Frozen, at_work
from rlhf_ppo.models.inputs import is_peft_model
from rlhf_ppo.models.logprobs import ResponseLogprobs, response_logprobs

INITIAL_ADAPTER = "ref"
"""Name of the frozen copy of an adapter that was already trained when it was handed over."""


class FrozenPolicy(Frozen):
    """A language model whose forward pass gives the log-probabilities of responses.

    Args:
        policy: The model; it is frozen.
        temperature: Sampling temperature that divides the logits.
    """

    def __init__(self, policy: nn.Module, temperature: float) -> None:
        super().__init__(policy)
        self.temperature = temperature

    @property
    def policy(self) -> nn.Module:
        """The language model, as `PolicyAndValue` calls its own."""
        return self.model

    def on_policy(self, function: Callable[[nn.Module], Any]) -> Any:
        """Call `function` with the language model; FSDP registers this method to run the way it runs `forward`."""
        return function(self.model)

    def forward(self, query_responses: Tensor, attention_mask: Tensor, response_mask: Tensor) -> ResponseLogprobs:
        """Evaluate responses, without entropy; shapes as in `response_logprobs`."""
        batch = query_responses, attention_mask, response_mask
        return response_logprobs(self.model, *batch, self.temperature, with_entropy=False)


class Reference:
    """The policy that the KL penalty compares with (Ziegler et al., arXiv 1909.08593, section 2.1).

    Args:
        model: A frozen model of its own, or None when the policy's base weights serve.
        adapter_name: With `model=None`, the adapter that makes the policy the reference; None switches adapters off.
    """

    def __init__(self, model: nn.Module | None, adapter_name: str | None = None) -> None:
        self.model = model
        self.adapter_name = adapter_name

    @contextmanager
    def forward(self, model: nn.Module, policy: nn.Module) -> Iterator[Callable[..., tuple[Tensor, ...]]]:
        """Yield the function that evaluates responses under the reference; shapes as in `response_logprobs`.

        Args:
            model: The prepared `PolicyAndValue`, which runs while the policy's adapters are switched.
            policy: The unwrapped policy.
        """
        if self.model is not None:
            with at_work(self.model):
                yield self.model
        else:
            with use_adapter(cast(Any, policy), self.adapter_name):
                yield functools.partial(model, only="policy", with_entropy=False)

    @contextmanager
    def generating(self, model: nn.Module, policy: nn.Module) -> Iterator[nn.Module]:
        """Yield the module whose `policy` is the reference, to generate from; the arguments are those of `forward`."""
        if self.model is not None:
            with at_work(self.model):
                yield self.model
        else:
            with use_adapter(cast(Any, policy), self.adapter_name):
                yield model


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
        new and a frozen copy of the adapter when it was already trained, so that KL starts at 0; else a frozen copy.

    Raises:
        ValueError: `ref_adapter_name` is given without such an adapter, or together with `ref_model`.
    """
    if ref_adapter_name is not None:
        _check_adapter(policy, ref_model, ref_adapter_name)
        return Reference(None, ref_adapter_name)
    if ref_model is not None:
        return Reference(FrozenPolicy(ref_model, temperature))
    if not is_peft_model(policy):
        return Reference(FrozenPolicy(copy_model(policy), temperature))
    if adapter_is_new:
        return Reference(None)
    _copy_active_adapter(cast(Any, policy), INITIAL_ADAPTER)
    return Reference(None, INITIAL_ADAPTER)


def _check_adapter(policy: nn.Module, ref_model: nn.Module | None, ref_adapter_name: str) -> None:
    if ref_model is not None:
        raise ValueError(f"ref_adapter_name={ref_adapter_name!r} and ref_model are both given; pass one of them")
    adapters = list(cast(Any, policy).peft_config) if is_peft_model(policy) else []
    if ref_adapter_name not in adapters:
        raise ValueError(f"ref_adapter_name={ref_adapter_name!r} is no adapter of the policy, which has {adapters}")


def _copy_active_adapter(policy: Any, name: str) -> None:
    active = policy.active_adapter
    if name in policy.peft_config:
        raise ValueError(
            f"the policy already has an adapter {name!r}: name the reference with ref_adapter_name, or rename it"
        )
    policy.add_adapter(name, policy.peft_config[active])
    for parameter_name, parameter in policy.named_parameters():
        if f".{active}." in parameter_name:
            copied = policy.get_parameter(parameter_name.replace(f".{active}.", f".{name}."))
            copied.data.copy_(parameter.data)
            copied.requires_grad_(False)
