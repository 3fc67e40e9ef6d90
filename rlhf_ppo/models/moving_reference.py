"""A reference that follows the policy: an exponential moving average of its weights."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, distribute_tensor

from rlhf_ppo.models.unwrapping import is_peft_model
from rlhf_ppo.processes.logs import get_logger

logger = get_logger(__name__)

MOVED_NAME = "moved_reference.safetensors"


class _Pair(NamedTuple):
    """A parameter of the reference and the policy's of that name, by the modules that hold them.

    Engines put other parameters into the modules that they take apart.
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


class MovingReference:
    r"""Moves a reference towards the policy after each update of PPO.

        theta_ref <- decay theta_ref + (1 - decay) theta

    Xu et al., *Is DPO Superior to PPO for LLM Alignment?*, 2404.10719. Each rank moves what it holds, in
    float32: beside a reference that is stored in 16 bits, whose steps would be lost in rounding, there is a copy.

    Args:
        decay: Weight of the reference's own parameters.
        reference: The language model of the reference, before an engine takes it apart.
        policy: The policy, likewise.

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
        _take_apart(model, placed)
        for pair in self._pairs:
            exact = self._exact_share(pair)
            exact.lerp_(_share(pair.followed).to(exact), 1 - self.decay)
            self._put(pair, exact)

    @torch.no_grad()
    def save(self, directory: str, model: nn.Module, placed: nn.Module, is_main: bool) -> None:
        """Write the whole reference in float32; every rank calls this, the main process writes.

        Args:
            directory: The checkpoint's.
            model: The prepared `PolicyAndValue`.
            placed: The placed `FrozenPolicy`.
            is_main: Whether this is the main process.
        """
        _take_apart(model, placed)
        whole: dict[str, Tensor] = {}
        for pair in self._pairs:
            value = _whole(pair.stored, self._exact_share(pair))
            if is_main:
                whole[pair.name] = value.cpu().contiguous()
        if is_main:
            save_file(whole, Path(directory, MOVED_NAME))

    @torch.no_grad()
    def load(self, checkpoint: str, model: nn.Module, placed: nn.Module) -> None:
        """Go on from a checkpoint; every rank calls this.

        Args:
            checkpoint: Its directory.
            model: The prepared `PolicyAndValue`.
            placed: The placed `FrozenPolicy`.

        Raises:
            ValueError: Its file is of another reference, or cannot be read.
        """
        path = Path(checkpoint, MOVED_NAME)
        if not path.exists():
            logger.warning(
                f"{checkpoint} has no {MOVED_NAME}, as its run had no reference_ema: the reference starts to move "
                "from where it is, ref_model or the policy as it was given."
            )
            return
        _take_apart(model, placed)
        try:
            with safe_open(path, "pt") as file:
                for pair in self._pairs:
                    share = _share_of_whole(pair.stored, file.get_tensor(pair.name))
                    exact = self._exact_share(pair)
                    self._put(pair, exact.copy_(share))
        except (SafetensorError, RuntimeError, OSError) as error:
            raise ValueError(
                f"the {MOVED_NAME} in {checkpoint} is no reference of this policy: {error!s:.200}"
            ) from error

    def _exact_share(self, pair: _Pair) -> Tensor:
        """Return this rank's share in float32: the parameter's own memory where that is its type."""
        share = _share(pair.stored)
        if share.dtype == torch.float32:
            return share
        return self._exact.setdefault(pair.name, share.float())

    def _put(self, pair: _Pair, exact: Tensor) -> None:
        """Let passes of the reference read a share that was written."""
        stored = pair.stored
        share = _share(stored)
        if share is not exact:
            share.copy_(exact)
        if hasattr(stored, "ds_tensor") and stored.numel() > 0:  # ZeRO-3 keeps small ones whole between passes
            stored.partition()


def warn_of_unread(checkpoint: str) -> None:
    """Say where a checkpoint has a moved reference that the run, without `reference_ema`, does not go on with."""
    if Path(checkpoint, MOVED_NAME).exists():
        logger.warning(
            f"{checkpoint} has a reference that had moved, but reference_ema=None: the KL is to ref_model, or to the "
            "policy as it was given."
        )


def check_can_move(decay: float | None, reference: nn.Module | None, policy: nn.Module) -> None:
    """Check that the reference has weights that can follow the policy's.

    Args:
        decay: `reference_ema`.
        reference: The language model of the reference; None where it has no weights of its own.
        policy: The policy.

    Raises:
        ValueError: It has not.
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


def _take_apart(*models: nn.Module) -> None:
    """Let FSDP2 hold shares only: what is outside of blocks it leaves whole after a pass without gradients."""
    for module in _modules(*models):
        if isinstance(module, FSDPModule):
            module.reshard()


def _modules(*models: nn.Module) -> Iterator[nn.Module]:
    for model in models:
        yield from model.modules()


def _share(parameter: Any) -> Tensor:
    """Return what this rank holds of a parameter."""
    if hasattr(parameter, "ds_tensor"):
        return parameter.ds_tensor
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter.data


def _whole(parameter: Any, share: Tensor) -> Tensor:
    """Put the shares of all ranks together."""
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
