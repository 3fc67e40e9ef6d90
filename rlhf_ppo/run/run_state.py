"""State of a run that several parts share: the trainer makes one `RunState` and passes it to them."""

from __future__ import annotations

import copy
import io
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Protocol, cast

import numpy as np
import torch
from accelerate import Accelerator
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase, ProcessorMixin, TrainerControl
from transformers.trainer_callback import CallbackHandler

from rlhf_ppo.config import PPOConfig
from rlhf_ppo.generation.sampling import SpecialTokens
from rlhf_ppo.models.policy_and_value import PolicyAndValue
from rlhf_ppo.ranks.processes import get_logger, is_on_all_ranks
from rlhf_ppo.ranks.random_streams import RngStreams
from rlhf_ppo.reporting.metrics import PhaseTimer
from rlhf_ppo.rewards.functions import LoggedByFunctions
from rlhf_ppo.run.checkpoints import PPOTrainerState

logger = get_logger(__name__)


class HoldsState(Protocol):
    """The trainer, whose state and control Trainer replaces while it runs."""

    state: PPOTrainerState
    control: TrainerControl


@dataclass(kw_only=True)
class RunState:
    """What the parts of a trainer share.

    Attributes:
        trainer: Holds Trainer's state and control.
        args: The arguments.
        tokenizer: The policy's tokenizer.
        tokens: Padding and stop tokens.
        processor: The policy's processor of images and text, or None.
        accelerator: Trainer's accelerator.
        callbacks: Trainer's callback handler.
        streams: The random-number streams.
        logged: Values that reward functions have logged since the last update.
        timer: Seconds of the update's phases.
        error: The error that ended the run on this rank only.
    """

    trainer: HoldsState
    args: PPOConfig
    tokenizer: PreTrainedTokenizerBase
    tokens: SpecialTokens
    processor: ProcessorMixin | None
    accelerator: Accelerator
    callbacks: CallbackHandler
    streams: RngStreams
    logged: LoggedByFunctions
    timer: PhaseTimer = field(default_factory=PhaseTimer)
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

    def unwrapped(self, model: nn.Module) -> PolicyAndValue:
        """Return policy and value model without the wrappers of backends and compilation."""
        return cast(PolicyAndValue, self.accelerator.unwrap_model(model, keep_torch_compile=False))

    def fire(self, event: str) -> None:
        """Call the method of that name of every callback."""
        self.trainer.control = getattr(self.callbacks, event)(self.args, self.state, self.control)

    def agree_on_control(self) -> None:
        """Set on all ranks each flag that a callback has set on any rank, so that none waits for the others."""
        if self.accelerator.num_processes == 1:
            return
        flags = [each.name for each in fields(TrainerControl)]
        own = torch.tensor([float(getattr(self.control, flag)) for flag in flags], device=self.args.device)
        for flag, count in zip(flags, self.sum_over_ranks(own).tolist(), strict=True):
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

    def moment(self) -> str:
        """Return the current position for errors: `update 3`, or `evaluation after update 3`."""
        done = self.state.global_step
        return f"update {done + 1}" if self.streams.num_apart is None else f"evaluation after update {done}"


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
        """
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
"""What a number of NumPy is made of."""


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


def _load(file: Any) -> Any:
    with torch.serialization.safe_globals(_NUMPY):
        return torch.load(file, map_location="cpu", weights_only=True)
