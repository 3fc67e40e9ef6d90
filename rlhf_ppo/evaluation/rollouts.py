"""Evaluation: a rollout for every batch of held-out prompts, and what it is worth."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor

from rlhf_ppo.data.prompts import Prompts
from rlhf_ppo.reporting.metrics import gather_columns, warn_of_unscored


def evaluated(
    batches: Iterable[Mapping[str, object]],
    evaluate: Callable[[Prompts], Mapping[str, Tensor]],
    gather: Callable[[Tensor], Tensor],
    device: torch.device,
    after_batch: Callable[[], None],
) -> dict[str, Tensor]:
    """Evaluate held-out prompts batch by batch.

    Args:
        batches: Collated batches of this process.
        evaluate: Takes a batch's prompts, returns what `evaluation_columns` gives for their rollout.
        gather: Concatenates over ranks, without rows that only fill the last batch up.
        device: Where the prompts are put.
        after_batch: Called after each batch.

    Returns:
        One value per episode of all ranks, by name.
    """
    parts: list[dict[str, Tensor]] = []
    for batch in batches:
        parts.append(gather_columns(evaluate(Prompts.from_collated(batch, device)), gather))
        after_batch()
    columns = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
    warn_of_unscored(columns["scores"])
    return columns
