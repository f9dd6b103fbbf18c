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

from skyfab.errors import ProtocolError
from skyfab.host.agent.store import Writer
from skyfab.protocol import LIBRARY_NAMES
from skyfab.protocol.blobs import check_name

TYPE_CHECKING = False  # importing `typing` would slow the start of an agent
if TYPE_CHECKING:
    from collections.abc import Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType

    from skyfab.protocol.messages import Library

ROOT = os.path.abspath(os.path.join(os.path.dirname(__file__), "..", "..", ".."))
"""The bundle's folder."""
ARCHIVE = "library"
"""The file in it that contains the library."""
_PATIENCE = 60.0
_INTERVAL = 0.005
_ROOM = 512 * 1024
"""Bytes that the archive needs at least, with some to spare."""


def is_here(root: str = ROOT) -> bool:
    """Whether the client need not send the library. A checkout has all packages, and no list of some."""
    return os.path.exists(os.path.join(root, ARCHIVE)) or not os.path.exists(os.path.join(root, LIBRARY_NAMES))


def install(root: str = ROOT) -> None:
    """Lets this process and its children import the library."""
    with contextlib.suppress(OSError), open(os.path.join(root, LIBRARY_NAMES)) as file:
        sys.meta_path.append(Finder(root, file.read().split()))


class LibraryWriter:
    """Stores the library, which comes in pieces, one at a time: on a slow link the rest must not hold up heartbeats."""

    def __init__(self, root: str = ROOT) -> None:
        self._root = root
        self._begun = False
        self._writer: Writer | None = None
        """None while nothing is sent, and while what another pool was faster with is dropped."""

    def take(self, message: Library, data: memoryview | None) -> None:
        """The next piece. Raises OSError if it cannot be stored, and ProtocolError for what is not the next piece."""
        if message.begins:
            self.close()
            name = check_name(message.name)
            self._writer = None if is_here(self._root) else Writer(self._root, name, target=ARCHIVE)
            self._begun = True
        if data is None or not self._begun:
            raise ProtocolError("a piece of a library that did not begin")
        if self._writer is None:
            return
        try:
            self._writer.write(data)
            if message.ends:
                self._writer.commit()
                self._writer, self._begun = None, False
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Drops what is incomplete."""
        self._begun = False
        if self._writer is not None:
            self._writer.abort()
            self._writer = None


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
            reason = _obstacle(self._root)
            if reason or time.monotonic() > deadline:
                reason = (
                    reason or f"it did not come within {self._patience:.0f} s, over a connection that is slow or broken"
                )
                raise ModuleNotFoundError(f"{name} has not arrived on this host: {reason}", name=name)
            time.sleep(_INTERVAL)


def _obstacle(root: str) -> str:
    """Why the library cannot be stored; empty if it can."""
    if not os.access(root, os.W_OK):
        return f"{root} cannot be written to"
    found = os.statvfs(root)
    free = found.f_frsize * (found.f_bavail if os.getuid() else found.f_bfree)
    return f"No space left on the disk of {root}" if free < _ROOM else ""


def unpack(root: str) -> None:
    """Unpacks the library. Each package appears at once and complete; several processes may do so at a time.

    Raises ImportError for an archive that is damaged, and deletes it: the next pool will send it again.
    """
    import gzip
    import shutil
    import tarfile
    import tempfile
    import zlib

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
    except (EOFError, gzip.BadGzipFile, tarfile.TarError, zlib.error) as error:
        with contextlib.suppress(OSError):
            os.unlink(os.path.join(root, ARCHIVE))
        raise ImportError(
            f"{root}/{ARCHIVE} is damaged ({error}); the next pool that opens here sends it again"
        ) from error
    finally:
        shutil.rmtree(draft, ignore_errors=True)
