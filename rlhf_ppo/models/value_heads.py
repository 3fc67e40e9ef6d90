"""Outputs of a value model's head, and the values that they stand for.

A head gives one number per token, or with `value_loss="hl_gauss"` the logits of a distribution over bins, whose
expectation is the value (Farebrother et al., 2403.03950). The model's configuration says which, so that a saved critic
can be read without its run.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

from rlhf_ppo.models.unwrapping import transformers_model

_MARGIN = 0.1
"""Room beside the returns in a running range, as a share of their range."""
_LEAST_MARGIN = 1e-3
"""The same where all returns are equal, in the reward's unit."""


class HeadValues(NamedTuple):
    """Values that a head's outputs stand for.

    Attributes:
        values: The value, float32 `(...)`, in the reward's unit.
        logits: Logits of the bins, float32 `(..., num_bins)`; None for a head without bins.
    """

    values: Tensor
    logits: Tensor | None


class ValueHead(NamedTuple):
    """Layout of a value model's head.

    Attributes:
        centers: Centers of the bins, of equal width, in the reward's unit; None: the output is the value.
    """

    centers: tuple[float, ...] | None = None

    @classmethod
    def of(cls, config: PreTrainedConfig | SimpleNamespace) -> Self:
        """Read the layout from a model's configuration."""
        centers: Any = getattr(config, "value_centers", None)
        return cls(None if centers is None else tuple(centers))

    @classmethod
    def with_bins(cls, num_bins: int, low: float, high: float) -> Self:
        """Cut the range from `low` to `high` into bins of equal width."""
        width = (high - low) / num_bins
        return cls(tuple(low + width * (index + 0.5) for index in range(num_bins)))

    @property
    def num_outputs(self) -> int:
        """Rows of the head's weight."""
        return 1 if self.centers is None else len(self.centers)

    @property
    def range(self) -> tuple[float, float]:
        """Outer edges of the bins, in the reward's unit; equal ones where no return is known yet."""
        first, *_, last = self.centers or (0.0, 0.0)
        half = (last - first) / (2 * max(1, self.num_outputs - 1))
        return first - half, last + half

    def write_to(self, config: PreTrainedConfig) -> None:
        """Write the layout into a model's configuration."""
        config.num_labels = self.num_outputs
        if self.centers is not None:
            config.value_centers = list(self.centers)  # pyright: ignore[reportAttributeAccessIssue]

    def centers_on(self, device: torch.device) -> Tensor:
        """Return the centers of the bins, float32 `(num_bins,)`, computed on the device."""
        first, *_, last = self.centers or (0.0, 0.0)
        return torch.linspace(first, last, self.num_outputs, device=device)

    def read(self, outputs: Tensor) -> HeadValues:
        """Compute values from a head's outputs, float32 `(..., num_outputs)`: `sum_i softmax(logits)_i center_i`."""
        if self.centers is None:
            return HeadValues(outputs.squeeze(-1), None)
        return HeadValues(outputs.softmax(dim=-1) @ self.centers_on(outputs.device), outputs)


def value_head_of(model: nn.Module) -> ValueHead:
    """Return the layout of a value model's head."""
    return ValueHead.of(transformers_model(model).config)


def saved_value_head(path: str | os.PathLike[str]) -> ValueHead:
    """Return the layout of a saved value model's head, by its directory or hub name; that of one number by default."""
    try:
        config, _ = PreTrainedConfig.get_config_dict(os.fspath(path))
    except (OSError, ValueError):  # loading the model says what is wrong
        return ValueHead()
    return ValueHead.of(SimpleNamespace(**config))


def load_value_range(model: nn.Module, directory: str) -> None:
    """Take over the range of the bins of a value model's weights.

    Args:
        model: The value model, which has read the weights in the directory.
        directory: The directory that it was saved in.
    """
    if (own := value_head_of(model)).centers is not None:
        saved = saved_value_head(directory)
        if saved.num_outputs == own.num_outputs:
            saved.write_to(transformers_model(model).config)


def cover_returns(model: nn.Module, returns: Tensor, mask: Tensor, gather: Callable[[Tensor], Tensor]) -> None:
    """Widen the range of the bins, with some room, if a return of any rank lies outside.

    The logits keep their places, so that values stretch with the range.

    Args:
        model: The value model; its configuration is changed.
        returns: Targets of the value model, `(B, T)`.
        mask: True on the tokens that are learned from, bool `(B, T)`.
        gather: Concatenates over ranks along the first dimension; every rank calls this.
    """
    lowest = returns.float().masked_fill(~mask, torch.inf).min()
    highest = returns.float().masked_fill(~mask, -torch.inf).max()
    negated, last = gather(torch.stack([-lowest, highest])[None]).amax(dim=0).tolist()
    head, first = value_head_of(model), -negated
    low, high = head.range
    is_new = low == high
    if first > last or (not is_new and low <= first and last <= high):  # no tokens, or covered
        return
    widest = last - first if is_new else max(last, high) - min(first, low)
    room = max(_MARGIN * widest, _LEAST_MARGIN)
    low = low if not is_new and low <= first else first - room
    high = high if not is_new and last <= high else last + room
    ValueHead.with_bins(head.num_outputs, low, high).write_to(transformers_model(model).config)
