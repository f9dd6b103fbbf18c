"""Entries: the files, folders and links of a transfer, and the check of those that another machine has sent."""

from __future__ import annotations

import errno
import os
import re
import stat

from skyfab.errors import ProtocolError

TYPE_CHECKING = False  # importing `typing` would slow the start of a transfer
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Any, Final

    Row = list[Any]
    """An entry in JSON: path, kind, size, time, mode, link."""
    Skip = tuple[bytes, str]
    """A path that is left out, and why."""
    Keeps = Callable[[os.DirEntry[bytes], bytes], bool]
    """Says of a file or folder, given its place, whether it is taken."""

FILE: Final = "f"
FOLDER: Final = "d"
LINK: Final = "l"
MOST_ENTRIES: Final = 1_000_000
"""Entries of one transfer."""
LARGEST: Final = 1 << 50
"""Bytes of one file."""
_LONGEST: Final = 4096
_DEEPEST: Final = 200
"""Folders that an entry may be in."""
_LATEST: Final = 1 << 90
_OUTER: Final = re.compile(rb"(?:^|/)\.{0,2}(?:/|\Z)|\0")
_MISSING: Final = "missing, or a broken link"
PART: Final = (b".skyfab-", b".part")
"""How the names of incomplete files begin and end. They are never transferred."""
_PART: Final = re.compile(rb"\.skyfab-(?:[0-9a-f]{8}|[0-9a-f]{16})\.part")


class Entry:
    """A file, folder or symbolic link: its path below the target, and what it is."""

    __slots__ = ("kind", "link", "mode", "path", "size", "time")

    def __init__(self, path: bytes, kind: str, size: int = 0, time: int = 0, mode: int = 0, link: bytes = b"") -> None:
        self.path = path
        self.kind = kind
        self.size = size
        self.time = time
        """The time of its last modification, in nanoseconds."""
        self.mode = mode
        self.link = link
        """What a symbolic link refers to."""

    @classmethod
    def of(cls, path: bytes, about: os.stat_result) -> Entry:
        kind = FOLDER if stat.S_ISDIR(about.st_mode) else FILE
        return cls(path, kind, 0 if kind is FOLDER else about.st_size, about.st_mtime_ns, about.st_mode & 0o777)

    @property
    def row(self) -> Row:
        return [text(self.path), self.kind, self.size, self.time, self.mode, text(self.link)]

    @classmethod
    def parse(cls, row: Any) -> Entry:
        """The entry of a row. Raises ProtocolError for a row that could lead out of the target."""
        try:
            path, kind, size, time, mode, link = row
            entry = cls(name(path), kind, size, time, mode, b"" if link == "" else name(link))
        except (TypeError, ValueError, AttributeError) as error:
            raise ProtocolError(f"not a file: {row!r:.200}") from error
        if kind not in (FILE, FOLDER, LINK) or not type(size) is type(time) is type(mode) is int:
            raise ProtocolError(f"not a file: {row!r:.200}")
        fits = 0 <= size <= LARGEST and -_LATEST <= time <= _LATEST and 0 <= mode <= 0o777
        if not fits or not is_inner(entry.path):
            raise ProtocolError(f"invalid path, size or time: {row!r:.200}")
        if entry.path.count(b"/") > _DEEPEST:
            raise ProtocolError(f"nested more than {_DEEPEST} folders deep: {row!r:.200}")
        if (kind == LINK) != bool(link) or (link and not leads_inside(entry.path, entry.link)):
            raise ProtocolError(f"a link that points outside its folder: {row!r:.200}")
        return entry


def text(path: bytes) -> str:
    """A path as text, whatever bytes it has."""
    return path.decode("utf-8", "surrogateescape")


def name(path: str) -> bytes:
    """The path that `text` was made of. Raises ProtocolError for other text."""
    try:
        return path.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        raise ProtocolError(f"not a path: {path!a:.200}") from None


def shown(path: bytes | str) -> str:
    """A path for people."""
    said = text(path) if isinstance(path, bytes) else path
    return said if said.isprintable() else ascii(said)[1:-1]


def words(error: OSError) -> str:
    """An error for people, whatever its path is made of."""
    path = error.filename
    where = "" if path is None else f": {shown(path)}"
    return f"{error.strerror or error}{where}"


def is_inner(path: bytes) -> bool:
    """Whether it is a path below a folder, without anything that leads up or is empty."""
    return len(path) <= _LONGEST and _OUTER.search(path) is None


def leads_inside(path: bytes, link: bytes) -> bool:
    """Whether a link at this path stays in its folder. ``..`` is allowed at its beginning only.

    After another link, ``..`` would lead to the parent of what that one refers to, which may be outside.
    """
    words = [word for word in link.split(b"/") if word not in (b"", b".")]
    up = 0
    while up < len(words) and words[up] == b"..":
        up += 1
    rest = words[up:]
    is_below = not link.startswith(b"/") and up <= path.count(b"/") and b".." not in rest
    return is_below and b"\0" not in link and len(link) <= _LONGEST


def is_part(name: bytes) -> bool:
    """Whether it is the name of an incomplete file."""
    return _PART.fullmatch(name) is not None


def walk(top: bytes, place: bytes, skipped: list[Skip], keeps: Keeps | None = None) -> Iterator[tuple[Entry, bytes]]:
    """The entries of a file or folder, with the path of each; `place` is where it will be, empty for the target itself.

    A link that leads to a place inside of the folder stays one. In place of another link its file is taken; a folder is
    left out. `top` itself may be a link. `keeps` chooses among what is below it.
    Raises OSError for what cannot be read.
    """
    about = os.stat(os.fsdecode(top))  # an error then has a readable name
    if stat.S_ISREG(about.st_mode):
        yield Entry.of(place, about), top
    elif not stat.S_ISDIR(about.st_mode):
        skipped.append((place, "neither a file nor a folder"))
    else:
        if place:
            yield Entry.of(place, about), top
        base = len(place) + 1 if place else 0
        folders = [(top, place)]
        while folders:
            folder, inner = folders.pop()
            try:
                with os.scandir(folder) as found:
                    children = sorted(found, key=_name)
            except (FileNotFoundError, NotADirectoryError):
                skipped.append((inner, "removed while it was read"))
                continue
            except OSError:
                if inner == place:
                    raise
                skipped.append((inner, "not readable"))
                continue
            for child in children:
                path = b"%s/%s" % (inner, child.name) if inner else child.name
                if keeps is not None and not keeps(child, path):
                    continue
                entry = _entry(child, path, base, skipped)
                if entry is not None:
                    yield entry, child.path
                    if entry.kind is FOLDER:
                        folders.append((child.path, path))


def why_not_followed(link: bytes, place: bytes) -> str:
    """Why a link that was found, not named, is left out; empty if its target is taken, or if it is not a link."""
    try:
        about, inside = os.stat(link), leads_inside(place, os.readlink(link))
    except OSError as error:
        return _MISSING if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP) else ""
    return "a link to a folder outside it" if stat.S_ISDIR(about.st_mode) and not inside else ""


def _name(child: os.DirEntry[bytes]) -> bytes:
    return child.name


def _entry(child: os.DirEntry[bytes], path: bytes, base: int, skipped: list[Skip]) -> Entry | None:
    if is_part(child.name):
        return None
    if path.count(b"/") > _DEEPEST:
        skipped.append((path, f"nested more than {_DEEPEST} folders deep"))
        return None
    try:
        about = child.stat(follow_symlinks=False)
        if stat.S_ISLNK(about.st_mode):
            link = os.readlink(child.path)
            if leads_inside(path[base:], link):
                return Entry(path, LINK, link=link)
            if why := why_not_followed(child.path, path[base:]):
                skipped.append((path, why))
                return None
            about = os.stat(child.path)
    except FileNotFoundError:
        skipped.append((path, _MISSING))
        return None
    except OSError:
        skipped.append((path, "not readable"))
        return None
    if not stat.S_ISREG(about.st_mode) and not stat.S_ISDIR(about.st_mode):
        skipped.append((path, "neither a file nor a folder"))
        return None
    return Entry.of(path, about)
