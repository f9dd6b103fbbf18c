"""The files of the caller's project, named by content hash, so that hosts can import its modules.

Sent are the program's own modules (`modules`) and the `includes` of its image. A host is sent the files that it lacks.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path, PurePath
from typing import Final

from skyfab._util.signals import SIGNAL_GUARD, SignalCame
from skyfab.calls.folder_watch import Changes
from skyfab.calls.gitignore import is_kept, spec_of
from skyfab.calls.image import Image
from skyfab.calls.modules import Modules, files_below, names_in
from skyfab.errors import UsageError
from skyfab.files.entries import FOLDER, Entry, text
from skyfab.protocol.blobs import name_of


@dataclass(frozen=True, slots=True)
class _Include:
    """An item of ``Image(includes=[…])``."""

    path: Path
    root: Path
    """The folder that is on `sys.path` on hosts: the path itself, or that of a file or package."""
    place: PurePath | None
    """Where the root is in the working folder; None if its files are not copied there."""


@dataclass(frozen=True, slots=True)
class Tree:
    """A snapshot of the project: its files as in the message, the local file of each blob, and a digest of it all."""

    digest: str
    files: tuple[tuple[str, ...], ...]
    sources: dict[str, Path]
    changing: set[bytes] = field(default_factory=set)
    """The files that have changed between a snapshot and when they were sent."""
    held: dict[str, bytes] = field(default_factory=dict)
    """The content of these files: a program may write to its log faster than hosts reply."""

    def content(self, name: str) -> bytes | None:
        """A blob's content; None if its file has changed since the snapshot. The next snapshot holds its content."""
        if name in self.held:
            return self.held[name]
        with contextlib.suppress(OSError):
            content = self.sources[name].read_bytes()
            if name_of(content) == name:
                return content
        self.changing.add(os.fsencode(self.sources[name]))
        return None


EMPTY: Final = Tree("", (), {})


class Project:
    """The files that the functions of this program import. Scanned again when they change."""

    def __init__(self, image: Image) -> None:
        self._includes = [_include_of(word) for word in image.includes]
        self._image = image
        self._tree = EMPTY
        self._changing: set[bytes] = set()
        self._held: dict[str, bytes] = {}
        self._known: dict[tuple[bytes, int, int], tuple[str, set[str]]] = {}
        """Of each file by path, size and time: the name of its blob, and the modules that it may import."""
        self._modules = 0
        self._next_scan = 0.0
        self._folders: set[str] = set()
        self._changes = Changes()
        self._lock = threading.RLock()

    def tree(self, *, anew: bool = False) -> Tree:
        """The project as it is now.

        With inotify, a check takes a microsecond. Without it, and for remote changes on a network file system, files
        are compared at intervals that keep the cost low.
        """
        if self._image.excludes == ("*",) and not self._includes:
            return EMPTY
        with SIGNAL_GUARD:  # a handler may make a call, and wait for a thread that waits for the lock
            try:
                return SIGNAL_GUARD.poll(self._current, anew)
            except SignalCame:  # only once: a timer may be faster than a scan
                SIGNAL_GUARD.allow(bool)
                return self._current(anew)

    def _current(self, anew: bool) -> Tree:
        with self._lock:  # a scan replaces the watch: other threads must not get the old tree meanwhile
            now = time.monotonic()
            has_changed = self._changes.changed()
            if has_changed or now >= self._next_scan or len(sys.modules) != self._modules or anew:
                self._next_scan = 0.0  # if the scan is interrupted, the next call scans again
                self._changes.forget()
                self._scan()
                spent = time.monotonic() - now
                self._next_scan = now + (max(1.0, 100 * spent) if self._changes.active else 10 * spent)
            return self._tree

    def close(self) -> None:
        """Stops watching; the next `tree` scans again."""
        with self._lock:
            self._changes.close()
            self._next_scan = 0.0  # changes until then are not watched

    def _scan(self) -> None:
        self._modules = len(sys.modules)
        while True:
            self._changes.watch(self._folders)  # before the folders are read: no change is missed
            found, roots, folders = self._find()
            if folders == self._folders:
                break
            self._folders = folders
        self._held = {}
        sources: dict[str, Path] = {}
        files: list[tuple[str, ...]] = []
        for inner, (entry, path) in sorted(found.items()):
            if blob := self._read(entry, path)[0]:
                sources[blob] = Path(os.fsdecode(path))
                files.append((inner, blob, "x") if entry.mode & 0o100 else (inner, blob))
        digest = name_of(*(os.fsencode("\0".join(file) + "\n") for file in files)) if files else ""
        if digest != self._tree.digest:
            self._tree = Tree(digest, tuple(files), sources, self._changing)
            SENT[digest] = roots
        self._tree.held.update(self._held)

    def _find(self) -> tuple[dict[str, tuple[Entry, bytes]], list[str], set[str]]:
        """The files to send, by their paths in the tree; the folders of `sys.path` there; and the folders to watch."""
        modules = Modules(self._image.program, self._names_in)
        included = [list(self._files_of(include, modules)) for include in self._includes]
        roots = [*(str(include.root) for include in self._includes), *modules.roots]
        numbers = {root: number for number, root in enumerate(roots) if number >= len(included)}
        found: dict[str, tuple[Entry, bytes]] = {}
        for path, (root, entry) in modules.found.items():
            found[f"{numbers[root]:03d}/{text(entry.path)}"] = (entry, path)
        for number, (include, files) in enumerate(zip(self._includes, included, strict=True)):
            for entry, path in files:
                found |= dict.fromkeys(_paths(number, include, entry, path, numbers), (entry, path))
        if self._image.excludes:
            excluded = spec_of(self._image.excludes)
            found = {inner: file for inner, file in found.items() if not excluded.match_file(text(file[0].path))}
        linked = {os.path.dirname(os.path.realpath(path)) for _, path in found.values() if os.path.islink(path)}
        return found, roots, modules.folders | set(map(os.fsdecode, linked))

    def _files_of(self, include: _Include, modules: Modules) -> Iterator[tuple[Entry, bytes]]:
        """The files of an include; the modules that they import are added to `modules`."""
        modules.folders.add(str(include.root))
        for entry, path in files_below(str(include.path), os.path.relpath(include.path, include.root), is_kept):
            if entry.kind == FOLDER:
                modules.folders.add(os.fsdecode(path))
            else:
                modules.add(self._names_in(entry, path))
                yield entry, path

    def _names_in(self, entry: Entry, path: bytes) -> set[str]:
        return self._read(entry, path)[1] if path.endswith(b".py") else set()

    def _read(self, entry: Entry, path: bytes) -> tuple[str, set[str]]:
        key = (path, entry.size, entry.time)
        is_changing = path in self._changing
        if key not in self._known or is_changing:
            try:
                content = Path(os.fsdecode(path)).read_bytes()
            except OSError:  # deleted during the scan
                return "", set()
            is_module = path.endswith(b".py")
            names = names_in(content.decode(errors="replace"), text(entry.path).split("/")[:-1]) if is_module else set()
            self._known[key] = (name_of(content), names)
            if is_changing:
                self._held[self._known[key][0]] = content
        return self._known[key]


def _paths(number: int, include: _Include, entry: Entry, path: bytes, numbers: Mapping[str, int]) -> Iterator[str]:
    """The paths of an included file in a tree: for `sys.path`, in the working folder, and beside modules as here."""
    yield f"{number:03d}/{text(entry.path)}"
    if include.place is not None:
        yield (PurePath("files") / include.place / text(entry.path)).as_posix()
        for root, other in numbers.items():
            if path.startswith(os.fsencode(root) + b"/"):
                yield f"{other:03d}/{text(path[len(os.fsencode(root)) + 1 :])}"


SENT: Final[dict[str, Sequence[str]]] = {}
"""The folders of `sys.path` of the trees that were sent, by digest; the last one read is the last one."""
_LAID_OUT: Final[dict[str, dict[str, str]]] = {}
"""By host: folders there, and the folders here that were copied there."""
_THERE: Final = re.compile(r'(?<=File ")[^"\n]*/trees/([0-9a-f]{64})/([0-9]{3})/')
"""The beginning of a path in a tree on a host, as tracebacks have it."""


def note_laid_out(host: str, there: str, folder: str) -> None:
    """A folder of this machine was copied to this path on a host, which may name any: "/" would match every file."""
    if re.fullmatch(r"(/[^/]+){2,}", there):
        _LAID_OUT.setdefault(host, {})[there] = folder


def with_local_paths(trace: str, host: str) -> str:
    """A host's traceback with the files of the project named as they are here: an editor can open them.

    Files of a tree that another program sent are named without the host's folder.
    """
    for there, folder in _LAID_OUT.get(host, {}).items():
        trace = trace.replace(f'File "{there}/', f'File "{folder}/')
    return _THERE.sub(_folder_here, trace)


def _folder_here(found: re.Match[str]) -> str:
    """The folder on this machine that is this one in a tree on hosts; empty if that is not known."""
    folders, number = SENT.get(found[1], ()), int(found[2])
    return f"{folders[number]}{os.sep}" if number < len(folders) else ""


def _include_of(word: str) -> _Include:
    """The item of ``Image(includes=[…])``: a folder, a file or an importable module."""
    path = Path(word).expanduser()
    by_name = not path.exists()
    if by_name:
        spec = find_spec(word) if word.isidentifier() else None
        if spec is None or spec.origin is None:
            raise UsageError(f"Image(includes=…) names {word!r}, which is neither a file nor a module on this machine")
        path = Path(spec.origin)
        path = path.parent if path.name == "__init__.py" else path
    if not os.access(path, os.R_OK):
        raise UsageError(f"Image(includes=…) names {word!r}, which is not readable")
    path, here = Path(os.path.abspath(path)), Path(os.path.abspath("."))
    place = path.relative_to(here) if path.is_relative_to(here) else PurePath(path.name)
    root = path.parent if path.is_file() or os.path.exists(path / "__init__.py") else path
    place = place.parent if root != path else place
    return _Include(path, root, None if by_name else place)
