"""Downloads over HTTP into the store, on a host or on the user's machine: resumed after interruptions, and checked.

A download is written to a draft that is named after the content, so a later download of any program on this host
continues it.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import http.client
import os
import socket
import threading
import urllib.error
import urllib.request
from urllib.parse import urlsplit

from skyfab.host.agent.store import seal
from skyfab.host.hub import ContentHash, HubCache

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import IO, Any, Final

UNREACHED, REFUSED, DAMAGED = "unreached", "refused", "damaged"
"""Why a download ends: the server does not respond, responds with an error, or sends other content."""
_PIECE: Final = 1 << 20
_PROBE: Final = 5.0
"""Seconds for a connection to a server, and for its response if that only shows whether it can be reached."""
_SILENCE: Final = 30.0
"""Seconds without a byte after which a connection counts as broken."""
_TRIES: Final = 5
"""Consecutive connections without progress after which a download ends."""
_BUSY: Final = (408, 425, 429, 500, 502, 503, 504)
"""HTTP statuses after which a retry may succeed."""
_LATER: Final = 60
"""Seconds after which a server may ask to be asked again, at most."""
_FAILURES: Final = (OSError, http.client.HTTPException)
"""The errors of a connection."""


class Downloads(HubCache):
    """The downloads of one process, one at a time: `begin`, and then `look` until it has ended."""

    def __init__(self, cache: str) -> None:
        super().__init__(cache)
        self._thread = threading.Thread()
        self._done = 0
        self._result = ("", "", "")
        self._error: OSError | None = None
        self._closed = threading.Event()

    def page(self, url: str, token: str, most: int) -> tuple[int, str, int, bytes]:
        """The response of a server: status, cause of an error, size of the content, and up to `most` bytes of it.

        The status is 0 if the server cannot be reached, and the size -1 if it is unknown.
        """
        try:
            with _opened(url, token, "" if most else "0-0", _SILENCE if most else _PROBE) as response:
                head = response.headers
                size = head.get("Content-Range", "").rpartition("/")[2] or head.get("Content-Length", "")
                return 200, "", int(size) if size.isdecimal() else -1, response.read(most)
        except urllib.error.HTTPError as error:
            error.close()
            return error.code, error.headers.get("X-Error-Code", "") if error.headers else "", -1, b""
        except (*_FAILURES, ValueError) as error:
            return 0, _why(error), -1, b""

    def begin(self, url: str, tag: str, size: int, token: str) -> None:
        """Starts to download the content that the hub names `tag`."""
        self._done, self._result, self._error = 0, ("", "", ""), None
        self._thread = threading.Thread(target=self._run, args=(url, tag, size, token), daemon=True)
        self._thread.start()

    def look(self, seconds: float) -> tuple[int, str, str, str]:
        """How many bytes have arrived, the name in the store once it is complete, why it has ended, and details.

        Waits for its end, or for some time. Raises errors of the disk.
        """
        self._thread.join(seconds)
        if self._error is not None:
            raise self._error
        return (self._done, *self._result)

    def close(self) -> None:
        """Ends the download; what has arrived is kept."""
        self._closed.set()

    def _run(self, url: str, tag: str, size: int, token: str) -> None:
        try:
            self._result = (self._download(url, tag, size, token), "", "")
        except _Ended as ended:
            self._result = ("", ended.problem, str(ended))
        except OSError as error:
            self._error = error
        except Exception as error:  # of urllib, for a reply that it cannot parse
            self._result = ("", UNREACHED, _why(error))

    def _download(self, url: str, tag: str, size: int, token: str) -> str:
        with self._draft(tag) as file:
            if file is None:
                return tag
            for _ in range(2):
                had = os.fstat(file.fileno()).st_size
                found = self._receive(file, url, size, token)
                file.flush()
                is_whole = os.fstat(file.fileno()).st_size == size  # else another process wrote to it: locks failed
                if (name := found.name(tag)) and is_whole:
                    seal(file.name, name)
                    os.replace(file.name, os.path.join(self.store, name))
                    return name
                file.truncate(0)
                if not had:  # else the part of an earlier download may be damaged
                    break
            raise _Ended(DAMAGED, f"expected {tag}, found {found.like(tag)}")

    @contextlib.contextmanager
    def _draft(self, tag: str) -> Iterator[IO[bytes] | None]:
        """The draft, locked against other processes; None if the store already has the content.

        Each host has its own: in a shared store, locks may work on one host only.
        """
        os.makedirs(self.store, mode=0o700, exist_ok=True)
        path = os.path.join(self.store, f".{tag[:16]}-{tag[16:]}.{socket.gethostname()}")
        while not os.path.exists(os.path.join(self.store, tag)):
            with open(path, "a+b") as file:
                with contextlib.suppress(OSError):  # some file systems have no locks
                    fcntl.flock(file, fcntl.LOCK_EX)
                if os.path.exists(path) and os.path.samestat(os.fstat(file.fileno()), os.stat(path)):
                    yield file
                    return
        yield None

    def _receive(self, file: IO[bytes], url: str, size: int, token: str) -> ContentHash:
        """Continues a draft until it is complete."""
        found, self._done = ContentHash(size), 0
        file.seek(0)
        while piece := file.read(_PIECE):
            found.update(piece)
            self._done += len(piece)
        tries, furthest = 0, self._done
        while self._done < size:
            why, pause = "", 0
            try:
                with _asked(url, token, f"{self._done}-" if self._done else "") as response:
                    if self._done and response.status != 206:  # the server sends all of it
                        file.truncate(0)
                        found, self._done = ContentHash(size), 0
                    while self._done < size and (piece := self._read(response, size - self._done)):
                        file.write(piece)
                        found.update(piece)
                        self._done += len(piece)
            except _Broken as broken:
                why, pause = str(broken), broken.pause
            tries, furthest = (0, self._done) if self._done > furthest else (tries + 1, furthest)
            if tries == _TRIES:
                raise _Ended(UNREACHED, why or f"the server sent only {self._done:,} of {size:,} bytes")
            if tries:
                self._closed.wait(max(pause, 2**tries / 8))
        return found

    def _read(self, response: Any, most: int) -> bytes:
        if self._closed.is_set():
            raise _Ended(UNREACHED, "interrupted")
        try:
            data: bytes = response.read(min(most, _PIECE))
        except _FAILURES as error:  # but not those of the disk
            raise _Broken(_why(error)) from None
        return data


class _Ended(Exception):
    def __init__(self, problem: str, text: str) -> None:
        super().__init__(text)
        self.problem = problem


class _Broken(Exception):
    """The connection failed; a retry may succeed."""

    def __init__(self, why: str, pause: int = 0) -> None:
        """`pause` is how many seconds the server asks to wait."""
        super().__init__(why)
        self.pause = pause


@contextlib.contextmanager
def _asked(url: str, token: str, part: str) -> Iterator[Any]:
    """A response, as `_opened` returns it. Raises _Ended and _Broken."""
    try:
        response = _opened(url, token, part, _SILENCE)
    except urllib.error.HTTPError as error:
        error.close()
        if error.code not in _BUSY:
            raise _Ended(REFUSED, str(error.code)) from None
        later = (error.headers.get("Retry-After") if error.headers else None) or ""
        raise _Broken(_why(error), min(int(later), _LATER) if later.isdecimal() else 2) from None
    except _FAILURES as error:
        raise _Broken(_why(error)) from None
    with response:
        yield response


def _opened(url: str, token: str, part: str, silence: float) -> Any:
    """A response with all of the content, or a part of it."""
    headers = {"User-Agent": "skyfab", "Accept-Encoding": "identity"}
    headers |= {"Authorization": f"Bearer {token}"} if token else {}
    headers |= {"Range": f"bytes={part}"} if part else {}
    opener = urllib.request.build_opener(_Redirects, _Http, _Https)
    return opener.open(urllib.request.Request(url, headers=headers), timeout=silence)


def _patient(kind: Callable[..., Any], host: str, *, timeout: float, **options: Any) -> Any:
    """A connection of urllib, which may need less time to begin than to respond."""
    made = kind(host, timeout=min(timeout, _PROBE), **options)
    connect = made.connect

    def connected() -> None:
        connect()
        made.sock.settimeout(timeout)

    made.connect = connected
    return made


class _Http(urllib.request.HTTPHandler):
    def do_open(self, http_class: Any, req: Any, **options: Any) -> Any:
        return super().do_open(functools.partial(_patient, http_class), req, **options)


class _Https(urllib.request.HTTPSHandler):
    def do_open(self, http_class: Any, req: Any, **options: Any) -> Any:
        return super().do_open(functools.partial(_patient, http_class), req, **options)


class _Redirects(urllib.request.HTTPRedirectHandler):
    """Follows redirects to other servers, which do not get the token."""

    def redirect_request(self, request: Any, response: Any, code: int, text: str, headers: Any, url: str) -> Any:
        found = super().redirect_request(request, response, code, text, headers, url)
        if found is not None and urlsplit(url)[:2] != urlsplit(request.full_url)[:2]:
            found.remove_header("Authorization")
        return found


def _why(error: Exception) -> str:
    """The cause of an error, without the URL of a redirect, which may contain a signature."""
    if isinstance(error, urllib.error.HTTPError):
        return f"HTTP {error.code}"
    reason = getattr(error, "reason", None) or error
    return str(getattr(reason, "strerror", None) or reason)[:200] or type(error).__name__
