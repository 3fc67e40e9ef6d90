"""Processes of a run: launch mode (DDP, DeepSpeed, FSDP), precision, logs, collectives, errors and random numbers."""

from __future__ import annotations

import hashlib
import logging
import os
import random
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator, PartialState
from accelerate.logging import MultiProcessAdapter
from accelerate.utils import gather_object, reduce, set_seed
from torch import nn
from transformers import TrainerCallback, TrainingArguments

from rlhf_ppo.terminal import visible_logger


class RankedLogger(MultiProcessAdapter):
    """accelerate's logger, which logs on the main process only unless `main_process_only=False`."""

    def process(self, msg: Any, kwargs: MutableMapping[str, Any]) -> tuple[Any, MutableMapping[str, Any]]:
        """Prefix the rank if there are several processes."""
        if PartialState().num_processes > 1:
            return super().process(msg, kwargs)
        kwargs.setdefault("stacklevel", 2)  # as in the base class: log the caller's line
        return logging.LoggerAdapter.process(self, msg, kwargs)


def get_logger(name: str) -> RankedLogger:
    """Return the logger of a module; with several processes its messages name the rank."""
    return RankedLogger(visible_logger(name), {})


logger = get_logger(__name__)


def num_processes(args: TrainingArguments) -> int:
    """Return the number of processes, after starting the process group.

    Raises:
        ValueError: Launched processes do not know each other, or `fp16` is on without an accelerator.
    """
    args._setup_devices  # noqa: B018  the property starts it
    count, launched = PartialState().num_processes, int(os.environ.get("WORLD_SIZE", 1))
    if "LOCAL_RANK" in os.environ and count < launched:
        raise ValueError(
            f"use_cpu={args.use_cpu!r}: the launcher started {launched} processes without accelerators; each would "
            "train alone; set use_cpu=True (--use_cpu) to train on CPUs together"
        )
    if args.fp16 and args.device.type == "cpu":
        raise ValueError("fp16=True has no effect on a CPU: leave it out, or set bf16=True")
    return count


def use_one_device(args: TrainingArguments) -> None:
    """Keep Trainer from spreading one process over several accelerators with `nn.DataParallel`."""
    if args.n_gpu > 1:
        logger.warning(f"One of {args.n_gpu} accelerators is used; start the script with `accelerate launch` for all.")
        args._n_gpu = 1


def mixed_precision_dtype(source: Accelerator | TrainingArguments) -> torch.dtype | None:
    """Return the 16-bit dtype of matrix products, which DeepSpeed also stores weights in; None: the weights' own."""
    return {"bf16": torch.bfloat16, "fp16": torch.float16}.get(source.mixed_precision)


def give_trained_one_type(model: nn.Module, accelerator: Accelerator) -> None:
    """With 16-bit precision, convert trainable, unsharded weights to the engine's type.

    ZeRO-3 keeps trainable weights in buffers of one type; its optimizer has float32 copies. PEFT creates float32
    adapters over 16-bit models.
    """
    if (dtype := mixed_precision_dtype(accelerator)) is None:
        return
    for parameter in model.parameters():
        if parameter.requires_grad and not hasattr(parameter, "ds_id"):
            parameter.data = parameter.data.to(dtype)


def zero_stage(accelerator: Accelerator) -> int | None:
    """Return the stage of DeepSpeed ZeRO, or None without DeepSpeed."""
    plugin = getattr(accelerator.state, "deepspeed_plugin", None)
    return None if plugin is None else plugin.zero_stage


def is_fsdp(accelerator: Accelerator) -> bool:
    """Return whether FSDP shards the models."""
    return getattr(accelerator.state, "fsdp_plugin", None) is not None


def warn_of_missing_fsdp(accelerator: Accelerator) -> None:
    """Warn if the launcher asked for FSDP, which accelerate leaves out on CPUs without a word."""
    if os.environ.get("ACCELERATE_USE_FSDP") == "true" and not is_fsdp(accelerator):
        logger.warning("FSDP was asked for, but accelerate has none on CPUs: each process holds whole models (DDP).")


def is_sharding(accelerator: Accelerator) -> bool:
    """Return whether weights are sharded, so that every rank takes part in saving them."""
    return is_fsdp(accelerator) or zero_stage(accelerator) == 3


def any_rank(condition: bool) -> bool:
    """Return whether a condition holds on any rank; every rank must call this.

    Use it before a rare exchange of objects, which synchronizes host and device several times; this does so once.
    """
    state = PartialState()
    if state.num_processes == 1:
        return condition
    flag = torch.full((), float(condition), device=state.device)  # filled on the device: no copy
    return bool(reduce(flag) > 0)  # pyright: ignore[reportOperatorIssue]


@contextmanager
def raise_on_all_ranks(accelerator: Accelerator | PartialState, kind: type[Exception] = Exception) -> Iterator[None]:
    """Run a block of each rank's own work, such as a reward function; raise an error of one rank on all ranks.

    In the block no rank may wait for another one, as in a pass of a sharded model: there a rank raises its error, its
    process ends, and the launcher ends the others.

    Args:
        accelerator: Gives the number of processes; one process exchanges nothing.
        kind: The errors to exchange; others are raised on their rank only.

    Raises:
        Exception: Another rank failed. An error of this package, such as `DivergenceError`, is the same on all ranks;
            a common built-in error keeps its type and names the rank; any other becomes a `RuntimeError` that names
            rank and type.
    """
    own: Exception | None = None
    try:
        yield
    except kind as error:
        own = error
    if accelerator.num_processes > 1 and any_rank(own is not None):
        sent = None if own is None else _portable(own, accelerator.process_index)
        raised = [error for error in gather_object([sent]) if error is not None]
        own = own or raised[0]
    if own is not None:
        own.__dict__[_ON_ALL_RANKS] = True
        raise own


_ON_ALL_RANKS = "_rlhf_ppo_on_all_ranks"


def is_on_all_ranks(error: Exception) -> bool:
    """Return whether `raise_on_all_ranks` has raised the error."""
    return _ON_ALL_RANKS in error.__dict__


def _portable(error: Exception, rank: int) -> Exception:
    """Return the error that the other ranks raise; the original might not be picklable."""
    kind = type(error)
    if kind.__module__.split(".")[0] == __name__.split(".")[0]:
        with suppress(TypeError):  # its constructor takes more than a text
            return kind(str(error))
    if kind in (ValueError, TypeError, OSError, ConnectionError, FileNotFoundError, ImportError, RuntimeError):
        return kind(f"rank {rank} failed: {error}")
    return RuntimeError(f"rank {rank} failed: {kind.__name__}: {error}")


# ---- Random numbers ----


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
def isolated_rng(seed: int, device_specific: bool = True) -> Iterator[None]:
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
        seed = derive_seed(self.label, *words)
        self._states: dict[str, Any] = {
            "python": random.Random(seed).getstate(),
            "numpy": np.random.RandomState(seed).get_state(),
            "cpu": torch.Generator().manual_seed(seed).get_state(),
        }
        if torch.cuda.is_available():
            self._states["cuda"] = torch.Generator("cuda").manual_seed(seed).get_state()

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
        known = {key: state.get(key, own) for key, own in self._states.items()}
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


def set_up_callbacks(handler: Any, stream: RngStream, policy: torch.nn.Module) -> None:
    """Let all callbacks of a handler draw from a stream, and see the policy as `model`.

    Args:
        handler: Trainer's `CallbackHandler`; every event goes through its `call_event`.
        stream: The stream.
        policy: A transformers model, which callbacks can generate with and save.
    """
    call_event: Callable[..., Any] = handler.call_event

    def call_in_stream(event: str, *args: Any, **kwargs: Any) -> Any:
        handler.model = policy
        if not any(_handles(callback, event) for callback in handler.callbacks):
            return call_event(event, *args, **kwargs)
        with stream.in_use():
            return call_event(event, *args, **kwargs)

    handler.call_event = call_in_stream


def _handles(callback: TrainerCallback, event: str) -> bool:
    return getattr(getattr(callback, event, None), "__func__", None) is not getattr(TrainerCallback, event, None)
