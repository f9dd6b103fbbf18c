"""The library: the packages of skyfab that the agent does not need but functions may import, such as `skyfab.pool`.

The client sends them as one archive while the agent already runs. A worker that imports one of them waits for the
archive and unpacks it beside the core, once for all workers and later pools on this host.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
import time

from skyfab.protocol import LIBRARY_NAMES

TYPE_CHECKING = False  # importing `typing` would slow the start of an agent
if TYPE_CHECKING:
    from collections.abc import Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
"""The bundle's folder."""
ARCHIVE = "library"
"""The file in it that contains the library."""
_PATIENCE = 60.0
_INTERVAL = 0.005


def is_here(root: str = ROOT) -> bool:
    """Whether the client need not send the library. A checkout has all packages, and no list of some."""
    return os.path.exists(os.path.join(root, ARCHIVE)) or not os.path.exists(os.path.join(root, LIBRARY_NAMES))


def install(root: str = ROOT) -> None:
    """Lets this process and its children import the library."""
    with contextlib.suppress(OSError), open(os.path.join(root, LIBRARY_NAMES)) as file:
        sys.meta_path.append(Finder(root, file.read().split()))


class Finder:
    """Finds packages of the library that are not unpacked yet. The last finder in `sys.meta_path`."""

    def __init__(self, root: str, packages: Sequence[str], patience: float = _PATIENCE) -> None:
        self._root = root
        self._packages = {f"skyfab.{package}": package for package in packages}
        self._patience = patience

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        package = self._packages.get(name)
        if package is None:
            return None
        from importlib.machinery import PathFinder

        if not os.path.exists(os.path.join(self._root, "skyfab", package)):
            self._wait(name)
            unpack(self._root)
        importlib.invalidate_caches()  # a folder's listing may be older than what is in it now
        return PathFinder.find_spec(name, path, target)

    def _wait(self, name: str) -> None:
        archive = os.path.join(self._root, ARCHIVE)
        deadline = time.monotonic() + self._patience
        while not os.path.exists(archive):
            if time.monotonic() > deadline:
                raise ModuleNotFoundError(
                    f"{name} has not arrived on this host within {self._patience:.0f} s: "
                    "the connection is slow or broken, or the disk of the cache folder is full",
                    name=name,
                )
            time.sleep(_INTERVAL)


def unpack(root: str) -> None:
    """Unpacks the library. Each package appears at once and complete; several processes may do so at a time."""
    import shutil
    import tarfile
    import tempfile

    draft = tempfile.mkdtemp(prefix=".library-", dir=root)
    try:
        with tarfile.open(os.path.join(root, ARCHIVE)) as tar:
            for entry in tar:
                path, content = os.path.join(draft, entry.name), tar.extractfile(entry)
                if content is not None:
                    os.makedirs(os.path.join(os.path.dirname(path), "__pycache__"), exist_ok=True)
                    with open(path, "wb") as file:
                        file.write(content.read())
        for folder, _, files in os.walk(draft):  # the umask of a worker is the user's
            os.chmod(folder, 0o700)
            for name in files:
                os.chmod(os.path.join(folder, name), 0o600)
        for package in os.listdir(os.path.join(draft, "skyfab")):
            with contextlib.suppress(OSError):  # another process was faster
                os.rename(os.path.join(draft, "skyfab", package), os.path.join(root, "skyfab", package))
    finally:
        shutil.rmtree(draft, ignore_errors=True)
