"""Models that are only evaluated: the reward model and the reference."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Self

import torch
from torch import nn
from transformers import PreTrainedConfig

from rlhf_ppo.models.packing import pack_rows
from rlhf_ppo.models.unwrapping import no_split_modules, transformers_model


class Offload:
    """Keeps a frozen model's weights on the CPU and lends them to a device while a context lasts.

    Frozen weights never change, so that nothing is copied back.

    Args:
        model: The model; its weights move to the CPU.
        device: Where it runs.
    """

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self.device = device
        self._weights = [*model.parameters(), *model.buffers()]
        self._at_home = [_on_cpu(weight.data) for weight in self._weights]
        self._return()

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """Have the weights on the device while the context lasts."""
        try:
            for weight, at_home in zip(self._weights, self._at_home, strict=True):
                weight.data = at_home.to(self.device, non_blocking=True, copy=True)
            yield
        finally:
            self._return()

    def _return(self) -> None:
        for weight, at_home in zip(self._weights, self._at_home, strict=True):
            weight.data = at_home


def at_work(model: nn.Module) -> AbstractContextManager[None]:
    """Return a context in which a placed `Frozen` model has its weights where it runs."""
    offload = getattr(model, "offload", None)
    return nullcontext() if offload is None else offload()


class Frozen(nn.Module):
    """A model in eval mode, without gradients, in the form that engines shard.

    Subclasses say with `forward` what is computed, the only way in: ZeRO-3 and FSDP2 gather parameters around it.

    Args:
        model: A transformers model, or a `PeftModel` around one; it is changed in place.

    Attributes:
        offload: Brings the weights from the CPU for each use; None where they stay on the device.
    """

    offload: Offload | None = None

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        pack_rows(model)
        self.model = model.requires_grad_(False)
        self.eval()

    def train(self, mode: bool = True) -> Self:
        """Stay in eval mode."""
        return super().train(False)

    @property
    def config(self) -> PreTrainedConfig:
        """The model's configuration; engines that shard models read it."""
        return transformers_model(self.model).config

    @property
    def _no_split_modules(self) -> list[str]:
        return no_split_modules(self.model)


def _on_cpu(weight: torch.Tensor) -> torch.Tensor:
    weight = weight.cpu()
    return weight.pin_memory() if torch.cuda.is_available() else weight
