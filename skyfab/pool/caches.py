"""The caches that a fetch fills, on hosts and on this machine: their content, and downloads into them."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Sequence
from typing import Any, Final

from skyfab._util.cache import made_cache
from skyfab.errors import ProtocolError, SkyfabError, Unreachable
from skyfab.files.entries import words
from skyfab.files.transfer import Here, check
from skyfab.host.download import DAMAGED, REFUSED, Downloads
from skyfab.host.hub import is_sha256
from skyfab.pool.file_worker import Remote, fits
from skyfab.pool.hub import Found, HubFile, denied
from skyfab.pool.node import Node, WorkerSpec
from skyfab.pool.relay import FULL
from skyfab.ui.events import HERE

_LOOK: Final = 0.5
"""Seconds after which a download reports its progress."""
_LONGEST: Final = 300
"""Characters of a host's text in an error."""


class Cache:
    """The cache of a host, or of this machine (`node` is None), with one download at a time."""

    def __init__(self, node: Node | None, spec: WorkerSpec | None, stopped: threading.Event) -> None:
        """Once `stopped` is set, requests fail."""
        self.name = HERE if node is None else node.name
        self._stopped = stopped
        self._asked: Here | Remote
        if node is None or spec is None:
            downloads = Downloads(str(made_cache()))
            self._asked, self._close = Here(downloads), downloads.close
        else:
            remote = Remote(node, spec, stopped, full=FULL)
            self._asked, self._close = remote, remote.close
            self.ask(Any, "hub")

    def ask(self, shape: Any, request: str, *arguments: Any) -> Any:
        """Raises the errors of a host; SkyfabError for those of this machine; ProtocolError for an invalid reply."""
        try:
            return check(request, self._asked.ask(request, *arguments), shape, self.name)
        except OSError as error:
            if isinstance(error, SkyfabError):
                raise
            raise SkyfabError(f"{self.name}: {words(error)}") from error

    def page(self, url: str, token: str, most: int) -> tuple[int, str, int, bytes]:
        """As in host/download.py. A host that does not respond counts as one that does not reach the server."""
        try:
            status, why, size, body = self.ask(tuple[int, str, int, bytes], "page", url, token, most)
        except SkyfabError as error:
            return 0, str(error), -1, b""
        return status, why[:_LONGEST], size, bytes(body[:most])

    def find(self, repository: str, files: Sequence[HubFile]) -> list[str]:
        """The names of contents in the store; empty for what it lacks. Raises HostUnfit without space for that."""
        asked = [(file.tag, file.size) for file in files]
        names: list[str]
        names, room = self.ask(tuple[list[str], int], "find", repository, asked)
        if len(names) != len(files) or not all(map(_may_be, names, files)):
            raise ProtocolError("invalid reply to find", host=self.name)
        fits(room, self.name, sum(file.size for name, file in zip(names, files, strict=True) if not name), FULL)
        return names

    def download(self, file: HubFile, found: Found, progress: Callable[[int], None]) -> str:
        """Returns the name of the content in the store.

        Raises Unreachable, with the cause alone, if another host may get it; UsageError and SkyfabError if no host can.
        """
        self.ask(Any, "begin", file.url, file.tag, file.size, found.token)
        while not self._stopped.is_set():
            done, name, problem, text = self.ask(tuple[int, str, str, str], "look", _LOOK)
            progress(max(0, min(done, file.size)))
            text = text[:_LONGEST]
            if problem == DAMAGED and found.repository:
                raise SkyfabError(f"{file.path} arrived damaged from {file.url}: {text}", host=self.name)
            if problem == DAMAGED:
                hint = "check the sha256, and that the URL is that of the file itself"
                raise SkyfabError(f"{file.url} has another sha256: {text}", host=self.name, hint=hint)
            if problem == REFUSED and text in ("401", "403") and found.shown:
                raise denied(found.shown, text, found.token)
            if problem == REFUSED and text == "416":
                raise SkyfabError(f"{file.url} has fewer bytes than the {file.size} listed", host=self.name)
            if problem == REFUSED:
                raise SkyfabError(f"{file.url}: HTTP {text}", host=self.name)
            if problem or not _may_be(name, file):
                raise Unreachable(text or "invalid reply", host=self.name)
            if name:
                return str(name)
        raise Unreachable("interrupted", host=self.name)

    def close(self) -> None:
        self._close()


def _may_be(name: str, file: HubFile) -> bool:
    """Whether a name in the store is valid; an empty one is, for what the store lacks."""
    return name in ("", file.tag) if is_sha256(file.tag) else re.fullmatch("([0-9a-f]{64})?", name) is not None
