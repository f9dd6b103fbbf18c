"""`Target`: the folder into which the files of a transfer are written. Nothing is written outside of it."""

from __future__ import annotations

import contextlib
import errno
import os
import stat

from skyfab.errors import ProtocolError
from skyfab.files.draft import Draft, own_part, part_of, remove_stale
from skyfab.files.entries import FILE, FOLDER, LINK, MOST_ENTRIES, Entry, is_part, shown, text
from skyfab.files.source import GONE, SMALL, digest_of, opened

TYPE_CHECKING = False  # importing `typing` would slow the start of a transfer
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Final

    from skyfab.protocol.frames import Buffer

MISSING: Final = "missing"
"""The content must be sent."""
NEWER: Final = "newer"
"""The file that is there stays: it is newer, and the transfer is not to replace such ones."""
EQUAL_SIZE: Final = "equal size"
"""Another time, but perhaps the same content: its digest decides."""
_FOLDERS: Final = 64
"""Folders that are kept open."""
_SECOND: Final = 1_000_000_000
_OPEN: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_READ: Final = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK
_WRITE: Final = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
_INNER: Final = _OPEN | os.O_NOFOLLOW


class Target:
    """A folder. The folder itself may be reached through links; below it none is followed."""

    def __init__(
        self,
        folder: bytes,
        *,
        top: Entry | None = None,
        keep_newer: bool = False,
        expects: Callable[[bytes], bool] = lambda path: True,
        place_of: Callable[[Entry], bytes] = lambda entry: entry.path,
    ) -> None:
        """Makes the folder if it is not there, with the mode and time of `top`. Raises OSError.

        With `keep_newer`, files there that are newer stay. Only paths that it `expects` are written, each to the place
        that `place_of` says.
        """
        self.path = folder
        self._top = top
        self._made: set[bytes] = set()
        """Folders that were not there before."""
        os.makedirs(folder if top is None else os.path.dirname(folder), exist_ok=True)
        if top is not None:
            with contextlib.suppress(FileExistsError):
                os.mkdir(folder, top.mode | 0o700)
                self._made.add(b"")
        self._keep_newer = keep_newer
        self._expects = expects
        self._place_of = place_of
        self._open = {b"": os.open(folder, _OPEN)}
        self._entries: list[Entry] = []
        self._seen: set[bytes] = set()
        self._drafts: dict[int, Draft] = {}
        self._part = own_part()
        self._written: set[bytes] = set()
        """Folders into which small files were written."""
        self._newer: set[bytes] = set()
        """Files that stay."""

    def close(self) -> None:
        for draft in self._drafts.values():
            draft.close()
        for fd in self._open.values():
            os.close(fd)
        self._drafts, self._open = {}, {}

    @property
    def room(self) -> int:
        """Free bytes."""
        found = os.fstatvfs(self._open[b""])
        return found.f_frsize * (found.f_bavail if os.geteuid() else found.f_bfree)

    # ---- comparing

    def compare(self, rows: Sequence[object]) -> list[list[object]]:
        """Takes the next entries: makes folders and links, and returns what files are needed.

        For each of these: its number, `MISSING` or `EQUAL_SIZE`, how many bytes of it are there, complete
        or not, and the digest of a complete file. And each that stays because it is newer, as `NEWER`.
        Raises ProtocolError for entries that no source lists, and OSError.
        """
        wanted: list[list[object]] = []
        for row in rows:
            entry = Entry.parse(row)
            number = len(self._entries)
            if entry.path in self._seen or number >= MOST_ENTRIES or is_part(entry.path.rpartition(b"/")[2]):
                raise ProtocolError(f"{shown(entry.path)} is listed twice, or more than a transfer may have")
            if not self._expects(entry.path):
                raise ProtocolError(f"{shown(entry.path)} was not requested")
            self._seen.add(entry.path)
            entry.path = self._place_of(entry)
            self._entries.append(entry)
            if entry.kind == FOLDER:
                self._folder(entry.path, entry.mode | 0o700)
            elif entry.kind == LINK:
                self._link(entry)
            elif (found := self._look(entry)) is not None:
                wanted.append([number, *found])
        return wanted

    def _look(self, entry: Entry) -> tuple[str, int, str] | None:
        folder, name = self._place(entry)
        begun = self._size(folder, part_of(name)) if entry.size > SMALL else 0
        try:
            about = os.stat(name, dir_fd=folder, follow_symlinks=False)
        except FileNotFoundError:
            return MISSING, begun, ""
        if stat.S_ISDIR(about.st_mode):
            raise IsADirectoryError(errno.EISDIR, "expected a file, found a folder", self._shown(entry))
        if self._keep_newer and about.st_mtime_ns > entry.time + _SECOND:
            self._newer.add(entry.path)
            return NEWER, 0, ""
        if not stat.S_ISREG(about.st_mode) or about.st_size != entry.size:
            return MISSING, about.st_size + begun, ""
        is_same = _same_time(about.st_mtime_ns, entry.time)
        if is_same and about.st_mode & 0o777 == entry.mode:
            return None
        if about.st_nlink > 1:  # its mode and time are those of other files too, as in a copy of a working folder
            return MISSING, about.st_size + begun, ""
        if is_same:
            self._settle(folder, name, entry, about.st_mtime_ns)
            return None
        try:
            with opened(name, _READ, dir_fd=folder) as fd:
                return EQUAL_SIZE, about.st_size + begun, digest_of(fd, entry.size)
        except PermissionError:
            return MISSING, about.st_size + begun, ""

    def _size(self, folder: int, name: bytes) -> int:
        try:
            return os.stat(name, dir_fd=folder, follow_symlinks=False).st_size
        except FileNotFoundError:
            return 0

    def adopt(self, number: int) -> None:
        """What is there has the same content: it gets the mode and the time of the entry."""
        entry = self._file(number)
        self._settle(*self._place(entry), entry, entry.time)

    def _settle(self, folder: int, name: bytes, entry: Entry, time: int) -> None:
        with contextlib.suppress(OSError), opened(name, _READ, dir_fd=folder) as fd:  # it may belong to another user
            os.fchmod(fd, entry.mode)
            os.utime(fd, ns=(time, time))

    # ---- writing

    def store(self, found: Sequence[Sequence[int]], data: Buffer) -> None:
        """Writes small files, as `Source.pack` returns them. Raises ProtocolError for other data."""
        data = memoryview(data)
        there = [(self._file(number), size, time) for number, size, time in found if size != GONE]
        if any(not 0 <= size <= SMALL for _, size, _ in there) or sum(size for _, size, _ in there) != len(data):
            raise ProtocolError(f"{len(data)} bytes that are not these {len(there)} files")
        at = 0
        for entry, size, time in there:
            self._write(entry, data[at : at + size], time)
            at += size

    def _write(self, entry: Entry, content: memoryview, time: int) -> None:
        """Writes a small file."""
        folder, name = self._place(entry)
        above = entry.path[: -len(name)]
        if above not in self._written:
            self._written.add(above)
            remove_stale(folder)
        try:
            with opened(self._part, _WRITE, entry.mode, folder) as fd:
                while content:
                    content = content[os.write(fd, content) :]
                os.fchmod(fd, entry.mode)  # the umask may have taken something away
                os.utime(fd, ns=(time, time))
            os.rename(self._part, name, src_dir_fd=folder, dst_dir_fd=folder)
        except OSError as error:
            with contextlib.suppress(OSError):
                os.unlink(self._part, dir_fd=folder)
            raise OSError(error.errno, error.strerror, self._shown(entry)) from None

    def begin(self, number: int) -> tuple[int, str]:
        """Opens the draft of a large file: how much of it an earlier transfer has left, and its digest."""
        draft = self.draft(number)
        return draft.size, digest_of(draft.fd, draft.size) if draft.size else ""

    def draft(self, number: int) -> Draft:
        """Opens the draft of a large file, which `piece` writes to."""
        entry = self._file(number)
        draft = self._drafts[number] = Draft(*self._place(entry), entry.mode)
        if draft.size > entry.size:
            draft.cut(0)
        return draft

    def leave(self, number: int) -> None:
        """Closes the draft of a large file, if it is open, and leaves it to whoever begins the file again."""
        if number in self._drafts:
            self._drafts.pop(number).close()

    def begun(self, number: int) -> int:
        """How many bytes of a large file an earlier transfer has left."""
        folder, name = self._place(self._file(number))
        return self._size(folder, part_of(name))

    def place(self, number: int) -> bytes:
        """The path of a file."""
        return os.path.join(self.path, self._file(number).path)

    def piece(self, number: int, at: int, data: Buffer) -> None:
        """The next piece of a large file; with the last one it is complete."""
        entry, draft = self._file(number), self._drafts[number]
        data = memoryview(data)
        if at > draft.size or at + len(data) > entry.size:
            raise ProtocolError(f"a piece of {shown(entry.path)} that is not the next one")
        if at < draft.size:
            draft.cut(at)
        draft.write(data)
        if draft.size == entry.size:
            del self._drafts[number]
            try:
                draft.commit(entry.time)
            except OSError as error:
                draft.discard()
                raise OSError(error.errno, error.strerror, self._shown(entry)) from None

    def resize(self, number: int, size: int, time: int) -> None:
        """A large file has changed since it was listed: `piece` gets it from its beginning. Raises ProtocolError."""
        entry = self._file(number)
        self._entries[number] = Entry.parse([text(entry.path), FILE, size, time, entry.mode, ""])

    def drafted(self, number: int) -> str:
        """The digest of what has been written of a large file."""
        draft = self._drafts[number]
        return digest_of(draft.fd, draft.size)

    def discard(self, number: int) -> None:
        """A large file is left out."""
        self._drafts.pop(number).discard()

    def finish(self) -> None:
        """Everything is there: the folders that were made get their modes and times, the deepest first."""
        folders = [(entry.path, entry) for entry in self._entries if entry.kind == FOLDER]
        folders.sort(key=lambda one: -one[0].count(b"/"))
        for path, entry in [*folders, *([(b"", self._top)] if self._top is not None else ())]:
            if path in self._made:
                fd = self._folder(path)
                with contextlib.suppress(OSError):  # it belongs to another user
                    os.fchmod(fd, entry.mode)
                    os.utime(fd, ns=(entry.time, entry.time))

    def settled(self) -> list[bytes]:
        """The paths of all files, except those that stay because they are newer."""
        files = (entry.path for entry in self._entries if entry.kind == FILE)
        return [os.path.join(self.path, path) for path in files if path not in self._newer]

    def _file(self, number: int) -> Entry:
        entry = self._entries[number] if 0 <= number < len(self._entries) else None
        if entry is None or entry.kind != FILE:
            raise ProtocolError(f"no file {number} in this transfer")
        return entry

    def _link(self, entry: Entry) -> None:
        folder, name = self._place(entry)
        try:
            if os.readlink(name, dir_fd=folder) == entry.link:
                return
        except OSError:  # it is not there, or not a link
            pass
        draft = own_part()
        os.symlink(entry.link, draft, dir_fd=folder)
        try:
            os.rename(draft, name, src_dir_fd=folder, dst_dir_fd=folder)
        except OSError as error:
            os.unlink(draft, dir_fd=folder)
            raise OSError(error.errno, error.strerror, self._shown(entry)) from None

    # ---- folders

    def _place(self, entry: Entry) -> tuple[int, bytes]:
        """The folder of an entry, as a file descriptor, and its name there."""
        above, _, name = entry.path.rpartition(b"/")
        return self._folder(above), name

    def _folder(self, path: bytes, mode: int = 0o755) -> int:
        fd = self._open.get(path)
        if fd is not None:
            return fd
        above, _, name = path.rpartition(b"/")
        parent = self._folder(above)
        try:
            with contextlib.suppress(FileExistsError):
                os.mkdir(name, mode, dir_fd=parent)
                self._made.add(path)
            fd = os.open(name, _INNER, dir_fd=parent)
        except OSError as error:
            is_link = error.errno in (errno.ENOTDIR, errno.ELOOP)
            what = "expected a folder, found a link or a file" if is_link else error.strerror
            raise OSError(error.errno, what, os.path.join(self.path, path)) from None
        while len(self._open) > _FOLDERS:
            oldest = next(key for key in self._open if key)
            os.close(self._open.pop(oldest))
        self._open[path] = fd
        return fd

    def _shown(self, entry: Entry) -> str:
        return text(os.path.join(self.path, entry.path))


def _same_time(one: int, other: int) -> bool:
    """Whether two times are equal, on file systems that keep whole seconds too."""
    return one == other or (one // _SECOND == other // _SECOND and not (one % _SECOND and other % _SECOND))


def is_news(folder: bytes, entry: Entry) -> bool | None:
    """Whether a file is newer than the one in a folder; None for the same one, as its size and time show."""
    try:
        about = os.stat(os.path.join(folder, entry.path), follow_symlinks=False)
    except OSError:
        return True
    if stat.S_ISREG(about.st_mode) and about.st_size == entry.size and _same_time(about.st_mtime_ns, entry.time):
        return None
    return entry.time > about.st_mtime_ns
