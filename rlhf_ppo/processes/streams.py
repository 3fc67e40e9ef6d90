"""Random numbers of the user's own code: reward functions and callbacks draw without disturbing training."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from transformers import TrainerCallback

from rlhf_ppo.processes.random_numbers import seed_of


class SeparateStream:
    """States of Python's, NumPy's and PyTorch's generators that somebody else's code draws from.

    They are in place while `in_use` lasts, and go on where they were at the next time, so that the numbers differ from
    call to call, are the same at every run, and neither disturb those of training nor depend on them.

    Args:
        label: Makes the streams of one run differ.
    """

    def __init__(self, label: str) -> None:
        self.label = label
        self._in_use = False
        self.seed(0)

    def seed(self, *words: int) -> None:
        """Begin the stream that belongs to these numbers: a run's seed, a process' index."""
        seed = seed_of(self.label, *words)
        self._states: dict[str, Any] = {
            "python": random.Random(seed).getstate(),
            "numpy": np.random.RandomState(seed).get_state(),
            "cpu": torch.Generator().manual_seed(seed).get_state(),
        }
        if torch.cuda.is_available():
            self._states["cuda"] = torch.Generator("cuda").manual_seed(seed).get_state()

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Let everything inside draw from this stream; inside another `in_use` of it this does nothing."""
        if self._in_use:
            yield
            return
        of_training = _current("cuda" in self._states)
        _put_in_place(self._states)
        self._in_use = True
        try:
            yield
        finally:
            self._in_use = False
            self._states = _current("cuda" in self._states)
            _put_in_place(of_training)

    @contextmanager
    def apart(self, *words: int) -> Iterator[None]:
        """Begin another stream, and go on with this one after it: what an evaluation draws changes nothing later."""
        kept = self._states
        self.seed(*words)
        try:
            yield
        finally:
            self._states = kept

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint keeps, in types that `torch.load(weights_only=True)` reads."""
        name, keys, *rest = self._states["numpy"]
        return {**self._states, "numpy": (name, torch.from_numpy(keys.astype(np.int64)), *rest)}

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from what `state` gave."""
        name, keys, *rest = state["numpy"]
        known = {key: state.get(key, own) for key, own in self._states.items()}
        self._states = {**known, "numpy": (name, keys.numpy().astype(np.uint32), *rest)}


class Streams:
    """The streams of one process of a run.

    Args:
        process_index: The process, which draws numbers of its own.
        seed: The run's.

    Attributes:
        rewards: What reward functions draw from.
        callbacks: What callbacks draw from.
    """

    def __init__(self, process_index: int, seed: int) -> None:
        self.process_index = process_index
        self.rewards, self.callbacks = SeparateStream("rewards"), SeparateStream("callbacks")
        self.seed(seed)

    def seed(self, *words: int) -> None:
        """Begin the streams that belong to these numbers."""
        for stream in (self.rewards, self.callbacks):
            stream.seed(*words, self.process_index)

    def mark(self) -> None:
        """Remember where training's generators and the streams are, for `go_back`."""
        self._marked = {**self._states(), "training": _current(torch.cuda.is_available())}

    def mark_streams(self) -> None:
        """Do so for the streams alone; training's generators go back to where they were before."""
        self._marked |= self._states()

    def go_back(self) -> None:
        """Go on from the mark: what was drawn since is drawn again."""
        self._restore(self._marked)
        _put_in_place(self._marked["training"])

    def _states(self) -> dict[str, dict[str, Any]]:
        return {stream.label: stream.state() for stream in (self.rewards, self.callbacks)}

    def _restore(self, states: Mapping[str, dict[str, Any]]) -> None:
        for stream in (self.rewards, self.callbacks):
            stream.restore(states[stream.label])

    def save(self, checkpoint: str) -> None:
        """Write this process' file into a checkpoint."""
        os.makedirs(checkpoint, exist_ok=True)
        torch.save(self._states(), self._file(checkpoint))

    def load(self, checkpoint: str) -> None:
        """Go on from a checkpoint; older ones have no such file, and leave the streams as they are."""
        if not os.path.isfile(self._file(checkpoint)):
            return
        self._restore(torch.load(self._file(checkpoint), weights_only=True, map_location="cpu"))

    def _file(self, checkpoint: str) -> str:
        return os.path.join(checkpoint, f"separate_rng_state_{self.process_index}.pth")


def draw_apart(handler: Any, stream: SeparateStream) -> None:
    """Let all callbacks of a handler draw from a stream.

    Args:
        handler: Trainer's `CallbackHandler`, through whose `call_event` every event goes.
        stream: The stream.
    """
    call_event: Callable[..., Any] = handler.call_event

    def call_apart(event: str, *args: Any, **kwargs: Any) -> Any:
        if not any(_handles(callback, event) for callback in handler.callbacks):
            return call_event(event, *args, **kwargs)
        with stream.in_use():
            return call_event(event, *args, **kwargs)

    handler.call_event = call_apart


def _handles(callback: TrainerCallback, event: str) -> bool:
    return getattr(getattr(callback, event, None), "__func__", None) is not getattr(TrainerCallback, event, None)


def _current(with_cuda: bool) -> dict[str, Any]:
    states: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "cpu": torch.get_rng_state(),
    }
    return states | ({"cuda": torch.cuda.get_rng_state()} if with_cuda else {})


def _put_in_place(states: dict[str, Any]) -> None:
    random.setstate(states["python"])
    np.random.set_state(states["numpy"])
    torch.set_rng_state(states["cpu"])
    if "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"])
