"""A small model hub on 127.0.0.1: what huggingface_hub asks of the real one, and the ways in which it can fail.

A repository's listing comes from `/api/models/…`; its files are redirected to a second port, as the real hub sends
them to a CDN. Every request is kept, so that tests can say what was sent.
"""

import hashlib
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

COMMIT = "c0ffee" + "0" * 34


@dataclass(frozen=True)
class Seen:
    """One request. `sent`: bytes of the body that went out."""

    path: str
    range: str | None
    token: str | None
    sent: list[int] = field(default_factory=lambda: [0], compare=False)


@dataclass
class LoopbackHub:
    """The hub's files, and its faults. `endpoint` is what HF_ENDPOINT is set to."""

    files: dict[str, dict[str, bytes]] = field(default_factory=dict)  # repository → name → content
    cut_after: list[int] = field(default_factory=list)  # the next downloads break off after so many bytes
    ignore_ranges: bool = False
    hold_first_download_s: float = 0.0  # wait so long at most for both listing requests and a second download
    another: threading.Event = field(default_factory=threading.Event)
    claim: dict[str, tuple[int, str]] = field(default_factory=dict)  # name → size and sha256 that the listing says
    gated: set[str] = field(default_factory=set)
    api_status: int = 200
    api_body: bytes | None = None
    seen: list[Seen] = field(default_factory=list)
    endpoint: str = ""
    cdn: str = ""

    def downloads(self) -> list[Seen]:
        return [request for request in self.seen if request.path.startswith("/cdn/")]

    def bytes_sent(self) -> int:
        return sum(request.sent[0] for request in self.downloads())

    def listing(self, repo: str) -> dict[str, Any]:
        siblings = []
        for name, content in self.files[repo].items():
            size, sha256 = self.claim.get(name, (len(content), hashlib.sha256(content).hexdigest()))
            lfs = {"size": size, "sha256": sha256, "pointerSize": 134}
            siblings.append({"rfilename": name, "size": size, "blobId": hashlib.sha1(content).hexdigest(), "lfs": lfs})
        return {"id": repo, "sha": COMMIT, "private": False, "tags": [], "siblings": siblings}


@contextmanager
def running_hub() -> Iterator[LoopbackHub]:
    hub = LoopbackHub()

    class Handler(_Handler):
        state = hub

    servers = [ThreadingHTTPServer(("127.0.0.1", 0), Handler) for _ in range(2)]
    hub.endpoint, hub.cdn = (f"http://127.0.0.1:{server.server_address[1]}" for server in servers)
    threads = [threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}) for server in servers]
    for thread in threads:
        thread.start()
    try:
        yield hub
    finally:
        for server, thread in zip(servers, threads, strict=True):
            server.shutdown()
            thread.join()
            server.server_close()


class _Handler(BaseHTTPRequestHandler):
    state: LoopbackHub
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path)
        token = self.headers.get("Authorization")
        request = Seen(path, self.headers.get("Range"), token)
        self.state.seen.append(request)
        kind, _, rest = path.removeprefix("/").partition("/")
        if kind == "api":
            self._api(rest.removeprefix("models/").partition("/revision/")[0])
        elif kind == "cdn":
            repo, _, name = rest.partition("@")
            if self.state.hold_first_download_s:
                self._hold()
            self._content(self.state.files[repo][name], request)
        else:
            repo, _, where = path.removeprefix("/").partition("/resolve/")
            commit, _, name = where.partition("/")
            if commit != COMMIT or name not in self.state.files.get(repo, {}):
                self._answer(404, b"", {"X-Error-Code": "EntryNotFound"})
            else:
                self._answer(302, b"", {"Location": f"{self.state.cdn}/cdn/{repo}@{name}"})

    def _hold(self) -> None:
        if len(self.state.downloads()) > 1:
            self.state.another.set()
        deadline = time.monotonic() + 30
        while sum(r.path.startswith("/api/models/") for r in self.state.seen) < 2 and time.monotonic() < deadline:
            time.sleep(0.01)
        self.state.another.wait(self.state.hold_first_download_s)

    def _api(self, repo: str) -> None:
        state = self.state
        if state.api_body is not None or state.api_status != 200:
            self._answer(state.api_status, state.api_body or b"")
        elif repo in state.gated:
            self._answer(403, b"", {"X-Error-Code": "GatedRepo"})
        elif repo not in state.files:
            self._answer(404, b"", {"X-Error-Code": "RepoNotFound"})
        else:
            self._answer(200, json.dumps(state.listing(repo)).encode(), {"Content-Type": "application/json"})

    def _answer(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _content(self, content: bytes, request: Seen) -> None:
        start = 0
        if request.range and not self.state.ignore_ranges:
            start = int(request.range.removeprefix("bytes=").partition("-")[0])
            self.send_response(206)
            self.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
        else:
            self.send_response(200)
        body = content[start:]
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.state.cut_after:
            body = body[: self.state.cut_after.pop(0)]
            self.close_connection = True
        try:
            self.wfile.write(body)
            request.sent[0] = len(body)
        except ConnectionError:  # the client left; how much it got is not known here
            self.close_connection = True
