"""State of a run: what its parts share, what checkpoints save of it, and the position of its loop."""

from __future__ import annotations

import copy
import io
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import IO, Any, Protocol, Self, cast

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils.memory import clear_device_cache
from torch import Tensor
from transformers import PreTrainedTokenizerBase, ProcessorMixin, TrainerControl, TrainerState
from transformers.trainer_callback import CallbackHandler

from rlhf_ppo.config import PPOConfig
from rlhf_ppo.data.files import read_object, write_json
from rlhf_ppo.generation.sampling import SpecialTokens
from rlhf_ppo.models.policy_and_value import PolicyAndValue
from rlhf_ppo.ranks.processes import get_logger, is_on_all_ranks
from rlhf_ppo.ranks.random_streams import RngStreams
from rlhf_ppo.reporting.metrics import PhaseTimer, rate
from rlhf_ppo.rewards.functions import LoggedByFunctions

logger = get_logger(__name__)


class PPOTrainerState(TrainerState):
    """Trainer's state with the number of episodes.

    Attributes:
        episode: Episodes generated so far, on all ranks.
    """

    episode: int = 0

    @classmethod
    def of(cls, state: TrainerState, episode: int = 0) -> Self:
        """Return a state with the fields of another one."""
        copied = cls(**{item.name: getattr(state, item.name) for item in fields(state)})
        copied.episode = episode
        return copied


class HoldsState(Protocol):
    """The trainer, whose state and control Trainer replaces while it runs."""

    args: PPOConfig
    accelerator: Accelerator
    callback_handler: CallbackHandler
    state: PPOTrainerState
    control: TrainerControl


@dataclass(kw_only=True)
class RunState:
    """What the parts of a trainer share.

    Attributes:
        trainer: Holds Trainer's state and control.
        args: The arguments.
        models: Policy and value model without the wrappers of backends and compilation.
        starts: The directories that models were loaded from, which are not saved over; see `starts_of`.
        tokenizer: The policy's tokenizer.
        tokens: Padding and stop tokens.
        processor: The policy's processor of images and text, or None.
        template_kwargs: Further arguments of the chat template, or None.
        accelerator: Trainer's accelerator.
        callbacks: Trainer's callback handler.
        streams: The random-number streams.
        logged: Values that reward functions have logged since the last update.
        stateful: Objects whose states checkpoints save.
        timer: Seconds of the update's phases.
        last_checkpoint: The checkpoint that the run last wrote or resumed from.
        error: The error that ended the run on this rank only.
    """

    trainer: HoldsState
    args: PPOConfig
    models: PolicyAndValue
    starts: Mapping[str, str]
    tokenizer: PreTrainedTokenizerBase
    tokens: SpecialTokens
    processor: ProcessorMixin | None
    template_kwargs: Mapping[str, Any] | None
    accelerator: Accelerator
    callbacks: CallbackHandler
    streams: RngStreams
    logged: LoggedByFunctions
    stateful: StatefulParts
    timer: PhaseTimer = field(default_factory=PhaseTimer)
    last_checkpoint: str | None = None
    error: Exception | None = None

    @property
    def state(self) -> PPOTrainerState:
        """Trainer's state."""
        return self.trainer.state

    @state.setter
    def state(self, state: PPOTrainerState) -> None:
        self.trainer.state = state

    @property
    def control(self) -> TrainerControl:
        """Trainer's control."""
        return self.trainer.control

    def sum_over_ranks(self, tensor: Tensor) -> Tensor:
        """Sum a small tensor over all ranks; one process returns the tensor."""
        return self.accelerator.reduce(tensor, reduction="sum")  # pyright: ignore[reportReturnType]

    def gather(self, tensor: Tensor) -> Tensor:
        """Concatenate a tensor's rows over all ranks; one process returns the tensor."""
        return self.accelerator.gather(tensor)  # pyright: ignore[reportReturnType]

    def fire(self, event: str) -> None:
        """Call the method of that name of every callback."""
        self.trainer.control = getattr(self.callbacks, event)(self.args, self.state, self.control)

    def agree_on_control(self) -> None:
        """Set on all ranks each flag that a callback has set on any rank, so that none waits for the others."""
        if self.accelerator.num_processes == 1:
            return
        flags = [flag.name for flag in fields(TrainerControl)]
        of_rank = torch.tensor([float(getattr(self.control, flag)) for flag in flags], device=self.args.device)
        for flag, count in zip(flags, self.sum_over_ranks(of_rank).tolist(), strict=True):
            setattr(self.control, flag, count > 0)

    @contextmanager
    def noting_error(self) -> Iterator[None]:
        """Keep an error that only this rank has; `check_in_step` raises after it."""
        try:
            yield
        except Exception as error:
            if self.accelerator.num_processes > 1 and not is_on_all_ranks(error):
                self.error = error
            raise

    def check_in_step(self) -> None:
        """Raise a RuntimeError if this rank has left the others, which may wait for it at another place."""
        if self.error is not None:
            raise RuntimeError(
                f"{type(self.error).__name__} has ended training in this process, and the others may wait for it "
                "elsewhere: let the program end, and resume from a checkpoint"
            ) from self.error

    @property
    def is_over(self) -> bool:
        """Whether the run has had all its updates."""
        return self.state.global_step >= self.state.max_steps

    @property
    def is_saved(self) -> bool:
        """Whether the latest update has a checkpoint."""
        return os.path.basename(self.last_checkpoint or "") == f"checkpoint-{self.state.global_step}"

    def position(self) -> str:
        """Return the current position for errors: `update 3`, or `evaluation after update 3`."""
        done = self.state.global_step
        return f"update {done + 1}" if self.streams.num_apart is None else f"evaluation after update {done}"


# ---- What checkpoints save ----

PROGRESS_NAME = "ppo_state.json"


@dataclass
class Progress:
    """State of the training loop beyond `TrainerState`.

    Attributes:
        episode: Episodes generated so far, on all ranks.
        epoch: Index of the current pass over the data.
        batches_in_epoch: Batches taken from that pass.
        num_prompts: Rows of the data; 0 if unknown.
        losses: Each rank's sum of the losses since the last log.
        last_logged_step: Update of the last log.
        pending_metrics: Metrics of the updates since the last log.
        batch_size: Episodes of an update, on all ranks.
        num_processes: Number of processes of the run.
        num_generations: Responses to each prompt of an update.
        optimization: Settings of optimizer and scheduler, by name.
        arguments: The other arguments, as JSON values and without secrets.
        kinds: What is trained in `model` and `value_model`: all weights, a kind of adapter, or a head.
    """

    episode: int = 0
    epoch: int = 0
    batches_in_epoch: int = 0
    num_prompts: int = 0
    losses: list[float] = field(default_factory=list)
    last_logged_step: int = 0
    pending_metrics: list[dict[str, float]] = field(default_factory=list)
    batch_size: int = 0
    num_processes: int = 0
    num_generations: int = 1
    optimization: dict[str, Any] = field(default_factory=dict)
    arguments: dict[str, Any] = field(default_factory=dict)
    kinds: dict[str, str] = field(default_factory=dict)

    def unlogged_loss(self, rank: int, num_processes: int) -> tuple[float, float]:
        """Return the sum of losses of a rank, and the mean of the ranks' sums.

        After a change of the number of processes the first is that mean, too.
        """
        mean = math.fsum(self.losses) / max(1, len(self.losses))
        return (self.losses[rank] if len(self.losses) == num_processes else mean), mean

    def save(self, directory: str) -> None:
        """Write `ppo_state.json`."""
        write_json(Path(directory, PROGRESS_NAME), asdict(self))

    @classmethod
    def load(cls, directory: str) -> Self:
        """Read `ppo_state.json`."""
        return cls(**read_object(Path(directory, PROGRESS_NAME)))


STATEFUL_NAME = "stateful.pt"


class Stateful(Protocol):
    """An object with a state that checkpoints save."""

    def state_dict(self) -> Mapping[str, Any]:
        """Return the state: tensors, numbers, texts, and lists and dicts of these."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state."""
        ...


class StatefulParts:
    """Registered objects. The main process saves their states, which are the same on all ranks."""

    def __init__(self) -> None:
        self._parts: dict[str, Stateful] = {}
        self._initial: dict[str, Mapping[str, Any]] = {}

    def register(self, name: str, part: Stateful) -> None:
        """Save a part's state in every checkpoint, and restore it on resume.

        Args:
            name: Key of the state in checkpoints.
            part: The part; a new run starts from its current state.

        Raises:
            TypeError: The part's state cannot be in a checkpoint.
            ValueError: Another part has the name.
        """
        if self._parts.get(name, part) is not part:
            raise ValueError(f"register_stateful: the name {name!r} is taken by another part; choose another")
        self._initial[name] = copy.deepcopy(_state_of(name, part))
        self._parts[name] = part

    def start(self, checkpoint: str | None) -> None:
        """Restore the parts' states from a checkpoint's directory, or from their registration for a new run."""
        path = None if checkpoint is None else Path(checkpoint, STATEFUL_NAME)
        states = _load(path) if path is not None and path.exists() else {}
        for name, part in self._parts.items():
            state = states.get(name, self._initial[name])
            if state or part.state_dict():  # else it has no state, perhaps not yet
                part.load_state_dict(copy.deepcopy(state))

    def save(self, directory: str) -> None:
        """Write `stateful.pt`, if a part has a state."""
        states = {name: _state_of(name, part) for name, part in self._parts.items()}
        if states := {name: state for name, state in states.items() if state}:
            torch.save(states, Path(directory, STATEFUL_NAME))


_NUMPY: list[Any] = [np.float64(0).__reduce__()[0], np.dtype, *{type(np.dtype(kind)) for kind in "?bhilqBHILQefd"}]
"""Functions and types that a pickled NumPy number needs."""


def _state_of(name: str, part: Stateful) -> dict[str, Any]:
    state, written = dict(part.state_dict()), io.BytesIO()
    try:
        torch.save(state, written)
        written.seek(0)
        _load(written)
    except Exception as error:
        raise TypeError(
            f"{name}: {type(part).__name__}.state_dict() returned a state that no run can resume from: return a dict "
            f"of tensors, numbers, texts, and lists and dicts of these ({error!r:.200})"
        ) from error
    return state


def _load(file: Path | IO[bytes]) -> Any:
    with torch.serialization.safe_globals(_NUMPY):
        return torch.load(file, map_location="cpu", weights_only=True)


# ---- The loop ----


@dataclass
class LoopState:
    """Position of a run's loop, from its start to its end.

    Attributes:
        batches: Yields the batches of a pass over the prompts, after the skipped ones; takes both numbers.
        checkpoint: The checkpoint that the run resumes from, until the end of its pass.
        updates_per_epoch: Updates of a pass.
        num_episodes_before: Episodes of the earlier run.
        grad_norm: Gradient norm of the latest update.
        learning_rate: Learning rate of the latest update.
        start: Start time, for Trainer's summary.
        began: Start time on the monotonic clock.
    """

    batches: Callable[[int, int], Iterator[Mapping[str, Any]]]
    checkpoint: str | None
    updates_per_epoch: int
    num_episodes_before: int
    grad_norm: float | Tensor | None = None
    learning_rate: float | None = None
    start: float = field(default_factory=time.time)
    began: float = field(default_factory=time.monotonic)


def count_update(
    run: RunState, loop: LoopState, progress: Progress, batch_size: int, num_tokens: int
) -> dict[str, float]:
    """Count an update in Trainer's state and in `progress`; return its times, rates and position.

    Args:
        run: The run.
        loop: The loop, with the learning rate of the update.
        progress: The progress that checkpoints save.
        batch_size: Episodes of an update.
        num_tokens: Response tokens of this one.
    """
    args, state = run.args, run.state
    state.global_step += 1
    state.epoch = state.global_step / loop.updates_per_epoch
    progress.batches_in_epoch += 1
    progress.episode += batch_size
    state.episode = progress.episode
    seconds = run.timer.drain()
    num_episodes, elapsed = state.episode - loop.num_episodes_before, time.monotonic() - loop.began
    if args.torch_empty_cache_steps is not None and state.global_step % args.torch_empty_cache_steps == 0:
        clear_device_cache()
    return (
        seconds
        | rate("time/tokens_per_second", num_tokens, sum(seconds.values()))
        | rate("eps", num_episodes, elapsed)
        | {"lr": cast(float, loop.learning_rate), "episode": state.episode}
    )
