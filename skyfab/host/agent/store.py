"""Content-addressed store of a host: blobs and project trees by sha256, in the pool's run folder or the host's cache.

A blob is written under a temporary name, verified, sealed, and renamed: a file with its final name is complete.

The seal is the microseconds of the file's mtime, which are derived from its name: whoever writes to the file changes
them. Content without its seal, or from before the machine started, which may have lost power, is verified again.
"""

from __future__ import annotations

import contextlib
import functools
import mmap
import os
import stat
import time

from skyfab.errors import ProtocolError
from skyfab.host.agent.workdir import INCLUDED
from skyfab.protocol.blobs import allocate_bytes, check_name, name_of

TYPE_CHECKING = False  # importing `typing` would slow the start of an agent
if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from typing import Any

_SECOND = 1_000_000_000
_FIXED = 0x10  # MAP_FIXED, the same on Linux, macOS and the BSDs: replaces the mapping at that address


class NotStored(OSError):
    """The store does not have a blob, or no longer has it as it was."""


def map_blob(stores: Sequence[str], name: str) -> memoryview:
    """The blob as copy-on-write memory: workers share one copy until they write to it.

    Raises NotStored, and deletes a blob whose content has changed.
    """
    for store in stores:
        path = os.path.join(store, name)
        with contextlib.suppress(FileNotFoundError), _opened(path) as (fd, found):
            content = map_file(fd, found.st_size)
            if _is_sealed(found, name) or name_of(content) == name:
                return content
            os.unlink(path)
            raise NotStored(f"blob {name} has changed on this host")
    raise NotStored(f"blob {name} is not on this host")


@contextlib.contextmanager
def _opened(path: str) -> Iterator[tuple[int, os.stat_result]]:
    """Opens a regular file. Raises NotStored for anything else."""
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # a named pipe would block
    try:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode):
            raise NotStored(f"{path} is not a file")
        yield fd, found
    finally:
        os.close(fd)


def seal(path: str, name: str) -> None:
    """Notes that the file has the content of that name."""
    used = _soon(_seal_of(name))
    os.utime(path, ns=(used, used))


def mark_used(path: str) -> None:
    """Notes for `skyfab gc` that a file of the store is used now; its seal stays what it is. Raises OSError."""
    used = _soon(os.stat(path).st_mtime_ns)
    os.utime(path, ns=(used, used))


def _soon(seal: int) -> int:
    """The next time with this seal, within a second: a file that a pool uses is not older than the pool."""
    now = time.time_ns()
    return now + (seal - now) % _SECOND


def _seal_of(name: str) -> int:
    return int(name[:8], 16) % 1_000_000 * 1000


def _is_sealed(found: os.stat_result, name: str) -> bool:
    return found.st_mtime_ns % _SECOND // 1000 == _seal_of(name) // 1000


def is_intact(path: str, name: str) -> bool:
    """Whether a file has the content of that name. Raises OSError if it cannot be read."""
    found = os.stat(path)
    if stat.S_ISREG(found.st_mode) and _is_sealed(found, name) and found.st_mtime >= _started():
        return True
    with _opened(path) as (fd, found):
        if name_of(map_file(fd, found.st_size)) != name:
            return False
    seal(path, name)
    return True


def _started() -> float:
    """When this machine started."""
    return time.time() - time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


class Blobs:
    """The blobs of a worker's calls, in memory."""

    def __init__(self, stores: Sequence[str]) -> None:
        self._stores = stores
        self.kept: dict[str, memoryview] = {}
        """Bytes objects of the last call: if the next one has them too, it gets the same, since they cannot change."""

    def keep_only(self, parts: Sequence[Any]) -> None:
        """A call with these parts has begun to arrive."""
        names = {part[0] for part in parts if isinstance(part, list)}
        self.kept = {name: memory for name, memory in self.kept.items() if name in names}

    def __call__(self, name: str, kind: str = "") -> memoryview:
        """The blob: as `map_blob` has it, or in the memory of an object of that kind."""
        if not kind:
            return map_blob(self._stores, name)
        if name not in self.kept:
            content = map_blob(self._stores, name)
            self.kept[name] = allocate_bytes(len(content))
            self.kept[name][:] = content
        return self.kept[name]


def map_file(fd: int, size: int) -> memoryview:
    """A file as private memory. Python's `mmap` would keep a descriptor open: a model has many blobs."""
    import ctypes

    if not size:
        return memoryview(bytearray())
    area = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    place = ctypes.addressof(ctypes.c_char.from_buffer(area))
    prot, flags = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | _FIXED
    if _libc_mmap()(place, size, prot, flags, fd, 0) != place:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return memoryview(area)


@functools.cache
def _libc_mmap() -> Any:
    import ctypes

    found = ctypes.CDLL(None, use_errno=True).mmap
    found.restype = ctypes.c_void_p
    found.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
    return found


class Store:
    """One pool's view of the store: its own blobs, then the cache's."""

    def __init__(self, *, run: str, cache: str) -> None:
        self.folders = [os.path.join(run, "blobs"), os.path.join(cache, "blobs")]
        self._trees = os.path.join(cache, "trees")

    def missing(self, names: Sequence[object]) -> list[str]:
        """The names that are in neither folder. Marks the others as used. Deletes what is damaged."""
        return [name for name in map(check_name, names) if not self._find(name)]

    def _find(self, name: str) -> str | None:
        for folder in self.folders:
            path = os.path.join(folder, name)
            with contextlib.suppress(OSError):
                if is_intact(path, name):
                    mark_used(path)
                    return path
                os.unlink(path)
        return None

    def writer(self, name: str, *, keep: bool) -> Writer:
        """Creates a writer for a new blob, in the cache if `keep`."""
        return Writer(self.folders[1 if keep else 0], check_name(name))

    def lay_out(self, digest: str, files: Sequence[Sequence[str]]) -> str:
        """Creates the folder of a tree atomically and returns it. Raises FileNotFoundError for a missing blob.

        In a folder that is there, files that were changed or deleted are replaced: other pools may be using the rest.
        """
        target = self.tree(digest)
        import shutil
        import tempfile

        if os.path.isdir(target):
            self._fill(target, files)
            os.utime(target)
            return target
        os.makedirs(self._trees, mode=0o700, exist_ok=True)
        draft = tempfile.mkdtemp(prefix=f".{digest[:16]}-", dir=self._trees)  # unique, even if hosts share the cache
        try:
            self._fill(draft, files)
            with contextlib.suppress(OSError):  # another process may have created it first
                os.rename(draft, target)
            if not os.path.isdir(target):
                raise OSError(f"{target} could not be created")
        finally:
            shutil.rmtree(draft, ignore_errors=True)
        return target

    def _fill(self, folder: str, files: Sequence[Sequence[str]]) -> None:
        """Copies the files that a folder lacks, or has with other content."""
        import shutil

        from skyfab.files.draft import own_part

        for path, name, *executable in files:
            inner = _inside(folder, path)
            with contextlib.suppress(OSError):  # it is missing, or not a file
                if is_intact(inner, check_name(name)):
                    continue
            source = self._find(name)
            if source is None:
                raise FileNotFoundError(f"the content of {path} is not on this host")
            above = os.path.dirname(inner)
            os.makedirs(above, mode=0o700, exist_ok=True)
            draft = os.path.join(above, os.fsdecode(own_part()))
            try:
                shutil.copyfile(source, draft)
                if executable:  # by whoever may read it
                    mode = stat.S_IMODE(os.stat(draft).st_mode)
                    os.chmod(draft, mode | (mode & 0o444) >> 2)
                seal(draft, name)
                os.replace(draft, inner)
            except OSError:
                with contextlib.suppress(OSError):
                    os.unlink(draft)
                raise

    def tree(self, digest: str) -> str:
        """The path of a tree's folder, whether or not it exists."""
        return os.path.join(self._trees, check_name(digest))

    def roots(self, digest: str) -> list[str]:
        """The folders of a tree for `sys.path`, in order of their numbered names."""
        folder = self.tree(digest)
        return [os.path.join(folder, name) for name in sorted(os.listdir(folder)) if name != INCLUDED]

    def included(self, digest: str) -> str:
        """The folder of a tree with the files for working folders; empty if it has none."""
        folder = os.path.join(self.tree(digest), INCLUDED) if digest else ""
        return folder if folder and os.path.isdir(folder) else ""


class Writer:
    """Writes one blob into the store."""

    def __init__(self, folder: str, name: str) -> None:
        import hashlib  # imported late: OpenSSL is slow to load, and few pools have blobs
        import tempfile

        os.makedirs(folder, mode=0o700, exist_ok=True)
        self._digest: Any = hashlib.sha256()
        self._name = name
        self._target = os.path.join(folder, name)
        self._fd, self._draft = tempfile.mkstemp(prefix=f".{name[:16]}-", dir=folder)

    def write(self, view: memoryview) -> None:
        self._digest.update(view)
        while view:
            view = view[os.write(self._fd, view) :]

    def commit(self) -> None:
        """Completes the blob. Raises ProtocolError if its sha256 does not match its name."""
        os.close(self._fd)
        self._fd = -1
        if self._digest.hexdigest() != self._name:
            self.abort()
            raise ProtocolError(
                "an argument has other content than when the call was made",
                hint="do not modify it until the call has ended, or pass a copy",
            )
        seal(self._draft, self._name)
        os.replace(self._draft, self._target)

    def abort(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
        with contextlib.suppress(OSError):
            os.unlink(self._draft)


def _inside(root: str, path: str) -> str:
    """The relative path below `root`. Raises ProtocolError for a path outside it."""
    clean = os.path.normpath(path)
    if os.path.isabs(clean) or clean == ".." or clean.startswith("../") or "\0" in clean:
        raise ProtocolError(f"a path outside its tree: {path!r}")
    return os.path.join(root, clean)
