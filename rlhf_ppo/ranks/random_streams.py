"""Random numbers of a run: seeds, generators that are restored, and streams for a user's code."""

from __future__ import annotations

import hashlib
import os
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from accelerate.utils import set_seed
from transformers import TrainerCallback
from transformers.trainer_callback import CallbackHandler


def upcoming_seed(label: str) -> int:
    """Derive a seed from the current generator states, without drawing from them.

    Args:
        label: Distinguishes several seeds of one state.

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


def derive_seed(label: str, *words: int) -> int:
    """Derive a seed from a label and numbers, 0 to 2**32 - 1."""
    digest = hashlib.blake2b(repr((label, *words)).encode(), digest_size=4)
    return int.from_bytes(digest.digest(), "big")


def minibatch_generator(seed: int, update: int, rank: int) -> torch.Generator:
    """Return the generator that shuffles one update's mini-batches.

    It depends on its arguments only, so checkpoints do not save it.

    Args:
        seed: The run's seed.
        update: Index of the PPO update.
        rank: Index of the process.
    """
    words = np.random.SeedSequence([seed, update, rank]).generate_state(1, np.uint64)
    return torch.Generator().manual_seed(int(words[0]) >> 1)


@contextmanager
def isolated_rng(seed: int, device_specific: bool = False) -> Iterator[None]:
    """Seed every generator in the block, and restore them after it.

    Args:
        seed: Base seed.
        device_specific: Whether to add the rank, so that every rank draws different numbers.
    """
    with preserve_rng():
        set_seed(seed, device_specific=device_specific)
        yield


@contextmanager
def preserve_rng() -> Iterator[None]:
    """Restore every generator after the block."""
    states = _rng_states()
    try:
        yield
    finally:
        _set_rng_states(states)


def _rng_states() -> dict[str, Any]:
    states: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "cpu": torch.get_rng_state(),
    }
    return states | ({"cuda": torch.cuda.get_rng_state()} if torch.cuda.is_available() else {})


def _set_rng_states(states: dict[str, Any]) -> None:
    random.setstate(states["python"])
    np.random.set_state(states["numpy"])
    torch.set_rng_state(states["cpu"])
    if "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"])


class RngStream:
    """Generator states of Python, NumPy and PyTorch for a user's code.

    `in_use` installs them for a block and then keeps the advanced states: the numbers differ from call to call, repeat
    in every run, and are independent of those of training.

    Args:
        label: Distinguishes the streams of one run.
    """

    def __init__(self, label: str) -> None:
        self.label = label
        self._in_use = False
        self.seed(0)

    def seed(self, *words: int) -> None:
        """Start the stream from these numbers, such as the run's seed and the process index."""
        with isolated_rng(derive_seed(self.label, *words)):
            self._states = _rng_states()

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Draw from this stream in the block; nested blocks have no effect."""
        if self._in_use:
            yield
            return
        of_training = _rng_states()
        _set_rng_states(self._states)
        self._in_use = True
        try:
            yield
        finally:
            self._in_use = False
            self._states = _rng_states()
            _set_rng_states(of_training)

    @contextmanager
    def reseeded(self, *words: int) -> Iterator[None]:
        """Use another seed in the block, such as for an evaluation, then continue as if it had not run."""
        states = self._states
        self.seed(*words)
        try:
            yield
        finally:
            self._states = states

    def state(self) -> dict[str, Any]:
        """Return the state, in types that `torch.load(weights_only=True)` reads."""
        name, keys, *rest = self._states["numpy"]
        return {**self._states, "numpy": (name, torch.from_numpy(keys.astype(np.int64)), *rest)}

    def restore(self, state: dict[str, Any]) -> None:
        """Restore what `state` returned."""
        name, keys, *rest = state["numpy"]
        known = {key: state.get(key, present) for key, present in self._states.items()}
        self._states = {**known, "numpy": (name, keys.numpy().astype(np.uint32), *rest)}


class RngStreams:
    """The random-number streams of one process.

    Args:
        process_index: Index of the process; each draws different numbers.
        seed: The run's seed.

    Attributes:
        rewards: Stream of the reward functions, tools and environments.
        callbacks: Stream of the callbacks.
        num_apart: Batches of episodes of the running evaluation; None while there is none.
    """

    def __init__(self, process_index: int, seed: int) -> None:
        self.process_index = process_index
        self.rewards, self.callbacks = RngStream("rewards"), RngStream("callbacks")
        self.num_apart: int | None = None
        self.seed(seed)

    def seed(self, *words: int) -> None:
        """Start both streams from these numbers."""
        for stream in (self.rewards, self.callbacks):
            stream.seed(*words, self.process_index)

    def save(self, checkpoint: str) -> None:
        """Write this process's states into a checkpoint."""
        os.makedirs(checkpoint, exist_ok=True)
        states = {stream.label: stream.state() for stream in (self.rewards, self.callbacks)}
        torch.save(states, self._file(checkpoint))

    def load(self, checkpoint: str) -> None:
        """Read this process's states from a checkpoint; without a file, as of a new rank, keep the streams."""
        if os.path.isfile(self._file(checkpoint)):
            states = torch.load(self._file(checkpoint), weights_only=True, map_location="cpu")
            for stream in (self.rewards, self.callbacks):
                stream.restore(states[stream.label])

    def _file(self, checkpoint: str) -> str:
        return os.path.join(checkpoint, f"separate_rng_state_{self.process_index}.pth")


def set_up_callbacks(handler: CallbackHandler, stream: RngStream, policy: torch.nn.Module) -> None:
    """Let all callbacks of a handler draw from a stream, and see the policy as `model`.

    Args:
        handler: Trainer's `CallbackHandler`; every event goes through its `call_event`.
        stream: The stream.
        policy: A transformers model, which callbacks can generate with and save.
    """
    call_event: Callable[..., Any] = handler.call_event

    def call_in_stream(event: str, *args: object, **kwargs: object) -> Any:
        handler.model = policy
        if not any(_handles(callback, event) for callback in handler.callbacks):
            return call_event(event, *args, **kwargs)
        with stream.in_use():
            return call_event(event, *args, **kwargs)

    handler.call_event = call_in_stream


def _handles(callback: TrainerCallback, event: str) -> bool:
    return getattr(getattr(callback, event, None), "__func__", None) is not getattr(TrainerCallback, event, None)
