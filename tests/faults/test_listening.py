"""Which signals are heard, by whom, and what becomes of one that another rank has received."""

from __future__ import annotations

import ctypes
import fcntl
import multiprocessing
import os
import signal
import socket
import subprocess
import termios
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch.distributed import HashStore

from rlhf_ppo.processes import signals
from rlhf_ppo.processes.signals import (
    SAME_SIGNAL,
    StopOnSignal,
    Stopped,
    interruptible,
    raise_if_any_rank_stopped,
    say,
)


@pytest.fixture
def ends() -> StopOnSignal:
    return StopOnSignal(lambda flags: flags, pending=lambda: "it ends")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_a_signal_that_is_ignored_stays_ignored(number: signal.Signals, ends: StopOnSignal) -> None:
    before = signal.signal(number, signal.SIG_IGN)
    try:
        with ends.listening():
            os.kill(os.getpid(), number)
            assert signal.getsignal(number) == signal.SIG_IGN
            assert signal.getsignal(signal.SIGTERM) not in (signal.SIG_DFL, signal.SIG_IGN)
        assert ends.received is None
    finally:
        signal.signal(number, before)


def test_a_terminal_that_is_closed_ends_a_run_like_any_signal() -> None:
    """What the run prints after it is no error."""
    terminal, of_child = os.openpty()
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        signal.alarm(30)
        os.setsid()
        os.close(terminal)
        fcntl.ioctl(of_child, termios.TIOCSCTTY, 0)
        os.dup2(of_child, 1)
        os.dup2(of_child, 2)
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        ends = StopOnSignal(lambda flags: flags, pending=lambda: "it ends")
        try:
            with ends.listening():
                os.write(writer, b"ready\n")
                try:
                    with interruptible():
                        time.sleep(20)
                except Stopped as stopped:
                    ends.wait_until_logged()
                    os.write(1, b"a line of the log\n")
                    say("the end")
                    os.write(writer, f"{stopped.number}\n".encode())
        finally:
            os._exit(0)
    os.close(of_child)
    os.close(writer)
    with open(reader) as said:
        assert said.readline() == "ready\n"
        os.close(terminal)
        assert said.read() == f"{int(signal.SIGHUP)}\n"
    os.waitpid(child, 0)


def test_a_forked_worker_leaves_the_terminal_to_its_parent(ends: StopOnSignal) -> None:
    with ends.listening():
        if (child := os.fork()) == 0:
            ignored = [signal.getsignal(number) == signal.SIG_IGN for number in (signal.SIGINT, signal.SIGHUP)]
            os._exit(0 if all(ignored) and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_only_the_run_ends_its_data_loader_workers(make_trainer: Callable[..., Any]) -> None:
    """A scheduler signals them too, and a dead worker would end the run without a checkpoint."""
    trainer = make_trainer(dataloader_num_workers=1)
    others = set(multiprocessing.active_children())
    batches = iter(trainer.get_train_dataloader())
    next(batches)
    (worker,) = set(multiprocessing.active_children()) - others
    for name in ("TERM", "INT", "HUP"):
        subprocess.run(["kill", f"-{name}", str(worker.pid)], check=True)
    worker.join(0.5)
    assert worker.is_alive() and len(list(batches)) == 3
    worker.terminate()
    worker.join(10)
    assert worker.exitcode == 0


def test_runs_that_listen_at_a_time_may_end_in_any_order(ends: StopOnSignal) -> None:
    """A signal is for all that are left."""
    other, before = StopOnSignal(lambda flags: flags, pending=lambda: "it ends"), signal.getsignal(signal.SIGTERM)
    first, second = ends.listening(), other.listening()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    os.kill(os.getpid(), signal.SIGTERM)
    with pytest.raises(Stopped):
        other.raise_if_stopped()
    ends.raise_if_stopped()
    second.__exit__(None, None, None)
    assert signal.getsignal(signal.SIGTERM) is before and signal.set_wakeup_fd(-1) == -1


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, -signal.SIGTERM), (signal.SIGINT, 7)])
@pytest.mark.parametrize(
    "use", [lambda saved: saved, lambda saved: lambda *given: saved(*given)], ids=["as is", "chained"]
)
def test_a_handler_that_the_program_saves_in_a_run_and_uses_after_it_does_the_default(
    use: Callable[[Any], Any], number: signal.Signals, code: int, ends: StopOnSignal
) -> None:
    if (child := os.fork()) == 0:
        signal.alarm(10)
        signal.signal(number, signal.SIG_DFL)
        with ends.listening():
            saved = signal.getsignal(number)
        signal.signal(number, use(saved))
        try:
            os.kill(os.getpid(), number)
            time.sleep(1)
        except KeyboardInterrupt:
            os._exit(7)
        finally:
            os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == code


@pytest.mark.parametrize("left", ["open", "closed", "replaced"])
def test_the_wakeup_descriptor_of_the_program_is_put_back(left: str, ends: StopOnSignal) -> None:
    """An event loop that ends while a run is open closes its descriptor, and may set another; that one stays."""
    pairs = [socket.socketpair() for _ in range(2)]
    (_, own), (_, later) = pairs
    own.setblocking(False)
    later.setblocking(False)
    signal.set_wakeup_fd(own.fileno())
    expected = {"open": own.fileno(), "closed": -1, "replaced": later.fileno()}[left]
    before = signal.getsignal(signal.SIGTERM)
    try:
        with ends.listening():
            if left == "closed":
                own.close()
            elif left == "replaced":
                signal.set_wakeup_fd(later.fileno())
        assert signal.getsignal(signal.SIGTERM) is before
    finally:
        found = signal.set_wakeup_fd(-1)
        for end in (end for pair in pairs for end in pair):
            end.close()
    assert found == expected


def test_in_another_thread_signals_stay_the_programs(ends: StopOnSignal) -> None:
    seen: list[bool] = []
    before = signal.getsignal(signal.SIGTERM)

    def listen() -> None:
        with ends.listening():
            seen.append(signal.getsignal(signal.SIGTERM) == before)

    thread = threading.Thread(target=listen)
    thread.start()
    thread.join()
    assert seen == [True]


def test_a_second_signal_ends_c_code_that_never_comes_back(ends: StopOnSignal) -> None:
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        signal.alarm(30)
        os.dup2(writer, 2)
        mutex = ctypes.create_string_buffer(128)
        with ends.listening():
            os.write(2, b"It listens.\n")
            for _ in range(2):  # no signal interrupts the second wait
                ctypes.CDLL(None).pthread_mutex_lock(mutex)
        os._exit(0)
    os.close(writer)
    with open(reader) as said:
        assert said.readline() == "It listens.\n"
        os.kill(child, signal.SIGTERM)
        assert any("A second signal ends the process at once" in line for line in said)
        time.sleep(SAME_SIGNAL + 0.1)
        assert os.waitpid(child, os.WNOHANG) == (0, 0)
        os.kill(child, signal.SIGTERM)
        _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 128 + signal.SIGTERM


# ---- Other ranks ----


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """What the ranks share, as if there were others, and the name under which the next run tells of its signal."""
    monkeypatch.setattr(signals, "SECONDS_BETWEEN_LOOKS", 0.02)
    monkeypatch.setattr(signals, "_sessions", iter([7, 8]))
    shared = HashStore()
    monkeypatch.setattr(signals, "_store", lambda: shared)
    yield shared


def test_what_another_rank_has_received_breaks_off_a_wait_here(ends: StopOnSignal, store: Any) -> None:
    threading.Timer(0.1, store.set, ["rlhf_ppo/signal/7", str(int(signal.SIGTERM))]).start()
    before = time.monotonic()
    with ends.listening(), pytest.raises(Stopped), interruptible():
        time.sleep(20)
    assert ends.received == signal.SIGTERM and time.monotonic() - before < 5


def test_the_others_are_told(ends: StopOnSignal, store: Any) -> None:
    with ends.listening():
        os.kill(os.getpid(), signal.SIGTERM)
        store.wait(["rlhf_ppo/signal/7"], timedelta(seconds=30))
    assert int(store.get("rlhf_ppo/signal/7")) == signal.SIGTERM


def test_after_a_run_its_signals_are_nobodys(ends: StopOnSignal, store: Any) -> None:
    with ends.listening():
        pass
    store.set("rlhf_ppo/signal/7", str(int(signal.SIGTERM)))
    with ends.listening():
        time.sleep(0.2)
    assert ends.received is None


def test_ranks_that_sample_in_step_leave_together() -> None:
    """This rank has received nothing; the sum over all says that another has."""
    device = torch.device("cpu")
    other = StopOnSignal(lambda flags: flags.index_fill(0, torch.tensor([1]), 1.0), pending=lambda: "it ends")
    with other.listening(), pytest.raises(Stopped) as stopped:
        raise_if_any_rank_stopped(device)
    assert stopped.value.number == signal.SIGINT
    raise_if_any_rank_stopped(device)  # outside of a run nobody asks
