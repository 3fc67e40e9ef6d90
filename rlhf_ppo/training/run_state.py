"""State of a run that several parts share: the trainer makes one `RunState` and passes it to them."""

from __future__ import annotations

import copy
import io
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast

import numpy as np
import torch
from accelerate import Accelerator
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase, TrainerControl
from transformers.trainer_callback import CallbackHandler

from rlhf_ppo.checkpoints.state import PPOTrainerState, Progress
from rlhf_ppo.config import PPOConfig
from rlhf_ppo.config.ppo_config import Sizes
from rlhf_ppo.data.prompts import PositionLimit, Prompts, eos_id, pad_id
from rlhf_ppo.data.rollout import Responses
from rlhf_ppo.generation.sampling import StopStrings, ended
from rlhf_ppo.models.capabilities import Vocabulary
from rlhf_ppo.models.policy_and_value import PolicyAndValue
from rlhf_ppo.processes.distributed import RngStreams, get_logger
from rlhf_ppo.processes.signals import StopOnSignal
from rlhf_ppo.reporting.metrics import MetricWindow, PhaseTimer
from rlhf_ppo.rewards.functions import LoggedByFunctions
from rlhf_ppo.training.guards import DivergenceGuard

if TYPE_CHECKING:
    from rlhf_ppo.training.datasets import Passes

logger = get_logger(__name__)


@dataclass
class LoopState:
    """Position of a run's loop, from its start to its end.

    Attributes:
        model: The prepared model.
        passes: The passes over the prompts.
        checkpoint: The checkpoint that the run resumes from, until the end of its pass.
        epoch: The current pass over the data.
        num_skipped: Batches of that pass that an earlier run has used.
        updates_per_epoch: Updates of a pass.
        ignore_keys: For evaluations.
        num_episodes_before: Episodes of the earlier run.
        schedule_follows_metric: Whether the schedule steps after evaluations instead of after updates.
        grad_norm: Gradient norm of the latest update.
        learning_rate: Learning rate of the latest update.
        start: Start time, for Trainer's summary.
        began: Start time on the monotonic clock.
    """

    model: nn.Module
    passes: Passes
    checkpoint: str | None
    epoch: int
    num_skipped: int
    updates_per_epoch: int
    ignore_keys: list[str] | None
    num_episodes_before: int
    schedule_follows_metric: bool
    grad_norm: float | Tensor | None = None
    learning_rate: float | None = None
    start: float = field(default_factory=time.time)
    began: float = field(default_factory=time.monotonic)


@dataclass
class RunState:
    """State that the parts of a trainer share.

    Attributes:
        args: The arguments.
        tokenizer: The policy's tokenizer.
        tokens: Padding and stop tokens.
        reward_funcs: The reward functions.
        sizes: Sizes derived from the arguments, the processes and the data.
        vocabulary: Ids that all models embed.
        longest_sequence: Longest sequence that every model supports, or None.
        stateful: Parts whose state is in every checkpoint.
        state: Trainer's state.
        control: Trainer's control.
        callbacks: Trainer's callback handler.
        accelerator: Trainer's accelerator.
        guard: The guard against divergence.
        streams: The random-number streams.
        signals: The received signals.
        logged: Values that reward functions have logged since the last update.
        loop: Position of the loop; set when the run begins.
        timer: Seconds of the update's phases.
        progress: Progress of the run, for checkpoints.
        window: Metrics of the updates since the last log.
        metrics: Metrics of the current update.
        latest_prompts: This rank's prompts of the latest update, without repetitions; None before it.
        is_evaluating: Whether an evaluation is running.
        num_apart: Number of episode batches of this evaluation.
        is_saving: Whether a checkpoint is being written.
    """

    args: PPOConfig
    tokenizer: PreTrainedTokenizerBase
    tokens: SpecialTokens
    reward_funcs: Sequence[Callable[..., Any]]
    sizes: Sizes
    vocabulary: Vocabulary
    longest_sequence: PositionLimit | None
    stateful: StatefulParts = field(default_factory=lambda: StatefulParts())
    state: PPOTrainerState = field(init=False)
    control: TrainerControl = field(init=False)
    callbacks: CallbackHandler = field(init=False)
    accelerator: Accelerator = field(init=False)
    guard: DivergenceGuard = field(init=False)
    streams: RngStreams = field(init=False)
    signals: StopOnSignal = field(init=False)
    logged: LoggedByFunctions = field(init=False)
    loop: LoopState = field(init=False)
    timer: PhaseTimer = field(default_factory=PhaseTimer)
    progress: Progress = field(default_factory=Progress)
    window: MetricWindow = field(default_factory=MetricWindow)
    metrics: dict[str, float] = field(default_factory=dict)
    latest_prompts: Prompts | None = None
    is_evaluating: bool = False
    num_apart: int = 0
    is_saving: bool = False

    def connect(self, accelerator: Accelerator, callbacks: CallbackHandler, model: nn.Module) -> None:
        """Set the objects that Trainer's constructor made, and make the parts that need them."""
        self.accelerator, self.callbacks = accelerator, callbacks
        self.guard = DivergenceGuard(self, self.unwrapped(model))
        self.streams = RngStreams(self.args.process_index, self.args.seed)
        self.logged = LoggedByFunctions(is_used=bool(self.reward_funcs))

    def sum_over_ranks(self, tensor: Tensor) -> Tensor:
        """Sum a small tensor over all ranks; one process returns the tensor."""
        return self.accelerator.reduce(tensor, reduction="sum")  # pyright: ignore[reportReturnType]

    def gather(self, tensor: Tensor) -> Tensor:
        """Concatenate a tensor's rows over all ranks; one process returns the tensor."""
        return self.accelerator.gather(tensor)  # pyright: ignore[reportReturnType]

    def unwrapped(self, model: nn.Module) -> PolicyAndValue:
        """Return policy and value model without the wrappers of engines and compilation."""
        return cast(PolicyAndValue, self.accelerator.unwrap_model(model, keep_torch_compile=False))

    def fire(self, event: str) -> None:
        """Call the method of that name of every callback."""
        self.control = getattr(self.callbacks, event)(self.args, self.state, self.control)

    def agree_on_control(self) -> None:
        """Set on all ranks each flag that a callback has set on any rank, so that none waits for the others."""
        if self.accelerator.num_processes == 1:
            return
        flags = [each.name for each in fields(TrainerControl)]
        own = torch.tensor([float(getattr(self.control, flag)) for flag in flags], device=self.args.device)
        for flag, count in zip(flags, self.sum_over_ranks(own).tolist(), strict=True):
            setattr(self.control, flag, count > 0)

    def moment(self) -> str:
        """Return the current position for errors: `update 3`, or `evaluation after update 3`."""
        done = self.state.global_step
        return f"evaluation after update {done}" if self.is_evaluating else f"update {done + 1}"


@dataclass(frozen=True)
class SpecialTokens:
    """Token ids for generation and truncation.

    Attributes:
        pad: Pads prompts, and responses after their stop token; may equal `stop`, or lie outside the vocabulary.
        stop: Responses are cut after this token; or None.
        end: `missing_eos_penalty` and `missing_eos_score` apply without this token: the stop token, or EOS without
            one.
        stop_strings: Responses are also cut after these texts; or None.
    """

    pad: int
    stop: int | None
    end: int | None
    stop_strings: StopStrings | None = None

    def ended(self, responses: Responses) -> Tensor:
        """Return which responses ended by themselves, bool `(B,)`; every part uses this definition."""
        return responses.ended if responses.ended is not None else ended(responses, self.end, self.stop_strings)


def special_tokens(args: PPOConfig, tokenizer: PreTrainedTokenizerBase) -> SpecialTokens:
    """Return the special tokens from arguments and tokenizer.

    Raises:
        TypeError: `processing_class` is not a tokenizer.
        ValueError: The tokenizer has neither PAD nor EOS, or lacks the EOS that an argument needs.
    """
    if not isinstance(tokenizer, PreTrainedTokenizerBase):
        raise TypeError(f"processing_class must be a tokenizer, got {type(tokenizer).__name__}; pass AutoTokenizer's")
    eos = eos_id(tokenizer)
    pad = pad_id(tokenizer)
    filling = eos if pad is None else pad
    if filling is None:
        raise ValueError(
            "processing_class has neither a pad_token nor an eos_token; set tokenizer.pad_token to a token that "
            "prompts do not use"
        )
    if eos is None and args.stop_token == "eos":
        raise ValueError("stop_token='eos', but processing_class has no eos_token; set stop_token_id instead")
    stop = eos if args.stop_token == "eos" else args.stop_token_id
    end = eos if stop is None else stop
    for name in ("missing_eos_penalty", "missing_eos_score"):
        if end is None and not args.stop_strings and getattr(args, name) is not None:
            raise ValueError(
                f"{name}={getattr(args, name)} needs something that ends a response; set stop_token_id, stop_strings, "
                "or an eos_token"
            )
    if stop is None and eos is not None and not args.stop_strings:
        logger.warning_once(
            "No stop token is set: every response has response_length tokens, also if EOS comes earlier. Set "
            "stop_token='eos' to end responses at EOS."
        )
    strings = StopStrings(tokenizer, tuple(args.stop_strings)) if args.stop_strings else None
    return SpecialTokens(pad=filling, stop=stop, end=end, stop_strings=strings)


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
            ValueError: The name is taken.
        """
        if self._parts.get(name, part) is not part:
            raise ValueError(f"a part called {name!r} is registered already; give this one another name")
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
