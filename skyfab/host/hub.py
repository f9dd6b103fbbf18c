"""The cache of the Hugging Face hub in a host's cache folder: ``hub``, in the layout of its own library.

A file is a hard link to its content in the store (agent/store.py): the content is on the disk once, hosts can pass it
on to each other, and each of the two can be cleaned without the other.
"""

from __future__ import annotations

import contextlib
import functools
import os

from skyfab.host.agent.store import is_intact, mark_used

TYPE_CHECKING = False  # importing `typing` would slow the start of a worker
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from typing import Final

_PIECE: Final = 1 << 20


def variables(cache: str, given: Mapping[str, str]) -> dict[str, str]:
    """The variables by which the hub's library finds this cache; none without a cache, or if the user chose another."""
    folder = os.path.join(cache, "hub")
    is_chosen = any(name in given for name in ("HF_HUB_CACHE", "HF_HOME", "HUGGINGFACE_HUB_CACHE"))
    return {} if is_chosen or not os.path.isdir(folder) else {"HF_HUB_CACHE": folder}


class HubCache:
    """Finds and lays out files in the cache folder of a host, or of the user's machine."""

    def __init__(self, cache: str) -> None:
        self._cache = os.path.abspath(cache)
        self.store = os.path.join(self._cache, "blobs")

    def find(self, repository: str, files: Sequence[tuple[str, int]]) -> tuple[list[str], int]:
        """The name in the store of each content, or an empty string. `files` are the hub's names and sizes.

        Also returns how many bytes are free. Links to the store what the repository has and the store lacks.
        """
        os.makedirs(self.store, mode=0o700, exist_ok=True)
        found = [
            self._find(os.path.join(self._cache, "hub", repository, "blobs", tag), tag, size) for tag, size in files
        ]
        disk = os.statvfs(self.store)
        return found, disk.f_bavail * disk.f_frsize

    def _find(self, blob: str, tag: str, size: int) -> str:
        name = tag if is_sha256(tag) else ""
        if _has(blob, size):
            name = name or named(blob, tag)
            if name and not _has(self._stored(name), size):
                _replace(self._stored(name), functools.partial(_link, blob))
        if not name or not _has(self._stored(name), size):
            return ""
        with contextlib.suppress(OSError):  # another user's file, if hosts share the cache
            if not is_intact(self._stored(name), name):
                os.unlink(self._stored(name))
                return ""
            mark_used(self._stored(name))
        return name

    def _stored(self, name: str) -> str:
        return os.path.join(self.store, name)

    def lay_out(self, repository: str, commit: str, revision: str, files: Sequence[tuple[str, str, str]]) -> str:
        """Creates the folder of a commit and returns it. `files` are paths, the hub's names, and names in the store."""
        top = os.path.join(self._cache, "hub", repository)
        folder = os.path.join(top, "snapshots", commit)
        for path, tag, name in files:
            blob, link = os.path.join(top, "blobs", tag), os.path.join(folder, path)
            os.makedirs(os.path.dirname(blob), mode=0o700, exist_ok=True)
            os.makedirs(os.path.dirname(link), mode=0o700, exist_ok=True)
            self._give(name, tag, blob, path)
            target = os.path.relpath(blob, os.path.dirname(link))
            if not os.path.islink(link) or os.readlink(link) != target:
                _replace(link, functools.partial(os.symlink, target))
        if revision != commit:
            reference = os.path.join(top, "refs", revision)
            os.makedirs(os.path.dirname(reference), mode=0o700, exist_ok=True)
            _replace(reference, functools.partial(_write, commit))
        return folder

    def place(self, name: str, path: str) -> str:
        """Links content of the store to a path below ``fetched``, and returns that path."""
        target = os.path.join(self._cache, "fetched", path)
        os.makedirs(os.path.dirname(target), mode=0o700, exist_ok=True)
        self._give(name, name, target, path)
        return target

    def _give(self, name: str, tag: str, target: str, path: str) -> None:
        source = self._stored(name)
        if os.path.exists(target) and os.path.samefile(source, target):
            return
        if not is_sha256(tag) and named(source, tag) != name:  # another host may have lied about its sha256
            raise OSError(0, f"{path} does not match the hub: its git hash is not {tag}")
        try:
            _replace(target, functools.partial(os.link, os.path.realpath(source)))
        except OSError:  # a file system without hard links, or another disk
            import shutil

            _replace(target, functools.partial(shutil.move, source))
            _replace(source, functools.partial(os.symlink, target))


def is_sha256(tag: str) -> bool:
    """Whether the hub names a content by its sha256, not by git's hash as for small files."""
    return len(tag) == 64


class ContentHash:
    """Both hashes of a content: its sha256, and git's, which covers the size first."""

    def __init__(self, size: int) -> None:
        import hashlib  # imported late: OpenSSL is slow to load

        self._sha256 = hashlib.sha256()
        self._git = hashlib.sha1(b"blob %d\0" % size, usedforsecurity=False)

    def update(self, data: bytes) -> None:
        self._sha256.update(data)
        self._git.update(data)

    def name(self, tag: str) -> str:
        """The sha256 if the hub names this content `tag`; else an empty string."""
        name = self._sha256.hexdigest()
        return name if tag in (name, self._git.hexdigest()) else ""

    def like(self, tag: str) -> str:
        """The hash of the kind that the hub names `tag`."""
        return (self._sha256 if is_sha256(tag) else self._git).hexdigest()


def named(path: str, tag: str) -> str:
    """The sha256 of a file if the hub names its content `tag`; else an empty string."""
    found = ContentHash(os.path.getsize(path))
    with open(path, "rb") as file:
        while piece := file.read(_PIECE):
            found.update(piece)
    return found.name(tag)


def _has(path: str, size: int) -> bool:
    return os.path.isfile(path) and os.path.getsize(path) == size


def _link(source: str, target: str) -> None:
    try:
        os.link(os.path.realpath(source), target)
    except OSError:  # as above
        os.symlink(os.path.realpath(source), target)


def _write(text: str, path: str) -> None:
    with open(path, "x") as file:
        file.write(text)


def _replace(path: str, make: Callable[[str], object]) -> None:
    """Has `make` create a draft, and renames it to the path: others see the old file or the complete new one."""
    draft = os.path.join(os.path.dirname(path), f".{os.urandom(8).hex()}-")
    try:
        make(draft)
        os.replace(draft, path)
    finally:
        with contextlib.suppress(FileNotFoundError):  # a rename between two links to one file does nothing
            os.unlink(draft)
