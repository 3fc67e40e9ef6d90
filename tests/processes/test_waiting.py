"""Threads that are told to end."""

from __future__ import annotations

import subprocess
import sys

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
