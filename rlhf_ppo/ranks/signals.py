"""Stop a run on SIGTERM, SIGINT or SIGHUP after the current update; a second signal exits at once.

Schedulers send SIGTERM before they reclaim a machine, Ctrl-C sends SIGINT, a closed terminal sends SIGHUP.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from rlhf_ppo.terminal import visible

STOPPING = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGINT", "SIGHUP") if hasattr(signal, name))

SAME_SIGNAL = 0.3
"""Signals within this many seconds count as one: schedulers and terminals may signal a process and its parent."""

SAME_SIGNAL_OF_RANKS = 5.0
"""The same for one of several processes: the launcher forwards its own signal to each."""

_listening: list[StopOnSignal] = []
"""The open runs. A signal stops all of them."""

_previous: dict[int, Any] = {}
"""The program's own handlers, while a run is open."""


class RunStopped(SystemExit):
    """Raised when a signal has ended the run. A script that does not catch it exits with 128 plus the signal's number.

    That is 143 after SIGTERM, 130 after SIGINT and 129 after SIGHUP.

    Attributes:
        number: The signal's number.
        checkpoint: The checkpoint of the run.
    """

    def __init__(self, number: int, checkpoint: str) -> None:
        super().__init__(128 + number)
        self.number, self.checkpoint = number, checkpoint


class StopOnSignal(TrainerCallback):
    """Stop training on all ranks after a signal to any of them, with a checkpoint that resumes exactly.

    A signal that the program ignores, such as SIGHUP under nohup, stays ignored.

    Args:
        reduce_sum: Sums a tensor over all ranks, so that all stop after the same update.
        num_processes: Number of ranks.

    Attributes:
        received: The signal that this rank received.
        stopped: The signal that ended training on all ranks.
    """

    def __init__(self, reduce_sum: Callable[[Tensor], Tensor], num_processes: int = 1) -> None:
        self.reduce_sum = reduce_sum
        self.same_signal = SAME_SIGNAL if num_processes == 1 else SAME_SIGNAL_OF_RANKS
        self.received: int | None = None
        self.stopped: int | None = None
        self._at = 0.0

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Handle signals in the block; outside of the main thread, where Python cannot, do nothing.

        Several listeners may be open at once and close in any order: a signal reaches all of them.
        """
        self.received = self.stopped = None
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        if not _previous:
            numbers = [number for number in STOPPING if signal.getsignal(number) != signal.SIG_IGN]
            _previous.update({number: signal.signal(number, _handle) for number in numbers})
        _listening.append(self)
        try:
            yield
        finally:
            _listening.remove(self)
            if not _listening and threading.current_thread() is threading.main_thread():
                _restore_handlers()

    def receive(self, number: int) -> None:
        """Record the first signal; exit on a later one."""
        if self.received is None:
            self.received, self._at = number, time.monotonic()
            say(
                f"{signal.Signals(number).name}: the run ends with a checkpoint after this update. A second signal "
                "ends the process at once."
            )
        elif time.monotonic() - self._at > self.same_signal:
            say(f"{signal.Signals(number).name}, the second signal: the process ends at once.")
            os._exit(128 + number)

    def agree(self, device: torch.device) -> None:
        """Set `stopped` on all ranks if any rank has received a signal; every rank must call this."""
        received = torch.tensor([float(self.received == number) for number in STOPPING], device=device)
        flags = self.reduce_sum(received).tolist()
        self.stopped = next((int(number) for number, flag in zip(STOPPING, flags, strict=True) if flag > 0), None)

    def on_step_end(self, args: TrainingArguments, state: object, control: TrainerControl, **kwargs: object) -> None:
        """Request a checkpoint and the end of training, on all ranks together."""
        self.agree(args.device)
        if self.stopped is not None:
            control.should_save = control.should_training_stop = True


def _restore_handlers() -> None:
    for number, handler in _previous.items():
        signal.signal(number, handler)
    _previous.clear()


def _handle(number: int, frame: object) -> None:
    if number == getattr(signal, "SIGHUP", None):
        discard_closed_terminal()
    if not _listening:  # the last run was closed in another thread
        _restore_handlers()
        signal.raise_signal(number)
    for listener in list(_listening):
        listener.receive(number)


def _reset_in_child() -> None:
    """Let a forked process, such as a data-loader worker, exit on SIGTERM and ignore signals of the terminal."""
    if _listening:
        for number in STOPPING:
            signal.signal(number, signal.SIG_DFL if number == signal.SIGTERM else signal.SIG_IGN)
        _listening.clear()
        _previous.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_reset_in_child)


def leave_signals_to_parent(initialize: Callable[[int], object] | None, worker: int) -> None:
    """Initialize a data-loader worker that only its parent ends: schedulers signal all processes of a job.

    Args:
        initialize: The loader's own `worker_init_fn`, or None.
        worker: The worker's number.
    """
    if hasattr(signal, "sigwaitinfo"):
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        threading.Thread(target=_exit_with_parent, name="rlhf_ppo-worker-signals", daemon=True).start()
    if initialize is not None:
        initialize(worker)


def _exit_with_parent() -> None:
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != os.getppid():
        pass
    os._exit(0)


def say(text: str) -> None:
    """Write a line to stderr, once on each machine, below a progress bar."""
    if os.environ.get("LOCAL_RANK", "0") == "0":
        with suppress(OSError):  # the terminal is closed
            os.write(2, f"\n{visible(text)}\n".encode())


def stopped(number: int, checkpoint: str, state: TrainerState, args: TrainingArguments) -> RunStopped:
    """Print that a signal has ended the run, and return the exception to raise."""
    if args.process_index == 0:
        then = (
            "save_only_model=True has left out what a resumed run needs: start a new run with the checkpoint as model"
            if args.save_only_model
            else "resume_from_checkpoint=True (--resume_from_checkpoint True) continues from it"
        )
        say(
            f"{signal.Signals(number).name}: the run has ended after update {state.global_step} of {state.max_steps}, "
            f"with the checkpoint {checkpoint}; {then}."
        )
    return RunStopped(number, checkpoint)


def discard_closed_terminal() -> None:
    """Redirect output to a closed terminal to the null device; otherwise each line is an error that ends the run."""
    for stream in (1, 2):
        try:
            os.write(stream, b"")
        except OSError:
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, stream)
            os.close(null)
