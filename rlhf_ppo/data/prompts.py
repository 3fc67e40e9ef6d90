"""The prompts of one update."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rlhf_ppo.data.rollout import check_shape


@dataclass(frozen=True)
class Prompts:
    """Left-padded prompts and the data set's other columns.

    Attributes:
        input_ids: Token ids, long `(B, C)`, padded on the left.
        attention_mask: True on real tokens, bool `(B, C)`.
        columns: The data set's other columns, each a list of `B` values; reward functions receive them.
    """

    input_ids: Tensor
    attention_mask: Tensor
    columns: Mapping[str, list[Any]]

    def __post_init__(self) -> None:
        check_shape("attention_mask", self.attention_mask, tuple(self.input_ids.shape))
        if not self.attention_mask.any(dim=1).all():
            row = int((~self.attention_mask.any(dim=1)).nonzero()[0])
            raise ValueError(f"prompt {row} of the batch is empty (its attention_mask is all zeros); drop such rows")

    def __len__(self) -> int:
        return self.input_ids.shape[0]

    @classmethod
    def from_collated(cls, batch: Mapping[str, Any], device: torch.device) -> Prompts:
        """Take a collator's output, whatever side it padded on, and move the padding to the left.

        Args:
            batch: `input_ids` and `attention_mask`, both `(B, C)`, and any other columns.
            device: Where the tensors go.

        Returns:
            The prompts, without columns that are padding in every row.
        """
        missing = {"input_ids", "attention_mask"} - batch.keys()
        if missing:
            raise ValueError(f"the data_collator returned no {sorted(missing)}; it must return both `(B, C)` tensors")
        ids, mask = batch["input_ids"].to(device), batch["attention_mask"].to(device).bool()
        order = mask.to(torch.int8).argsort(dim=1, stable=True)  # padding (0) first, real tokens in their own order
        ids, mask = ids.gather(1, order), mask.gather(1, order)
        longest = int(mask.sum(dim=1).max())
        columns = {name: list(values) for name, values in batch.items() if name not in ("input_ids", "attention_mask")}
        return cls(ids[:, -longest:], mask[:, -longest:], columns)

    def repeated(self, times: int) -> Prompts:
        """Return every prompt `times` times, next to each other: rows 0, 0, ..., 1, 1, ..."""
        if times == 1:
            return self
        columns = {name: [value for value in values for _ in range(times)] for name, values in self.columns.items()}
        ids, mask = (rows.repeat_interleave(times, dim=0) for rows in (self.input_ids, self.attention_mask))
        return Prompts(ids, mask, columns)

    def first(self, num_rows: int) -> Prompts:
        """Return the first rows."""
        columns = {name: values[:num_rows] for name, values in self.columns.items()}
        return Prompts(self.input_ids[:num_rows], self.attention_mask[:num_rows], columns)
