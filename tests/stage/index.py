"""A package index for tests: tiny wheels made on the spot, served over HTTP, with a password, or not at all."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
import ssl
import tarfile
import threading
import zipfile
from collections.abc import Mapping, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from urllib.parse import quote, unquote

import pytest

PURE = "py3-none-any"


def make_wheel(
    folder: Path,
    name: str,
    version: str,
    *,
    tag: str = PURE,
    requires: Sequence[str] = (),
    files: Mapping[str, str | bytes] | None = None,
    python: str = "",
) -> Path:
    """A wheel with one module that has `version`, and what else is asked for. The same arguments, the same bytes."""
    module = name.replace("-", "_")
    folder.mkdir(parents=True, exist_ok=True)
    info = f"{module}-{version}.dist-info"
    metadata = [f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}"]
    metadata += [f"Requires-Python: {python}"] if python else []
    metadata += [f"Requires-Dist: {one}" for one in requires]
    content: dict[str, str | bytes] = {
        f"{module}/__init__.py": f"version = {version!r}\n",
        **(files or {}),
        f"{info}/METADATA": "\n".join(metadata) + "\n",
        f"{info}/WHEEL": f"Wheel-Version: 1.0\nRoot-Is-Purelib: {str(tag == PURE).lower()}\n" + _tags(tag),
    }
    record = "".join(f"{path},{_sum(data)},{len(_bytes(data))}\n" for path, data in content.items())
    wheel = folder / f"{module}-{version}-{tag}.whl"
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        for path, data in {**content, f"{info}/RECORD": record + f"{info}/RECORD,,\n"}.items():
            entry = zipfile.ZipInfo(path)  # of 1980, so that nothing depends on the clock
            entry.external_attr = 0o644 << 16
            archive.writestr(entry, data, zipfile.ZIP_DEFLATED)
    return wheel


BACKEND = """
import base64, hashlib, os, zipfile

NAME, VERSION, REQUIRES = {name!r}, {version!r}, {requires!r}

def build_wheel(folder, config_settings=None, metadata_directory=None):
    info = f"{{NAME}}-{{VERSION}}.dist-info"
    files = {{
        f"{{NAME}}.py": open("code.txt").read(),
        f"{{info}}/METADATA": "\\n".join([f"Metadata-Version: 2.1\\nName: {{NAME}}\\nVersion: {{VERSION}}"]
            + [f"Requires-Dist: {{one}}" for one in REQUIRES]) + "\\n",
        f"{{info}}/WHEEL": "Wheel-Version: 1.0\\nRoot-Is-Purelib: true\\nTag: {tag}\\n",
    }}
    record = "".join(
        f"{{path}},sha256={{base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b'=').decode()}},"
        f"{{len(text)}}\\n"
        for path, text in files.items()
    )
    filename = f"{{NAME}}-{{VERSION}}-{tag}.whl"
    with zipfile.ZipFile(os.path.join(folder, filename), "w") as archive:
        for path, text in {{**files, f"{{info}}/RECORD": record + f"{{info}}/RECORD,,\\n"}}.items():
            archive.writestr(path, text)
    return filename
"""


def make_source(folder: Path, name: str, version: str, *, requires: Sequence[str] = (), tag: str = PURE) -> Path:
    """The source of a package with one module that has `version`; it has a build backend of its own."""
    folder.mkdir(parents=True, exist_ok=True)
    backend = BACKEND.format(name=name, version=version, requires=list(requires), tag=tag)
    project = f'name = "{name}"\nversion = "{version}"\ndependencies = {json.dumps(list(requires))}\n'
    build = '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n'
    (folder / "backend.py").write_text(backend)
    (folder / "code.txt").write_text(f"version = {version!r}\n")
    (folder / "pyproject.toml").write_text(f"{build}[project]\n{project}")
    (folder / "PKG-INFO").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    return folder


def _tags(tag: str) -> str:
    python, abi, platforms = tag.split("-")
    return "".join(f"Tag: {python}-{abi}-{platform}\n" for platform in platforms.split("."))


def _bytes(data: str | bytes) -> bytes:
    return data.encode() if isinstance(data, str) else data


def _sum(data: str | bytes) -> str:
    return "sha256=" + base64.urlsafe_b64encode(hashlib.sha256(_bytes(data)).digest()).rstrip(b"=").decode()


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


class Index:
    """The wheels of a folder as a simple index (PEP 503) on an address of this machine.

    Any file of the folder can be had under /files/. What `fail` says is answered first.
    """

    def __init__(
        self,
        folder: Path,
        *,
        address: str = "127.0.0.1",
        user: str = "",
        password: str = "",
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self.folder = folder
        self.requests: list[str] = []
        """The paths asked for, each time they were asked for."""
        self.fail: dict[str, list[int]] = {}
        """Path → statuses to answer with before it is served; -1 breaks off in the middle of the answer."""
        self.hashes = True
        """Whether links say what the files' hashes are."""
        self.lasting = False
        """Whether clients are told that files never change, as public indexes do."""
        self._login = base64.b64encode(f"{user}:{password}".encode()).decode() if user else ""
        self._userinfo = f"{quote(user, safe='')}:{quote(password, safe='')}@" if user else ""
        self._server = _Server((address, 0), _Handler)
        self._scheme = "https" if tls else "http"
        if tls:
            self._server.socket = tls.wrap_socket(self._server.socket, server_side=True)
        self._server.index = self
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True)
        self._thread.start()

    def __enter__(self) -> Index:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """From now on nobody answers at its address. May be called again."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    @property
    def root(self) -> str:
        """Its address without credentials."""
        host, port = self._server.server_address[:2]
        return f"{self._scheme}://{host!s}:{port}"

    @property
    def url(self) -> str:
        """What to give as an index, without credentials."""
        return f"{self.root}/simple"

    @property
    def secret_url(self) -> str:
        """The same with user and password."""
        return self.url.replace("http://", f"http://{self._userinfo}", 1)

    def add(self, name: str, version: str, **options: object) -> Path:
        """Makes a wheel and serves it."""
        return make_wheel(self.folder, name, version, **options)  # type: ignore[arg-type]

    def add_source(self, name: str, version: str, **options: object) -> Path:
        """Makes a source archive and serves it."""
        self.folder.mkdir(parents=True, exist_ok=True)
        source = make_source(self.folder.parent / "sources" / f"{name}-{version}", name, version, **options)  # type: ignore[arg-type]
        archive = self.folder / f"{name}-{version}.tar.gz"
        with tarfile.open(archive, "w:gz") as tar:
            tar.add(source, f"{name}-{version}")
        return archive

    def count(self, part: str) -> int:
        """How often something with `part` in its path was asked for."""
        return sum(part in path for path in self.requests)

    def answer(self, path: str, login: str) -> tuple[int, bytes]:
        self.requests.append(path)
        if self.fail.get(path):
            return self.fail[path].pop(0), b""
        if self._login and login != f"Basic {self._login}":
            return 401, b""
        parts = [unquote(part) for part in path.strip("/").split("/")]
        if parts[0] == "files" and len(parts) == 2 and (self.folder / parts[1]).is_file():
            return 200, (self.folder / parts[1]).read_bytes()
        if parts[0] == "moved" and len(parts) == 2:
            return 302, f"{self.root}/files/{quote(parts[1])}".encode()
        if parts[0] == "simple" and len(parts) == 2:
            page = self._page(parts[1])
            return (200, page.encode()) if page else (404, b"")
        return 404, b""

    def _page(self, name: str) -> str:
        links = []
        for wheel in sorted([*self.folder.glob("*.whl"), *self.folder.glob("*.tar.gz")]):
            if re.sub(r"[-_.]+", "-", wheel.name.partition("-")[0]).lower() == name:
                known = f"#sha256={sha256(wheel)}" if self.hashes else ""
                links.append(f'<a href="/files/{quote(wheel.name)}{known}">{wheel.name}</a>\n')
        return f"<!DOCTYPE html>\n<html><body>\n{''.join(links)}</body></html>\n" if links else ""


class _Server(ThreadingHTTPServer):
    daemon_threads = False  # waited for in server_close, so that a test leaves no thread
    index: Index


class _Handler(BaseHTTPRequestHandler):
    server: _Server

    def do_GET(self) -> None:
        status, body = self.server.index.answer(self.path, self.headers.get("Authorization", ""))
        self.send_response(200 if status == -1 else status)
        if status == 401:
            self.send_header("WWW-Authenticate", 'Basic realm="index"')
        if status == 302:
            self.send_header("Location", body.decode())
            body = b""
        self.send_header("Content-Type", "text/html" if self.path.startswith("/simple") else "application/octet-stream")
        if self.server.index.lasting and self.path.startswith("/files/"):
            self.send_header("Cache-Control", "max-age=365000000, immutable, public")
        self.send_header("Content-Length", "1000" if status == -1 else str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(b"half" if status == -1 else body)

    do_HEAD = do_GET

    def log_message(self, format: str, *arguments: object) -> None:  # noqa: A002 - the base class's name
        """Says nothing: tests look at `requests`."""


def isolate_uv(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """uv sees nothing of this machine's settings and caches."""
    for name in list(os.environ):
        if name.upper().startswith(("UV_", "PIP_", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("NETRC", os.devnull)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("UV_CACHE_DIR", str(tmp_path / "uv"))
    monkeypatch.setenv("UV_HTTP_RETRIES", "0")
