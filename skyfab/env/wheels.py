"""Selects the wheels that a host can install, and downloads them to a cache on this machine."""

from __future__ import annotations

import base64
import hashlib
import http.client
import ssl
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any
from urllib.parse import urlsplit
from urllib.request import url2pathname

from packaging.markers import Marker, UndefinedEnvironmentName
from packaging.tags import Tag, compatible_tags, cpython_tags, mac_platforms

from skyfab._util.cache import cache_folder
from skyfab.env import uv
from skyfab.env.facts import Target
from skyfab.errors import SkyfabError, UsageError

_PIECE = 256 * 1024
_TRIES = 3
_PAUSE = 0.5


class FetchError(SkyfabError):
    """A file of a lock could not be downloaded, or is not the one that was locked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wheel:
    """One file of a lock."""

    package: str
    version: str
    filename: str
    url: str = field(repr=False)
    """http, https or file. It may contain a user and password, and is therefore not shown."""
    sha256: str
    size: int | None = None


# ---- compatible tags


def tags(target: Target) -> tuple[Tag, ...]:
    """The tags that a target can install, best first, as pip and uv order them."""
    major, minor = (int(part) for part in target.python.split(".")[:2])
    platforms = list(_platforms(target))
    interpreter = f"cp{major}{minor}"
    return (
        *cpython_tags((major, minor), [interpreter], platforms),
        *compatible_tags((major, minor), interpreter, platforms),
    )


def _platforms(target: Target) -> Iterator[str]:
    arch, (libc, release) = target.machine, target.c_library
    if target.system == "Darwin":
        # The macOS version is not known: uv resolves for 13, too.
        yield from mac_platforms((13, 0), "arm64" if arch == "aarch64" else arch)
        return
    if libc == "glibc" and len(release) == 2:
        oldest = 5 if arch == "x86_64" else 17
        aliases = {17: "manylinux2014", 12: "manylinux2010", 5: "manylinux1"}
        for minor in range(release[1], oldest - 1, -1):
            yield f"manylinux_2_{minor}_{arch}"
            if minor in aliases:
                yield f"{aliases[minor]}_{arch}"
    elif libc == "musl" and len(release) == 2:
        yield from (f"musllinux_1_{minor}_{arch}" for minor in range(release[1], -1, -1))
    yield f"linux_{arch}"


def _markers(target: Target) -> dict[str, str]:
    """What differs from the Python that runs this."""
    return {
        "platform_machine": target.arch,
        "platform_release": "",
        "platform_system": target.system,
        "platform_version": "",
        "python_full_version": f"{target.python}.0",
        "python_version": target.python,
        "sys_platform": target.system.lower(),
    }


def applies(marker: str, target: Target, groups: Set[str] = frozenset()) -> bool:
    """Evaluates a marker for a target and dependency groups; an image has no extras. Raises InvalidMarker."""
    if not marker:
        return True
    try:
        return Marker(marker).evaluate(
            {**_markers(target), "extras": set(), "dependency_groups": groups}, context="lock_file"
        )
    except UndefinedEnvironmentName:
        return False


# ---- downloading


def fetch(wheels: Sequence[Wheel], *, progress: Callable[[int, int], None] | None = None) -> dict[str, Path]:
    """Downloads wheels to the cache folder of this machine, four at a time; returns sha256 → file.

    Files that are there already are not downloaded again. `progress` is called with the bytes received and the expected
    total, 0 if a size is not known, from several threads but one at a time. Raises FetchError.
    """
    once = {wheel.sha256: wheel for wheel in wheels}
    is_known = all(wheel.size is not None for wheel in once.values())
    count = _Progress(progress, sum(wheel.size or 0 for wheel in once.values()) if is_known else 0)
    source = _Source(wheels)
    with ThreadPoolExecutor(4, thread_name_prefix="skyfab-fetch") as threads:
        jobs = {sha256: threads.submit(_one, wheel, source, count) for sha256, wheel in once.items()}
        try:
            return {sha256: job.result() for sha256, job in jobs.items()}
        except BaseException:
            count.stopped = True
            threads.shutdown(cancel_futures=True)
            raise


def delete_damaged(wheels: Iterable[Wheel]) -> None:
    """Deletes wheels from the cache folder of this machine whose content is not the locked one."""
    for wheel in wheels:
        path = _place(wheel)
        with uv.making(path), suppress(FileNotFoundError), path.open("rb") as file:
            digest = hashlib.sha256()
            while piece := file.read(_PIECE):
                digest.update(piece)
            if digest.hexdigest() != wheel.sha256:
                path.unlink()


def _place(wheel: Wheel) -> Path:
    return cache_folder() / "wheels" / wheel.sha256 / Path(wheel.filename).name


def _one(wheel: Wheel, source: _Source, count: _Progress) -> Path:
    path = _place(wheel)
    with uv.making(path):  # another process may be downloading it
        if path.exists() and wheel.size in {None, path.stat().st_size}:
            count.add(path.stat().st_size)
        else:
            _bring(wheel, path, source, count)
    return path


def _bring(wheel: Wheel, path: Path, source: _Source, count: _Progress) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.part")  # the lock is held: overwrites what an interrupted download left
    try:
        for left in reversed(range(_TRIES)):
            try:
                found = _copy(source.open(wheel.url), part, count)
                break
            except (OSError, http.client.HTTPException) as error:
                if isinstance(error, urllib.error.HTTPError):
                    error.close()  # the error is also the open response
                if not left or not _passing(error) or count.stopped:
                    raise FetchError(_why(wheel, error), hint=_hint(error)) from None
                threading.Event().wait(_PAUSE * (_TRIES - left))
        if found != wheel.sha256:
            raise FetchError(
                f"{wheel.package} {wheel.version}: {wheel.filename} does not match the lock\n"
                f"sha256 {found}\nlocked {wheel.sha256}",
                hint="the file in the index has changed: ask its maintainer, or run skyfab prepare --upgrade",
            )
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def _copy(source: IO[bytes], part: Path, count: _Progress) -> str:
    """Writes the data to a file; returns its sha256. After an error its bytes no longer count."""
    digest = hashlib.sha256()
    done = 0
    try:
        with source, part.open("wb") as file:
            while piece := source.read(_PIECE):
                if count.stopped:
                    raise InterruptedError("stopped")
                file.write(piece)
                digest.update(piece)
                count.add(len(piece))
                done += len(piece)
            if missing := getattr(source, "length", 0):  # read(size) does not raise when an HTTP response ends early
                raise http.client.IncompleteRead(b"", missing)
    except BaseException:
        count.add(-done)
        raise
    return digest.hexdigest()


def _passing(error: Exception) -> bool:
    """Whether the same request may succeed a moment later."""
    if isinstance(error, urllib.error.HTTPError):
        return error.code >= 500 or error.code in {408, 429}
    if isinstance(error, urllib.error.URLError):
        return not isinstance(error.reason, ssl.SSLError)
    return isinstance(error, (http.client.HTTPException, ConnectionError, TimeoutError))


def _why(wheel: Wheel, error: Exception) -> str:
    reason = getattr(error, "reason", None) or getattr(error, "strerror", None) or error
    reason = f"{error.code} {reason}" if isinstance(error, urllib.error.HTTPError) else reason
    text = f"cannot get {wheel.package} {wheel.version} from {uv.bare(wheel.url)}: {reason}"
    return uv.redact(text, tuple(filter(None, uv.userinfo(wheel.url) or ())))


def _hint(error: Exception) -> str | None:
    if getattr(error, "code", None) in {401, 403}:
        return "put user and password into the index's URL, pip's configuration or ~/.netrc"
    if isinstance(error, FileNotFoundError) or getattr(error, "code", None) in {404, 410}:
        return "the index no longer has it: lock again"
    return None


class _Progress:
    """Counts bytes and reports them, one call at a time."""

    def __init__(self, tell: Callable[[int, int], None] | None, total: int) -> None:
        self.done = 0
        self.stopped = False
        self._tell, self._total, self._lock = tell, total, threading.Lock()

    def add(self, count: int) -> None:
        with self._lock:
            self.done += count
            if self._tell and count:
                self._tell(self.done, self._total and max(self._total, self.done))


class _Source:
    """Opens URLs as uv would: with its credentials, certificates and proxies."""

    def __init__(self, wheels: Iterable[Wheel]) -> None:
        environ = uv.environment()
        own = {uv.origin(wheel.url): pair for wheel in wheels if (pair := uv.userinfo(wheel.url))}
        proxies = {}
        for scheme in ("http", "https"):
            names = (f"{scheme}_proxy", f"{scheme}_proxy".upper(), "all_proxy", "ALL_PROXY")
            if proxy := next((environ[name] for name in names if environ.get(name)), ""):
                proxies[scheme] = proxy
        self._opener = urllib.request.build_opener(
            _Proxies(proxies), _Login(environ, {**uv.logins(environ), **own}), _Https(environ)
        )
        seconds = environ.get("UV_HTTP_TIMEOUT", "")
        self._timeout = int(seconds) if seconds.isdecimal() else 60

    def open(self, url: str) -> IO[bytes]:
        if uv.is_local(url):
            return Path(url2pathname(urlsplit(url).path) if "://" in url else url).open("rb")
        answer: IO[bytes] = self._opener.open(uv.bare(url), timeout=self._timeout)
        return answer


class _Proxies(urllib.request.ProxyHandler):
    """Refuses SOCKS proxies, which uv can use and urllib cannot."""

    def proxy_open(self, req: urllib.request.Request, proxy: str, type: str) -> Any:  # noqa: A002 - urllib's name
        if proxy.startswith("socks") and not urllib.request.proxy_bypass(req.host):
            raise UsageError(
                f"cannot download {uv.bare(req.full_url)} through a SOCKS proxy",
                hint=f"name an HTTP proxy: {type.upper()}_PROXY=http://HOST:PORT",
            )
        return super().proxy_open(req, proxy, type)


class _Login(urllib.request.BaseHandler):
    """Adds the credentials of a request's own host. They are not forwarded to another: a redirect is a request too."""

    def __init__(self, environ: Mapping[str, str], logins: Mapping[str, tuple[str, str]]) -> None:
        self._environ, self._logins = environ, logins

    def http_request(self, request: urllib.request.Request) -> urllib.request.Request:
        url = request.full_url
        if pair := self._logins.get(uv.origin(url)) or uv.netrc_login(url, self._environ):
            basic = base64.b64encode(":".join(pair).encode()).decode()
            request.add_unredirected_header("Authorization", f"Basic {basic}")
        return request

    https_request = http_request


class _Https(urllib.request.HTTPSHandler):
    """Trusts what uv would trust: SSL_CERT_FILE, SSL_CERT_DIR, and any certificate of a trusted host."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        super().__init__()
        self._environ = environ

    def https_open(self, req: urllib.request.Request) -> http.client.HTTPResponse:
        return self.do_open(http.client.HTTPSConnection, req, context=self._trust(req.host))

    def _trust(self, host: str) -> ssl.SSLContext:
        file, folder = self._environ.get("SSL_CERT_FILE"), self._environ.get("SSL_CERT_DIR")
        context = ssl.create_default_context(cafile=file or None, capath=folder or None)
        if client := self._environ.get("SSL_CLIENT_CERT"):
            context.load_cert_chain(client)
        trusted = self._environ.get("UV_INSECURE_HOST", "").replace(",", " ").split()
        if host in trusted or host.rpartition(":")[0] in trusted:
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
        return context
