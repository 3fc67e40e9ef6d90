"""Comparisons that may never return, in a process that ends itself after a time limit.

Powers of huge numbers and regular expressions run in C code that holds the interpreter, so no thread and no signal
handler can stop them. The process is this file, run as a script; the system ends it when its alarm goes off.
"""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import threading
from typing import Any

SECONDS = 10.0
"""Longest time for one comparison."""


def same_formula(reference: str, answer: str) -> bool:
    """Return whether math-verify finds the reference's value in an answer."""
    from math_verify import parse, verify

    without_limit: Any = {"parsing_timeout": None}
    gold = parse(f"${reference}$", **without_limit) if reference else []
    return verify(gold, parse(answer, **without_limit), timeout_seconds=None)


def matches(pattern: str, text: str) -> bool:
    """Return whether a regular expression matches anywhere in a text."""
    return re.search(pattern, text) is not None


class LimitedProcess:
    """Calls the functions of this file in one process, which is started again after it has ended."""

    def __init__(self) -> None:
        self._process: Any = None
        self._lock = threading.Lock()

    def __call__(self, function: str, *texts: str) -> bool:
        """Return a function's result; False after `SECONDS`.

        Raises:
            RuntimeError: The function failed, and its traceback has been printed, or a signal killed the process.
        """
        with self._lock:
            if self._process is None or self._process.poll() is not None:
                command = [sys.executable, "-P", __file__]
                self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            self._process.stdin.write(json.dumps([function, SECONDS, *texts]) + "\n")
            self._process.stdin.flush()
            if reply := self._process.stdout.readline():
                return json.loads(reply)
            code, self._process = self._process.wait(), None
        if code != -signal.SIGALRM:
            raise RuntimeError(f"{function} ended with exit code {code} on {texts!r:.200}")
        return False


limited = LimitedProcess()
"""The process of this interpreter."""


def serve() -> None:
    """Answer each line of the standard input, `[function, seconds, *texts]`."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # the trainer's to handle; it then closes the standard input
    import logging
    import warnings

    logging.disable()  # math-verify warns that it has no time limit
    warnings.simplefilter("ignore")
    for line in sys.stdin:
        function, seconds, *texts = json.loads(line)
        if function == "same_formula":
            import math_verify  # noqa: F401  outside the limit
        signal.setitimer(signal.ITIMER_REAL, seconds)
        result = bool(globals()[function](*texts))
        signal.setitimer(signal.ITIMER_REAL, 0)
        sys.stdout.write(json.dumps(result) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    serve()
