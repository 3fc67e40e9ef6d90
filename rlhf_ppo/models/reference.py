"""The reference policy of the KL penalty, and its moving average over the policies of a run."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, distribute_tensor

from rlhf_ppo.config import PPOConfig
from rlhf_ppo.models.adapters import adapter_kind, adapter_state, adds_nothing, moved, probe, probe_tokens
from rlhf_ppo.models.frozen import FrozenPolicy
from rlhf_ppo.models.loading import low_precision_parameters
from rlhf_ppo.models.unwrapping import (
    active_adapter,
    copy_model,
    is_peft_model,
    is_sharded,
    own_share,
    with_adapters,
)
from rlhf_ppo.processes.distributed import get_logger

if TYPE_CHECKING:
    from peft import PeftModel


logger = get_logger(__name__)

MOVED_NAME = "moved_reference.safetensors"
"""The file of a checkpoint with the moving average."""

INITIAL_ADAPTER = "ref"
"""Name of the frozen copy of an adapter that was trained before the run."""

_ONE_AT_A_TIME = ("ADALORA", "ADAPTION_PROMPT")
"""Kinds of adapters of which a model holds only one, or that share state outside of PyTorch's parameters."""


class Reference:
    """The policy that the KL penalty compares with (Ziegler et al., arXiv 1909.08593, section 2.1).

    Args:
        model: A separate frozen model, or None if the policy's base weights serve.
        adapter_name: With `model=None`, the adapter that makes the policy the reference; None switches adapters off.

    Attributes:
        ema: Moves `model` towards the policy after each update; None if it stays.
    """

    def __init__(self, model: nn.Module | None, adapter_name: str | None = None) -> None:
        self.model = model
        self.adapter_name = adapter_name
        self.ema: EMAReference | None = None

    def follow(self, model: nn.Module) -> None:
        """Move towards the policy after an update, if `reference_ema` is set; every rank calls this.

        Args:
            model: The prepared `PolicyAndValue`.
        """
        if self.ema is not None and self.model is not None:
            self.ema.move(model, self.model)

    def save(self, directory: str, model: nn.Module, is_main: bool) -> None:
        """Write the EMA reference into a checkpoint; every rank calls this, the main process writes."""
        if self.ema is not None and self.model is not None:
            self.ema.save(directory, model, self.model, is_main)

    def resume(self, checkpoint: str, model: nn.Module) -> None:
        """Load the EMA reference of a checkpoint; every rank calls this.

        Raises:
            ValueError: The file belongs to another model, or cannot be read.
        """
        if self.ema is not None and self.model is not None:
            self.ema.load(checkpoint, model, self.model)
        elif Path(checkpoint, MOVED_NAME).exists():
            logger.warning(
                f"{checkpoint} has a reference that had moved, but reference_ema=None: the KL is to ref_model, or to "
                "the policy as it was given."
            )

    @property
    def own_policy(self) -> nn.Module | None:
        """The separate language model; None if the policy's base serves, or an engine holds the model."""
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
            with _use_adapter(with_adapters(policy), self.adapter_name):
                yield model
        else:
            with getattr(self.model, "offload", nullcontext)():
                yield self.model


def asks_for_reference(args: PPOConfig) -> bool:
    """Return whether the arguments need a reference: for a KL penalty, or to log the KL."""
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
    model = adapter = None
    if ref_adapter_name is not None:
        _check_adapter(policy, ref_model, ref_adapter_name)
        adapter = ref_adapter_name
    elif ref_model is not None:
        _check_own_weights(policy, ref_model)
        model = ref_model
    elif not is_peft_model(policy):
        model = copy_model(policy)
    elif not adapter_is_new and can_hold_two(policy):
        _copy_active_adapter(policy, INITIAL_ADAPTER)
        adapter = INITIAL_ADAPTER
    elif not adapter_is_new:
        model = _whole_copy(policy)
    reference = Reference(None if model is None else FrozenPolicy(model, temperature), adapter)
    if is_peft_model(policy):
        _check_stays(reference, policy)
    return reference


def _check_adapter(policy: nn.Module, ref_model: nn.Module | None, ref_adapter_name: str) -> None:
    if ref_model is not None:
        raise ValueError(f"ref_adapter_name={ref_adapter_name!r} and ref_model are both given; pass one of them")
    adapters = list(policy.peft_config) if is_peft_model(policy) else []
    if ref_adapter_name not in adapters:
        raise ValueError(
            f"ref_adapter_name={ref_adapter_name!r} is not an adapter of the policy, which has {adapters}"
        )


def _check_own_weights(policy: nn.Module, ref_model: nn.Module) -> None:
    trained = {id(parameter): name for name, parameter in policy.named_parameters() if parameter.requires_grad}
    shared = [trained[id(parameter)] for parameter in ref_model.parameters() if id(parameter) in trained]
    if shared:
        raise ValueError(
            f"ref_model holds parameters that the policy trains (the first is {shared[0]}): PEFT puts adapters into "
            "the very model that it is given; load ref_model anew, or leave it out"
        )


def can_hold_two(policy: nn.Module) -> bool:
    """Return whether the policy can have a second adapter of this kind that shares no trainable parameter."""
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
    """Raise if training the policy's adapter would change the reference."""
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


def _use_adapter(policy: PeftModel, name: str | None) -> AbstractContextManager[None]:
    """Enable an adapter of the policy, or none, inside a context."""
    from trl.trainer.utils import use_adapter  # slow to import

    return use_adapter(policy, name)


def _logits(reference: Reference, policy: PeftModel, tokens: Tensor) -> Tensor:
    if isinstance(reference.model, FrozenPolicy):
        return probe(reference.model.policy, tokens)
    with _use_adapter(policy, reference.adapter_name):
        return probe(policy, tokens)


# ---- The moving average ----


class _Pair(NamedTuple):
    """The modules that hold a parameter of the reference and the policy's parameter of that name.

    Engines put other parameters into modules that they shard.
    """

    name: str
    of_reference: nn.Module
    of_policy: nn.Module

    @property
    def stored(self) -> Any:
        """The reference's parameter."""
        return self.of_reference.get_parameter(self.name.rpartition(".")[2])

    @property
    def followed(self) -> Any:
        """The policy's parameter."""
        return self.of_policy.get_parameter(self.name.rpartition(".")[2])


class EMAReference:
    r"""Exponential moving average of the policy, updated after each update of PPO.

        theta_ref <- decay theta_ref + (1 - decay) theta

    Xu et al., *Is DPO Superior to PPO for LLM Alignment?*, 2404.10719. Each rank updates its share in
    float32, with a float32 copy of a reference in 16 bits, whose steps rounding would lose.

    Args:
        decay: Weight of the reference's own parameters.
        reference: The language model of the reference, before an engine shards it.
        policy: The policy, before an engine shards it.

    Raises:
        ValueError: They have different parameters.
    """

    def __init__(self, decay: float, reference: nn.Module, policy: nn.Module) -> None:
        self.decay = decay
        self._pairs = _paired(decay, reference, policy)
        self._exact: dict[str, Tensor] = {}

    @torch.no_grad()
    def move(self, model: nn.Module, placed: nn.Module) -> None:
        """Take one step towards the policy.

        Args:
            model: The prepared `PolicyAndValue`.
            placed: The placed `FrozenPolicy`.
        """
        _reshard(model, placed)
        for pair in self._pairs:
            exact = self._exact_share(pair)
            exact.lerp_(own_share(pair.followed).to(exact), 1 - self.decay)
            self._put(pair, exact)

    @torch.no_grad()
    def save(self, directory: str, model: nn.Module, placed: nn.Module, is_main: bool) -> None:
        """Write the reference in float32; every rank calls this, the main process writes.

        Args:
            directory: The checkpoint's.
            model: The prepared `PolicyAndValue`.
            placed: The placed `FrozenPolicy`.
            is_main: Whether this is the main process.
        """
        _reshard(model, placed)
        whole: dict[str, Tensor] = {}
        for pair in self._pairs:
            value = _whole(pair.stored, self._exact_share(pair))
            if is_main:
                whole[pair.name] = value.cpu().contiguous()
        if is_main:
            save_file(whole, Path(directory, MOVED_NAME))

    @torch.no_grad()
    def load(self, checkpoint: str, model: nn.Module, placed: nn.Module) -> None:
        """Load a checkpoint; every rank calls this.

        Args:
            checkpoint: Directory of the checkpoint.
            model: The prepared `PolicyAndValue`.
            placed: The placed `FrozenPolicy`.

        Raises:
            ValueError: The file belongs to another reference, or cannot be read.
        """
        path = Path(checkpoint, MOVED_NAME)
        if not path.exists():
            logger.warning(
                f"{checkpoint} has no {MOVED_NAME}, as its run had no reference_ema: the reference starts to move "
                "from where it is, ref_model or the policy as it was given."
            )
            return
        _reshard(model, placed)
        try:
            with safe_open(path, "pt") as file:
                for pair in self._pairs:
                    share = _share_of_whole(pair.stored, file.get_tensor(pair.name))
                    exact = self._exact_share(pair)
                    self._put(pair, exact.copy_(share))
        except (SafetensorError, RuntimeError, OSError) as error:
            raise ValueError(
                f"the {MOVED_NAME} in {checkpoint} is not a reference of this policy: {error!s:.200}"
            ) from error

    def _exact_share(self, pair: _Pair) -> Tensor:
        """Return this rank's share in float32: the parameter's own memory if it is float32."""
        share = own_share(pair.stored)
        if share.dtype == torch.float32:
            return share
        return self._exact.setdefault(pair.name, share.float())

    def _put(self, pair: _Pair, exact: Tensor) -> None:
        """Copy a share into the parameter that forward passes read."""
        stored = pair.stored
        if stored.dtype != torch.float32:
            own_share(stored).copy_(exact)
        if hasattr(stored, "ds_tensor") and stored.numel() > 0:  # small: ZeRO-3 keeps it gathered
            stored.partition()


def check_can_move(decay: float | None, reference: nn.Module | None, policy: nn.Module) -> None:
    """Check that the reference has weights that can be averaged with the policy's.

    Args:
        decay: `reference_ema`.
        reference: The language model of the reference; None if it has no separate weights.
        policy: The policy.

    Raises:
        ValueError: It has none.
    """
    if decay is None:
        return
    if is_peft_model(policy):
        raise ValueError(
            f"reference_ema={decay} moves a reference's own weights towards the policy's, but here an adapter is "
            "trained; train all weights (no peft_config), or leave reference_ema None"
        )
    if reference is None:
        raise ValueError(
            f"reference_ema={decay} moves the reference, but there is none; set kl_coef above 0, or log_kl=True, or "
            "leave reference_ema None"
        )
    _paired(decay, reference, policy)


def _paired(decay: float, reference: nn.Module, policy: nn.Module) -> list[_Pair]:
    own = dict(reference.named_parameters())
    followed = dict(policy.named_parameters(remove_duplicate=False))
    foreign = {name for name, value in own.items() if name not in followed or _shape(followed[name]) != _shape(value)}
    if odd := foreign | (dict(policy.named_parameters()).keys() - own.keys()):
        raise ValueError(
            f"reference_ema={decay} moves ref_model towards the policy, but they have different parameters (the first "
            f"is {min(odd)}); give a ref_model of the policy's architecture, not quantized, or leave it out"
        )
    return [_Pair(name, *(_holder(model, name) for model in (reference, policy))) for name in own]


def _holder(model: nn.Module, name: str) -> nn.Module:
    return model.get_submodule(name.rpartition(".")[0])


def _shape(parameter: Any) -> tuple[int, ...]:
    return tuple(getattr(parameter, "ds_shape", parameter.shape))


def _reshard(*models: nn.Module) -> None:
    """Reshard FSDP2's modules: those outside of blocks stay gathered after a pass without gradients."""
    for module in (module for model in models for module in model.modules()):
        if isinstance(module, FSDPModule):
            module.reshard()


def _whole(parameter: Any, share: Tensor) -> Tensor:
    """Gather the shares of all ranks."""
    if hasattr(parameter, "ds_tensor"):
        group = parameter.ds_process_group
        parts = [torch.empty_like(share) for _ in range(torch.distributed.get_world_size(group))]
        torch.distributed.all_gather(parts, share.contiguous(), group=group)
        return torch.cat(parts)[: parameter.ds_numel].view(parameter.ds_shape)
    if isinstance(parameter, DTensor):
        how = {"shape": parameter.shape, "stride": parameter.stride()}
        return DTensor.from_local(share, parameter.device_mesh, parameter.placements, **how).full_tensor()
    return share


def _share_of_whole(parameter: Any, whole: Tensor) -> Tensor:
    """Return this rank's share of a whole parameter; a `RuntimeError` if it has another shape."""
    if whole.shape != torch.Size(_shape(parameter)):
        raise RuntimeError(f"a tensor has the shape {tuple(whole.shape)}, not {_shape(parameter)}")
    if hasattr(parameter, "ds_tensor"):
        size, rank = parameter.ds_tensor.numel(), torch.distributed.get_rank(parameter.ds_process_group)
        piece = whole.flatten()[rank * size : (rank + 1) * size]
        return nn.functional.pad(piece, (0, size - len(piece)))
    if isinstance(parameter, DTensor):
        device = parameter.to_local().device
        return distribute_tensor(whole.to(device), parameter.device_mesh, parameter.placements).to_local()
    return whole
