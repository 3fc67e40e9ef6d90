"""Random numbers that evaluation and sample tables draw without disturbing those of training."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from accelerate.utils import set_seed


@contextmanager
def isolated_rng(seed: int, device_specific: bool = True) -> Iterator[None]:
    """Seed every generator inside the block and restore them all after it.

    Args:
        seed: Base seed.
        device_specific: Whether to add the rank, so that every rank draws other numbers.
    """
    with rng_kept():
        set_seed(seed, device_specific=device_specific)
        yield


@contextmanager
def rng_kept() -> Iterator[None]:
    """Restore every generator after the block."""
    python_state, numpy_state = random.getstate(), np.random.get_state()
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    with torch.random.fork_rng(devices=devices):
        try:
            yield
        finally:
            random.setstate(python_state)
            np.random.set_state(numpy_state)


def upcoming_seed(label: str) -> int:
    """Derive a seed from what the generators are about to give, without drawing from them.

    Args:
        label: Makes several seeds of one state.

    Returns:
        A function of the generators' states and the label, 0 to 2**32 - 1.
    """
    states = [torch.get_rng_state()]
    if torch.cuda.is_available():
        states.append(torch.cuda.get_rng_state())
    digest = hashlib.blake2b(label.encode(), digest_size=4)
    for state in states:
        digest.update(state.numpy().tobytes())
    return int.from_bytes(digest.digest(), "big")


def seed_of(label: str, *words: int) -> int:
    """Derive a seed from a label and numbers, 0 to 2**32 - 1."""
    digest = hashlib.blake2b(repr((label, *words)).encode(), digest_size=4)
    return int.from_bytes(digest.digest(), "big")


def shuffling_generator(seed: int, update: int, rank: int) -> torch.Generator:
    """Make the generator that shuffles one update's mini-batches.

    It is a function of its arguments alone, so nothing of it needs saving.

    Args:
        seed: The run's seed.
        update: Index of the PPO update.
        rank: Index of the process.
    """
    words = np.random.SeedSequence([seed, update, rank]).generate_state(1, np.uint64)
    return torch.Generator().manual_seed(int(words[0]) >> 1)
