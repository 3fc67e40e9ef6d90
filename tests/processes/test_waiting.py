"""Threads that are told to end."""

from __future__ import annotations

import subprocess
import sys
import threading
import time

import pytest

from rlhf_ppo.processes import waiting

PROFILED = """
import sys, threading, time
from rlhf_ppo.processes.waiting import end_thread
spinning = threading.Thread(target=exec, args=("while True: pass",), daemon=True)
spinning.start()
end_thread(spinning.ident)
spinning.join(30)
assert not spinning.is_alive()
thread = threading.Thread(target=time.sleep, args=(100,), daemon=True)
thread.start()
end_thread(thread.ident)
calls = []
sys.setprofile(lambda frame, event, argument: calls.append(event))
def called(): pass
called()
sys.setprofile(None)
assert calls.count("call") == 1
"""


def test_a_profiler_goes_on_beside_a_thread_that_cannot_be_ended() -> None:
    """In a process of its own, which would loop for ever."""
    subprocess.run([sys.executable, "-c", PROFILED], check=True, timeout=60)


ENDED = """
import gc, time
from rlhf_ppo.processes import waiting
async def ends(): raise SystemExit
waiting.run_on_event_loop(ends())
while waiting._event_loop() in waiting._threads or waiting._event_loop().is_running(): time.sleep(0.01)
waiting.abandon_event_loop()
gc.collect()
"""


def test_nothing_is_printed_of_a_task_whose_thread_has_ended() -> None:
    ran = subprocess.run([sys.executable, "-c", ENDED], check=True, timeout=60, capture_output=True, text=True)
    assert "Task" not in ran.stderr


@pytest.mark.parametrize("has_ended", [False, True])
def test_the_thread_of_an_event_loop_is_ended_once_and_while_it_runs(
    has_ended: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Later, another thread may have its number."""
    ended, begun, goes_on = list[int](), threading.Event(), threading.Event()
    monkeypatch.setattr(waiting, "end_thread", ended.append)

    async def block() -> None:
        begun.set()
        if has_ended:
            raise SystemExit
        goes_on.wait(60)

    waiting.abandon_event_loop()
    waiting.run_on_event_loop(block())
    assert begun.wait(60)
    if has_ended:
        while waiting._event_loop().is_running():
            time.sleep(0.01)
    given_up = [threading.Thread(target=waiting.abandon_blocked_event_loop) for _ in range(2)]
    for thread in given_up:
        thread.start()
    for thread in given_up:
        thread.join()
    goes_on.set()

    assert len(ended) == (not has_ended)
