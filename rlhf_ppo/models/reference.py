"""The reference policy of the KL penalty."""

from __future__ import annotations

import copy
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, TypeVar

from torch import Tensor, nn

from rlhf_ppo.config import PPOConfig
from rlhf_ppo.data.rollout import PackedIndices
from rlhf_ppo.models.adapters import (
    adapter_kind,
    adapter_state,
    adds_nothing,
    config_of_another,
    trained_in_base,
    trained_weights_kept,
)
from rlhf_ppo.models.frozen import Frozen
from rlhf_ppo.models.loading import low_precision_parameters
from rlhf_ppo.models.packing import share_prefixes
from rlhf_ppo.models.policy_and_value import ResponseLogprobs, response_logprobs
from rlhf_ppo.models.unwrapping import (
    active_adapter,
    copy_model,
    is_peft_model,
    with_adapters,
)
from rlhf_ppo.ranks.processes import get_logger

if TYPE_CHECKING:
    from peft import PeftModel

T = TypeVar("T")


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

    def on_policy(self, function: Callable[[nn.Module], T]) -> T:
        """Call `function` with the language model; FSDP registers this method to run the way it runs `forward`."""
        return function(self.model)

    def forward(
        self,
        query_responses: Tensor,
        attention_mask: Tensor,
        response_mask: Tensor,
        places: PackedIndices | None = None,
    ) -> ResponseLogprobs:
        """Evaluate responses, without entropy; shapes as in `response_logprobs`."""
        batch = query_responses, attention_mask, response_mask
        return response_logprobs(self.model, *batch, self.temperature, with_entropy=False, places=places)


logger = get_logger(__name__)

INITIAL_ADAPTER = "ref"
"""Name of the frozen copy of an adapter that was trained before the run; "ref2" for the model's second trainer."""

_ONE_AT_A_TIME = ("ADALORA", "ADAPTION_PROMPT")
"""Kinds of adapters of which a model holds only one, or that share state outside of PyTorch's parameters."""


class Reference:
    """The policy that the KL penalty compares with (Ziegler et al., arXiv 1909.08593, section 2.1).

    Args:
        model: A separate frozen model, or None if the policy's base weights serve.
        adapter_name: With `model=None`, the adapter that makes the policy the reference; None switches adapters off.
    """

    def __init__(self, model: nn.Module | None, adapter_name: str | None = None) -> None:
        self.model = model
        self.adapter_name = adapter_name

    @property
    def separate_policy(self) -> nn.Module | None:
        """The separate language model; None if the policy's base serves, or a backend holds the model."""
        return self.model.policy if isinstance(self.model, FrozenPolicy) else None

    @contextmanager
    def forward(self, model: nn.Module, policy: nn.Module) -> Iterator[Callable[..., tuple[Tensor, ...]]]:
        """Yield the function that evaluates responses under the reference; shapes as in `response_logprobs`.

        Args:
            model: The prepared `PolicyAndValue`, which runs with the policy's adapters switched.
            policy: The unwrapped policy.
        """
        with self.generating(model, policy) as module:
            yield functools.partial(module, only="policy", with_entropy=False) if module is model else module

    def is_policy(self, policy: nn.Module) -> bool:
        """Return whether both are the same modules with the same weights: a forward pass would repeat the policy's.

        Equal copies still get a forward pass: it shows that a run's KL starts at 0.
        """
        return self.model is None and self.adapter_name is None and adds_nothing(policy)

    @contextmanager
    def generating(self, model: nn.Module, policy: nn.Module) -> Iterator[nn.Module]:
        """Yield the module whose `policy` is the reference, to generate from; the arguments are those of `forward`."""
        if self.model is None:
            with trained_weights_kept(policy), _use_adapter(with_adapters(policy), self.adapter_name):
                yield model
        else:
            with getattr(self.model, "offload", nullcontext)():
                yield self.model


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
        ValueError: `ref_adapter_name` is given without such an adapter, or together with `ref_model`; or the reference
            would be trained along.
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
    adapters = list(policy.peft_config) if is_peft_model(policy) else []
    others = [name for name in adapters if name != active_adapter(policy)]
    if ref_adapter_name not in others:
        raise ValueError(
            f"ref_adapter_name={ref_adapter_name!r} is not an adapter of the policy beside the trained one; there are "
            f"{others}"
        )


def _check_separate_weights(policy: nn.Module, ref_model: nn.Module) -> None:
    trained = {id(parameter): name for name, parameter in policy.named_parameters() if parameter.requires_grad}
    shared = [trained[id(parameter)] for parameter in ref_model.parameters() if id(parameter) in trained]
    if shared:
        raise ValueError(
            f"ref_model holds parameters that the policy trains (the first is {shared[0]}): PEFT puts adapters into "
            "the model that it is given; load ref_model again, or leave it out"
        )


def set_up_prefix_sharing(
    args: PPOConfig,
    policy: nn.Module,
    value_model: nn.Module,
    reference: Reference | None,
    rewards: Sequence[nn.Module],
) -> None:
    """Let all models share prefixes as asked. Compiled models do not: each prefix tree would recompile them."""
    ref_policy = None if reference is None else reference.separate_policy
    share_prefixes(False if args.torch_compile else args.share_prefixes, policy, value_model, ref_policy, *rewards)


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

    active, name = active_adapter(policy), INITIAL_ADAPTER
    for number in itertools.count(2):
        if name not in policy.peft_config:
            break
        name = f"{INITIAL_ADAPTER}{number}"
    with trained_weights_kept(policy), config_of_another(policy) as config:
        policy.add_adapter(name, config, autocast_adapter_dtype=not low_precision_parameters(policy))
        set_peft_model_state_dict(policy, adapter_state(policy), adapter_name=name)
        policy.set_adapter(active)
    return name


def _use_adapter(policy: PeftModel, name: str | None) -> AbstractContextManager[None]:
    """Enable an adapter of the policy, or none, inside a context."""
    from trl.trainer.utils import use_adapter  # slow to import

    return use_adapter(policy, name)
