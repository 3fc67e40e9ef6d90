"""Where the real tokens of a padded batch stand: found out on the host, so that no pass waits for its device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from torch import Tensor


class HostMasks(NamedTuple):
    """The masks of a batch on the host, bool NumPy arrays.

    Attributes:
        attention: True on real tokens, `(B, L)`.
        response: True on the tokens of a response that are learned from, which belongs to the last `T` columns,
            `(B, T)`.
        source: The tensors that they are copies of.
    """

    attention: Any
    response: Any
    source: tuple[Tensor, Tensor]

    @classmethod
    def of(cls, attention_mask: Tensor, response_mask: Tensor) -> Self:
        """Copy masks, bool, in one piece, once their device has computed them."""
        width = attention_mask.shape[1]
        both = torch.cat([attention_mask.bool(), response_mask.bool()], dim=1).cpu().numpy()
        return cls(both[:, :width], both[:, width:], (attention_mask, response_mask))

    def are_of(self, attention_mask: Tensor, response_mask: Tensor) -> bool:
        """Tell whether they are copies of these very tensors."""
        return self.source[0] is attention_mask and self.source[1] is response_mask


@dataclass(frozen=True)
class Places:
    """Places of the `N` real tokens of `B` rows, of which `M` are a response's.

    Attributes:
        tokens: Places in the flattened `(B, L)`, long `(N,)`.
        positions: Number of each token in its own row, from 0, long `(N,)`.
        squeezed: Places in the flattened `(B, longest)` where every row begins at the left, long `(N,)`.
        lengths: Real tokens of each row, long `(B,)`.
        starts: Where each row begins among the real tokens, and where the last ends, int32 `(B + 1,)`.
        longest: Tokens of the longest row.
        response_tokens: Places of the response tokens in the flattened `(B, L)`, long `(M,)`; none where no response
            was told.
        responses: Their places in the flattened `(B, T)`, long `(M,)`, with holes where the mask has some.
    """

    tokens: Tensor
    positions: Tensor
    squeezed: Tensor
    lengths: Tensor
    starts: Tensor
    longest: int
    response_tokens: Tensor
    responses: Tensor

    @classmethod
    def of(cls, attention_mask: Tensor, response_mask: Tensor | None = None) -> Self:
        """Find the places from masks on a device; those of a response are none without its mask."""
        response_mask = attention_mask[:, :0] if response_mask is None else response_mask
        return cls.from_host(HostMasks.of(attention_mask, response_mask), attention_mask.device)

    @classmethod
    def from_host(cls, masks: HostMasks, device: torch.device) -> Self:
        """Find the places from masks on the host, and send them to a device in one piece."""
        width, length, lengths = masks.attention.shape[1], masks.response.shape[1], masks.attention.sum(axis=1)
        rows, columns = masks.attention.nonzero()
        ends = lengths.cumsum()
        positions = np.arange(len(rows)) - (ends - lengths)[rows]
        longest = int(lengths.max(initial=0))
        response_rows, response_columns = masks.response.nonzero()
        parts = (
            rows * width + columns,
            positions,
            rows * longest + positions,
            lengths,
            np.concatenate([[0], ends]),
            response_rows * width + response_columns + (width - length),
            response_rows * length + response_columns,
        )
        places = sent(torch.from_numpy(np.concatenate(parts).astype(np.int64)), device)
        pieces = places.split([len(part) for part in parts])
        tokens, positions, squeezed, lengths, starts, response_tokens, responses = pieces
        return cls(tokens, positions, squeezed, lengths, starts.to(torch.int32), longest, response_tokens, responses)

    def squeeze(self, values: Tensor) -> Tensor:
        """Move the real tokens of `(B, L)` to the left, `(B, longest)`, with 0 behind them."""
        num_rows = len(self.lengths)
        squeezed = values.new_zeros(num_rows * self.longest)
        return squeezed.index_copy_(0, self.squeezed, values.flatten()[self.tokens]).view(num_rows, self.longest)

    @property
    def squeezed_mask(self) -> Tensor:
        """True on the real tokens once they are at the left, bool `(B, longest)`."""
        return torch.arange(self.longest, device=self.lengths.device) < self.lengths[:, None]


def sent(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a tensor of the host to a device without waiting for the device: from pinned memory."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)
