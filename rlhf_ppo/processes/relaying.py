"""A signal to one of several processes is given to the others as well, whatever they are busy with.

Ranks that generate, or wait for a reward, each on its own, exchange nothing before they are through: what one of them
has received is left in the store that brought the processes together, where the others look for it.
"""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed
from torch.distributed import distributed_c10d

SECONDS_BETWEEN_LOOKS = 0.5
"""How often each process looks; one that has received a signal tells of it as late as that, too."""

_sessions = itertools.count()


@contextmanager
def told_to_all_ranks(received: Callable[[], int | None]) -> Iterator[None]:
    """Send this process, while the context lasts, the signal that another rank has received; every rank enters it.

    Args:
        received: Returns the number of the signal that this process has received, or None.
    """
    name, store = f"rlhf_ppo/signal/{next(_sessions)}", _store()
    if store is None:
        yield
        return
    is_over, sending = threading.Event(), threading.Lock()

    def send(number: int) -> None:
        with sending:
            if not is_over.is_set():  # nobody handles it any more
                os.kill(os.getpid(), number)

    def look() -> None:
        try:
            while not is_over.wait(SECONDS_BETWEEN_LOOKS):
                if (number := received()) is not None:
                    store.set(name, str(number))
                    return
                if store.check([name]):
                    send(int(store.get(name)))
                    return
        except RuntimeError:  # the process that holds the store has gone
            return

    threading.Thread(target=look, name="rlhf_ppo-relay", daemon=True).start()
    try:
        yield
    finally:
        with sending:
            is_over.set()


def _store() -> Any:
    """Return the store of the process group, or None where one process is alone."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return None
    return distributed_c10d._get_default_store() if torch.distributed.get_world_size() > 1 else None
