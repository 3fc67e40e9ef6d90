"""Stop a run on SIGTERM, SIGINT or SIGHUP: write a checkpoint, then exit; a second signal exits at once.

Schedulers send SIGTERM before they reclaim a machine, Ctrl-C sends SIGINT, a closed terminal sends SIGHUP. Work that a
resumed run repeats exactly is interrupted: sampling, rewards, evaluation, a mini-batch. Work that cannot be repeated,
an optimizer step or a save, is finished first.
"""

from __future__ import annotations

import atexit
import itertools
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
import torch.distributed
from torch import Tensor
from torch.distributed import distributed_c10d
from transformers import TrainerCallback, TrainerControl

from rlhf_ppo.terminal import visible

STOPPING = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGINT", "SIGHUP") if hasattr(signal, name))

SAME_SIGNAL = 0.3
"""Signals within this many seconds count as one: schedulers and terminals may signal a process and its parent."""

SAME_SIGNAL_OF_RANKS = 5.0
"""The same for one of several processes: the launcher forwards its own signal to each."""

SECONDS_BETWEEN_EXCHANGES = 2.0
"""Longest time that several processes learn without exchanging whether a signal has arrived."""

SECONDS_BETWEEN_LOOKS = 0.5
"""Interval at which each process reads the store in which other ranks leave their signals."""

SECONDS_UNTIL_LOGGED = 5.0
"""Longest wait, at the end of a run, for the line that reports the signal."""

SECONDS_FOR_THREADS = 5.0
"""Longest wait, at exit, for threads that a reward function or a generation engine left running."""

_WAKING = getattr(signal, "SIGURG", None)
"""A harmless signal that interrupts blocking calls of the main thread; ignored by default."""

_listening: list[StopOnSignal] = []
"""The open runs. A signal stops all of them; the last one is the run that is active."""

_sessions = itertools.count()


class Stopped(BaseException):
    """Interrupts the current work after a signal; not an `Exception`, which a reward function might catch.

    Args:
        number: The signal's number.
    """

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


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


def raise_if_stopped() -> None:
    """Raise `Stopped` if this rank has received a signal. Call it regularly from interruptible work."""
    if _listening:
        _listening[-1].raise_if_stopped()


def raise_if_any_rank_stopped(device: torch.device) -> None:
    """Raise `Stopped` on all ranks if any rank has received a signal; every rank must call this."""
    if _listening:
        _listening[-1].raise_if_any_rank_stopped(device)


@contextmanager
def interruptible() -> Iterator[None]:
    """Let a signal raise `Stopped` anywhere in the block, such as in a user's code or in a wait that may never end."""
    listener = _listening[-1] if _listening and threading.current_thread() is threading.main_thread() else None
    with nullcontext() if listener is None else listener.interruptible():
        yield


def can_be_ctrl_c() -> bool:
    """Return whether a `KeyboardInterrupt` in this thread may come from Ctrl-C."""
    handles = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    return handles and threading.current_thread() is threading.main_thread()


class StopOnSignal(TrainerCallback):
    """Stop training on all ranks after a signal to any of them, with a checkpoint that resumes exactly.

    A signal that the program ignores, such as SIGHUP under nohup, stays ignored.

    Args:
        reduce_sum: Sums a tensor over all ranks, so that all stop after the same update.
        pending: Returns the work that is finished before the run ends, in words.
        num_processes: Number of ranks.

    Attributes:
        received: The signal that this rank received.
        stopped: The signal that ended training on all ranks.
    """

    def __init__(
        self, reduce_sum: Callable[[Tensor], Tensor], pending: Callable[[], str], num_processes: int = 1
    ) -> None:
        self.reduce_sum, self.pending = reduce_sum, pending
        self.same_signal = SAME_SIGNAL if num_processes == 1 else SAME_SIGNAL_OF_RANKS
        self.received: int | None = None
        self.stopped: int | None = None
        self._raises, self.is_logged = False, threading.Event()

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Handle signals in the block; outside of the main thread, where Python cannot, do nothing.

        Several listeners may be open at once and close in any order: a signal reaches all of them.
        """
        self.received = self.stopped = None
        self.is_logged.clear()
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        _listening.append(self)  # first: the finalizer of another trainer then leaves the handlers installed
        try:
            _install_handlers()
            with _broadcast_signals(lambda: self.received):
                yield
        finally:
            if self in _listening:  # not in a forked process
                self.wait_until_logged()
                _listening.remove(self)
            _restore_handlers()

    def wait_until_logged(self) -> None:
        """Wait until another thread has written the line that reports this rank's signal."""
        if self.received is not None:
            self.is_logged.wait(SECONDS_UNTIL_LOGGED)

    def raise_if_stopped(self) -> None:
        """Raise `Stopped` if this rank has received a signal."""
        if self.received is not None:
            raise Stopped(self.received)

    @contextmanager
    def interruptible(self) -> Iterator[None]:
        """Let the signal handler raise `Stopped` in the block."""
        self.raise_if_stopped()
        self._raises = True
        try:
            yield
        finally:
            self._raises = False

    def on_step_end(self, args: Any, state: Any, control: TrainerControl, **kwargs: Any) -> None:
        """Request a checkpoint and the end of training, on all ranks together."""
        self.stopped, _ = self._exchange(args.device)
        if self.stopped is not None:
            control.should_save = control.should_training_stop = True

    def raise_if_any_rank_stopped(self, device: torch.device, value: float = 0.0) -> float:
        """Raise `Stopped` on all ranks if any rank has received a signal; every rank must call this.

        Args:
            device: Device of the exchanged tensor.
            value: A number to sum in the same exchange.

        Returns:
            The sum of `value` over all ranks.
        """
        number, total = self._exchange(device, value)
        if number is not None:
            raise Stopped(number)
        return total

    def _exchange(self, device: torch.device, value: float = 0.0) -> tuple[int | None, float]:
        own = [*(float(self.received == number) for number in STOPPING), value]
        *flags, total = self.reduce_sum(torch.tensor(own, device=device)).tolist()
        return next((int(number) for number, flag in zip(STOPPING, flags, strict=True) if flag > 0), None), total

    def receive(self, number: int) -> bool:
        """Record a signal; return whether the handler raises `Stopped`."""
        if self.received is None:
            self.received = number
        raises, self._raises = self._raises, False  # once: the handling of `Stopped` is not interrupted
        return raises


class MicroBatchStopCheck:
    """Interrupt learning between two micro-batches, on all ranks before the same one.

    A single process only reads a flag. Several processes exchange flags, which waits for the device: before each
    mini-batch, and within one every `SECONDS_BETWEEN_EXCHANGES`.

    Args:
        signals: Holds the received signals.
        num_processes: Number of ranks.
        device: Device of the exchanged tensors.

    Attributes:
        seconds: Duration of this rank's last mini-batch, with its optimizer step.
    """

    def __init__(self, signals: StopOnSignal, num_processes: int, device: torch.device) -> None:
        self.signals, self.num_processes, self.device = signals, num_processes, device
        self.seconds = 0.0
        self._latest, self._every = 0, 1

    def check_before_minibatch(self) -> None:
        """Raise `Stopped` if a signal has arrived; every rank must call this."""
        if self.num_processes == 1:
            self.signals.raise_if_stopped()
            return
        own = self.seconds / (self._latest + 1)
        seconds = self.signals.raise_if_any_rank_stopped(self.device, own) / self.num_processes  # equal on all ranks
        self._every = max(1, int(SECONDS_BETWEEN_EXCHANGES / seconds)) if seconds > 0 else 1

    def check_before_micro_batch(self, index: int) -> None:
        """Raise `Stopped` if a signal has arrived and this micro-batch is one at which the ranks exchange it."""
        self._latest = index
        if self.num_processes == 1:
            self.signals.raise_if_stopped()
        elif index > 0 and index % self._every == 0:
            self.signals.raise_if_any_rank_stopped(self.device)


@contextmanager
def _broadcast_signals(received: Callable[[], int | None]) -> Iterator[None]:
    """Send this process, in the block, the signal that another rank has received; every rank enters it.

    Ranks that generate or wait for rewards run no collective until they are done. Signals therefore go through the
    process group's key-value store, which a thread of each rank polls.

    Args:
        received: Returns the number of the signal that this process has received, or None.
    """
    name, store = f"rlhf_ppo/signal/{next(_sessions)}", _store()
    if store is None:
        yield
        return
    is_over, sending = threading.Event(), threading.Lock()

    def poll() -> None:
        with suppress(RuntimeError):  # the process that holds the store has exited
            while not is_over.wait(SECONDS_BETWEEN_LOOKS):
                if (number := received()) is not None:
                    store.set(name, str(number))
                    return
                if store.check([name]):
                    with sending:
                        if not is_over.is_set():  # else nothing handles the signal any more
                            os.kill(os.getpid(), int(store.get(name)))
                    return

    threading.Thread(target=poll, name="rlhf_ppo-signal-broadcast", daemon=True).start()
    try:
        yield
    finally:
        with sending:
            is_over.set()


def _store() -> Any:
    """Return the process group's key-value store, or None for a single process."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return None
    return distributed_c10d._get_default_store() if torch.distributed.get_world_size() > 1 else None


class _Watcher:
    """Report the first signal and exit on the second one, from a thread that runs while the main thread is blocked.

    Attributes:
        first: Monotonic time of the first signal; None before it.
        is_over: Whether no listener is open any more.
    """

    def __init__(self) -> None:
        self.first: float | None = None
        self.is_over = False

    def on_signal(self, number: int) -> None:
        """Handle the first signal for all listeners, or exit on a later one."""
        name, listeners = signal.Signals(number).name, list(_listening)
        if not listeners:
            return
        if name == "SIGHUP":
            discard_closed_terminal()
        if self.first is None:
            self.first = time.monotonic()
            threading.Thread(target=self._wake_main_thread, name="rlhf_ppo-waker", daemon=True).start()
            say(f"{name}: {listeners[-1].pending()}. A second signal ends the process at once.")
            for listener in listeners:
                listener.is_logged.set()
        elif time.monotonic() - self.first > listeners[-1].same_signal:
            say(f"{name}, the second signal: the process ends at once.")
            os._exit(128 + number)

    def _wake_main_thread(self) -> None:
        """Interrupt the main thread's blocking call: the system may have delivered the signal to another thread."""
        main = threading.main_thread().ident
        while _WAKING is not None and main is not None and not self.is_over:
            if all(listener.received is not None for listener in list(_listening)):
                return
            signal.pthread_kill(main, _WAKING)
            time.sleep(0.05)


_handlers = ExitStack()
"""Restores the program's own signal handlers."""

_watchers: list[_Watcher] = []


def _install_handlers() -> None:
    """Install the handlers; if they are installed already, count the next signal as the first again."""
    if _watchers:
        _watchers[0].first = None
        return
    numbers = [number for number in STOPPING if signal.getsignal(number) != signal.SIG_IGN]
    _watchers.append(_Watcher())
    _handlers.callback(_watchers.clear)
    _handlers.enter_context(_watching(_watchers[0]))
    for number in numbers:
        _handlers.callback(signal.signal, number, signal.signal(number, _handle))


def _restore_handlers() -> None:
    """Restore the program's handlers if no listener is open; only the main thread can.

    Another thread arrives here when its garbage collection finalizes a trainer in the middle of its `step` loop; it
    wakes the main thread.
    """
    if _listening:
        return
    if threading.current_thread() is threading.main_thread():
        _handlers.close()
    elif _WAKING is not None and (main := threading.main_thread().ident) is not None:
        signal.pthread_kill(main, _WAKING)


def _handle(number: int, frame: Any) -> None:
    """Record a signal with all listeners.

    Without listeners, pass it to the program if the last one was closed in another thread; else do the default, since
    the program has saved this handler during a run and uses it after it.
    """
    if not _listening and _watchers:
        _restore_handlers()
        os.kill(os.getpid(), number)
    elif not _listening and number == signal.SIGINT:
        signal.default_int_handler(number, frame)
    elif not _listening:
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
    if raised := [listener.received for listener in _listening if listener.receive(number)]:
        raise Stopped(raised[-1] or number)


@contextmanager
def _watching(watcher: _Watcher) -> Iterator[None]:
    """Call the watcher for each signal in the block, in a thread of its own.

    Python's handlers run in the main thread only, and only after it returns from C code.
    """
    reader, writer = socket.socketpair()
    writer.setblocking(False)
    previous = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
    waking = None if _WAKING is None else signal.signal(_WAKING, lambda *_: _restore_handlers())

    def watch() -> None:
        with reader:
            while byte := reader.recv(1):
                if byte[0] in STOPPING:
                    watcher.on_signal(byte[0])

    threading.Thread(target=watch, name="rlhf_ppo-signals", daemon=True).start()
    try:
        yield
    finally:
        watcher.is_over = True
        # The program's event loop may have set another descriptor meanwhile, or closed its own.
        if (current := signal.set_wakeup_fd(-1)) != writer.fileno():
            previous = current
        with suppress(OSError):
            signal.set_wakeup_fd(previous)
        writer.close()
        if _WAKING is not None:
            signal.signal(_WAKING, waking)


def _reset_in_child() -> None:
    """Let a forked process, such as a data-loader worker, exit on SIGTERM and ignore signals of the terminal."""
    if _listening:
        signal.set_wakeup_fd(-1)
        for number in STOPPING:
            signal.signal(number, signal.SIG_DFL if number == signal.SIGTERM else signal.SIG_IGN)
        _listening.clear()
        _watchers.clear()
        _handlers.pop_all()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_reset_in_child)


def leave_signals_to_parent(initialize: Callable[[int], Any] | None, worker: int) -> None:
    """Initialize a data-loader worker that only its parent ends: schedulers signal all processes of a job.

    Args:
        initialize: The loader's own `worker_init_fn`, or None.
        worker: The worker's number.
    """
    for number in STOPPING:
        if number != signal.SIGTERM:
            signal.signal(number, signal.SIG_IGN)
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


def discard_closed_terminal() -> None:
    """Redirect output to a closed terminal to the null device; otherwise each line is an error that ends the run."""
    for stream in (1, 2):
        try:
            os.write(stream, b"")
        except OSError:
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, stream)
            os.close(null)


def exit_despite_threads(code: int) -> None:
    """Make the program's exit wait at most `SECONDS_FOR_THREADS` for other threads.

    Args:
        code: Exit code if threads are still running then.
    """
    ending, over = threading.Event(), threading.Event()

    def wait() -> None:
        ending.wait()
        if not over.wait(SECONDS_FOR_THREADS):
            say(f"Threads of a reward function or an engine are still running: the process ends with code {code}.")
            sys.stdout.flush()
            os._exit(code)

    threading.Thread(target=wait, name="rlhf_ppo-exit", daemon=True).start()
    atexit.register(over.set)  # runs after all threads have ended
    threading._register_atexit(ending.set)  # pyright: ignore  runs before that, in reverse order
