"""Waiting for other people's code: daemon threads and an event loop that no program waits for, and time limits."""

from __future__ import annotations

import asyncio
import contextvars
import functools
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future, InvalidStateError, ThreadPoolExecutor
from typing import Any, TypeVar

import torch

T = TypeVar("T")


class RewardTimeoutError(TimeoutError):
    """A reward function has not returned within `reward_timeout`."""


def in_daemon_thread(function: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
    """Call a function in a thread of its own, which ends with the program at the latest.

    The caller's context variables and its CUDA device are those of the thread; gradients are off.

    Returns:
        The result to come, or what the function raises.
    """
    future: Future[T] = Future()
    context = contextvars.copy_context()
    device = torch.cuda.current_device() if torch.cuda.is_initialized() else None

    def run() -> None:
        if device is not None:
            torch.cuda.set_device(device)
        if not future.set_running_or_notify_cancel():
            return
        try:
            with torch.no_grad():
                result = context.run(function, *args, **kwargs)
        except BaseException as error:
            future.set_exception(error)
        else:
            future.set_result(result)

    threading.Thread(target=run, name=f"rlhf_ppo-{getattr(function, '__name__', 'call')}", daemon=True).start()
    return future


def expiring(
    future: Future[T], seconds: float | None, message: str, before_error: Callable[[], object] | None = None
) -> Future[T]:
    """Limit the time that a result may take, whatever the one who works on it is busy with.

    Args:
        future: The result to come.
        seconds: How long it may take from now; None: as long as it does.
        message: That of the error.
        before_error: Called when the time is up, before whoever waits for the result hears of it.

    Returns:
        A future that raises a `RewardTimeoutError` where the time is up; `future` is then cancelled.
    """
    if seconds is None:
        return future
    limited: Future[T] = Future()

    def pass_on(done: Future[T]) -> None:
        if done.cancelled():
            limited.cancel()
        else:
            _settle(limited, done.exception() or done)

    def give_up() -> None:
        if before_error is not None:
            before_error()
        _settle(limited, RewardTimeoutError(message))

    timer = threading.Timer(seconds, give_up)
    timer.daemon = True
    timer.start()
    limited.add_done_callback(lambda _: (timer.cancel(), future.cancel()))
    future.add_done_callback(pass_on)
    return limited


def _settle(future: Future[Any], outcome: Future[Any] | BaseException) -> None:
    """Set a future's result or error, unless it has one, or was cancelled."""
    try:
        if isinstance(outcome, BaseException):
            future.set_exception(outcome)
        else:
            future.set_result(outcome.result())
    except InvalidStateError:
        pass


class _DaemonThreads(ThreadPoolExecutor):
    """Runs each call in a daemon thread: `asyncio.to_thread` of a reward function may hang when the program ends."""

    def __init__(self) -> None:
        super().__init__()
        self._free = threading.BoundedSemaphore(self._max_workers)  # pyright: ignore[reportAttributeAccessIssue]

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        """Start a call; those above the pool's number of threads wait for their turn."""

        def in_turn() -> T:
            with self._free:
                return fn(*args, **kwargs)

        return in_daemon_thread(in_turn)


def on_event_loop(coroutine: Coroutine[Any, Any, T]) -> Future[T]:
    """Run a coroutine on the loop that all async functions share, so that clients they keep stay usable."""
    return asyncio.run_coroutine_threadsafe(coroutine, _event_loop())


def leave_event_loop() -> None:
    """Leave the loop to what blocks it; the next coroutine gets another one."""
    _event_loop.cache_clear()


@functools.cache
def _event_loop() -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()
    loop.set_default_executor(_DaemonThreads())

    def run() -> None:
        torch.set_grad_enabled(False)  # per thread; a context manager would leak between interleaved coroutines
        loop.run_forever()

    threading.Thread(target=run, name="rlhf_ppo-rewards", daemon=True).start()
    return loop
