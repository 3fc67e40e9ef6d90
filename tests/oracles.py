"""Parts of independent recomputations of a run: episodes without padding and masks, and weights in float64."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Episode:
    """A prompt and the response to it, the stop token included, as ids.

    `written` tells which tokens of the response the policy wrote; None says all of them.
    """

    prompt: list[int]
    response: list[int]
    ended: bool
    written: list[bool] | None = None

    @property
    def ids(self) -> list[int]:
        return self.prompt + self.response

    @property
    def own(self) -> list[int]:
        """Places in the response of the tokens that the policy wrote."""
        return [place for place in range(len(self.response)) if self.written is None or self.written[place]]


def weights_of(model: Any) -> dict[str, Array]:
    """Every parameter of a torch module, in float64."""
    return {name: value.detach().double().cpu().numpy().copy() for name, value in model.named_parameters()}


def log_softmax(x: Array) -> Array:
    shifted = x - x.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


@torch.no_grad()
def logits_after(model: Any, ids: list[int]) -> Array:
    """A language model's logits of the next token, by transformers alone in float64."""
    return copy.deepcopy(model).double().eval()(input_ids=torch.tensor([ids])).logits[0, -1].numpy()
