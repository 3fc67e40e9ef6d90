"""A hub on this machine: the part of its HTTP API through which repositories are made and files are committed."""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

LFS = (".safetensors", ".bin", ".png")


@dataclass
class Commit:
    """What was committed.

    Attributes:
        repository: The repository's full name.
        revision: The branch.
        message: The commit's title.
        token: Of whom.
        files: Path to content; large files come by another request than the rest.
    """

    repository: str
    revision: str
    message: str
    token: str
    files: dict[str, bytes]


@dataclass
class LocalHub:
    """What the hub was asked, and how it answers.

    Attributes:
        made: The bodies of the requests that make repositories, each with `token`.
        commits: In order.
        refusals: What a request's path contains to the status and text with which it is refused.
    """

    endpoint: str = ""
    made: list[dict[str, Any]] = field(default_factory=list)
    commits: list[Commit] = field(default_factory=list)
    refusals: dict[str, tuple[int, str]] = field(default_factory=dict)
    objects: dict[str, bytes] = field(default_factory=dict)


class Request(BaseHTTPRequestHandler):
    """One request."""

    protocol_version = "HTTP/1.1"

    def do_PUT(self) -> None:
        """Take a large file."""
        self.hub.objects[self.path.rpartition("/")[2]] = self.body()
        self.answer({})

    def do_POST(self) -> None:
        """Answer what `HfApi` asks."""
        body = self.body()
        for part, (status, text) in self.hub.refusals.items():
            if part in self.path:
                self.answer({"error": text}, status, **{"X-Error-Message": text})
                return
        if self.path == "/api/repos/create":
            asked = json.loads(body)
            self.hub.made.append({**asked, "token": self.token})
            name = f"{asked.get('organization') or 'somebody'}/{asked['name']}"
            self.answer({"url": f"{self.hub.endpoint}/{name}", "name": name})
        elif "/preupload/" in self.path:
            paths = [file["path"] for file in json.loads(body)["files"]]
            modes = {path: "lfs" if path.endswith(LFS) else "regular" for path in paths}
            self.answer(
                {"files": [{"path": path, "uploadMode": mode, "shouldIgnore": False} for path, mode in modes.items()]}
            )
        elif self.path.endswith("/info/lfs/objects/batch"):
            places = [(one, f"{self.hub.endpoint}/lfs/{one['oid']}") for one in json.loads(body)["objects"]]
            self.answer({"objects": [{**one, "actions": {"upload": {"href": place}}} for one, place in places]})
        elif "/commit/" in self.path:
            self.commit(body)
        else:
            self.answer({"errors": [], "warnings": []})  # of the card's metadata

    def commit(self, body: bytes) -> None:
        """Take a commit, a line of JSON for each file."""
        lines = [json.loads(line) for line in body.splitlines()]
        files: dict[str, bytes] = {}
        for line in lines:
            value = line["value"]
            if line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                files[value["path"]] = self.hub.objects[value["oid"]]
        repository, _, revision = self.path.removeprefix("/api/models/").partition("/commit/")
        message = next(line["value"]["summary"] for line in lines if line["key"] == "header")
        self.hub.commits.append(Commit(repository, revision, message, self.token, files))
        oid = f"{len(self.hub.commits):040x}"
        url = f"{self.hub.endpoint}/{repository}/commit/{oid}"
        self.answer({"commitUrl": url, "commitOid": oid, "success": True})

    @property
    def hub(self) -> LocalHub:
        """What the server belongs to."""
        return self.server.hub  # pyright: ignore[reportAttributeAccessIssue]

    @property
    def token(self) -> str:
        """Who asks."""
        return self.headers.get("Authorization", "").removeprefix("Bearer ")

    def body(self) -> bytes:
        """Read what was sent, of a known length or in chunks."""
        if "Content-Length" in self.headers:
            return self.rfile.read(int(self.headers["Content-Length"]))
        body = b""
        while (size := int(self.rfile.readline(), 16)) > 0:
            body += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return body

    def answer(self, value: Any, status: int = 200, **headers: str) -> None:
        """Answer with JSON."""
        text = json.dumps(value).encode()
        self.send_response(status)
        for name, content in {"Content-Type": "application/json", "Content-Length": str(len(text)), **headers}.items():
            self.send_header(name, content)
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *_: Any) -> None:
        """Say nothing."""


@contextmanager
def local_hub() -> Iterator[LocalHub]:
    """Run a hub while the context lasts."""
    server, hub = ThreadingHTTPServer(("127.0.0.1", 0), Request), LocalHub()
    server.hub = hub  # pyright: ignore[reportAttributeAccessIssue]
    server.daemon_threads = True
    hub.endpoint = f"http://127.0.0.1:{server.server_port}"
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
    yield hub
    server.shutdown()
    server.server_close()
