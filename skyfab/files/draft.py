"""`Draft`: a file that is being written, under a temporary name beside its own until it is complete."""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
import zlib

from skyfab.files.entries import PART
from skyfab.files.source import digest_of

TYPE_CHECKING = False  # importing `typing` would slow the start of a transfer
if TYPE_CHECKING:
    from typing import Final

_PATIENCE: Final = 15.0
"""Seconds to wait for a transfer of the same file that makes no progress: its program may have been killed."""
_PAUSE: Final = 0.5
_OPEN: Final = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC


def part_of(name: bytes) -> bytes:
    """The name of a file while it is incomplete."""
    return b"%s%08x%s" % (PART[0], zlib.crc32(name), PART[1])


class Draft:
    """An incomplete file. Its name depends on the final name alone, so a later transfer finds it and goes on with it.

    It is locked: a second transfer of the same file at the same time writes a draft of its own.
    """

    def __init__(self, folder: int, name: bytes, mode: int, *, resume: bool = False) -> None:
        """`folder` is a file descriptor. With `resume`, what was written before is kept."""
        self._folder = os.dup(folder) if resume else folder
        self._owned = self._folder if resume else -1
        self._name = name
        self._part = part_of(name)
        self.fd = -1
        try:
            self._take(mode, time.monotonic() + _PATIENCE if resume else 0.0)
            about = os.fstat(self.fd)
            self.size = about.st_size
            if self.size and not resume:
                self.cut(0)
            if about.st_mode & 0o777 != mode:
                os.fchmod(self.fd, mode)
        except BaseException:
            self.close()
            raise

    def _take(self, mode: int, deadline: float) -> None:
        """Opens and locks the file."""
        size = -1
        while True:
            self.fd = os.open(self._part, _OPEN, mode | 0o600, dir_fd=self._folder)
            try:
                fcntl.flock(self.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if self._is_there():
                    return
                before = size
            except BlockingIOError:
                before, size = size, os.fstat(self.fd).st_size
            except OSError:  # a file system without locks
                return
            os.close(self.fd)
            self.fd = -1
            if before == size == -1:
                continue  # it was renamed in between
            if time.monotonic() > deadline or -1 < before < size:
                break
            time.sleep(_PAUSE)
        self._part = b"%s%s%s" % (PART[0], os.urandom(8).hex().encode(), PART[1])
        self.fd = os.open(self._part, _OPEN | os.O_EXCL, mode | 0o600, dir_fd=self._folder)

    def _is_there(self) -> bool:
        try:
            return os.path.samestat(
                os.fstat(self.fd), os.stat(self._part, dir_fd=self._folder, follow_symlinks=False)
            )
        except FileNotFoundError:
            return False

    def digest(self) -> str:
        return digest_of(self.fd, self.size)

    def cut(self, size: int) -> None:
        """Drops what comes after `size` bytes."""
        os.ftruncate(self.fd, size)
        self.size = size

    def write(self, data: memoryview) -> None:
        """Appends data."""
        try:
            while data:
                sent = os.pwrite(self.fd, data, self.size)
                self.size += sent
                data = data[sent:]
        except OSError:  # as a rule a full disk
            self.discard()
            raise

    def commit(self, time: int) -> None:
        """The file is complete, and gets its name and the time of its last modification."""
        os.utime(self.fd, ns=(time, time))
        os.rename(self._part, self._name, src_dir_fd=self._folder, dst_dir_fd=self._folder)
        self.close()

    def discard(self) -> None:
        with contextlib.suppress(OSError):
            os.unlink(self._part, dir_fd=self._folder)
        self.close()

    def close(self) -> None:
        """Leaves what was written for a later transfer."""
        for fd in {self.fd, self._owned} - {-1}:
            os.close(fd)
        self.fd = self._owned = -1
