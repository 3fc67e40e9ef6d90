"""Daemon threads, and the event loop that all async functions share.

Reward functions, tools and environments are code of the user. All threads here are daemon threads: a program can end
while such code still runs.
"""

from __future__ import annotations

import asyncio
import contextvars
import functools
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import TypeVar

import torch

T = TypeVar("T")


def in_daemon_thread(function: Callable[..., T], *args: object) -> Future[T]:
    """Call a function in a new daemon thread, with the caller's context variables and CUDA device, without gradients.

    Args:
        function: The function.
        *args: Its arguments.

    Returns:
        A future of the function's result or error.
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
                result = context.run(function, *args)
        except BaseException as error:
            future.set_exception(error)
        else:
            future.set_result(result)

    threading.Thread(target=run, name=f"rlhf_ppo-{getattr(function, '__name__', 'call')}", daemon=True).start()
    return future


class _DaemonThreads(ThreadPoolExecutor):
    """Daemon threads for `asyncio.to_thread`, whose own threads would keep the program from ending."""

    def __init__(self) -> None:
        super().__init__()
        self._free = threading.BoundedSemaphore(self._max_workers)  # pyright: ignore[reportAttributeAccessIssue]

    def submit(self, fn: Callable[..., T], /, *args: object, **kwargs: object) -> Future[T]:
        """Start a call; calls beyond the pool's size wait."""

        def when_free() -> T:
            with self._free:
                return fn(*args, **kwargs)

        return in_daemon_thread(when_free)


def run_on_event_loop(coroutine: Coroutine[object, object, T]) -> Future[T]:
    """Run a coroutine on the loop that all async functions share, so that the clients they keep stay usable."""
    with _LOCK:
        loop = _event_loop()
    return asyncio.run_coroutine_threadsafe(without_exit(coroutine), loop)


async def without_exit(coroutine: Coroutine[object, object, T]) -> T:
    """Run a coroutine whose `exit()` is an ordinary error: it would end the loop that all share."""
    try:
        return await coroutine
    except (SystemExit, KeyboardInterrupt) as error:
        raise RuntimeError(repr(error)) from error


def abandon_blocked_event_loop(seconds: float) -> None:
    """Leave the loop if it runs no coroutine within some seconds; the next coroutine gets a new one."""
    with _LOCK:
        running = asyncio.run_coroutine_threadsafe(asyncio.sleep(0), _event_loop())
        if not wait([running], seconds).done:
            _event_loop.cache_clear()


_LOCK = threading.Lock()  # several threads may ask for the first loop at once


@functools.cache
def _event_loop() -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()
    loop.set_default_executor(_DaemonThreads())

    def run() -> None:
        torch.set_grad_enabled(False)  # per thread; a context manager would leak between interleaved coroutines
        loop.run_forever()

    threading.Thread(target=run, name="rlhf_ppo-event-loop", daemon=True).start()
    return loop
