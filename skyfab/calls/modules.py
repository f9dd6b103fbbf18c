"""Finds the modules that a program imports, by their names, in the folders of `sys.path` that are the user's own.

The packages of a script's project are found too, installed or not. A package is taken as a whole: its modules, its
subpackages, and small data files. Of anything else, only the module itself. No folder is searched, so it does not
matter what else is in it.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import re
import site
import sys
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib.machinery import BuiltinImporter, FrozenImporter, PathFinder
from pathlib import Path
from typing import TYPE_CHECKING, Final

from skyfab.calls.gitignore import is_kept
from skyfab.files.entries import FOLDER, LINK, Entry, text, walk

if TYPE_CHECKING:
    from skyfab.files.entries import Keeps

_DATA: Final = 1024 * 1024
"""Data files in packages are sent up to this size in bytes; larger ones only with `includes`."""
_LIST: Final = r"\((?:#.*|[^)#])*\)|(?:\\\n|[^\n;])*"
_IMPORT: Final = re.compile(rf"from\b[ \t]*(\.*)([\w.]*)[ \t]*\bimport\b[ \t]*({_LIST})|import[ \t]+({_LIST})")
_NAME: Final = re.compile(r"(?:^|[,(])(?:\s|\\\n|#.*\n)*([^\W\d][\w.]*)")
_TEXT: Final = re.compile(r"""["']([^\W\d]\w*(?:\.\w+)*)["']""")
_INIT: Final = "__init__.py"
_STANDARD: Final = (BuiltinImporter, FrozenImporter, PathFinder)
"""Finders of modules that are in no other folders than those of `sys.path`."""

Place = tuple[str, str]
"""A folder of `sys.path`, and the same or a folder in it."""


class Modules:
    """The user's own modules that a program imports, directly or not."""

    def __init__(self, program: str | None, names_in: Callable[[Entry, bytes], Iterable[str]]) -> None:
        """`program` is as in `Image`. `names_in` says what a file imports."""
        folder, _, named = (program or "").rpartition("/-m ")
        script = None if folder else _script_of(program)
        paths = [folder or os.path.dirname(script or "")] if folder or script else []
        paths += [os.path.abspath(entry or os.getcwd()) for entry in sys.path]
        paths += _project_folder(Path(folder or script or "")) if folder or script else []
        self._places = [(path, path) for path in dict.fromkeys(paths) if _is_own(path + os.sep)]
        self._names_in = names_in
        self._seen: set[str] = set()
        self._absent = {"skyfab"}
        """First parts of names that no folder has, or that hosts have."""
        self._packages: set[str] = set()
        self._elsewhere: list[str] = []
        """Folders of modules that only an import finder finds, as that of an editable install."""
        self.found: dict[bytes, tuple[str, Entry]] = {}
        """The folder of `sys.path` and the entry of each file, by its path."""
        self.folders = {folder for folder, _ in self._places if os.path.isdir(folder)}
        """Folders where a change may mean other modules."""
        if script:
            for entry, path in files_below(script, os.path.basename(script)):
                self.found[path] = (paths[0], entry)
                self.add(names_in(entry, path))
        if folder:
            self.add(name + inner for name in named.split() for inner in ("", ".__main__"))
        self.add(_loaded_modules())
        if program is None and not getattr(sys.modules.get("__main__"), "__file__", None):
            self.add(_modules_here())

    @property
    def roots(self) -> list[str]:
        """The folders of `sys.path` in which modules were found."""
        used = {root for root, _ in self.found.values()}
        return [folder for folder in dict.fromkeys([*dict(self._places), *self._elsewhere]) if folder in used]

    def add(self, names: Iterable[str]) -> None:
        """Adds the modules of these names, and those that they import, if they are the user's own."""
        waiting = list(names)
        while waiting:
            name = waiting.pop()
            if name not in self._seen and name.partition(".")[0] not in self._absent:
                self._seen.add(name)
                for root, entry, path in self._files_of(name.split(".")):
                    if path not in self.found:
                        self.found[path] = (root, entry)
                        waiting += self._names_in(entry, path)

    def _files_of(self, words: Sequence[str], places: Sequence[Place] = ()) -> Iterator[tuple[str, Entry, bytes]]:
        """The files of a module, in the order in which Python looks for it; `places` are those of its package."""
        name, *rest = words
        inner: list[Place] = []
        for root, folder in places or itertools.chain(self._places, self._found(name)):
            place = f"{folder}/{name}"
            if os.path.isfile(f"{place}/{_INIT}"):
                inner = [(root, place)]
                yield from self._package(root, place)
                break
            if os.access(f"{place}.py", os.R_OK):
                self.folders.add(folder)
                for entry, path in files_below(f"{place}.py", os.path.relpath(f"{place}.py", root)):
                    yield root, entry, path
                return
            if os.path.isdir(place):  # a namespace package: only the modules in it that are named
                inner.append((root, place))
        self.folders |= {place for _, place in inner}
        if not inner and not places:
            self._absent.add(name)
        if rest and inner:
            yield from self._files_of(rest, inner)

    def _found(self, name: str) -> Iterator[Place]:
        """The folder of a top-level module of the user's own that is loaded, or that an import finder finds."""
        with contextlib.suppress(Exception):  # whatever a finder raises, or a module without a specification
            finders = (finder.find_spec for finder in sys.meta_path if finder not in _STANDARD)
            specs = [sys.modules[name].__spec__] if name in sys.modules else (find(name, None) for find in finders)
            file = next((spec.origin for spec in specs if spec is not None), None) or ""
            place = file.removesuffix(f"/{_INIT}").removesuffix(".py")
            if os.path.basename(place) == name and _is_own(file):
                self._elsewhere.append(os.path.dirname(place))
                yield self._elsewhere[-1], self._elsewhere[-1]

    def _package(self, root: str, folder: str) -> Iterator[tuple[str, Entry, bytes]]:
        if folder in self._packages:
            return
        for entry, path in files_below(folder, os.path.relpath(folder, root), _in_package):
            if entry.kind == FOLDER:
                self.folders.add(os.fsdecode(path))
                self._packages.add(os.fsdecode(path))
            else:
                yield root, entry, path


def _in_package(child: os.DirEntry[bytes], path: bytes) -> bool:
    """Whether a package is sent with this file or folder."""
    try:
        if not is_kept(child, path):
            return False
        if child.is_dir():
            return not child.is_symlink() and os.path.isfile(os.path.join(child.path, _INIT.encode()))
        return child.name.endswith(b".py") or (not child.name.startswith(b".") and child.stat().st_size <= _DATA)
    except OSError:  # a link into a folder of another user
        return False


def files_below(
    top: str, place: str, keeps: Keeps | None = None, above: frozenset[str] = frozenset()
) -> Iterator[tuple[Entry, bytes]]:
    """As `walk`, with files and folders instead of links. What is removed meanwhile is missing.

    `above` are the folders that it is in, as links may lead there.
    """
    above |= {os.path.realpath(top)}
    with contextlib.suppress(OSError):
        for entry, path in walk(os.fsencode(top), os.fsencode("" if place == "." else place), [], keeps):
            if entry.kind != LINK:
                yield entry, path
            elif os.path.isfile(path):
                yield Entry.of(entry.path, os.stat(path)), path
            elif os.path.realpath(os.fsdecode(path)) not in above:
                yield from files_below(os.fsdecode(path), text(entry.path), keeps, above)


def names_in(text: str, package: Sequence[str]) -> set[str]:
    """The names of modules that a source may import; some are not those of modules.

    >>> sorted(names_in("from . import a as x, b\\nimport c.d, e", ["zoo"]))
    ['c.d', 'e', 'zoo', 'zoo.a', 'zoo.b']
    """
    found: set[str] = set()
    for dots, module, names, modules in _IMPORT.findall(text):
        if modules:
            found.update(_NAME.findall(modules))
            continue
        above = package[: len(package) - len(dots) + 1] if dots else ()
        words = [*above, *module.split(".")] if module else above
        found.update(".".join([*words, name]) for name in ("", *_NAME.findall(names)))
    if "import_module" in text or "__import__" in text:
        found.update(_TEXT.findall(text))
    return {name.strip(".") for name in found} - {""}


def _script_of(program: str | None) -> str | None:
    """The path of the program's script, or of this process's. None if it has none, or an installed one."""
    main = sys.modules.get("__main__")
    if program is None and getattr(main, "__spec__", None) is not None:
        return None  # started with -m: a module as any other
    file = program or getattr(main, "__file__", None)
    path = os.path.abspath(file) if file else ""
    return path if os.path.isfile(path) and _is_own(path) else None


def _project_folder(script: Path) -> list[str]:
    """Where the packages of a script's project are, which need not be installed: ``src``, or its own folder."""
    project = next((folder for folder in folders_above(script) if (folder / "pyproject.toml").is_file()), None)
    if project is None:
        return []
    return [str(project / "src" if (project / "src").is_dir() else project)]


def folders_above(path: Path) -> Iterator[Path]:
    """The folder of a script, or the folder itself, and those above it, up to the repository or the home folder."""
    start = path.absolute().parent if path.is_file() else path.absolute()
    outside = {Path.home(), Path(start.anchor)} - {start}
    for folder in (start, *start.parents):
        if folder in outside:
            return
        yield folder
        if (folder / ".git").exists():
            return


def _loaded_modules() -> Iterator[str]:
    """The names of the user's own modules that this process has loaded."""
    for name, module in sys.modules.copy().items():  # another thread may import one, also while `list` copies
        file, spec = getattr(module, "__file__", None), getattr(module, "__spec__", None)
        if isinstance(file, str) and _is_own(file):
            yield spec.name if name == "__main__" and spec is not None else name


def _modules_here() -> list[str]:
    """All modules and packages of the current folder: what is typed in a session, as in a notebook, may import any."""
    found = os.listdir()
    modules = [name.removesuffix(".py") for name in found if name.endswith(".py")]
    return modules + [name for name in found if os.path.isfile(os.path.join(name, _INIT))]


@functools.cache
def _is_own(file: str) -> bool:
    """Whether a file belongs to neither Python, nor an installed package."""
    real = os.path.realpath(file)
    is_installed = any(place.startswith(_INSTALLED) for place in (file, real, real + os.sep))
    return not is_installed and "site-packages" not in real and "dist-packages" not in real


def _installed() -> tuple[str, ...]:
    paths = sysconfig.get_paths()
    del paths["data"]  # all of /usr/local, for the Python of Debian
    places = {*paths.values(), *site.getsitepackages(), site.getusersitepackages()}
    places |= {os.path.realpath(place) for place in places}
    places.add(os.path.dirname(os.path.realpath(os.__file__)))
    places.discard("/")
    return tuple(place.rstrip(os.sep) + os.sep for place in places if place not in (sys.prefix, sys.base_prefix))


_INSTALLED: Final = _installed()
