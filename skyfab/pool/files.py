"""Files and folders to the hosts of a pool and back: `Compute.upload` and `Compute.download`."""

from __future__ import annotations

import errno
import functools
import itertools
import json
import os
import pickle
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from skyfab._util.signals import SIGNAL_GUARD
from skyfab._util.sizes import readable
from skyfab.calls.call import as_function
from skyfab.calls.gitignore import as_git, is_kept
from skyfab.calls.pack import PackedCall, PackedFunction, pack_function
from skyfab.calls.project import note_laid_out
from skyfab.calls.results import unpack_result
from skyfab.errors import CallCancelled, HostLost, HostUnfit, ProtocolError, SkyfabError, UsageError
from skyfab.files.entries import FOLDER, LINK, MOST_ENTRIES, Entry, name, walk
from skyfab.files.source import Source, and_above, expected
from skyfab.files.target import Target, is_at
from skyfab.files.transfer import Here, Ready, Report, Side, Transfer, check
from skyfab.host.ask.files import serve
from skyfab.pool.futures import refuse_to_block
from skyfab.pool.node import Node, WorkerSpec
from skyfab.protocol import codec, messages
from skyfab.session.fanout import Raised, for_each_host, one_error
from skyfab.session.replies import Reply
from skyfab.ui.events import Events, Moved, Notice

if TYPE_CHECKING:
    from skyfab.files.entries import Skip

_PACE: Final = 0.1
"""Seconds between two events of progress."""
_SHOWN: Final = 20
"""Paths that are left out and shown."""
_FULL: Final = (errno.ENOSPC, errno.EDQUOT)
_FULL_HINT: Final = "free some space on it, or send to another disk (to=…, --to=…)"
AGAIN: Final = "run it again: it resumes where it stopped"
_workers = itertools.count(1)
AnyPath = str | os.PathLike[str]


def local_path(path: AnyPath) -> Path:
    """A path on this machine. One that exists is used literally, also if it begins with ``~``."""
    return Path(path) if os.path.lexists(path) else Path(path).expanduser()


class Files:
    """The transfers of a pool."""

    def __init__(self, spec_of: Callable[[Node, str], WorkerSpec], events: Events) -> None:
        self._spec_of = spec_of
        self._events = events

    def upload(self, path: AnyPath, to: AnyPath | None, nodes: Sequence[Node]) -> list[Report]:
        """Copies a file or folder to hosts. Raises OSError for what cannot be read here."""
        if not os.fspath(path):
            raise UsageError("upload needs the path of a file or folder", hint='"." is the current folder')
        top = local_path(path).absolute()
        base = os.fsencode(top.name)
        skipped: list[Skip] = []
        is_file = not top.is_dir()
        found: Iterable[tuple[Entry, bytes]] = walk(os.fsencode(top), base if is_file else b"", skipped)
        if len(nodes) > 1:  # for one host, it is listed here while that host compares
            found = list(found)
        place = os.fsencode(to if to is not None else _place(top, elsewhere=top.name))
        return self._send(found, skipped, place, base, is_file, nodes)

    def lay_out(self, folder: Path, nodes: Sequence[Node], *, ignored: bool = False) -> tuple[str, list[Report]]:
        """Copies what .gitignore allows of a folder, or all of it (`ignored`), to the same place in working folders.

        Returns that place, relative to the working folder, beside the reports.
        Files that are newer there stay, and what was fetched from these hosts into folders of their names is left out.
        """
        skipped: list[Skip] = []
        fetched = {os.fsencode(node.name) for node in nodes}
        allowed = is_kept if ignored else as_git(folder)
        found = list(
            walk(
                os.fsencode(folder),
                b"",
                skipped,
                lambda child, path: path.partition(b"/")[0] not in fetched and allowed(child, path),
            )
        )
        place = _place(folder, elsewhere=".")
        there = [node for node in nodes if not node.workdir.callers]  # where it is not this folder itself
        return place, self._send(found, skipped, os.fsencode(place), b"", False, there, laid_out=folder)

    def _send(
        self,
        found: Iterable[tuple[Entry, bytes]],
        skipped: list[Skip],
        place: bytes,
        base: bytes,
        is_file: bool,
        nodes: Sequence[Node],
        *,
        laid_out: Path | None = None,
    ) -> list[Report]:
        def send(node: Node, stopped: threading.Event) -> Report:
            own = list(skipped) if len(nodes) > 1 else skipped  # `found` may still add to it
            with closing(Remote(node, self._spec_of(node, ""), claims=True)) as remote:
                remote.stopped = stopped
                keep_newer = laid_out is not None
                there, called, room = check("receive", remote.ask("receive", place, base, is_file, keep_newer).result())
                if laid_out is not None:
                    note_laid_out(node.name, there, str(laid_out))
                entries = [(_renamed(entry, name(called)), path) for entry, path in found] if is_file else found
                with closing(Source(entries, own)) as source:
                    transfer = self._transfer(node, "sending files", Here(source), remote)
                    transfer.run(functools.partial(fits, room, node.name))
                return transfer.report

        return self._on_each(send, nodes)

    def download(self, paths: Sequence[AnyPath], to: AnyPath, nodes: Sequence[Node], *, apart: bool) -> list[Report]:
        """Copies files and folders from hosts; with `apart`, what several have into folders of the hosts' names.

        Raises UsageError if there is nothing to copy on any host.
        """
        folder = Path(to).expanduser().absolute()
        is_new = not folder.is_dir()
        patterns = [os.fsencode(path) for path in paths]
        places: dict[str, str] = {}
        sources = {node.name: Remote(node, self._spec_of(node, "")) for node in nodes}

        def look(node: Node, stopped: threading.Event) -> Report:
            source = sources[node.name]
            source.stopped = stopped
            try:
                places[node.name] = check("send", source.ask("send", patterns).result())
                if apart:
                    source.list(os.fsencode(folder))
            finally:
                if stopped.is_set():  # after Ctrl-C, nobody else closes it
                    source.close()
            return Report(node.name)

        def fetch(node: Node, stopped: threading.Event) -> Report:
            is_inner = apart

            def place_of(entry: Entry) -> bytes:
                nonlocal is_inner
                is_inner &= not (lone := is_lone(entry, node.name))
                return entry.path if lone else os.fsencode(node.name) + b"/" + entry.path

            with closing(sources[node.name]) as source:
                source.stopped = stopped
                with closing(Target(os.fsencode(folder), expects=expected(patterns), place_of=place_of)) as target:
                    transfer = self._transfer(node, "fetching files", source, Here(target))
                    transfer.run(functools.partial(fits, target.room, ""))
                transfer.report.folder = _typed(folder / node.name if is_inner else folder)
                with suppress(SkyfabError):  # it is reported as written then
                    source.ask("fetched", patterns).result()
                return transfer.report

        try:
            self._on_each(look, nodes)
            is_lone = _lone(sources) if apart else lambda entry, host: True
            reports = self._on_each(fetch, nodes)
        finally:
            for source in sources.values():
                source.close()
        empty = [report.host for report in reports if not report.entries]
        if len(empty) == len(nodes):
            if is_new:
                with suppress(OSError):  # it is not empty
                    folder.rmdir()
            words = ", ".join(map(str, paths))
            is_relative = not words.startswith(("/", "~"))
            hint = f"looked in {places[empty[0]]}" if is_relative else None
            raise UsageError(f"no file matches {words}", host=empty[0], hint=hint)
        for host in empty:
            self._events.emit(Notice(host=host, text=f"no file matches {', '.join(map(str, paths))}"))
        return reports

    # ---- one host

    def _transfer(self, node: Node, what: str, source: Side, target: Side) -> Transfer:
        began = last = time.monotonic()
        transfer: Transfer

        def progress(done: int, total: int) -> None:
            nonlocal last
            now = time.monotonic()
            if total and (done == total or now - last > _PACE):
                last = now
                self._events.emit(Moved(host=node.name, what=what, done=done, total=total))
            transfer.report.seconds = now - began

        transfer = Transfer(source, target, progress)
        transfer.report.host = node.name
        return transfer

    def _on_each(self, action: Callable[[Node, threading.Event], Report], nodes: Sequence[Node]) -> list[Report]:
        refuse_to_block()
        stopped = threading.Event()

        def act(node: Node) -> Report:
            try:
                return action(node, stopped)
            except ProtocolError as error:
                error.host = error.host or node.name
                raise

        try:
            outcomes = for_each_host(act, nodes)
        finally:
            stopped.set()  # after Ctrl-C, threads end with their next request
        errors = [outcome.error for outcome in outcomes if isinstance(outcome, Raised)]
        if errors:
            raise one_error(errors, len(nodes))
        reports = [outcome for outcome in outcomes if isinstance(outcome, Report)]
        for report in reports:
            for path, why in report.skipped[:_SHOWN]:
                self._events.emit(Notice(host=report.host, text=f"skipped {path}: {why}"))
            if len(report.skipped) > _SHOWN:
                self._events.emit(Notice(host=report.host, text=f"skipped {len(report.skipped) - _SHOWN} more"))
        return reports


class Remote:
    """The source or target on a host: a worker of its own, which is asked with calls."""

    def __init__(self, node: Node, spec: WorkerSpec, *, claims: bool = False, full: str = _FULL_HINT) -> None:
        """`full` is the hint for a disk that is full."""
        self._node = node
        self._full = full
        self._session = node.session
        self._worker = f"files.{next(_workers)}"
        self._spec = replace(spec, pipelined=True, reported=False, plain=True, claims=claims)
        self.stopped = threading.Event()
        """Once it is set, requests fail."""
        self.paths: dict[bytes, bool] = {}  # whether the file is as it is here
        """Of all entries, after `list`."""
        self._pages: deque[Any] = deque()

    def list(self, folder: bytes) -> None:
        """Lists the source, once, for a transfer into `folder`, to which the replies are given again."""
        pages: deque[Any] = deque()
        while not pages or (pages[-1][0] and len(self.paths) <= MOST_ENTRIES):  # the transfer refuses more
            pages.append(check("rows", self.ask("rows").result()))
            self.paths |= {entry.path: is_at(folder, entry) for entry in map(Entry.parse, pages[-1][0])}
        self._pages = pages

    def ask(self, request: str, *arguments: Any) -> Answer | Ready:
        if request == "rows" and self._pages:
            return Ready(self._pages.popleft())
        if self.stopped.is_set():
            raise CallCancelled("the transfer was interrupted", host=self._node.name)
        if self._node.session is not self._session:
            raise HostLost(
                "it was lost during the transfer",
                host=self._node.name,
                hint=AGAIN,
            )
        *words, last = (request, *arguments)
        if isinstance(last, (bytes, memoryview)) and request in ("store", "piece", "chunk"):
            last = pickle.PickleBuffer(last)
        answer = Answer(self._node.name, request, self._full)
        payload = codec.dumps((*words, last, None))
        with SIGNAL_GUARD:
            call = PackedCall(function=_server(), arguments=payload, label=request)
            self._node.call(self._worker, self._spec, call, caller=answer, store="none")
        return answer

    def close(self) -> None:
        with SIGNAL_GUARD, suppress(SkyfabError):
            self._node.release(self._worker)


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
            raise _unfit(errno.ESTALE, "the process of the transfer was killed", self._host, self._full)
        if not isinstance(message, messages.Result) or not buffers:
            return unpack_result(message, buffers, host=self._host, rank=None, label="a transfer", untrusted=True)
        try:
            found = json.loads(bytes(buffers[0]))
            if "value" not in found:
                raise _unfit(int(found["errno"] or 0), str(found["text"]), self._host, self._full)
            return found["value"] if len(buffers) == 1 else [*found["value"], *buffers[1:]]
        except (ValueError, TypeError, KeyError, OverflowError, RecursionError) as error:
            raise ProtocolError(f"not a reply to {self._request}", host=self._host) from error


@functools.cache
def _server() -> PackedFunction:
    """What workers of transfers run."""
    return pack_function(as_function(serve))


def _lone(sources: Mapping[str, Remote]) -> Callable[[Entry, str], bool]:
    """Says of a host's entry whether it keeps its place: the host alone has it, or something in it.

    So does a file that the others have as it is here: they were sent it, and this host has written it since.
    """
    hosts: dict[bytes, list[str]] = {}
    for host, source in sources.items():
        for path in source.paths:
            hosts.setdefault(path, []).append(host)
    names = {os.fsencode(host) for host in sources}
    lone: set[bytes] = set()
    for path, owners in hosts.items():
        hosts[path] = owners if len(owners) == 1 else [host for host in owners if not sources[host].paths[path]]
        if len(hosts[path]) == 1 and path.split(b"/")[0] not in names:
            lone.update(and_above(path))

    def is_lone(entry: Entry, host: str) -> bool:
        target = os.path.normpath(b"%s/../%s" % (entry.path, entry.link))
        if entry.kind == LINK and target in hosts and target not in lone:  # a link is beside its file
            return False
        return entry.path in lone and (entry.kind == FOLDER or hosts[entry.path] == [host])

    return is_lone


def _unfit(number: int, text: str, host: str, full: str = _FULL_HINT) -> HostUnfit:
    hint = None
    if number in _FULL:
        hint = full
    elif number == errno.ESTALE:
        hint = AGAIN
    return HostUnfit(text, host=host, hint=hint)


def fits(room: int, host: str, size: int) -> None:
    """Raises HostUnfit, or OSError for this machine, if this many bytes do not fit."""
    if size <= room:
        return
    text = f"not enough space for these files: they need {readable(size)}, {readable(room)} is free"
    raise _unfit(errno.ENOSPC, text, host) if host else OSError(errno.ENOSPC, text)


def _typed(folder: Path) -> str:
    """A folder of this machine as one would type it."""
    try:
        return str(folder.relative_to(Path.cwd()))
    except (ValueError, OSError):
        return str(folder)


def _place(path: Path, *, elsewhere: str) -> str:
    """The path in working folders that corresponds to one of this machine: as in the current folder."""
    path, here = Path(os.path.normpath(path)), Path.cwd()
    return str(path.relative_to(here)) if path.is_relative_to(here) else elsewhere


def _renamed(entry: Entry, called: bytes) -> Entry:
    return Entry(called, entry.kind, entry.size, entry.time, entry.mode, entry.link)
