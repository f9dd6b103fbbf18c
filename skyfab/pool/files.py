"""Files and folders to the hosts of a pool and back: `Compute.upload` and `Compute.download`."""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final

from skyfab._util.sizes import counted
from skyfab.calls.gitignore import as_git, is_kept
from skyfab.calls.project import note_laid_out
from skyfab.detached.written import current_folder, required_folder
from skyfab.errors import ProtocolError, SkyfabError, UsageError
from skyfab.files.entries import FILE, FOLDER, LINK, Entry, name, shown, walk
from skyfab.files.source import NO_MATCH, Source, and_above, expected
from skyfab.files.target import Target
from skyfab.files.transfer import Here, Report, Side, Transfer, check
from skyfab.pool.file_relay import SharedUpload
from skyfab.pool.file_worker import Remote, fits, opened, tell
from skyfab.pool.futures import refuse_to_block
from skyfab.pool.node import Node, WorkerSpec
from skyfab.pool.relay import Relay
from skyfab.session.fanout import Raised, for_each_host, one_error
from skyfab.ui.events import HERE, Moved, Notice, Step

if TYPE_CHECKING:
    from skyfab.files.entries import Skip

_PACE: Final = 0.1
"""Seconds between two events of progress."""
_SHOWN: Final = 20
"""Paths that are left out and shown."""
AnyPath = str | os.PathLike[str]


def local_path(path: AnyPath) -> Path:
    """A path on this machine. One that exists is used literally, also if it begins with ``~``."""
    return Path(path) if os.path.lexists(path) else Path(path).expanduser()


class Files:
    """The transfers of a pool."""

    def __init__(self, spec_of: Callable[[Node, str], WorkerSpec], relay: Relay) -> None:
        self._spec_of = spec_of
        self._relay = relay
        self._events = relay.events

    def upload(self, path: AnyPath, to: AnyPath | None, nodes: Sequence[Node]) -> list[Report]:
        """Copies a file or folder to hosts. Raises OSError for what cannot be read here."""
        if not os.fspath(path):
            raise UsageError("upload needs the path of a file or folder", hint='"." is the current folder')
        top = local_path(path).absolute()
        top = top.resolve() if top.name == ".." else top  # its copy needs a name
        what = Entry.of(os.fsencode(top.name), top.stat())
        skipped: list[Skip] = []
        found: Iterable[tuple[Entry, bytes]] = walk(os.fsencode(top), what.path if what.kind == FILE else b"", skipped)
        if len(nodes) > 1:  # for one host, it is listed here while that host compares
            found = self._listed(found)
        place = os.fsencode(to if to is not None else _place(top, elsewhere=top.name))
        return self._send(found, skipped, what, place, nodes)

    def lay_out(self, folder: Path, nodes: Sequence[Node], *, ignored: bool = False) -> tuple[str, list[Report]]:
        """Copies what .gitignore allows of a folder, or all of it (`ignored`), to the same place in working folders.

        Returns that place, relative to the working folder, beside the reports.
        Files that are newer there stay, and what was fetched from these hosts into folders of their names is left out.
        """
        skipped: list[Skip] = []
        fetched = {os.fsencode(node.name) for node in nodes}
        allowed = is_kept if ignored else as_git(folder)
        found = self._listed(
            walk(
                os.fsencode(folder),
                b"",
                skipped,
                lambda child, path: path.partition(b"/")[0] not in fetched and allowed(child, path),
            )
        )
        place, what = _place(folder, elsewhere="."), Entry.of(b"", folder.stat())
        there = [node for node in nodes if not node.workdir.callers]  # where it is not this folder itself
        return place, self._send(found, skipped, what, os.fsencode(place), there, laid_out=folder)

    def _listed(self, found: Iterable[tuple[Entry, bytes]]) -> list[tuple[Entry, bytes]]:
        """All of them, with progress while they are found."""
        listed: list[tuple[Entry, bytes]] = []
        last = time.monotonic()
        try:
            for one in found:
                listed.append(one)
                if (now := time.monotonic()) - last > _PACE:
                    last = now
                    self._events.emit(Step(host=HERE, text=f"listing files: {len(listed):,}"))
        finally:
            self._events.emit(Step(host=HERE, text=""))
        return listed

    def _send(
        self,
        found: Iterable[tuple[Entry, bytes]],
        skipped: list[Skip],
        what: Entry,
        place: bytes,
        nodes: Sequence[Node],
        *,
        laid_out: Path | None = None,
    ) -> list[Report]:
        shared = SharedUpload(self._relay, nodes)

        def send(node: Node, remote: Remote) -> Report:
            own = list(skipped) if len(nodes) > 1 else skipped  # `found` may still add to it
            try:
                there, called, room = check("receive", remote.ask("receive", place, what, laid_out is not None))
                if laid_out is not None:
                    note_laid_out(node.name, there, str(laid_out))
                is_file = what.kind == FILE
                entries = [(_renamed(entry, name(called)), path) for entry, path in found] if is_file else found
                with closing(Source(entries, own)) as source:
                    transfer = self._transfer(node, "sending files", Here(source), remote)
                    relay = functools.partial(shared.relay, node, remote, source, transfer)
                    transfer.run(functools.partial(fits, room, node.name), relay)
                return transfer.report
            finally:
                shared.without(node)

        with opened(nodes, self._spec_of, claims=True) as remotes:  # to the end: hosts may take files from each other
            return self._on_each(send, remotes)

    def download(self, paths: Sequence[AnyPath], to: AnyPath, nodes: Sequence[Node], *, apart: bool) -> list[Report]:
        """Copies files and folders from hosts; with `apart`, what several have into folders of the hosts' names.

        Raises UsageError after the rest if something of `paths` matches nothing on any host.
        """
        folder = Path(to).expanduser()
        folder = folder if folder.is_absolute() else required_folder() / folder
        is_new = not folder.is_dir()
        patterns = [os.fsencode(path) for path in paths]
        places: dict[str, str] = {}

        def look(node: Node, source: Remote) -> Report:
            places[node.name] = check("send", source.ask("send", patterns))
            if apart:
                source.list(os.fsencode(folder))
            return Report(node.name)

        def fetch(node: Node, source: Remote) -> Report:
            is_inner = apart

            def place_of(entry: Entry) -> bytes:
                nonlocal is_inner
                is_inner &= not (lone := is_lone(entry, node.name))
                return entry.path if lone else os.fsencode(node.name) + b"/" + entry.path

            with closing(Target(os.fsencode(folder), expects=expected(patterns), place_of=place_of)) as target:
                transfer = self._transfer(node, "fetching files", source, Here(target))
                transfer.run(functools.partial(fits, target.room, ""))
            transfer.report.folder = _typed(folder / node.name if is_inner else folder)
            with suppress(SkyfabError):  # it is reported as written then
                source.ask("fetched", patterns).result()
            return transfer.report

        with opened(nodes, self._spec_of) as sources:
            self._on_each(look, sources)
            is_lone = _lone({node.name: source for node, source in sources.items()}) if apart else lambda *_: True
            reports = self._on_each(fetch, sources)
        if is_new and not any(report.entries for report in reports):
            with suppress(OSError):  # it is not empty
                folder.rmdir()
        self._check_matches([*map(str, paths)], reports, places)
        return reports

    def _check_matches(self, paths: Sequence[str], reports: Sequence[Report], places: Mapping[str, str]) -> None:
        missed = {
            report.host: [path for path in paths if not report.entries or (shown(path), NO_MATCH) in report.skipped]
            for report in reports
        }
        nowhere = [path for path in paths if all(path in some for some in missed.values())]
        for host, some in missed.items():
            if rest := [path for path in some if path not in nowhere]:
                self._events.emit(Notice(host=host, text=f"no file matches {', '.join(rest)}"))
        if nowhere:
            tell(self._events, [report for report in reports if report.entries])
            first, words = reports[0].host, ", ".join(nowhere)
            hint = None if words.startswith(("/", "~")) else f"looked in {places[first]}"
            if len(reports) > 1:
                raise UsageError(f"no file matches {words} on {counted(len(reports), 'host')}", hint=hint)
            raise UsageError(f"no file matches {words}", host=first, hint=hint)

    # ---- one host

    def _transfer(self, node: Node, what: str, source: Side, target: Side) -> Transfer:
        began = last = time.monotonic()
        transfer: Transfer

        def progress(done: int, total: int | None) -> None:
            nonlocal last
            now = time.monotonic()
            if total and (done == total or now - last > _PACE):
                last = now
                self._events.emit(Moved(host=node.name, what=what, done=done, total=total))
            elif total is None and now - last > _PACE:
                last = now
                self._events.emit(Step(host=node.name, text=f"comparing files: {done:,}"))
            transfer.report.seconds = now - began

        transfer = Transfer(source, target, progress)
        transfer.report.host = node.name
        return transfer

    def _on_each(self, action: Callable[[Node, Remote], Report], remotes: Mapping[Node, Remote]) -> list[Report]:
        refuse_to_block()

        def act(node: Node) -> Report:
            try:
                return action(node, remotes[node])
            except ProtocolError as error:
                error.host = error.host or node.name
                raise
            finally:  # it may have failed, or was interrupted
                self._events.emit(Step(host=node.name, text=""))

        outcomes = for_each_host(act, [*remotes], most=len(remotes))  # they wait for each other
        errors = [outcome.error for outcome in outcomes if isinstance(outcome, Raised)]
        reports = [outcome for outcome in outcomes if isinstance(outcome, Report)]
        if errors:
            tell(self._events, [report for report in reports if report.entries])
            raise one_error(errors, len(remotes))
        for report in reports:
            skipped = [one for one in report.skipped if one[1] != NO_MATCH]
            for path, why in skipped[:_SHOWN]:
                self._events.emit(Notice(host=report.host, text=f"skipped {path}: {why}"))
            if len(skipped) > _SHOWN:
                self._events.emit(Notice(host=report.host, text=f"skipped {len(skipped) - _SHOWN} more"))
        return reports


def _lone(sources: Mapping[str, Remote]) -> Callable[[Entry, str], bool]:
    """Says of a host's entry whether it keeps its place: the host alone has it, or something in it.

    Of a file that differs from the one here on one host only, the newer version keeps its place: that of this host has
    been written since the others were sent theirs, or those of the others have been fetched.
    """
    hosts: dict[bytes, list[str]] = {}
    for host, source in sources.items():
        for path in source.paths:
            hosts.setdefault(path, []).append(host)
    names = {os.fsencode(host) for host in sources}
    lone: set[bytes] = set()
    for path, owners in hosts.items():
        differ = [host for host in owners if sources[host].paths[path] is not None]
        if len(owners) > 1:
            if len(differ) != 1:
                hosts[path] = []
            elif sources[differ[0]].paths[path]:
                hosts[path] = differ
            else:
                hosts[path] = [host for host in owners if host not in differ]
        if hosts[path] and path.split(b"/")[0] not in names:
            lone.update(and_above(path))

    def is_lone(entry: Entry, host: str) -> bool:
        target = os.path.normpath(b"%s/../%s" % (entry.path, entry.link))
        if entry.kind == LINK and target in hosts and target not in lone:  # a link is beside its file
            return False
        return entry.path in lone and (entry.kind == FOLDER or host in hosts[entry.path])

    return is_lone


def _typed(folder: Path) -> str:
    """A folder of this machine as one would type it."""
    try:
        return str(folder.relative_to(Path.cwd()))
    except (ValueError, OSError):
        return str(folder)


def _place(path: Path, *, elsewhere: str) -> str:
    """The path in working folders that corresponds to one of this machine: as in the current folder."""
    here = current_folder()
    for known in (Path(os.path.normpath(path)), path.parent.resolve() / path.name):  # a link may lead to this folder
        if here and known.is_relative_to(here):
            return str(known.relative_to(here))
    return elsewhere


def _renamed(entry: Entry, called: bytes) -> Entry:
    return Entry(called, entry.kind, entry.size, entry.time, entry.mode, entry.link)
