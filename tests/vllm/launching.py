"""Starts processes with vLLM, and servers."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.ports import free_port
from tests.vllm.conftest import FOLDER
from tests.vllm.training import MOST

LIMIT = 1500
"""Seconds for what takes one or two minutes on an idle machine."""


def start(folder: Path, what: str, *arguments: Any, rank: int = 0, world: int = 1, port: int = 0) -> subprocess.Popen:
    """Start tests/vllm/process.py; its output goes into a file of the folder."""
    environment = {**os.environ, "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)}
    environment |= {
        "LOCAL_WORLD_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port or free_port()),
    }
    if world == 1:
        for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
            environment.pop(name)
    command = [sys.executable, str(FOLDER / "process.py"), str(folder), what, *map(str, arguments)]
    with (folder / f"{what}-{rank}.log").open("w") as log:
        return subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT)


def finished(folder: Path, what: str, process: subprocess.Popen, rank: int = 0, code: int = 0) -> Any:
    """Wait for a process; return what it reported."""
    output = folder / f"{what}-{rank}.log"
    try:
        ended = process.wait(LIMIT)
    finally:
        process.kill()
    assert ended == code, output.read_text()[-6000:]
    report = folder / f"{what}-{rank}.json"
    return json.loads(report.read_text()) if report.exists() else None


def launched(folder: Path, world: int, what: str, *arguments: Any) -> list[Any]:
    """Run several processes as a launcher does; return what each reported."""
    port = free_port()
    for path in Path("/dev/shm").glob("-tp:0-*cpushm*"):  # what an earlier launch left; vLLM's name is always the same
        path.unlink()
    processes = [start(folder, what, *arguments, rank=rank, world=world, port=port) for rank in range(world)]
    return [finished(folder, what, process, rank) for rank, process in enumerate(processes)]


class Server:
    """`vllm serve`, with the command of the documentation but for gloo and float32.

    Attributes:
        url: Its address.
        group: Its process group, which a signal is sent to.
    """

    def __init__(self, saved: Path, log: Path) -> None:
        port = free_port()
        self.url, self.log = f"http://127.0.0.1:{port}", log
        command = [
            str(Path(sys.executable).with_name("vllm")), "serve", str(saved),
            "--port", str(port), "--host", "127.0.0.1", "--dtype", "float32",
            "--enforce-eager", "--max-model-len", str(MOST),
            "--logprobs-mode", "processed_logprobs", "--weight-transfer-config", '{"backend": "gloo"}',
        ]  # fmt: skip
        with log.open("w") as file:
            environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
            self.process = subprocess.Popen(command, env=environment, stdout=file, stderr=file, start_new_session=True)
        self.group = self.process.pid

    def wait(self) -> None:
        """Wait until it is up."""
        end = time.monotonic() + LIMIT
        while time.monotonic() < end and self.process.poll() is None:
            try:
                urllib.request.urlopen(f"{self.url}/health", timeout=5)
                return
            except OSError:
                time.sleep(1)
        raise AssertionError(self.log.read_text()[-6000:])

    def send(self, number: int) -> None:
        """Send a signal to all of its processes."""
        os.killpg(self.group, number)


@contextmanager
def serving(saved: Path, folder: Path) -> Iterator[Server]:
    """Run a server while the context lasts."""
    server = Server(saved, folder / "server.log")
    try:
        server.wait()
        yield server
    finally:
        try:
            server.send(signal.SIGKILL)
        except ProcessLookupError:
            pass
        server.process.wait()
