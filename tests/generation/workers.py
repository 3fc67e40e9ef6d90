"""Workers of `generation_overlap` from the tests' fork server, which has imported everything."""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import signal
import socket
from collections.abc import Iterator
from multiprocessing.reduction import DupFd
from types import SimpleNamespace
from typing import Any

import pytest

from rlhf_ppo.generation import overlap


class ForkedWorker:
    """Takes the place of `subprocess.Popen`."""

    def __init__(self, command: list[str], pass_fds: tuple[int, int], **_: Any) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["tests.preload"])
        self._process = context.Process(target=_run, args=(_sizes(command), _Handed(pass_fds)))
        self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid

    def kill(self) -> None:
        self._process.kill()

    def wait(self) -> int:
        self._process.join()
        assert self._process.exitcode is not None
        return self._process.exitcode


class PreforkedWorker:
    """The worker of a process that a fork server has made; fork it before anything starts a thread.

    Call it in place of `subprocess.Popen`.
    """

    def __init__(self) -> None:
        self._socket, theirs = socket.socketpair()
        self.pid = os.fork()
        self._code: int | None = None
        if self.pid == 0:
            self._socket.close()
            sizes, numbers, *_ = socket.recv_fds(theirs, 1000, 2)
            if sizes:  # else the process was killed before it began
                overlap.run_worker(numbers[0], numbers[1], *json.loads(sizes))
            os._exit(0)
        theirs.close()

    def __call__(self, command: list[str], pass_fds: tuple[int, int], **_: Any) -> PreforkedWorker:
        socket.send_fds(self._socket, [json.dumps(_sizes(command)).encode()], pass_fds)
        return self

    def kill(self) -> None:
        if self._code is None:
            os.kill(self.pid, signal.SIGKILL)

    def wait(self) -> int:
        if self._code is None:
            self._code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self._code


def _sizes(command: list[str]) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", command[-1])[-2:]]


class _Handed:
    """Descriptors; they can be handed over while the process is pickled, and only then."""

    def __init__(self, numbers: Any) -> None:
        self.numbers = numbers

    def __reduce__(self) -> Any:
        return list, ([DupFd(number) for number in self.numbers],)


def _run(sizes: list[int], descriptors: Any) -> None:
    overlap.run_worker(*(each.detach() for each in descriptors), *sizes)


def replace_processes(patch: pytest.MonkeyPatch, start: Any) -> None:
    """Let `SamplesInWorker` call a function instead of `subprocess.Popen`."""
    patch.setattr(overlap, "subprocess", SimpleNamespace(Popen=start, DEVNULL=None))


@pytest.fixture
def quick_workers(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[ForkedWorker]]:
    """Let workers begin at once; yields those that have begun, which must all have ended after the test."""
    made: list[ForkedWorker] = []

    def start(*given: Any, **how: Any) -> ForkedWorker:
        made.append(ForkedWorker(*given, **how))
        return made[-1]

    replace_processes(monkeypatch, start)
    yield made
    assert not any(worker._process.is_alive() for worker in made)
