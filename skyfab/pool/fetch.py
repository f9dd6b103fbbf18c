"""Fetches models and other files of servers into the caches of hosts: `Compute.fetch`.

Hosts that reach the server download different files. As soon as one has a file, a relay takes it to the others. If no
host can download, this machine does.
"""

from __future__ import annotations

import itertools
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass
from typing import Any, Final

from skyfab._util.cache import cache_folder, made_cache
from skyfab._util.signals import GuardedCondition
from skyfab._util.sizes import counted, readable
from skyfab.errors import HostError, ProtocolError, SkyfabError, Unreachable, printable
from skyfab.files.entries import words
from skyfab.files.transfer import Here, check
from skyfab.host.download import DAMAGED, REFUSED, Downloads
from skyfab.host.hub import is_sha256
from skyfab.pool.file_worker import AGAIN, Remote, fits, tell
from skyfab.pool.futures import refuse_to_block
from skyfab.pool.hub import Found, HubFile, denied, find
from skyfab.pool.node import Node, WorkerSpec
from skyfab.pool.relay import FULL, Relay
from skyfab.session.fanout import Raised, for_each_host, one_error, results_of
from skyfab.ui.events import HERE, Events, Moved, Step

_LANES: Final = 4
"""Downloads of one host at a time."""
_BATCH: Final = 1 << 30
"""Bytes of the files of one relay at most, if it has more than one: what it has delivered survives interruptions."""
_PACE: Final = 0.1
"""Seconds between two events of progress."""
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


@dataclass(slots=True, repr=False)
class Fetched:
    """What `Compute.fetch` has done for one host."""

    host: str = ""
    path: str = ""
    """Where the files are on the host."""
    files: int = 0
    size: int = 0
    """Bytes of all files."""
    downloaded: int = 0
    """Bytes that the host has downloaded."""
    from_hosts: int = 0
    """Bytes that other hosts have downloaded or had, and sent to it."""
    from_here: int = 0
    """Bytes that this machine has downloaded. Hosts pass them on to each other."""
    seconds: float = 0.0

    def __repr__(self) -> str:
        return f"<{self}>"

    def __str__(self) -> str:
        """
        >>> str(Fetched("node1", "/x", files=3, size=3_000_000, downloaded=1_000_000, from_hosts=2_000_000))
        'node1: 3 files, 3.0 MB; downloaded 1.0 MB, 2.0 MB from other hosts, in 0.0 s: /x'
        >>> str(Fetched("node1", "/x", files=1, size=12))
        'node1: 1 file, 12 bytes; nothing to fetch, in 0.0 s: /x'
        """
        parts = [f"downloaded {readable(self.downloaded)}"] if self.downloaded else []
        parts += [f"{readable(self.from_hosts)} from other hosts"] if self.from_hosts else []
        parts += [f"{readable(self.from_here)} downloaded by {HERE}"] if self.from_here else []
        what = ", ".join(parts) or "nothing to fetch"
        count = f"{counted(self.files, 'file')}, {readable(self.size)}"
        return f"{self.host}: {count}; {what}, in {self.seconds:.1f} s: {self.path}"


def fetch(
    source: str,
    patterns: tuple[Sequence[str], Sequence[str]],
    nodes: Sequence[Node],
    relay: Relay,
    spec_of: Callable[[Node, str], WorkerSpec],
) -> list[Fetched]:
    """Raises the errors of hosts, after the others have all files; UsageError and SkyfabError for the source.

    `patterns` are those of files to fetch, and of files to skip.
    """
    refuse_to_block()
    stopped = threading.Event()

    def open_cache(node: Node | None) -> Cache:
        return Cache(node, None if node is None else spec_of(node, ""), stopped)

    def hide_progress() -> None:
        for name in (HERE, *(node.name for node in nodes)):
            relay.events.emit(Step(host=name, text=""))

    with ExitStack() as ends:
        ends.callback(hide_progress)  # of a fetch that has failed or was interrupted
        here = ends.enter_context(closing(open_cache(None)))
        opened = results_of(for_each_host(open_cache, nodes))
        hosts = {node: ends.enter_context(closing(cache)) for node, cache in zip(nodes, opened, strict=True)}
        ends.callback(stopped.set)  # after Ctrl-C, downloads end; what has arrived is kept
        relay.events.emit(Step(host=HERE, text=f"asking for {source}"))
        found = find(source, lambda *asked: _page([here, *opened], *asked)).matching(*patterns)
        relay.events.emit(Step(host=HERE, text=""))
        return _Fetch(found, hosts, here, relay, open_cache).run()


def _page(caches: Sequence[Cache], url: str, token: str, most: int) -> tuple[int, str, int, bytes]:
    """Asks a server from this machine, or from the first host that reaches it."""
    said: list[str] = []
    for cache in caches:
        status, why, size, body = cache.page(url, token, most)
        if status:
            return status, why, size, body
        said.append(f"{cache.name}: {why}")
    return 0, "; ".join(said[:8]), -1, b""


class _Fetch:
    """One fetch, for a set of hosts."""

    def __init__(
        self,
        found: Found,
        hosts: Mapping[Node, Cache],
        here: Cache,
        relay: Relay,
        open_cache: Callable[[Node | None], Cache],
    ) -> None:
        self._found, self._hosts, self._here, self._relay, self._open_cache = found, hosts, here, relay, open_cache
        self._began = time.monotonic()
        self._files = {file.tag: file for file in sorted(found.files, key=lambda file: -file.size)}
        """By the server's name for their content, the largest first."""
        self._names: dict[str, str] = {}
        """The names of their content in the stores."""
        self._holders: dict[str, list[Node | None]] = {tag: [] for tag in self._files}
        self._lacking: dict[Node, set[str]] = {}
        """What hosts lack, without hosts that have failed."""
        self._errors: dict[Node, Exception] = {}
        self._pending: deque[str] = deque()
        """What must be downloaded."""
        self._places: list[Node | None] = [None]
        """Where it can be downloaded; this machine is the last resort."""
        self._why: list[str] = []
        """Why the other hosts cannot."""
        self._lanes = 0
        self._fatal: BaseException | None = None
        self._changed = GuardedCondition()
        size = sum(file.size for file in found.files)
        self._reports = {node: Fetched(node.name, files=len(found.files), size=size) for node in hosts}
        self._progress = {node: _Progress(HERE if node is None else node.name, relay.events) for node in (None, *hosts)}

    def run(self) -> list[Fetched]:
        self._find()
        try:
            while batch := self._next():
                self._pass_on(batch)
        finally:
            with self._changed:
                self._pending.clear()
        self._each(self._lay_out)
        done = [self._reports[node] for node in self._lacking]
        if self._errors:
            tell(self._relay.events, done)
            raise one_error([*self._errors.values()], len(self._hosts))
        return done

    def _each(self, action: Callable[[Node], object]) -> None:
        """Runs it for all hosts that have not failed, and drops those where it fails."""
        nodes = [*self._lacking]
        for node, outcome in zip(nodes, for_each_host(action, nodes), strict=True):
            if isinstance(outcome, Raised):
                self._drop(node, outcome.error)

    # ---- who has what

    def _find(self) -> None:
        """Raises the errors of hosts; then nothing is sent."""
        files = [*self._files.values()]
        nodes = [*self._hosts]
        outcomes = for_each_host(lambda node: self._hosts[node].find(self._found.repository, files), nodes)
        errors = [outcome.error for outcome in outcomes if isinstance(outcome, Raised)]
        if errors:
            raise one_error(errors, len(nodes))
        for node, names in zip(nodes, results_of(outcomes), strict=True):
            self._lacking[node] = {file.tag for file, name in zip(files, names, strict=True) if not name}
            self._progress[node].total = sum(self._files[tag].size for tag in self._lacking[node])
            for file, name in zip(files, names, strict=True):
                if name and name == self._names.setdefault(file.tag, name):
                    self._holders[file.tag].append(node)
        self._pending.extend(tag for tag, holders in self._holders.items() if not holders)
        if self._pending:
            self._places = [*self._reaching(self._files[self._pending[0]]), None]

    def _reaching(self, file: HubFile) -> list[Node]:
        """The hosts that reach the server."""
        nodes = [*self._hosts]
        found = for_each_host(lambda node: self._hosts[node].page(file.url, "", 0)[0], nodes)
        return [node for node, status in zip(nodes, found, strict=True) if not isinstance(status, Raised) and status]

    def _drop(self, node: Node, error: BaseException) -> None:
        """A host has failed: what only it has must be downloaded again."""
        with self._changed:
            if self._lacking.pop(node, None) is None:
                return
            self._errors[node] = error if isinstance(error, Exception) else SkyfabError(str(error), host=node.name)
            self._leave(node, getattr(error, "message", str(error)))
            for tag, holders in self._holders.items():
                if node in holders:
                    holders.remove(node)
                    if not holders:
                        self._pending.append(tag)

    # ---- downloads

    def _start(self) -> None:
        """Starts downloads, on hosts if any can. Raises SkyfabError if this machine cannot either."""
        if not self._places:
            what = self._files[self._pending[0]].path
            error = SkyfabError(f"cannot download {what}: {'; '.join(self._why[:8])}", hint=AGAIN)
            error.exit_code = 3
            raise error
        places = self._places[:-1] or self._places
        if places == [None]:
            self._here.find("", [self._files[tag] for tag in self._pending])  # raises if there is no space
            self._progress[None].total = sum(self._files[tag].size for tag in self._pending)
        lanes = [place for _ in range(_LANES) for place in places][: len(self._pending)]
        self._lanes = len(lanes)
        for place in lanes:  # each host in turn, so that few files are spread evenly
            threading.Thread(target=self._run_lane, args=(place, self._pending.popleft()), daemon=True).start()

    def _run_lane(self, place: Node | None, tag: str | None) -> None:
        """Downloads one file after another, until none is left or this host cannot."""
        try:
            with closing(self._open_cache(place)) as cache:
                while tag is not None:
                    self._download(tag, place, cache)
                    with self._changed:
                        tag = self._pending.popleft() if self._pending and self._fatal is None else None
        except Unreachable as error:
            self._leave(place, error.message)
        except BaseException as error:
            if place is not None and isinstance(error, (HostError, ProtocolError)):
                self._drop(place, error)
            else:
                self._fatal = error
        finally:
            with self._changed:
                if tag is not None and not self._holders[tag]:
                    self._pending.appendleft(tag)
                self._lanes -= 1
                self._changed.notify_all()

    def _download(self, tag: str, place: Node | None, cache: Cache) -> None:
        name = cache.download(self._files[tag], self._found, lambda done: self._progress[place].note(tag, done))
        with self._changed:
            self._names[tag] = name
            self._holders[tag].append(place)
            if place in self._lacking:
                self._lacking[place].discard(tag)
                self._reports[place].downloaded += self._files[tag].size
            self._changed.notify_all()

    def _leave(self, place: Node | None, why: str) -> None:
        """A host stops downloading."""
        with self._changed:
            if place in self._places:
                self._places.remove(place)
                self._why.append(f"{HERE if place is None else place.name}: {why}")

    # ---- relays

    def _next(self) -> list[str]:
        """Waits for contents that hosts lack and others have, all with the same holders. Empty at the end."""
        with self._changed:
            while True:
                if self._fatal is not None:
                    raise self._fatal
                wanted = set[str]().union(*self._lacking.values())
                if not wanted:
                    return []
                ready = [tag for tag in self._files if tag in wanted and self._holders[tag]]
                if ready:
                    same = [tag for tag in ready if self._holders[tag] == self._holders[ready[0]]]
                    sizes = itertools.accumulate(self._files[tag].size for tag in same)
                    return [tag for tag, size in zip(same, sizes, strict=True) if tag == same[0] or size <= _BATCH]
                if not self._lanes:
                    self._start()
                self._changed.wait()

    def _pass_on(self, batch: Sequence[str]) -> None:
        places = [*self._holders[batch[0]]]
        if not places:  # the only host that had it is lost: it is downloaded again
            return
        is_here, holders = None in places, [node for node in places if node is not None]
        blobs = cache_folder() / "blobs"
        errors = self._relay.send(
            {self._names[tag]: blobs / self._names[tag] if is_here else self._files[tag].size for tag in batch},
            [*self._lacking],
            keep=True,
            holders=() if is_here else holders,
            progress=lambda node, done, total: self._progress[node].note(batch[0], done),
        )
        with self._changed:
            for node in self._lacking.keys() - errors.keys():
                new = self._lacking[node].intersection(batch)
                size = sum(self._files[tag].size for tag in new)
                self._lacking[node] -= new
                for tag in new:
                    self._holders[tag].append(node)
                if is_here:
                    self._reports[node].from_here += size
                else:
                    self._reports[node].from_hosts += size
        if errors:
            self._each(lambda node: self._hosts[node].find("", []))  # hosts that do not respond are lost
            may_retry = not is_here and (not any(node in self._lacking for node in holders) or self._came_here(batch))
            for node, error in errors.items():
                if not may_retry or getattr(error, "hint", None) == FULL:
                    self._drop(node, error)

    def _came_here(self, batch: Sequence[str]) -> bool:
        """Downloads to this machine what hosts cannot pass on, as they may not reach each other."""
        with suppress(SkyfabError):
            for tag in batch:
                self._download(tag, None, self._here)
            return True
        return False

    def _lay_out(self, node: Node) -> None:
        found, report = self._found, self._reports[node]
        named = [(file.path, file.tag, self._names[file.tag]) for file in found.files]
        if found.repository:
            asked: tuple[Any, ...] = ("lay_out", found.repository, found.commit, found.revision, named)
        else:
            asked = ("place", named[0][2], named[0][0])
        report.path = printable(self._hosts[node].ask(str, *asked))
        report.seconds = time.monotonic() - self._began


class _Progress:
    """How much a host has received of what it lacked."""

    def __init__(self, host: str, events: Events) -> None:
        self._host = host
        self._events = events
        self.total = self._done = 0
        self._parts: dict[str, int] = {}
        """Bytes of each download, and of each relay by its first file."""
        self._last = 0.0
        self._lock = threading.Lock()

    def note(self, key: str, done: int) -> None:
        with self._lock:
            self._done += done - self._parts.get(key, 0)
            self._parts[key] = done
            now, done = time.monotonic(), min(self._done, self.total)
            is_due = self.total and (done == self.total or now - self._last > _PACE)
            self._last = now if is_due else self._last
        if is_due:
            self._events.emit(Moved(host=self._host, what="fetching files", done=done, total=self.total))
