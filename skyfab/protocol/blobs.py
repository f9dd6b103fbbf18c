"""Blobs (content named by its sha256), and the buffers into which the parts of a message are received."""

from __future__ import annotations

import mmap
import sys

from skyfab.errors import ProtocolError

TYPE_CHECKING = False  # see frames.py
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Any, Final

    from skyfab.protocol.frames import Buffer
    from skyfab.protocol.messages import Part

    Resolve = Callable[..., memoryview]
    """From the name of a blob, and the kind of object to read it into if the part has one, to its content."""

LARGE: Final = 1024 * 1024
"""Buffers of at least this size may be stored as blobs instead of being sent again."""
MOST_PARTS: Final = 8192
"""Maximum number of parts of one message: each, however small, has a separate allocation."""
KINDS: Final = ("bytes",)
"""The objects into whose own memory a part can be received. A bytearray could not change its size afterwards."""
_HEX: Final = frozenset("0123456789abcdef")


def name_of(*pieces: Buffer) -> str:
    """The blob name of the concatenated pieces: their sha256 in hex."""
    import hashlib  # imported late: OpenSSL is slow to load, and many pools have no blobs

    forget_unused()
    content = pieces[0].obj if len(pieces) == 1 and isinstance(pieces[0], memoryview) else None
    is_whole = type(content) is bytes and len(content) == len(pieces[0])
    if is_whole and id(content) in _known:
        return _known[id(content)][1]
    digest = hashlib.sha256()
    for piece in pieces:
        digest.update(piece)
    name = digest.hexdigest()
    if is_whole and sys.getrefcount(content) > _REFERENCES:
        assert isinstance(content, bytes)
        _known[id(content)] = content, name
    return name


_known: dict[int, tuple[bytes, str]] = {}
"""The names of bytes objects, by `id`: they cannot change, so that they are hashed once."""
_REFERENCES: Final = 4
"""References to bytes that nobody but a call refers to: its arguments, a view of them, and two in `name_of`."""


def forget_unused() -> None:
    """Forgets the names of bytes objects that nobody else refers to, so that their memory is free."""
    for key in list(_known):
        found = _known.get(key)  # another thread may have removed it
        if found is not None and sys.getrefcount(found[0]) <= 2:
            _known.pop(key, None)


def check_name(name: object) -> str:
    """Returns the name. Raises ProtocolError unless it is a sha256 in hex, because names become file names."""
    if not isinstance(name, str) or len(name) != 64 or not _HEX.issuperset(name):
        raise ProtocolError(f"not the name of a blob: {name if isinstance(name, str) else type(name)!s:.80}")
    return name


def allocate(size: int) -> memoryview:
    """Writable memory of that size. Large blocks are mapped, so that pages are used only when data arrives."""
    if size < LARGE:
        return memoryview(bytearray(size))
    area = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):  # one page fault per 2 MiB instead of one per page
        area.madvise(mmap.MADV_HUGEPAGE)
    return memoryview(area)


def allocate_bytes(size: int) -> memoryview:
    """The memory of new bytes, for content that is written before anything else refers to them."""
    if size < LARGE or sys.implementation.name != "cpython":
        return memoryview(bytearray(size))
    import ctypes  # only for large objects: importing it would slow an agent's start

    make = ctypes.pythonapi.PyBytes_FromStringAndSize
    make.restype, make.argtypes = ctypes.py_object, (ctypes.c_char_p, ctypes.c_ssize_t)
    made = make(None, size)
    area: Any = (ctypes.c_ubyte * size).from_address(id(made) + bytes.__basicsize__ - 1)
    area.owner = made  # `bytes_in` finds them there
    return memoryview(area).cast("B")


def bytes_in(memory: Any) -> bytes:
    """The bytes that this memory was allocated for; a copy of other memory."""
    content = getattr(memory, "obj", None)
    found = getattr(content, "owner", content)
    return found if type(found) is bytes and len(found) == len(memory) else bytes(memory)


def _inline(part: Part) -> int | None:
    """How many bytes of data a part announces; None if it refers to a blob. Raises ProtocolError."""
    size = part[1] if isinstance(part, list) and len(part) == 2 and part[0] in KINDS else part
    if isinstance(size, int) and not isinstance(size, bool) and size >= 0:
        return size
    if isinstance(size, list) and len(size) in (2, 3) and size[2:] in ([], ["bytes"]):
        check_name(size[0])
        return None
    raise ProtocolError(f"not a part: a {type(size).__name__}")


def inline_size(parts: Sequence[Part]) -> int:
    """How many bytes follow a message with these parts. Raises ProtocolError for invalid parts."""
    if len(parts) > MOST_PARTS:
        raise ProtocolError(f"a message of {len(parts)} parts")
    return sum(_inline(part) or 0 for part in parts)


def names_blobs(parts: Sequence[Part]) -> bool:
    """Whether some of the parts are blobs of the store."""
    return any(isinstance(part, list) and part[0] not in KINDS for part in parts)


def split(parts: Sequence[Part], data: memoryview) -> list[memoryview]:
    """The parts of a small message, each in its own allocation, because arrays should start at an aligned address."""
    if parts == [len(data)]:  # the common case
        return [memoryview(bytearray(data))]
    if inline_size(parts) != len(data):
        raise ProtocolError(f"{len(data)} bytes of data where {inline_size(parts)} were announced")
    found: list[memoryview] = []
    offset = 0
    for part in parts:
        size = _inline(part)
        if size is None:
            raise ProtocolError("a blob where none was expected")
        found.append(memoryview(bytearray(data[offset : offset + size])))
        offset += size
    return found


class Assembly:
    """The parts of a large message, filled as its data is received."""

    def __init__(self, parts: Sequence[Part], *, resolve: Resolve | None = None, limit: int | None = None) -> None:
        self.missing = inline_size(parts)
        if limit is not None and self.missing > limit:
            raise ProtocolError(f"a message of {self.missing} bytes; at most {limit} are accepted")
        self._parts = parts
        self._resolve = resolve
        self._inline = [part for part in parts if _inline(part) is not None]
        self.inline: list[memoryview] = []
        """The inline parts received so far. No memory is allocated for parts that are only announced."""
        self._offset = 0

    def place(self, length: int) -> memoryview:
        """The memory for the next `length` bytes, which never span two parts. Raises ProtocolError if too many."""
        if length > self.missing:
            raise ProtocolError(f"{length} bytes of data where {self.missing} were announced")
        if not length:
            return memoryview(bytearray())
        while not self.inline or self._offset == len(self.inline[-1]):
            self._begin()
        return self.inline[-1][self._offset : self._offset + length]

    def fill(self, data: memoryview) -> None:
        """All of the data was received. Raises ProtocolError if it is more or less than was announced."""
        if len(data) != self.missing:
            raise ProtocolError(f"{len(data)} bytes of data where {self.missing} were announced")
        for size in filter(None, map(_inline, self._inline)):
            self.place(size)[:] = data[:size]
            self.advance(size)
            data = data[size:]

    def _begin(self) -> None:
        """Allocates the next part."""
        part = self._inline[len(self.inline)]
        try:
            self.inline.append(allocate(part) if isinstance(part, int) else allocate_bytes(part[1]))
        except (OSError, OverflowError, MemoryError, ValueError) as error:
            raise ProtocolError(f"not enough memory for a part of {_inline(part)} bytes") from error
        self._offset = 0

    def advance(self, length: int) -> bool:
        """`length` bytes were received. Returns whether the message is complete."""
        self._offset += length
        self.missing -= length
        return self.missing == 0

    def buffers(self) -> list[memoryview]:
        """All parts in order; blobs are looked up with `resolve`, and what it raises is raised."""
        while len(self.inline) < len(self._inline):  # remaining parts are empty
            self._begin()
        inline = iter(self.inline)
        return [self._named(part) if _inline(part) is None else next(inline) for part in self._parts]

    def _named(self, part: Any) -> memoryview:
        if self._resolve is None:
            raise ProtocolError("a blob where none was expected")
        return self._resolve(part[0], *part[2:])
