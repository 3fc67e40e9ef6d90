"""The reference policy: a frozen copy, or the policy's own weights with another adapter, or none."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from rlhf_ppo.config import PPOConfig
from rlhf_ppo.data.places import Places
from rlhf_ppo.models.adapter_checks import adapter_kind, adds_nothing, moved, probe, probe_tokens
from rlhf_ppo.models.adapters import adapter_state
from rlhf_ppo.models.copying import copy_model
from rlhf_ppo.models.frozen import Frozen, at_work
from rlhf_ppo.models.loading import low_precision_parameters
from rlhf_ppo.models.logprobs import ResponseLogprobs, response_logprobs
from rlhf_ppo.models.moving_reference import MovingReference, warn_of_unread
from rlhf_ppo.models.sharded import is_sharded
from rlhf_ppo.models.unwrapping import active_adapter, is_peft_model, with_adapters
from rlhf_ppo.processes.logs import get_logger

if TYPE_CHECKING:
    from peft import PeftModel

logger = get_logger(__name__)

INITIAL_ADAPTER = "ref"
"""Name of the frozen copy of an adapter that was already trained when it was handed over."""

_ONE_AT_A_TIME = ("ADALORA", "ADAPTION_PROMPT")
"""Kinds of adapters of which a model trains one, or that move between two without PyTorch's knowledge."""


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

    def forward(
        self, query_responses: Tensor, attention_mask: Tensor, response_mask: Tensor, places: Places | None = None
    ) -> ResponseLogprobs:
        """Evaluate responses, without entropy; shapes as in `response_logprobs`."""
        batch = query_responses, attention_mask, response_mask
        return response_logprobs(self.model, *batch, self.temperature, with_entropy=False, places=places)


class Reference:
    """The policy that the KL penalty compares with (Ziegler et al., arXiv 1909.08593, section 2.1).

    Args:
        model: A frozen model of its own, or None when the policy's base weights serve.
        adapter_name: With `model=None`, the adapter that makes the policy the reference; None switches adapters off.

    Attributes:
        moving: Moves `model` towards the policy after each update; None where it stays.
    """

    def __init__(self, model: nn.Module | None, adapter_name: str | None = None) -> None:
        self.model = model
        self.adapter_name = adapter_name
        self.moving: MovingReference | None = None

    def follow(self, model: nn.Module) -> None:
        """Move towards the policy after an update, with `reference_ema`; every rank calls this.

        Args:
            model: The prepared `PolicyAndValue`.
        """
        if self.moving is not None and self.model is not None:
            self.moving.move(model, self.model)

    def save(self, directory: str, model: nn.Module, is_main: bool) -> None:
        """Write where it has moved to into a checkpoint; every rank calls this, the main process writes."""
        if self.moving is not None and self.model is not None:
            self.moving.save(directory, model, self.model, is_main)

    def take_up(self, checkpoint: str, model: nn.Module) -> None:
        """Go on from where it was at a checkpoint; every rank calls this.

        Raises:
            ValueError: The checkpoint's is of another model, or cannot be read.
        """
        if self.moving is not None and self.model is not None:
            self.moving.load(checkpoint, model, self.model)
        else:
            warn_of_unread(checkpoint)

    @property
    def own_policy(self) -> nn.Module | None:
        """The language model of its own; None where the policy's base serves, or an engine has it."""
        return self.model.policy if isinstance(self.model, FrozenPolicy) else None

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
            with _adapter_in_use(with_adapters(policy), self.adapter_name):
                yield functools.partial(model, only="policy", with_entropy=False)

    def is_policy(self, policy: nn.Module) -> bool:
        """Tell whether both are the same modules with the same weights now, so that a pass would repeat the policy's.

        Copies that are still equal get passes of their own: they show that a run's KL starts at 0.
        """
        return self.model is None and self.adapter_name is None and adds_nothing(policy)

    @contextmanager
    def generating(self, model: nn.Module, policy: nn.Module) -> Iterator[nn.Module]:
        """Yield the module whose `policy` is the reference, to generate from; the arguments are those of `forward`."""
        if self.model is not None:
            with at_work(self.model):
                yield self.model
        else:
            with _adapter_in_use(with_adapters(policy), self.adapter_name):
                yield model


def asks_for_reference(args: PPOConfig) -> bool:
    """Tell whether the arguments need a reference: for a KL penalty, or to log the KL."""
    return args.kl_coef > 0 or args.log_kl or args.ref_adapter_name is not None


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
        ValueError: `ref_adapter_name` is given without such an adapter, or together with `ref_model`; the adapter
            cannot be copied; or the reference would be trained along.
    """
    if ref_adapter_name is not None:
        _check_adapter(policy, ref_model, ref_adapter_name)
    reference = _choose_reference(policy, ref_model, ref_adapter_name, adapter_is_new, temperature)
    if is_peft_model(policy):
        _check_stays(reference, policy)
    return reference


def _choose_reference(
    policy: nn.Module,
    ref_model: nn.Module | None,
    ref_adapter_name: str | None,
    adapter_is_new: bool,
    temperature: float,
) -> Reference:
    if ref_adapter_name is not None:
        return Reference(None, ref_adapter_name)
    if ref_model is not None:
        _check_own_weights(policy, ref_model)
        return Reference(FrozenPolicy(ref_model, temperature))
    if not is_peft_model(policy):
        return Reference(FrozenPolicy(copy_model(policy), temperature))
    if adapter_is_new:
        return Reference(None)
    if not _can_hold_two(policy):
        return Reference(FrozenPolicy(_whole_copy(policy), temperature))
    _copy_active_adapter(policy, INITIAL_ADAPTER)
    return Reference(None, INITIAL_ADAPTER)


def _check_adapter(policy: nn.Module, ref_model: nn.Module | None, ref_adapter_name: str) -> None:
    if ref_model is not None:
        raise ValueError(f"ref_adapter_name={ref_adapter_name!r} and ref_model are both given; pass one of them")
    adapters = list(policy.peft_config) if is_peft_model(policy) else []
    if ref_adapter_name not in adapters:
        raise ValueError(f"ref_adapter_name={ref_adapter_name!r} is no adapter of the policy, which has {adapters}")


def _check_own_weights(policy: nn.Module, ref_model: nn.Module) -> None:
    trained = {id(parameter): name for name, parameter in policy.named_parameters() if parameter.requires_grad}
    shared = [trained[id(parameter)] for parameter in ref_model.parameters() if id(parameter) in trained]
    if shared:
        raise ValueError(
            f"ref_model holds parameters that the policy trains (the first is {shared[0]}): PEFT puts adapters into "
            "the very model that it is given; load ref_model anew, or leave it out"
        )


def _can_hold_two(policy: nn.Module) -> bool:
    """Tell whether a second adapter of the active one's kind can be had that shares nothing trainable with it."""
    config = with_adapters(policy).active_peft_config
    return adapter_kind(policy) not in _ONE_AT_A_TIME and getattr(config, "bias", "none") == "none"


def _whole_copy(policy: nn.Module) -> nn.Module:
    config = with_adapters(policy).active_peft_config
    what = f"an adapter of the kind {adapter_kind(policy)} with bias={getattr(config, 'bias', 'none')!r}"
    if is_sharded(policy):
        raise ValueError(f"model has {what}, which cannot be copied under ZeRO-3; pass ref_model, the initial policy")
    logger.warning(
        f"model has {what}, of which PEFT holds one at a time: the reference is a copy of the whole policy, and takes "
        "as much memory."
    )
    return copy.deepcopy(policy)


def _copy_active_adapter(policy: PeftModel, name: str) -> None:
    from peft import set_peft_model_state_dict

    active = active_adapter(policy)
    if name in policy.peft_config:
        raise ValueError(
            f"the policy already has an adapter {name!r}: name the reference with ref_adapter_name, or rename it"
        )
    config = copy.deepcopy(policy.peft_config[active])
    policy.add_adapter(name, config, autocast_adapter_dtype=not low_precision_parameters(policy))
    set_peft_model_state_dict(policy, adapter_state(policy), adapter_name=name)
    policy.set_adapter(active)
    if is_sharded(policy):
        return
    tokens = probe_tokens(policy)
    if not torch.equal(_logits(Reference(None, name), policy, tokens), probe(policy, tokens)):
        raise ValueError(
            f"the copy of the policy's adapter, of the kind {adapter_kind(policy)}, gives other logits than the "
            "adapter itself; pass ref_model, the initial policy"
        )


def _check_stays(reference: Reference, policy: PeftModel) -> None:
    """Raise where training the policy's adapter would change the reference too."""
    if is_sharded(policy):
        return
    tokens = probe_tokens(policy)
    before = _logits(reference, policy, tokens)
    with moved(policy):
        after = _logits(reference, policy, tokens)
    if not torch.equal(after, before):
        what = "ref_model" if reference.model is not None else f"the reference, adapter {reference.adapter_name!r},"
        raise ValueError(
            f"{what} changes when the policy's adapter {policy.active_adapter!r} (of the kind {adapter_kind(policy)}) "
            "is trained: pass a ref_model with weights of its own, or another ref_adapter_name"
        )


def _adapter_in_use(policy: PeftModel, name: str | None) -> AbstractContextManager[None]:
    """Let an adapter of the policy work in the block, or none."""
    from trl.trainer.utils import use_adapter

    return use_adapter(policy, name)


def _logits(reference: Reference, policy: PeftModel, tokens: Tensor) -> Tensor:
    if isinstance(reference.model, FrozenPolicy):
        return probe(reference.model.policy, tokens)
    with _adapter_in_use(policy, reference.adapter_name):
        return probe(policy, tokens)
