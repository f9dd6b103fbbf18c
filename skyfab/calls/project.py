"""Finds and hashes the files of the caller's project, so that hosts can import its modules.

Sent are the folders from which this program imports its own code: their Python files, and small data files inside
packages, unless .gitignore excludes them. Files are named by content hash; a host is sent those that it lacks.
"""

from __future__ import annotations

import functools
import os
import re
import site
import sys
import sysconfig
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Final

from skyfab._util.sizes import readable
from skyfab.calls import nesting
from skyfab.calls.folder_watch import Changes
from skyfab.calls.image import Image
from skyfab.errors import UsageError
from skyfab.protocol.blobs import name_of

_DATA: Final = 1024 * 1024
"""Data files in packages are sent up to this size in bytes; larger ones only with `includes`."""
_MOST_FILES: Final = 5000
_MOST_BYTES: Final = 256 * 1024 * 1024
_SKIPPED: Final = frozenset({"__pycache__", "node_modules", "site-packages", "dist-packages"})

_MOST_FOLDERS: Final = 2000

Stamp = tuple[int, int, int]

if TYPE_CHECKING:
    import pathspec

    Ignore = tuple[Path, pathspec.GitIgnoreSpec]


@dataclass(frozen=True, slots=True)
class Root:
    """A folder that is on `sys.path` on the hosts."""

    path: Path
    only: tuple[str, ...] = ()
    """Names in it that are sent; empty for all."""
    everything: bool = False
    """Files of any kind are sent, as `includes` promises."""
    packages: bool = False
    """Of its subfolders, only packages are sent: a script's folder may contain unrelated things."""
    place: PurePath | None = None
    """Where its files are copied in the working directory; None if they are not."""


@dataclass(frozen=True, slots=True)
class Tree:
    """A snapshot of the project: pairs of path and blob name, the local file of each blob, and a digest of it all."""

    digest: str
    files: tuple[tuple[str, str], ...]
    sources: dict[str, Path]

    def content(self, name: str) -> bytes | None:
        """A blob's content; None if its file has changed since the snapshot."""
        try:
            content = self.sources[name].read_bytes()
        except OSError:
            return None
        return content if name_of(content) == name else None


EMPTY: Final = Tree("", (), {})


class Project:
    """The files that the functions of this program import. Scanned again when they change."""

    def __init__(self, image: Image) -> None:
        self._includes = [_included(word) for word in image.includes]
        self._image = image
        self._tree = EMPTY
        self._stamps: dict[Path, Stamp] = {}
        self._names: dict[tuple[Path, Stamp], str] = {}
        self._watched: list[tuple[str, Stamp]] = []
        self._modules = 0
        self._loaded: list[str] = []
        self._next_scan = 0.0
        self._folders: set[str] = set()
        self._changes = Changes()
        self._lock = threading.Lock()

    @functools.cached_property
    def _excludes(self) -> pathspec.GitIgnoreSpec:
        return _patterns(self._image.excludes)

    def check(self) -> None:
        """Raises UsageError where no pool can be opened: a module that hosts import may still have a Compute."""
        self._excludes  # noqa: B018

    def tree(self, *, anew: bool = False) -> Tree:
        """The project as it is now.

        With inotify, a check takes a microsecond. Without it, and for remote changes on a network file system, the
        folders are scanned at intervals that keep the cost low; without it, the files of loaded modules are checked
        every time.
        """
        if self._image.excludes == ("*",) and not self._includes:
            return EMPTY  # of a large project, a scan would be most of what a small call costs
        with self._lock:  # a scan replaces the watch: other threads must not get the old tree meanwhile
            quiet = self._changes.none_since()
            now = time.monotonic()
            if quiet and now < self._next_scan and len(sys.modules) == self._modules and not anew:
                return self._tree
            if anew or now >= self._next_scan or len(sys.modules) != self._modules or not (quiet or self._same()):
                self._next_scan = float("inf")
                self._scan()
                if self._next_scan:
                    spent = time.monotonic() - now
                    pause = max(1.0, 100 * spent) if self._changes.active else max(0.02, 20 * spent)
                    self._next_scan = time.monotonic() + pause
            return self._tree

    def close(self) -> None:
        """Stops watching; the next `tree` scans again."""
        with self._lock:
            self._changes.close()
            self._next_scan = 0.0  # changes until then are not watched

    def _same(self) -> bool:
        return not self._changes.active and all(_stamp(path) == stamp for path, stamp in self._watched)

    def _scan(self) -> None:
        if len(sys.modules) != self._modules:
            self._modules = len(sys.modules)
            self._loaded = list(_own_modules(self._image.program))
        roots = _roots(self._loaded, self._includes, self._image.program)
        self._changes.watch(self._folders | {str(root.path) for root in roots})  # before the scan: no change is missed
        walks = [_Walk(root, self._excludes) for root in roots]
        found: dict[str, Path] = {}
        for number, (root, walk) in enumerate(zip(roots, walks, strict=True)):
            for path in walk.files():
                found[f"{number:03d}/{path.relative_to(root.path).as_posix()}"] = path
                if root.place is not None:
                    found |= dict.fromkeys(_places(path, root, roots), path)
        folders = {folder for walk in walks for folder in walk.folders()}
        if folders != self._folders:
            self._folders = folders
            self._changes.watch(folders)
            self._next_scan = 0.0  # changes there since the scan were not watched: the next check scans again
        stamps = {path: _stamp(str(path)) for path in found.values()}
        total = sum(stamp[1] for stamp in stamps.values())
        if total > _MOST_BYTES or len(found) > _MOST_FILES:
            raise UsageError(
                f"the project has {len(found)} files, {readable(total)}: too much to send",
                hint="leave some out: Image(excludes=[…]) takes patterns as in .gitignore",
            )
        if stamps != self._stamps:
            self._stamps = stamps
            self._tree = self._pack(found, stamps)
            _note_sent(self._tree.digest, [str(root.path) for root in roots])
        self._watched = [(file, _stamp(file)) for file in self._loaded]

    def _pack(self, found: dict[str, Path], stamps: dict[Path, Stamp]) -> Tree:
        files: list[tuple[str, str]] = []
        sources: dict[str, Path] = {}
        for inner, path in sorted(found.items()):
            key = (path, stamps[path])
            name = self._names.get(key)
            if name is None:
                try:
                    name = self._names[key] = name_of(path.read_bytes())
                except OSError:
                    continue  # deleted during the scan
            files.append((inner, name))
            sources[name] = path
        if not files:
            return EMPTY
        return Tree(name_of(*(os.fsencode(f"{inner}\0{name}\n") for inner, name in files)), tuple(files), sources)


_SENT: Final[dict[str, Sequence[str]]] = {}
"""The folders of the latest trees, by digest."""
_MOST_SENT: Final = 256
_LAID_OUT: Final[dict[str, str]] = {}
"""Folders on hosts, and the folders here that were copied there."""
_THERE: Final = re.compile(r'(?<=File ")[^"\n]*/trees/([0-9a-f]{64})/([0-9]{3})/')
"""The beginning of a path in a tree on a host, as tracebacks have it."""


def _note_sent(digest: str, folders: Sequence[str]) -> None:
    _SENT.pop(digest, None)
    _SENT[digest] = folders
    while len(_SENT) > _MOST_SENT:
        del _SENT[next(iter(_SENT))]


def note_laid_out(there: str, folder: str) -> None:
    """A folder of this machine was copied to this path on a host."""
    _LAID_OUT[there] = folder


def with_local_paths(trace: str) -> str:
    """A host's traceback with the files of the project named as they are here: an editor can open them.

    Files of a tree that another program sent are named without the host's folder.
    """
    for there, folder in _LAID_OUT.items():
        trace = trace.replace(f'File "{there}/', f'File "{folder}/')
    return _THERE.sub(lambda found: folder_here(found[1], int(found[2])), trace)


def folder_here(digest: str, number: int) -> str:
    """The folder on this machine that is this one in a tree on hosts; empty if that is not known."""
    folders = _SENT.get(digest, ())
    return f"{folders[number]}{os.sep}" if number < len(folders) else ""


def _stamp(path: str) -> Stamp:
    try:
        found = os.stat(path)
    except OSError:
        return (0, 0, 0)
    return (found.st_mtime_ns, found.st_size, found.st_ino)


# ---- which folders


def _roots(loaded: Sequence[str], includes: Sequence[Root], program: str | None) -> list[Root]:
    """The folders of sys.path from which this program imports its own modules, and the `includes`."""
    paths = [os.path.abspath(entry or os.getcwd()) for entry in sys.path]
    wanted = {path for path in paths if any(file.startswith(path + os.sep) for file in loaded)}
    program = program or getattr(sys.modules.get("__main__"), "__file__", None)
    main = _folder_of(program)
    script = os.path.abspath(program or "")
    if main:
        wanted.add(main)
        paths.append(main)
    home = str(Path.home())
    used = {path for path in paths if any(file.startswith(path + os.sep) and file != script for file in loaded)}
    roots = [
        Root(Path(path), packages=path not in used)
        for path in dict.fromkeys(paths)
        if path in wanted and path not in (home, "/")
    ]
    inner = [
        root for root in roots if not any(_holds(other.path, root.path) and _package(root.path) for other in roots)
    ]
    return [*includes, *inner]


def _places(path: Path, root: Root, roots: Sequence[Root]) -> Iterator[str]:
    """Additional paths of an included file: in the working directory, and beside modules as it is here."""
    assert root.place is not None
    yield ("files" / root.place / path.relative_to(root.path)).as_posix()
    for number, other in enumerate(roots):
        if not other.everything and other.path in path.parents:
            yield f"{number:03d}/{path.relative_to(other.path).as_posix()}"


def _holds(outer: Path, inner: Path) -> bool:
    return outer != inner and outer in inner.parents


def _package(folder: Path) -> bool:
    return os.path.exists(folder / "__init__.py")  # pathlib raises PermissionError for a folder of another user


def _folder_of(program: str | None) -> str | None:
    """The folder of the program's script; for an interactive program, the current folder."""
    if program is None:
        return os.getcwd()
    path = os.path.abspath(program)
    return os.path.dirname(path) if os.path.exists(path) and _is_own(path) else None


def _own_modules(program: str | None) -> Iterator[str]:
    """The files of loaded modules that belong to neither Python, nor an installed package, nor skyfab."""
    for name, module in list(sys.modules.items()):
        file = program if program and name == "__main__" else getattr(module, "__file__", None)
        if isinstance(file, str) and name.partition(".")[0] != "skyfab" and _is_own(file):
            yield os.path.abspath(file)


_own: dict[str, bool] = {}


def _is_own(file: str) -> bool:
    known = _own.get(file)
    if known is None:
        real = os.path.realpath(file)
        known = not any(file.startswith(place) or real.startswith(place) for place in _INSTALLED)
        _own[file] = known = known and "site-packages" not in real and "dist-packages" not in real
    return known


def _installed() -> tuple[str, ...]:
    places = {*sysconfig.get_paths().values(), *site.getsitepackages(), site.getusersitepackages()}
    places |= {os.path.realpath(place) for place in places}
    places.add(os.path.dirname(os.path.realpath(os.__file__)))
    places.discard("/")
    return tuple(place.rstrip(os.sep) + os.sep for place in places if place not in (sys.prefix, sys.base_prefix))


_INSTALLED: Final = _installed()


def _included(word: str) -> Root:
    """The root for an item of ``Image(includes=[…])``: a folder, a file or an importable module."""
    path = Path(word).expanduser()
    by_name = not path.exists()
    if by_name:
        spec = find_spec(word) if word.isidentifier() else None
        if spec is None or spec.origin is None:
            raise UsageError(f"Image(includes=…) names {word!r}, which is neither a file nor a module here")
        path = Path(spec.origin)
        path = path.parent if path.name == "__init__.py" else path
    path, here = Path(os.path.abspath(path)), Path(os.path.abspath("."))
    place = path.relative_to(here) if path.is_relative_to(here) else PurePath(path.name)
    if path.is_file() or _package(path):
        return Root(path.parent, only=(path.name,), everything=True, place=None if by_name else place.parent)
    return Root(path, everything=True, place=None if by_name else place)


# ---- which files


def files_of(folder: Path) -> list[Path]:
    """The files below a folder, of any kind, that .gitignore allows. Raises UsageError if they are too many."""
    return list(_Walk(Root(folder, everything=True), _patterns(()), ignoring=True).files())


class _Walk:
    """The files below a root that are sent."""

    def __init__(self, root: Root, excludes: pathspec.GitIgnoreSpec, *, ignoring: bool = False) -> None:
        self._root = root
        self._excludes = excludes
        is_free = root.everything and not ignoring  # .gitignore does not apply to `includes`
        above = [] if is_free else _up_to_repository(root.path)
        self._ignores = [(folder, spec) for folder in reversed(above) if (spec := _ignore_file(folder))]
        self._found: list[tuple[Path, list[Path]]] | None = None

    def files(self) -> Iterator[Path]:
        """The files to send."""
        for _, files in self._walk():
            yield from files

    def folders(self) -> Iterator[str]:
        """The folders that were scanned."""
        for folder, _ in self._walk():
            yield str(folder)

    def _walk(self) -> list[tuple[Path, list[Path]]]:
        if self._found is None:
            self._found = []
            self._look_into(self._root.path, self._ignores, 0)
        return self._found

    def _look_into(self, folder: Path, ignores: list[Ignore], depth: int) -> None:
        assert self._found is not None
        if depth and (spec := _ignore_file(folder)):
            ignores = [*ignores, (folder, spec)]
        try:
            entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
        except OSError:
            return
        files: list[Path] = []
        self._found.append((folder, files))
        if len(self._found) > _MOST_FOLDERS:
            raise UsageError(
                f"{self._root.path} has more than {_MOST_FOLDERS} folders: too much to look through",
                hint="leave some out, in .gitignore, or Image(excludes=[…]) with patterns as there",
            )
        package = any(entry.name == "__init__.py" for entry in entries)
        for entry in entries:
            if depth == 0 and self._root.only and entry.name not in self._root.only:
                continue
            path = Path(entry.path)
            try:
                is_folder = entry.is_dir()
            except OSError:  # a link into a folder of another user
                continue
            if is_folder:
                if depth == 0 and self._root.packages and not _package(path):
                    continue
                if self._enters(entry) and not self._ignored(path, ignores, folder=True):
                    self._look_into(path, ignores, depth + 1)
            elif self._takes(entry, package) and not self._ignored(path, ignores):
                files.append(path)

    def _enters(self, entry: os.DirEntry[str]) -> bool:
        if entry.name in _SKIPPED or entry.name.startswith(".") or entry.is_symlink():
            return False
        return not os.path.exists(os.path.join(entry.path, "pyvenv.cfg"))

    def _takes(self, entry: os.DirEntry[str], package: bool) -> bool:
        if not entry.is_file() or entry.name.endswith((".pyc", ".pyo")):
            return False
        if entry.name.endswith(".py") or self._root.everything:
            return True
        return package and not entry.name.startswith(".") and entry.stat().st_size <= _DATA

    def _ignored(self, path: Path, ignores: list[Ignore], *, folder: bool = False) -> bool:
        tail = "/" if folder else ""
        if self._excludes.match_file(path.relative_to(self._root.path).as_posix() + tail):
            return True
        for base, spec in reversed(ignores):  # the deepest .gitignore takes precedence
            verdict = spec.check_file(path.relative_to(base).as_posix() + tail).include
            if verdict is not None:
                return verdict
        return False


def _up_to_repository(folder: Path) -> list[Path]:
    """The folder and its parents up to the root of its git repository; only the folder itself outside of one."""
    chain = [folder, *folder.parents]
    for place, parent in enumerate(chain):
        if os.path.exists(parent / ".git"):
            return chain[: place + 1]
    return [folder]


def _ignore_file(folder: Path) -> pathspec.GitIgnoreSpec | None:
    try:
        return _patterns((folder / ".gitignore").read_text().splitlines())
    except (OSError, UnicodeDecodeError):
        return None


def _patterns(lines: Iterable[str]) -> pathspec.GitIgnoreSpec:
    """Imports pathspec only here: hosts import this module without it, and only opening a pool needs it.

    Raises UsageError if it is missing.
    """
    if find_spec("pathspec") is None:
        nesting.check()  # if a worker is importing a module, this raises the more helpful error
        raise UsageError(
            f"cannot open a pool: {sys.executable} has no pathspec",
            hint='a function that opens a pool needs skyfab\'s libraries on its host: Image(pip=["pathspec", …])',
        )
    import pathspec

    return pathspec.GitIgnoreSpec.from_lines(lines)
