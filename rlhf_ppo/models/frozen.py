"""Frozen models: reference policies and reward models without gradients, and offloading."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Self

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

from rlhf_ppo.data.images import RowImages
from rlhf_ppo.models.heads import last_token_score, multiply_scores_in_float32, pooled_score, reads_last_token
from rlhf_ppo.models.packing import pack_rows
from rlhf_ppo.models.unwrapping import no_split_modules, transformers_model


class Offload:
    """Keeps a frozen model's weights on the CPU, and on a device inside a context.

    Nothing is copied back: frozen weights never change.

    Args:
        model: The model; its weights move to the CPU.
        device: The device on which it runs.
    """

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self.device = device
        self._weights = [*model.parameters(), *model.buffers()]
        self._at_home = [weight.data.cpu() for weight in self._weights]
        if torch.cuda.is_available():
            self._at_home = [weight.pin_memory() for weight in self._at_home]
        self._return()

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """Copy the weights to the device for a context."""
        try:
            for weight, at_home in zip(self._weights, self._at_home, strict=True):
                weight.data = at_home.to(self.device, non_blocking=True, copy=True)
            yield
        finally:
            self._return()

    def _return(self) -> None:
        for weight, at_home in zip(self._weights, self._at_home, strict=True):
            weight.data = at_home


class Frozen(nn.Module):
    """A model in eval mode, without gradients, in the form that backends shard.

    Only `forward` of a subclass runs the model: ZeRO-3 and FSDP2 gather parameters around it.

    Args:
        model: A transformers model, or a `PeftModel` around one; it is changed in place.

    Attributes:
        offload: Makes a context that has the weights on the device; `Offload` where they are on the CPU between uses.
    """

    offload: Callable[[], AbstractContextManager[None]] = nullcontext

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
        """The model's configuration, which backends that shard it read."""
        return transformers_model(self.model).config

    @property
    def _no_split_modules(self) -> list[str]:
        return no_split_modules(self.model)


class FrozenScorer(Frozen):
    """A reward model whose forward pass gives one score per text.

    A causal model scores with its head at the last real token, found from the mask; an encoder with its own pooling.

    Args:
        model: A sequence-classification model with one label; it is frozen.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self._score = last_token_score if reads_last_token(model) else pooled_score
        multiply_scores_in_float32(model)

    def forward(self, input_ids: Tensor, attention_mask: Tensor, images: Sequence[RowImages] | None = None) -> Tensor:
        """Score texts.

        Args:
            input_ids: Token ids, long `(B, L)`, padded on either side or both.
            attention_mask: True on real tokens, bool `(B, L)`.
            images: The images of each row, or None.

        Returns:
            One score per row, float32 `(B,)`.
        """
        return self._score(self.model, input_ids, attention_mask, images)
