"""SIGTERM, SIGINT and SIGHUP: the run ends with a checkpoint, then the process; a second signal ends it at once.

Schedulers send SIGTERM before they take a machine away, Ctrl-C sends SIGINT, a closed terminal SIGHUP. Work that a
resumed run repeats exactly is given up: sampling, rewards, evaluation, the learning of a mini-batch. Work that cannot
be undone is finished: an optimizer step, a save.
"""

from __future__ import annotations

import atexit
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from typing import Any

import torch
from torch import Tensor
from transformers import TrainerCallback, TrainerControl

from rlhf_ppo.processes.relaying import told_to_all_ranks
from rlhf_ppo.terminal.foreign import visible

STOPPING = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGINT", "SIGHUP") if hasattr(signal, name))

SAME_SIGNAL = 0.3
"""Seconds in which signals count as one: a scheduler, or a terminal, may signal a process and what started it."""

SAME_SIGNAL_OF_RANKS = 5.0
"""The same for one of several processes, whose launcher passes its own signal on."""

SECONDS_UNASKED = 2.0
"""How long several processes may learn until they ask each other again whether one has received a signal."""

SECONDS_UNTIL_TOLD = 5.0
"""How long the end of a run waits for the line that says that a signal has come."""

SECONDS_FOR_THREADS = 5.0
"""How long a process that was told to end waits for threads that are left of a reward function or an engine."""

_WAKING = getattr(signal, "SIGURG", None)
"""Interrupts the main thread, and means nothing; one that is ignored where nobody handles it."""

_listening: list[EndsOnSignals] = []
"""The runs that are open; a signal is for all of them, and the latest stands for the one that is running."""


class Stopped(BaseException):
    """What runs now is given up, since a signal has come; no `Exception`, which a reward function might catch.

    Args:
        number: The signal's.
    """

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


class RunStopped(SystemExit):
    """A signal has ended the run. A script that does not catch it exits with 128 plus its number.

    That is 143 after SIGTERM, 130 after SIGINT and 129 after SIGHUP.

    Attributes:
        number: The signal's number.
        checkpoint: Where the run was saved.
    """

    def __init__(self, number: int, checkpoint: str) -> None:
        super().__init__(128 + number)
        self.number, self.checkpoint = number, checkpoint


def give_up_if_stopped() -> None:
    """Raise `Stopped` if a signal has come; called from time to time by what can be given up."""
    if _listening:
        _listening[-1].give_up_if_stopped()


def give_up_together(device: torch.device) -> None:
    """Raise `Stopped` on all ranks if any of them has received a signal; where every rank calls this in step."""
    if _listening:
        _listening[-1].give_up_together(device)


@contextmanager
def may_be_given_up() -> Iterator[None]:
    """Let a signal raise `Stopped` in the middle of the block: a user's code, or a wait, which may never end."""
    listener = _listening[-1] if _listening and threading.current_thread() is threading.main_thread() else None
    with nullcontext() if listener is None else listener.giving_up():
        yield


def is_main_thread_interruptible() -> bool:
    """Tell whether a `KeyboardInterrupt` in this thread may be Ctrl-C, and not what somebody raised."""
    handles = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    return handles and threading.current_thread() is threading.main_thread()


class EndsOnSignals(TrainerCallback):
    """Ends training after a signal to any rank, with a checkpoint from which the run can be resumed exactly.

    A signal that the program ignores, as SIGHUP under nohup, stays ignored.

    Args:
        reduce_sum: Adds a tensor up over all ranks, so that all of them stop after the same update.
        awaited: Says what is finished before the run ends.
        num_processes: How many ranks there are.

    Attributes:
        received: The signal that this rank received.
        stopped: The signal that ended training, on all ranks.
    """

    def __init__(
        self, reduce_sum: Callable[[Tensor], Tensor], awaited: Callable[[], str], num_processes: int = 1
    ) -> None:
        self.reduce_sum, self.awaited = reduce_sum, awaited
        self.same_signal = SAME_SIGNAL if num_processes == 1 else SAME_SIGNAL_OF_RANKS
        self.received: int | None = None
        self.stopped: int | None = None
        self._gives_up, self._told = False, threading.Event()

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Handle the signals while the context lasts; a thread other than the main one cannot, and does not.

        Several may listen at a time and end in any order: a signal is for all of them.
        """
        self.received = self.stopped = None
        self._told.clear()
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        _listening.append(self)  # first: a thread that collects another trainer meanwhile then leaves the handlers
        try:
            _handle_signals()
            with told_to_all_ranks(lambda: self.received):
                yield
        finally:
            if self in _listening:  # not in a forked process
                self.wait_until_told()
                _listening.remove(self)
            _restore_signals()

    def told(self) -> None:
        """Note that the line on the signal is written."""
        self._told.set()

    def wait_until_told(self) -> None:
        """Wait for the line on the signal that this rank has received, which another thread writes."""
        if self.received is not None:
            self._told.wait(SECONDS_UNTIL_TOLD)

    def give_up_if_stopped(self) -> None:
        """Raise `Stopped` if this rank has received a signal."""
        if self.received is not None:
            raise Stopped(self.received)

    @contextmanager
    def giving_up(self) -> Iterator[None]:
        """Let the signal's handler raise `Stopped` while the context lasts."""
        self.give_up_if_stopped()
        self._gives_up = True
        try:
            yield
        finally:
            self._gives_up = False

    def on_step_end(self, args: Any, state: Any, control: TrainerControl, **kwargs: Any) -> None:
        """Ask for a checkpoint and the end, on all ranks together."""
        self.stopped, _ = self._received_by_any(args.device)
        if self.stopped is not None:
            control.should_save = control.should_training_stop = True

    def give_up_together(self, device: torch.device, figure: float = 0.0) -> float:
        """Raise `Stopped` on all ranks if any has received a signal; every rank calls this.

        Args:
            device: Where tensors are exchanged.
            figure: This rank's summand of what is returned, for which no exchange of its own is needed.
        """
        number, total = self._received_by_any(device, figure)
        if number is not None:
            raise Stopped(number)
        return total

    def _received_by_any(self, device: torch.device, figure: float = 0.0) -> tuple[int | None, float]:
        own = [*(float(self.received == number) for number in STOPPING), figure]
        *flags, total = self.reduce_sum(torch.tensor(own, device=device)).tolist()
        return next((int(number) for number, flag in zip(STOPPING, flags, strict=True) if flag > 0), None), total

    def note(self, number: int) -> bool:
        """Take note of a signal, and return whether `Stopped` is to be raised at once."""
        if self.received is None:
            self.received = number
        gives_up, self._gives_up = self._gives_up, False  # once: what handles `Stopped` is not to be broken off
        return gives_up


class BetweenMicroBatches:
    """Lets learning be given up between two micro-batches, on all ranks before the same one.

    One process looks whether a signal has come. Several ask each other, which costs an exchange, and waiting for the
    device: before each mini-batch, whose number of tokens they exchange anyway, and within one as often as
    `SECONDS_UNASKED` allows.

    Args:
        signals: Knows which have come.
        num_processes: How many ranks there are.
        device: Where tensors are exchanged.

    Attributes:
        seconds: What this rank's latest mini-batch took, its optimizer step included.
    """

    def __init__(self, signals: EndsOnSignals, num_processes: int, device: torch.device) -> None:
        self.signals, self.num_processes, self.device = signals, num_processes, device
        self.seconds = 0.0
        self._latest, self._every = 0, 1

    def give_up_before_minibatch(self) -> None:
        """Raise `Stopped` if a signal has come; every rank calls this."""
        if self.num_processes == 1:
            self.signals.give_up_if_stopped()
            return
        of_each = self.seconds / (self._latest + 1)
        of_each = self.signals.give_up_together(self.device, of_each) / self.num_processes  # the same on all ranks
        self._every = max(1, int(SECONDS_UNASKED / of_each)) if of_each > 0 else 1

    def give_up_before(self, index: int) -> None:
        """Do the same before a micro-batch of the mini-batch; where it is not asked, nothing happens."""
        self._latest = index
        if self.num_processes == 1:
            self.signals.give_up_if_stopped()
        elif index > 0 and index % self._every == 0:
            self.signals.give_up_together(self.device)


class _Watcher:
    """Says what a signal waits for, and ends the process with the second one, whatever the main thread is busy with.

    Attributes:
        first: When the first signal came, in seconds of a clock that never goes back; None before it.
        is_over: Whether nobody listens any more.
    """

    def __init__(self) -> None:
        self.first: float | None = None
        self.is_over = False

    def hear(self, number: int) -> None:
        """Take note of a signal, which is the first for all that listen, or a further one."""
        name, listeners = signal.Signals(number).name, list(_listening)
        if not listeners:
            return
        if name == "SIGHUP":
            leave_closed_terminal()
        if self.first is None:
            self.first = time.monotonic()
            threading.Thread(target=self._wake_main_thread, name="rlhf_ppo-waker", daemon=True).start()
            say(f"{name}: {listeners[-1].awaited()}. A second signal ends the process at once.")
            for listener in listeners:
                listener.told()
        elif time.monotonic() - self.first > listeners[-1].same_signal:
            say(f"{name}, the second signal: the process ends at once.")
            os._exit(128 + number)

    def _wake_main_thread(self) -> None:
        """Interrupt what the main thread waits for: the system may have given the signal to another thread."""
        main = threading.main_thread().ident
        while _WAKING is not None and main is not None and not self.is_over:
            if all(listener.received is not None for listener in list(_listening)):
                return
            signal.pthread_kill(main, _WAKING)
            time.sleep(0.05)


_handlers = ExitStack()
"""Puts the signal handlers back that were there before anybody listened."""

_watchers: list[_Watcher] = []


def _handle_signals() -> None:
    """Install the handlers; where they are installed, the next signal counts as the first again."""
    if _watchers:
        _watchers[0].first = None
        return
    heard = [number for number in STOPPING if signal.getsignal(number) != signal.SIG_IGN]
    _watchers.append(_Watcher())
    _handlers.callback(_watchers.clear)
    _handlers.enter_context(_watching(_watchers[0]))
    for number in heard:
        _handlers.callback(signal.signal, number, signal.signal(number, _note))


def _restore_signals() -> None:
    """Put the handlers back if nobody listens any more, in the main thread, which alone can do so.

    Another thread gets here where it collects the garbage that a trainer has become in the middle of its `step` loop.
    """
    if _listening:
        return
    if threading.current_thread() is threading.main_thread():
        _handlers.close()
    elif _WAKING is not None and (main := threading.main_thread().ident) is not None:
        signal.pthread_kill(main, _WAKING)


def _note(number: int, frame: Any) -> None:
    """Tell all that listen of a signal; where the last has ended in another thread, the handler before gets it."""
    if not _listening:
        _restore_signals()
        os.kill(os.getpid(), number)
    if given_up := [listener.received for listener in _listening if listener.note(number)]:
        raise Stopped(given_up[-1] or number)


@contextmanager
def _watching(watcher: _Watcher) -> Iterator[None]:
    """Let the watcher hear, in a thread of its own, each signal that comes while the context lasts.

    Python's handlers run in the main thread only, and not before it comes back from what it calls in C.
    """
    reader, writer = socket.socketpair()
    writer.setblocking(False)
    previous = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
    waking = None if _WAKING is None else signal.signal(_WAKING, lambda *_: _restore_signals())

    def watch() -> None:
        with reader:
            while byte := reader.recv(1):
                if byte[0] in STOPPING:
                    watcher.hear(byte[0])

    threading.Thread(target=watch, name="rlhf_ppo-signals", daemon=True).start()
    try:
        yield
    finally:
        watcher.is_over = True
        _restore_wakeup_fd(writer.fileno(), previous)
        writer.close()
        if _WAKING is not None:
            signal.signal(_WAKING, waking)


def _restore_wakeup_fd(own: int, previous: int) -> None:
    """Put the descriptor back that was there before, unless the program has set another or closed it meanwhile.

    An event loop that handles signals does both at its end.
    """
    if (current := signal.set_wakeup_fd(-1)) != own:
        previous = current
    with suppress(OSError):
        signal.set_wakeup_fd(previous)


def _forget_in_child() -> None:
    """Let a forked process, such as a worker that loads data, die of SIGTERM, and leave the terminal to its parent."""
    if _listening:
        signal.set_wakeup_fd(-1)
        for number in STOPPING:
            signal.signal(number, signal.SIG_DFL if number == signal.SIGTERM else signal.SIG_IGN)
        _listening.clear()
        _watchers.clear()
        _handlers.pop_all()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_in_child)


def say(text: str) -> None:
    """Write a line on stderr, once on each machine, below a progress bar that may stand there."""
    if os.environ.get("LOCAL_RANK", "0") == "0":
        with suppress(OSError):  # the terminal is closed
            os.write(2, f"\n{visible(text)}\n".encode())


def leave_closed_terminal() -> None:
    """Drop further output to a terminal that is closed, where each line would be an error that ends the run."""
    for stream in (1, 2):
        try:
            os.write(stream, b"")
        except OSError:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, stream)
            os.close(nowhere)


def end_despite_threads(code: int) -> None:
    """Make sure that the program, once it ends, does not wait for other threads for ever.

    Args:
        code: Its exit code, where threads still run `SECONDS_FOR_THREADS` after its main thread has ended.
    """
    ending, over = threading.Event(), threading.Event()

    def wait() -> None:
        ending.wait()
        if not over.wait(SECONDS_FOR_THREADS):
            say(f"Threads of a reward function or an engine are still running: the process ends with code {code}.")
            sys.stdout.flush()
            os._exit(code)

    threading.Thread(target=wait, name="rlhf_ppo-exit", daemon=True).start()
    atexit.register(over.set)  # these functions run after the threads have ended
    threading._register_atexit(ending.set)  # pyright: ignore  these before, in reverse order
