"""`Mirror`: copies new files of a folder on hosts to this machine while they work (`Compute.mirror`)."""

from __future__ import annotations

import fcntl
import functools
import os
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import TYPE_CHECKING, Final

from skyfab._util.sizes import counted, rate_of
from skyfab.errors import ProtocolError, SkyfabError, UsageError
from skyfab.files.entries import shown, words
from skyfab.files.source import NO_MATCH, expected
from skyfab.files.target import Target
from skyfab.files.transfer import CHANGED, Here, Report, Transfer, check
from skyfab.pool.file_worker import Remote, fits
from skyfab.pool.files import AnyPath
from skyfab.pool.node import Node, WorkerSpec
from skyfab.session.fanout import one_error
from skyfab.ui.events import Events, Notice

if TYPE_CHECKING:
    from skyfab.files.entries import Row

_PACE: Final = 1.0
"""Seconds between two scans of a folder, or 20 times as long as a scan takes, but at most `_LONGEST`."""
_LONGEST: Final = 20.0
_RETRY: Final = 5.0
"""Seconds after an error."""
_MOMENT: Final = 0.5
_LOOKS: Final = 5
"""Seconds between the final scans, and how many of them wait for files that are changing."""
_SHOWN: Final = 20
"""Skipped paths that are shown, at most."""


class Mirror:
    """Copies new files of hosts to this machine until it is stopped; also a context manager."""

    def __init__(
        self,
        paths: Sequence[AnyPath],
        to: AnyPath,
        limit: str | None,
        nodes: Sequence[Node],
        spec_of: Callable[[Node, str], WorkerSpec],
        events: Events,
    ) -> None:
        """With several hosts, each has a folder in `to`. Raises UsageError if another mirror writes there."""
        rate = float("inf") if limit is None else rate_of(limit)
        if not rate:
            raise UsageError(f"invalid limit: {limit!r:.40}", hint="expected bytes per second, such as 20MB/s")
        self._rate = rate
        self._free = 0.0
        """When the bytes that were requested are due."""
        self._lock = threading.Lock()
        self._patterns = [os.fsencode(path) for path in paths]
        self._spec_of = spec_of
        self._events = events
        self._ending, self._stopped = threading.Event(), threading.Event()
        """Set when the final pass is due, and when nothing more is requested."""
        self._errors: list[Exception] = []
        there = [node for node in nodes if not node.workdir.callers]  # not those that work in this folder itself
        folders = [Path(to).expanduser() / (node.name if len(nodes) > 1 else "") for node in there]
        with ExitStack() as locks:
            for folder in folders:
                locks.callback(os.close, _locked(folder))
            self._locks = locks.pop_all()
        self.reports = [Report(node.name, folder=str(folder)) for node, folder in zip(there, folders, strict=True)]
        """What was fetched so far, for each host."""
        self._listed: dict[str, dict[str, Row]] = {report.host: {} for report in self.reports}
        """Each host's files, folders and links, by their path: of a file, several versions may be fetched."""
        each = zip(there, map(Path.absolute, folders), self.reports, strict=True)
        self._threads = [
            threading.Thread(target=self._run, args=one, name="skyfab-mirror", daemon=True) for one in each
        ]
        for thread in self._threads:
            thread.start()

    def __enter__(self) -> Mirror:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close() if kind else self.stop()

    def stop(self) -> list[Report]:
        """As `close`, but returns what was fetched, and raises the errors of the final pass."""
        self.close()
        if self._errors:
            raise one_error(self._errors, len(self.reports))
        return self.reports

    @property
    def is_stopped(self) -> bool:
        """Whether nothing more is fetched."""
        return self._stopped.is_set()

    def close(self) -> None:
        """Runs the final pass. Ctrl-C ends it."""
        self._ending.set()
        try:
            for thread in () if self._stopped.is_set() else self._threads:
                thread.join()
        finally:
            self.leave()

    def leave(self) -> None:
        """Ends it without a final pass. The next mirror or transfer resumes what is incomplete."""
        self._stopped.set()
        self._ending.set()
        for thread in self._threads:
            thread.join(_MOMENT)  # not longer: it may wait for a host that does not respond
        self._locks.close()

    # ---- one host, on its own thread

    def _run(self, node: Node, folder: Path, report: Report) -> None:
        said: object = None
        while True:
            is_last = self._ending.is_set()
            try:
                with closing(Remote(node, self._spec_of(node, ""), self._stopped, claims=True)) as remote:
                    self._follow(remote, folder, report)
                return
            except Exception as error:
                if self._stopped.is_set():
                    return
                this = (type(error), report.sent)
                if this != said:
                    self._events.emit(Notice(host=node.name, text=f"not mirrored: {_text(error)}"))
                said = this
                may_pass = isinstance(error, (SkyfabError, OSError)) and not isinstance(error, ProtocolError)
                if is_last or not may_pass:  # a hostile host is not asked again
                    self._errors.append(error)
                    return
            self._ending.wait(_RETRY)

    def _follow(self, remote: Remote, folder: Path, report: Report) -> None:
        looks = _LOOKS
        while looks:
            is_last, began = self._ending.is_set(), time.monotonic()
            count, changing = check("news", remote.ask("news", self._patterns, is_last))
            if count:
                self._take(remote, folder, report)
            elif not is_last:
                self._ending.wait(min(max(_PACE, 20 * (time.monotonic() - began)), _LONGEST))
            elif changing:
                looks -= 1
                self._stopped.wait(_MOMENT)
            else:
                if not self._listed[report.host]:
                    what = ", ".join(map(shown, self._patterns))
                    self._events.emit(Notice(host=report.host, text=f"nothing to mirror: no file matches {what}"))
                return
        what = f"{counted(changing, 'file')} not mirrored: still being written"
        self._events.emit(Notice(host=report.host, text=what))

    def _take(self, remote: Remote, folder: Path, report: Report) -> None:
        began = time.monotonic()
        with closing(Target(os.fsencode(folder), expects=expected(self._patterns))) as target:
            transfer = Transfer(remote, Here(target), lambda done, total: None, self._wait)
            transfer.run(functools.partial(fits, target.room, ""))
        if not transfer.report.entries:
            raise ProtocolError("announced files are not listed", host=report.host)
        remote.ask("fetched", self._patterns).result()
        transfer.report.seconds = time.monotonic() - began
        self._listed[report.host].update((row[0], row) for row in transfer.rows)
        report.count(self._listed[report.host].values())
        for name in ("sent", "sent_size", "seconds"):
            setattr(report, name, getattr(report, name) + getattr(transfer.report, name))
        for path, why in transfer.report.skipped:
            # Files that change, are removed or do not exist yet are normal.
            is_new = why not in (CHANGED, NO_MATCH) and (path, why) not in report.skipped
            if is_new and len(report.skipped) < _SHOWN:
                report.note(path, why)
                self._events.emit(Notice(host=report.host, text=f"skipped {path}: {why}"))

    def _wait(self, size: int) -> None:
        """Waits until this many bytes may be requested. All hosts share the limit."""
        with self._lock:
            now = time.monotonic()
            begin = max(now, self._free)
            self._free = begin + size / self._rate
        self._stopped.wait(begin - now)


def _text(error: Exception) -> str:
    if isinstance(error, SkyfabError):
        return error.message
    return words(error) if isinstance(error, OSError) else f"{type(error).__name__}: {error}"


def _locked(folder: Path) -> int:
    """Creates and locks a folder, and returns its descriptor. Raises UsageError if it is already locked."""
    folder.mkdir(parents=True, exist_ok=True)
    held = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(held)
        hint = 'choose another folder: to="results", --mirror=ckpt:results'
        raise UsageError(f"another mirror writes to {folder.absolute()}", hint=hint) from None
    except OSError:  # a file system without locks
        pass
    return held
