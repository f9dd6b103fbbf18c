"""A Hugging Face hub for tests: repositories made on the spot, and a second server that has the large files."""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import secrets
import socket
import subprocess
import threading
import time
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from urllib.parse import parse_qs, quote, unquote, urlsplit

from skyfab.lab import Lab

LARGE = 100_000
"""Bytes from which a file is stored with LFS: it has a sha256, and comes from the second server."""
COMMIT = "c0ffee" * 6 + "0001"


def git_hash(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


@dataclass
class Asked:
    """One request."""

    client: str
    path: str
    token: str
    range: str = ""
    server: str = "hub"
    sent: int = 0
    """Bytes of content."""


@dataclass
class Repository:
    files: dict[str, bytes]
    gated: bool = False
    private: bool = False
    commit: str = COMMIT
    extra: list[object] = field(default_factory=list)
    """More entries of the list of files."""

    def listing(self, name: str) -> dict[str, object]:
        siblings: list[object] = []
        for path, data in self.files.items():
            one: dict[str, object] = {"rfilename": path, "size": len(data), "blobId": git_hash(data)}
            if len(data) >= LARGE:
                one["lfs"] = {"sha256": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 134}
            siblings.append(one)
        gated = "manual" if self.gated else False
        return {
            "id": name,
            "sha": self.commit,
            "private": self.private,
            "gated": gated,
            "siblings": siblings + self.extra,
        }


class Hub:
    """Both servers, at an address of this machine."""

    def __init__(self, address: str = "127.0.0.1") -> None:
        self.token = f"hf_{secrets.token_hex(16)}"
        self.repositories: dict[str, Repository] = {}
        self.asked: list[Asked] = []
        self.damaged: set[str] = set()
        """Paths of files that have a wrong byte when they are sent."""
        self.cuts: dict[str, list[int]] = {}
        """Path → after how many bytes a connection is cut, each time."""
        self.rate = 0.0
        """Bytes per second of a large file, if it is limited."""
        self.ranges = True
        self.refused: set[str] = set()
        """Addresses of clients that get no response any more."""
        self.statuses: dict[str, list[int]] = {}
        """Path → what is answered before the file is sent."""
        self.headers: dict[str, str] = {}
        """The headers of these answers."""
        self.delay = 0.0
        """Seconds until it responds with a list of files."""
        self.cdn = _Server(self, "cdn", address)
        self.main = _Server(self, "hub", address)

    def __enter__(self) -> Hub:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.rate = 0
        for server in (self.main, self.cdn):
            server.end()

    @property
    def url(self) -> str:
        return self.main.url

    def add(self, name: str, files: dict[str, bytes], **options: object) -> Repository:
        self.repositories[name] = Repository(files, **options)  # type: ignore[arg-type]
        return self.repositories[name]

    def downloads(self, path: str) -> list[Asked]:
        """Requests for the content of a file that were answered with some of it."""
        return [one for one in self.asked if one.sent and one.path.endswith(f"/{path}")]


class _Server(ThreadingHTTPServer):
    daemon_threads = False
    request_queue_size = 100

    def __init__(self, hub: Hub, kind: str, address: str) -> None:
        super().__init__((address, 0), _Handler)
        self.hub, self.kind = hub, kind
        self._open: set[socket.socket] = set()
        self._thread = threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        host, port = self.server_address[:2]
        return f"http://{host!s}:{port}"

    def end(self) -> None:
        self.shutdown()
        self.server_close()
        self._thread.join()

    def process_request_thread(self, request: socket.socket, client_address: object) -> None:  # type: ignore[override]
        self._open.add(request)
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._open.discard(request)

    def verify_request(self, request: object, client_address: tuple[str, int]) -> bool:  # type: ignore[override]
        return client_address[0] not in self.hub.refused

    def close_all(self) -> None:
        """Cuts the connections."""
        for one in list(self._open):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request: object, client_address: object) -> None: ...


class _Handler(BaseHTTPRequestHandler):
    server: _Server

    def do_GET(self) -> None:
        token = self.headers.get("Authorization", "").removeprefix("Bearer ")
        parts = urlsplit(self.path)
        asked = Asked(
            self.client_address[0], unquote(parts.path), token, self.headers.get("Range", ""), self.server.kind
        )
        self.server.hub.asked.append(asked)
        self._answer(asked, parse_qs(parts.query))

    do_HEAD = do_GET

    def _answer(self, asked: Asked, query: dict[str, list[str]]) -> None:
        hub = self.server.hub
        if asked.server == "cdn":
            name, path = asked.path.strip("/").split("/-/")
            if path in hub.repositories[name].files:
                self._send(asked, path, hub.repositories[name].files[path])
            else:
                self._say(404, b"")
        elif found := re.fullmatch(r"/api/(models|datasets)/(.+)/revision/(.+)", asked.path):
            name = found[2] if found[1] == "models" else f"datasets/{found[2]}"
            self._list(asked, name, found[3])
        elif re.fullmatch("/api/(models|datasets)", asked.path):
            names = [one for one in hub.repositories if one.startswith(f"{query['author'][0]}/")]
            self._say(200, json.dumps([{"id": name} for name in names]).encode())
        elif found := re.fullmatch(r"/(.+)/resolve/([0-9a-f]{40})/(.+)", asked.path):
            self._resolve(asked, found[1], found[3])
        elif found := re.fullmatch(r"/api/resolve-cache/(.+)/-/(.+)", asked.path):
            if not self._may(found[1], asked):
                return
            self._send(asked, found[2], hub.repositories[found[1]].files[found[2]])
        else:
            self._say(404, b"")

    def _may(self, name: str, asked: Asked) -> bool:
        """As the real hub: who may not know that a repository exists gets a 401 too."""
        found, hub = self.server.hub.repositories.get(name), self.server.hub
        is_known = asked.token == hub.token
        if found is None or (found.private and not is_known):
            self._say(404 if is_known else 401, b"", {"X-Error-Code": "RepoNotFound"})
        elif found.gated and not is_known and "/api/" not in asked.path[:5]:
            self._say(403 if asked.token else 401, b"", {"X-Error-Code": "GatedRepo"})
        else:
            return True
        return False

    def _list(self, asked: Asked, name: str, revision: str) -> None:
        if not self._may(name, asked):
            return
        time.sleep(self.server.hub.delay)
        found = self.server.hub.repositories[name]
        if revision not in ("main", "v1/x", found.commit):
            self._say(404, b"", {"X-Error-Code": "RevisionNotFound"})
            return
        self._say(200, json.dumps(found.listing(name)).encode())

    def _resolve(self, asked: Asked, name: str, path: str) -> None:
        hub = self.server.hub
        if not self._may(name, asked):
            return
        if hub.statuses.get(path):
            self._say(hub.statuses[path].pop(0), b"", hub.headers)
        elif len(hub.repositories[name].files[path]) >= LARGE:
            url = f"{hub.cdn.url}/{quote(name)}/-/{quote(path)}?signature=s3cret"
            self._say(302, b"", {"Location": url})
        else:
            self._say(307, b"", {"Location": f"/api/resolve-cache/{quote(name)}/-/{quote(path)}"})

    def _send(self, asked: Asked, path: str, data: bytes) -> None:
        hub = self.server.hub
        if path in hub.damaged:
            data = data[:-1] + bytes([data[-1] ^ 1])
        part = asked.range.removeprefix("bytes=") if hub.ranges else ""
        if part == "0-0":  # a look
            self._say(206, data[:1], {"Content-Range": f"bytes 0-0/{len(data)}"})
            return
        start = int(part.removesuffix("-") or 0)
        if start >= len(data) > 0:
            self._say(416, b"")
            return
        self.send_response(206 if part else 200)
        self.send_header("Content-Length", str(len(data) - start))
        self.end_headers()
        end = min(len(data), start + hub.cuts[path].pop(0)) if hub.cuts.get(path) else len(data)
        for at in range(start, end, 65536):
            piece = data[at : min(at + 65536, end)]
            asked.sent += len(piece)  # before: the test may look as soon as it has arrived
            self.wfile.write(piece)
            if hub.rate and len(data) >= LARGE:
                time.sleep(len(piece) / hub.rate)
        if end < len(data):
            self.connection.close()

    def _say(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *arguments: object) -> None:  # noqa: A002 - the base class's name
        """Says nothing: tests look at `asked`."""


class Internet:
    """An address of this machine that stands for the internet: hosts of a lab reach it, or do not."""

    def __init__(self, lab: Lab) -> None:
        self._lab = lab
        self.address = lab.hosts[0].network.address(250)
        self._ip("address", "add", f"{self.address}/32", "dev", lab.hosts[0].network.bridge)

    def only_for(self, *names: str) -> None:
        for host in self._lab.hosts:
            host.run(["ip", "route", "delete", "unreachable", self.address], check=False)
            if host.name not in names:
                host.run(["ip", "route", "add", "unreachable", self.address])

    def close(self) -> None:
        self._ip("address", "delete", f"{self.address}/32", "dev", self._lab.hosts[0].network.bridge)

    def _ip(self, *words: str) -> None:
        subprocess.run(["ip", *words], check=True, capture_output=True)
