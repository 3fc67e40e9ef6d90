"""The order of the prompts: the same on all ranks, which share it, and after resuming."""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any, cast

from accelerate import skip_first_batches
from torch.utils.data import DataLoader
from transformers.trainer_utils import has_length

from rlhf_ppo.config import PPOConfig
from rlhf_ppo.config.sizes import Sizes
from rlhf_ppo.processes.random_numbers import isolated_rng


def data_order(args: PPOConfig, epoch: int = 0) -> AbstractContextManager[None]:
    """Draw the order of an epoch's prompts while the context lasts."""
    seed = args.seed if args.data_seed is None else args.data_seed
    return isolated_rng(seed + epoch, device_specific=False)


def num_prompts(sizes: Sizes, args: PPOConfig) -> int:
    """Count the different prompts of an update on each process."""
    return sizes.local_batch_size // args.num_generations


def counts(sizes: Sizes, loader: Any) -> tuple[int, int, int, int, int, int | None, int]:
    """Count epochs, steps and samples as Trainer wants them; one step is one PPO update.

    Args:
        sizes: What follows from the arguments.
        loader: Gives the batches.

    Returns:
        Epochs, updates of an epoch, rows, episodes of the run and of an update, updates of an epoch, and of the run.
    """
    num_updates, batch_size = sizes.num_total_batches, sizes.batch_size
    per_epoch, num_epochs, num_examples = num_updates, sys.maxsize, num_updates * batch_size
    dataset = loader.dataset
    if has_length(loader):
        per_epoch, num_examples = len(loader), len(dataset)
        num_epochs = math.ceil(num_updates / per_epoch)
    return num_epochs, per_epoch, num_examples, num_updates * batch_size, batch_size, per_epoch, num_updates


def batches_of_pass(
    loader: DataLoader, args: PPOConfig, sizes: Sizes, epoch: int, num_skipped: int
) -> Iterator[Mapping[str, Any]]:
    """Yield the full batches of a pass over the prompts.

    Args:
        loader: The prepared loader.
        args: The arguments.
        sizes: What follows from them.
        epoch: Number of the pass, from 0.
        num_skipped: How many batches a run before has taken from it.
    """
    if num_skipped > 0:
        loader = skip_first_batches(loader, num_skipped)
    if hasattr(loader, "set_epoch"):
        cast(Any, loader).set_epoch(epoch)
    batches = iter(loader)
    with data_order(args, epoch):  # samplers without a generator of their own draw when they start
        first = list(itertools.islice(batches, 1))
    for batch in itertools.chain(first, batches):
        if len(batch["input_ids"]) == num_prompts(sizes, args):  # a stream may end in a part of a batch
            yield batch
