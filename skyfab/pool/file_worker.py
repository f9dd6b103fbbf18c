"""Workers of transfers and relays on hosts, and the requests to them."""

from __future__ import annotations

import errno
import functools
import itertools
import json
import pickle
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any, Final

from skyfab._util.signals import SIGNAL_GUARD
from skyfab._util.sizes import readable
from skyfab.calls.call import as_function
from skyfab.calls.pack import PackedCall, PackedFunction, pack_function
from skyfab.calls.results import unpack_result
from skyfab.errors import CallCancelled, HostLost, HostUnfit, ProtocolError, SkyfabError
from skyfab.files.entries import MOST_ENTRIES, Entry
from skyfab.files.target import is_news
from skyfab.files.transfer import Ready, check
from skyfab.host.ask.files import serve
from skyfab.pool.node import Node, WorkerSpec
from skyfab.protocol import codec, messages
from skyfab.session.replies import Reply
from skyfab.ui.events import Events, Notice

_FULL: Final = (errno.ENOSPC, errno.EDQUOT)
_FULL_HINT: Final = "free some space on it, or use another disk (to=…, --to=…; --workdir=… of run)"
AGAIN: Final = "run it again: it resumes where it stopped"
_workers = itertools.count(1)


class Remote:
    """The source or target on a host: a worker of its own, which is asked with calls."""

    def __init__(
        self, node: Node, spec: WorkerSpec, stopped: threading.Event, *, claims: bool = False, full: str = _FULL_HINT
    ) -> None:
        """Once `stopped` is set, requests fail. `full` is the hint for a disk that is full."""
        self._node = node
        self._stopped = stopped
        self._full = full
        self._session = node.session
        self._worker = f"files.{next(_workers)}"
        self._spec = replace(spec, pipelined=True, reported=False, plain=True, claims=claims)
        self.paths: dict[bytes, bool | None] = {}
        """Of all entries, after `list`: whether the file is newer than the one here; None for the same one."""
        self._pages: deque[Any] = deque()

    def list(self, folder: bytes) -> None:
        """Lists the source, once, for a transfer into `folder`, to which the replies are given again."""
        pages: deque[Any] = deque()
        count = 0
        while not pages or (pages[-1][0] and count <= MOST_ENTRIES):  # the transfer refuses more
            pages.append(check("rows", self.ask("rows")))
            count += len(pages[-1][0])
            self.paths |= {entry.path: is_news(folder, entry) for entry in map(Entry.parse, pages[-1][0])}
        self._pages = pages

    def ask(self, request: str, *arguments: Any) -> Answer | Ready:
        if request == "rows" and self._pages:
            return Ready(self._pages.popleft())
        if self._stopped.is_set():
            raise CallCancelled("the transfer was interrupted", host=self._node.name)
        if self._node.session is not self._session:
            raise HostLost("it was lost during the transfer", host=self._node.name, hint=AGAIN)
        *words, last = (request, *arguments)
        if isinstance(last, (bytes, memoryview)) and request in ("store", "piece", "chunk", "relay"):
            last = pickle.PickleBuffer(last)
        answer = Answer(self._node.name, request, self._full)
        payload = codec.dumps((*words, last, None))
        with SIGNAL_GUARD:
            call = PackedCall(function=_server(), arguments=payload, label=request)
            self._node.call(self._worker, self._spec, call, caller=answer, store="none")
        if self._stopped.is_set():  # it may have been closed just before the call started it again
            self.close()
        return answer

    def close(self) -> None:
        with SIGNAL_GUARD, suppress(SkyfabError):
            self._node.release(self._worker)


@contextmanager
def opened(
    nodes: Iterable[Node], spec_of: Callable[[Node, str], WorkerSpec], **options: Any
) -> Iterator[dict[Node, Remote]]:
    """Workers on hosts, for a block that asks them on threads. After Ctrl-C, these end with their next request."""
    stopped = threading.Event()
    remotes = {node: Remote(node, spec_of(node, ""), stopped, **options) for node in nodes}
    try:
        yield remotes
    finally:
        stopped.set()
        for remote in remotes.values():
            remote.close()


class Answer(Reply):
    """The reply of a host to one request."""

    def __init__(self, host: str, request: str, full: str = _FULL_HINT) -> None:
        super().__init__()
        self._host = host
        self._request = request
        self._full = full

    def comes_within(self, seconds: float) -> bool:
        """Waits for the reply, at most this long."""
        until = time.monotonic() + seconds
        while not self.is_there and time.monotonic() < until:
            time.sleep(0.002)
        return self.is_there

    def result(self) -> Any:
        """Waits for the reply. Raises HostUnfit for an error of the host's system."""
        message, buffers = self.wait()
        if isinstance(message, messages.Ended):
            raise unfit(errno.ESTALE, "the process of the transfer was killed", self._host, self._full)
        if not isinstance(message, messages.Result) or not buffers:
            return unpack_result(message, buffers, host=self._host, rank=None, label="a transfer", untrusted=True)
        try:
            found = json.loads(bytes(buffers[0]))
            if "value" not in found:
                raise unfit(int(found["errno"] or 0), str(found["text"]), self._host, self._full)
            return found["value"] if len(buffers) == 1 else [*found["value"], *buffers[1:]]
        except (ValueError, TypeError, KeyError, OverflowError, RecursionError) as error:
            raise ProtocolError(f"not a reply to {self._request}", host=self._host) from error


def tell(events: Events, reports: Sequence[Any]) -> None:
    """Says what has been done on other hosts, before an error of some hosts is raised."""
    for report in reports:
        events.emit(Notice(host=report.host, text=str(report).removeprefix(f"{report.host}: ")))


@functools.cache
def _server() -> PackedFunction:
    """What workers of transfers run."""
    return pack_function(as_function(serve))


def fits(room: int, host: str, size: int, full: str = _FULL_HINT) -> None:
    """Raises HostUnfit, or OSError for this machine, if this many bytes do not fit."""
    if size <= room:
        return
    text = f"not enough space for these files: they need {readable(size)}, {readable(room)} is free"
    raise unfit(errno.ENOSPC, text, host, full) if host else OSError(errno.ENOSPC, text)


def unfit(number: int, text: str, host: str, full: str = _FULL_HINT) -> HostUnfit:
    hint = None
    if number in _FULL:
        hint = full
    elif number == errno.ESTALE:
        hint = AGAIN
    return HostUnfit(text, host=host, hint=hint)
