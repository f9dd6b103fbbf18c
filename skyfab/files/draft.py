"""`Draft`: a file that is being written, under a temporary name beside its own until it is complete."""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
import zlib

from skyfab.files.entries import PART, is_part

TYPE_CHECKING = False  # importing `typing` would slow the start of a transfer
if TYPE_CHECKING:
    from typing import Final

_PATIENCE: Final = 15.0
"""Seconds to wait for a transfer of the same file that makes no progress: its program may have been killed."""
_PAUSE: Final = 0.5
_STALE: Final = 24 * 3600.0
"""Seconds after which a file under a name of its own is left over: writing to it would change its time."""
_OWN: Final = len(PART[0]) + 16 + len(PART[1])
"""Length of such a name."""
_OPEN: Final = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC


def part_of(name: bytes) -> bytes:
    """The name of a file while it is incomplete."""
    return b"%s%08x%s" % (PART[0], zlib.crc32(name), PART[1])


def own_part() -> bytes:
    """A name for an incomplete file that no other transfer uses."""
    return b"%s%s%s" % (PART[0], os.urandom(8).hex().encode(), PART[1])


def remove_stale(folder: int) -> None:
    """Removes what killed transfers have left under names of their own: `part_of` is found again, these are not."""
    with contextlib.suppress(OSError), os.scandir(folder) as found:
        for child in found:
            if len(child.name) != _OWN or not is_part(os.fsencode(child.name)):
                continue
            if time.time() - child.stat(follow_symlinks=False).st_ctime > _STALE:
                os.unlink(child.name, dir_fd=folder)


class Draft:
    """An incomplete large file. Its name depends on the final name alone: a later transfer finds and resumes it.

    It is locked: a second transfer of the same file at the same time writes a draft of its own.
    """

    def __init__(self, folder: int, name: bytes, mode: int) -> None:
        """`folder` is a file descriptor."""
        self._folder = os.dup(folder)
        self._name = name
        self._mode = mode
        self._part = part_of(name)
        self.fd = -1
        try:
            self._take(time.monotonic() + _PATIENCE)
            self.size = os.fstat(self.fd).st_size
        except BaseException:
            self.close()
            raise

    def _take(self, deadline: float) -> None:
        """Opens and locks the file."""
        size = float("inf")
        while True:
            try:
                self.fd = os.open(self._part, _OPEN, 0o600, dir_fd=self._folder)
                about = os.fstat(self.fd)
                if about.st_uid != os.geteuid() or about.st_nlink > 1:  # another user may have put it there
                    break
                fcntl.flock(self.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if self._is_there():
                    return
            except BlockingIOError:
                if time.monotonic() > deadline or about.st_size > size:  # it makes progress
                    break
                size = about.st_size
                time.sleep(_PAUSE)
            except OSError:  # another user's file, or one that cannot be locked: another transfer may be writing to it
                break
            os.close(self.fd)
            self.fd = -1
        if self.fd != -1:
            os.close(self.fd)
            self.fd = -1
        self._part = own_part()
        self.fd = os.open(self._part, _OPEN | os.O_EXCL, 0o600, dir_fd=self._folder)

    def _is_there(self) -> bool:
        try:
            return os.path.samestat(os.fstat(self.fd), os.stat(self._part, dir_fd=self._folder, follow_symlinks=False))
        except FileNotFoundError:
            return False

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
        """The file is complete, and gets its name, its mode and the time of its last modification."""
        os.fchmod(self.fd, self._mode)  # not before: without write permission it could not be resumed
        os.utime(self.fd, ns=(time, time))
        os.rename(self._part, self._name, src_dir_fd=self._folder, dst_dir_fd=self._folder)
        self.close()

    def discard(self) -> None:
        with contextlib.suppress(OSError):
            os.unlink(self._part, dir_fd=self._folder)
        self.close()

    def close(self) -> None:
        """Leaves what was written for a later transfer."""
        for fd in {self.fd, self._folder} - {-1}:
            os.close(fd)
        self.fd = self._folder = -1
