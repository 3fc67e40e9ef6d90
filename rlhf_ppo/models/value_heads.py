"""Outputs of a value model's heads, and the values that they stand for.

A head gives one number per token, or with `value_loss="hl_gauss"` the logits of a distribution over bins, whose
expectation is the value (Farebrother et al., 2403.03950). With `critic_ensemble` several heads share the model, and
their mean is the value. The model's configuration says which, so that a saved critic can be read without its run.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

from rlhf_ppo.models.unwrapping import transformers_model

if TYPE_CHECKING:
    from rlhf_ppo.config import PPOConfig

_MARGIN = 0.1
"""Room beside the returns in a running range, as a share of their range."""
_LEAST_MARGIN = 1e-3
"""The same where all returns are equal, in the reward's unit."""


class HeadValues(NamedTuple):
    """Values that the heads' outputs stand for.

    Attributes:
        values: The value, or the mean of the heads' values, float32 `(...)`, in the reward's unit.
        logits: Logits of the bins, float32 `(..., num_bins)`, or `(..., num_heads, num_bins)` of several heads; None
            without bins.
        of_heads: The value of each head, float32 `(..., num_heads)`; None for a single head.
    """

    values: Tensor
    logits: Tensor | None
    of_heads: Tensor | None = None


class ValueHead(NamedTuple):
    """Layout of a value model's output layer.

    Attributes:
        centers: Centers of the bins, of equal width, in the reward's unit; None: the output is the value.
        num_heads: Number of heads, whose outputs follow each other.
    """

    centers: tuple[float, ...] | None = None
    num_heads: int = 1

    @classmethod
    def of(cls, config: PreTrainedConfig | SimpleNamespace) -> Self:
        """Read the layout from a model's configuration."""
        centers: Any = getattr(config, "value_centers", None)
        return cls(None if centers is None else tuple(centers), getattr(config, "value_heads", 1))

    @classmethod
    def with_bins(cls, num_bins: int, low: float, high: float, num_heads: int = 1) -> Self:
        """Cut the range from `low` to `high` into bins of equal width."""
        width = (high - low) / num_bins
        return cls(tuple(low + width * (index + 0.5) for index in range(num_bins)), num_heads)

    @classmethod
    def asked_for(cls, args: PPOConfig) -> Self:
        """Return the layout of `value_loss`, `value_bins`, `value_range` and `critic_ensemble`."""
        if args.value_loss == "mse":
            return cls(num_heads=args.critic_ensemble)
        return cls.with_bins(args.value_bins, *(args.value_range or (0.0, 0.0)), num_heads=args.critic_ensemble)

    @property
    def num_bins(self) -> int:
        """Outputs of each head: the number of bins, or 1."""
        return 1 if self.centers is None else len(self.centers)

    @property
    def num_outputs(self) -> int:
        """Rows of the layer's weight."""
        return self.num_heads * self.num_bins

    @property
    def range(self) -> tuple[float, float]:
        """Outer edges of the bins, in the reward's unit; equal ones where no return is known yet."""
        first, *_, last = self.centers or (0.0, 0.0)
        half = (last - first) / (2 * max(1, self.num_bins - 1))
        return first - half, last + half

    def write_to(self, config: PreTrainedConfig) -> None:
        """Write the layout into a model's configuration."""
        config.num_labels = self.num_outputs
        if self.centers is not None:
            config.value_centers = list(self.centers)  # pyright: ignore[reportAttributeAccessIssue]
        if self.num_heads > 1:
            config.value_heads = self.num_heads  # pyright: ignore[reportAttributeAccessIssue]

    def centers_on(self, device: torch.device) -> Tensor:
        """Return the centers of the bins, float32 `(num_bins,)`, computed on the device."""
        first, *_, last = self.centers or (0.0, 0.0)
        return torch.linspace(first, last, self.num_bins, device=device)

    def read(self, outputs: Tensor) -> HeadValues:
        """Compute values from the layer's outputs, float32 `(..., num_outputs)`.

        V_h = z_h, or sum_i softmax(z_h)_i center_i        V = mean_h V_h
        """
        if self.num_heads > 1:
            outputs = outputs.unflatten(-1, (self.num_heads, self.num_bins))
        logits = None if self.centers is None else outputs
        values = outputs.squeeze(-1) if logits is None else outputs.softmax(-1) @ self.centers_on(outputs.device)
        return HeadValues(values, logits) if self.num_heads == 1 else HeadValues(values.mean(-1), logits, values)


def of_own_heads(of_heads: Tensor, own: Tensor) -> Tensor:
    """Choose for each row what is its own head's.

    Args:
        of_heads: Figures of all heads, `(B, T, num_heads, ...)`.
        own: The head that learns from each row, long `(B,)`.

    Returns:
        `(B, T, ...)`.
    """
    return of_heads[torch.arange(len(own), device=own.device), :, own]


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
        if saved.num_bins == own.num_bins and saved.num_heads == own.num_heads:
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
    ValueHead.with_bins(head.num_bins, low, high, head.num_heads).write_to(transformers_model(model).config)
