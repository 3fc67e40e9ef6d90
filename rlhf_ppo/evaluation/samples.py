"""Which prompts a table of samples answers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from accelerate import Accelerator

from rlhf_ppo.data.prompts import Prompts


def held_out_prompts(
    eval_dataset: Any, loader_of: Callable[[str | None], Iterable[Mapping[str, Any]]], device: torch.device
) -> Iterator[Prompts]:
    """Yield all held-out prompts of this process in batches.

    Args:
        eval_dataset: The evaluation set, or a dict of them.
        loader_of: Takes the name of one of these, or None for the only one; gives collated batches.
        device: Where the prompts are put.
    """
    names = list(eval_dataset) if isinstance(eval_dataset, dict) else [None]
    for name in names:
        for batch in loader_of(name):
            yield Prompts.from_collated(batch, device)


def first_prompts(
    rows: Sequence[Any],
    num_rows: int,
    collate: Callable[[list[Any]], Mapping[str, Any]],
    accelerator: Accelerator,
    device: torch.device,
) -> Prompts:
    """Return this process' share of the first training prompts.

    Args:
        rows: The training set.
        num_rows: Rows of each process, of which there are fewer where the data has fewer.
        collate: Makes a batch.
        accelerator: Knows the processes.
        device: Where the prompts are put.
    """
    num_rows = min(num_rows, len(rows) // accelerator.num_processes)
    first = num_rows * accelerator.process_index
    batch = collate([rows[index] for index in range(first, first + num_rows)])
    return Prompts.from_collated(batch, device)
