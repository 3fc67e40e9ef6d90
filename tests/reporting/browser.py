"""Chromium without a window, driven through its pipe: what a page logs, shows and does."""

from __future__ import annotations

import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any, Self

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


class Browser:
    """A page in Chromium.

    Attributes:
        complaints: What the page has logged as an error or warning, and exceptions that nothing caught.
        requests: Addresses that the page has asked for.
    """

    def __init__(self) -> None:
        assert CHROMIUM is not None
        self._profile = tempfile.mkdtemp()
        to_browser, self._out = os.pipe()
        self._in, from_browser = os.pipe()
        flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--no-first-run"]
        flags += ["--disable-dev-shm-usage", "--remote-debugging-pipe", f"--user-data-dir={self._profile}"]

        def as_three_and_four() -> None:
            low, high = os.dup(to_browser), os.dup(from_browser)
            os.dup2(low, 3)
            os.dup2(high, 4)

        self._process = subprocess.Popen(
            [CHROMIUM, *flags, "about:blank"], preexec_fn=as_three_and_four, close_fds=False,
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        os.close(to_browser)
        os.close(from_browser)
        self._buffer, self._sent, self._session = b"", 0, None
        self.complaints: list[str] = []
        self.requests: list[str] = []
        target = self._ask("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self._ask(f"{domain}.enable")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._out)
        os.close(self._in)
        shutil.rmtree(self._profile, ignore_errors=True)

    def open(self, path: Path, width: int, height: int = 900) -> None:
        """Show a file in a window of that size, and wait until it is drawn."""
        self._ask(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )
        self._ask("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": "light"}])
        self._ask("Page.navigate", url=path.absolute().as_uri())
        for _ in range(600):
            if self.run("document.readyState") == "complete" and self.run("location.protocol") == "file:":
                return
            time.sleep(0.05)
        raise TimeoutError(f"{path} is not drawn")

    def run(self, script: str) -> Any:
        """Return what an expression has as its value."""
        answer = self._ask("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in answer:
            raise RuntimeError(f"{script}: {json.dumps(answer['exceptionDetails'])[:500]}")
        return answer["result"].get("value")

    def _ask(self, method: str, **arguments: Any) -> Any:
        self._sent += 1
        message = {"id": self._sent, "method": method, "params": arguments}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while (answer := self._next()).get("id") != self._sent:
            self._note(answer)
        if "error" in answer:
            raise RuntimeError(f"{method}: {answer['error']}")
        return answer["result"]

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            if not select.select([self._in], [], [], 60)[0]:
                raise TimeoutError("Chromium does not answer")
            if not (read := os.read(self._in, 1 << 20)):
                raise EOFError("Chromium has ended")
            self._buffer += read
        message, _, self._buffer = self._buffer.partition(b"\0")
        return json.loads(message)

    def _note(self, event: dict[str, Any]) -> None:
        method, told = event.get("method"), event.get("params", {})
        if method == "Runtime.exceptionThrown":
            self.complaints.append(json.dumps(told["exceptionDetails"])[:600])
        elif method == "Runtime.consoleAPICalled" and told["type"] in ("error", "warning", "assert"):
            self.complaints.append(json.dumps(told["args"])[:600])
        elif method == "Log.entryAdded" and told["entry"]["level"] in ("error", "warning"):
            self.complaints.append(told["entry"]["text"][:600])
        elif method == "Network.requestWillBeSent":
            self.requests.append(told["request"]["url"])
