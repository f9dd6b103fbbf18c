"""Moves what differs from a source to a target: compares, packs small files together, sends large ones in pieces.

Requests to the side that is on a host are sent ahead, so that neither side waits for the other.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby, zip_longest
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeVar

from skyfab._util import schema
from skyfab._util.sizes import counted, readable
from skyfab.errors import ProtocolError
from skyfab.files.entries import FILE, LARGEST, shown
from skyfab.files.source import GONE, PIECE, SMALL
from skyfab.files.target import EQUAL_SIZE, NEWER

if TYPE_CHECKING:
    from skyfab.files.entries import Row

T = TypeVar("T")
_AHEAD: Final = 16
"""Requests that are sent ahead: to read packs and pieces, and as many to write them."""
_FILES: Final = 512
"""Files of one pack."""
_PACK: Final = 2 * SMALL
"""Bytes of one pack at most: files may have grown since they were listed."""
_NOTES: Final = 1000
_SHAPES: Final[Mapping[str, Any]] = {
    "receive": tuple[str, str, int],
    "send": str,
    "compiled": str,
    "news": tuple[int, int],
    "rows": tuple[list[list[Any]], list[tuple[str, str]]],  # the target checks each row
    "digest": str,
    "reopen": tuple[int, int],
    "drafted": str,
    "compare": list[tuple[int, str, int, str]],
    "begin": tuple[int, str],
    "pack": tuple[list[tuple[int, int, int]], bytes],
    "piece": tuple[bool, bytes],
}
"""For each request of a transfer, the type of its reply, which may come from a host that is not trusted."""


class Reply(Protocol):
    """The reply to a request, which may not have come yet."""

    def result(self) -> Any:
        """Waits for it."""


class Side(Protocol):
    """A source or target, here or on a host."""

    def ask(self, request: str, *arguments: Any) -> Reply:
        """Sends a request: a method of `Source` or `Target` and its arguments."""


@dataclass(frozen=True, slots=True)
class Ready:
    """A reply that is there."""

    value: Any

    def result(self) -> Any:
        return self.value


def check(request: str, reply: Reply, shape: Any = None, host: str | None = None) -> Any:
    """Waits for a reply. Raises ProtocolError if it does not match the request."""
    try:
        return schema.parse(shape or _SHAPES[request], reply.result())
    except schema.Invalid as error:
        raise ProtocolError(f"invalid reply to {request}: {error}", host=host) from None


class Here:
    """A source, a target or a cache of the hub on this machine."""

    def __init__(self, side: object) -> None:
        self._side = side

    def ask(self, request: str, *arguments: Any) -> Reply:
        return Ready(getattr(self._side, request)(*arguments))


def packs(files: Iterable[T], size_of: Callable[[T], int]) -> Iterator[list[T]]:
    """Files in packs of small ones; a large one has a pack of its own."""
    pack: list[T] = []
    room = SMALL
    for file in files:
        if pack and (size_of(file) > room or len(pack) == _FILES):
            yield pack
            pack, room = [], SMALL
        pack.append(file)
        room -= size_of(file)
    if pack:
        yield pack


@dataclass(slots=True, repr=False)
class Report:
    """What a transfer to or from one host has done."""

    host: str = ""
    entries: int = 0
    """Files, folders and links."""
    files: int = 0
    size: int = 0
    """Bytes of all files."""
    sent: int = 0
    """Files whose content was sent, in either direction."""
    sent_size: int = 0
    seconds: float = 0.0
    skipped: list[tuple[str, str]] = field(default_factory=list)
    """Paths that were left out, and why."""
    folder: str = ""
    """The folder of this machine that files were fetched into; empty if they were sent."""

    def __repr__(self) -> str:
        return f"<{self}>"

    def __str__(self) -> str:
        """
        >>> str(Report("node1", files=1200, size=34_000_000, sent=1, sent_size=500_000, seconds=0.3))
        'node1: 1,200 files, 34 MB; sent 1, 500 kB, in 0.3 s'
        >>> str(Report("node1", files=1, size=12, folder="results"))
        'node1: 1 file, 12 bytes; nothing to fetch into results/, in 0.0 s'
        """
        count = f"{counted(self.files, 'file')}, {readable(self.size)}"
        past, present, where = ("fetched", "fetch", f" into {self.folder}/") if self.folder else ("sent", "send", "")
        what = f"{past} {self.sent:,}, {readable(self.sent_size)}" if self.sent else f"nothing to {present}"
        return f"{self.host}: {count}; {what}{where}, in {self.seconds:.1f} s"

    def count(self, rows: Collection[Row]) -> None:
        """Takes over how many entries there are."""
        files = [row for row in rows if row[1] == FILE]
        self.entries, self.files, self.size = len(rows), len(files), sum(row[2] for row in files)

    def note(self, path: str, why: str) -> None:
        if len(self.skipped) < _NOTES:
            self.skipped.append((shown(path), shown(why)))


Progress = Callable[[int, int | None], None]
"""Called with the bytes that were moved so far, and with those of all files that are moved.

Before that, with how many files and folders were compared, and None.
"""
CHANGED: Final = "removed, changed or not readable"


class Transfer:
    """One transfer, from `source` to `target`."""

    def __init__(
        self, source: Side, target: Side, progress: Progress, pace: Callable[[int], object] | None = None
    ) -> None:
        """`pace` is called before bytes are requested, and may wait; files then keep the source's order."""
        self._source = source
        self._target = target
        self._progress = progress
        self._in_order, self._pace = pace is not None, pace or int
        self._ahead = 4 if pace else _AHEAD  # what is not written yet when it is interrupted is sent again
        self.report = Report()
        self.rows: list[Row] = []
        """The source's entries."""
        self._reading: deque[tuple[str, tuple[Any, ...], Reply]] = deque()
        self._writing: deque[tuple[Reply, int]] = deque()
        self._done = self._total = 0
        self._needed = 0
        """Bytes that the target needs for all files."""
        self._fits: Callable[[int], None] = lambda size: None
        self._is_changed = self._is_cut = False
        """The large file that is being sent was changed, or made shorter, since it was opened."""
        self._missed: list[int] = []
        """Small files that could not be sent: gone, or large by now."""

    def run(self, fits: Callable[[int], None], relay: Callable[[list[int]], list[int]] = list) -> None:
        """Moves everything. `fits` is called with the bytes that are needed, and raises if they do not fit.

        `relay` may have other hosts send files. It returns the numbers of those that are still needed.
        """
        wanted = self._compare()
        self._total = sum(self._size(number) for number, _ in wanted)
        self._fits = fits
        self._needed = sum(self._size(number) - there for number, there in wanted)
        fits(self._needed)
        self._progress(0, self._total)
        numbers = relay([number for number, _ in wanted])
        if not self._in_order:
            numbers.sort(key=self._is_large)
        for is_large, some in groupby(numbers, self._is_large):
            (self._send_large if is_large else self._send_small)(list(some))
        while self._writing:
            self._wait_for_writing(0)
        self._target.ask("finish").result()
        self._progress(self._total, self._total)

    def _grow(self, size: int) -> None:
        """Files have that many bytes more than when they were listed. Raises if they do not fit."""
        if size > 0:
            self._needed += size
            self._fits(self._needed)

    def listed(self, number: int) -> tuple[int, int]:
        """The size and time of a file."""
        return self._size(number), self.rows[number][3]

    def arrived(self, size: int) -> None:
        """The target has received these bytes."""
        self.report.sent_size += size
        self._advance(size)

    def relayed(self, numbers: Sequence[int], received: int) -> None:
        """The target has these files from a relay, of which `received` bytes have arrived."""
        self.report.sent += len(numbers)
        self._advance(sum(map(self._size, numbers)) - received)  # less if a part of others has come, which is resumed

    def _size(self, number: int) -> int:
        size: int = self.rows[number][2]
        return size

    def _is_large(self, number: int) -> bool:
        return self._size(number) > SMALL

    # ---- what is needed

    def _compare(self) -> list[tuple[int, int]]:
        """The numbers of the files to send, each with how many bytes of it are there."""
        lists = deque(self._source.ask("rows") for _ in range(2))
        compared: deque[Reply] = deque()
        wanted: list[tuple[int, int]] = []
        while True:
            rows, skipped = check("rows", lists.popleft())
            for path, why in skipped:
                self.report.note(path, why)
            if not rows:
                break
            lists.append(self._source.ask("rows"))
            compared.append(self._target.ask("compare", rows))
            self.rows += rows
            self._progress(len(self.rows), None)
            while len(compared) > _AHEAD:
                wanted += self._judge(compared.popleft())
        for answer in compared:
            wanted += self._judge(answer)
        self.report.count(self.rows)
        if len({number for number, _ in wanted}) < len(wanted):
            raise ProtocolError("a file requested twice")
        return wanted

    def _judge(self, answer: Reply) -> Iterator[tuple[int, int]]:
        """Of the files that are needed, those whose content differs."""
        asked: list[tuple[int, int, str, Reply]] = []
        for number, state, there, digest in check("compare", answer):
            is_file = 0 <= number < len(self.rows) and self.rows[number][1] == FILE
            if not is_file or not 0 <= there <= 2 * LARGEST:
                raise ProtocolError(f"no file {number} in this transfer")
            if state == NEWER:
                self.report.note(self.rows[number][0], "newer on the host: kept")
            elif state == EQUAL_SIZE:
                asked.append((number, there, digest, self._source.ask("digest", number, self._size(number))))
            else:
                yield number, there
        for number, there, digest, reply in asked:
            if check("digest", reply) == digest and digest:
                self._writing.append((self._target.ask("adopt", number), 0))
                self._wait_for_writing(_AHEAD)
            else:
                yield number, there

    # ---- content

    def _send_small(self, numbers: Sequence[int]) -> None:
        for pack in packs(numbers, self._size):
            self._read("pack", pack, _PACK)
        self._pass_all_on()
        while self._missed:
            number = self._missed.pop()
            if self._reopen(number) and self._is_large(number):
                self._send_large([number])
            else:
                self.report.note(self.rows[number][0], CHANGED)

    def _send_large(self, numbers: Sequence[int]) -> None:
        begun = deque(self._target.ask("begin", number) for number in numbers[:1])
        for number, following in zip_longest(numbers, numbers[1:]):
            at = self._resumed(number, *check("begin", begun.popleft()))
            if following is not None:
                begun.append(self._target.ask("begin", following))
            self._advance(at)
            if self._send_pieces(number, at) or (self._reopen(number) and self._send_pieces(number, 0)):
                self.report.sent += 1
            else:
                self._target.ask("discard", number).result()
                self.report.note(self.rows[number][0], CHANGED)

    def _resumed(self, number: int, size: int, digest: str) -> int:
        """Where to resume: after what an earlier transfer has left, if that is the beginning of the file."""
        if not 0 < size <= self._size(number):
            return 0
        return size if check("digest", self._source.ask("digest", number, size)) == digest else 0

    def _reopen(self, number: int) -> bool:
        """A large file has changed since it was listed or begun: it is sent as it is now, once. False if it is gone."""
        size, time = check("reopen", self._source.ask("reopen", number))
        if size == GONE:
            return False
        self._grow(size - self._size(number))
        self.rows[number][2] = size
        self._target.ask("resize", number, size, time).result()
        return True

    def _send_pieces(self, number: int, at: int) -> bool:
        """Sends a large file, from `at` on. Returns False, without its last piece, if that would be a mixture.

        Lines that are appended to a log meanwhile do not matter.
        """
        self._is_changed = self._is_cut = False
        size = self._size(number)
        last = at + (size - at - 1) // PIECE * PIECE if at < size else size  # nothing may be missing but its name
        for place in range(at, last, PIECE):
            self._read("piece", number, place, PIECE)
        self._pace(size - last)
        reply = self._source.ask("piece", number, last, size - last)
        self._pass_all_on()
        is_changed, data = check("piece", reply)
        if self._is_cut or len(data) < size - last:
            return False
        if self._is_changed or is_changed:
            sent = check("drafted", self._target.ask("drafted", number))
            if sent != check("digest", self._source.ask("digest", number, last)):
                return False
        self._pass_piece(number, last, size - last, is_changed, data)
        return True

    def _read(self, request: str, *arguments: Any) -> None:
        self._pace(sum(map(self._size, arguments[0])) if request == "pack" else PIECE)
        self._reading.append((request, arguments, self._source.ask(request, *arguments)))
        if len(self._reading) > self._ahead:
            self._pass_on()

    def _pass_all_on(self) -> None:
        while self._reading:
            self._pass_on()
        self._wait_for_writing(_AHEAD)

    def _pass_on(self) -> None:
        """Has the target write what was read first."""
        request, arguments, reply = self._reading.popleft()
        found = check(request, reply)
        if request == "pack":
            self._pass_pack(*arguments, *found)
        else:
            self._pass_piece(*arguments, *found)
        self._wait_for_writing(_AHEAD)

    def _pass_pack(self, numbers: list[int], most: int, found: list[list[int]], data: Any) -> None:
        if [number for number, _, _ in found] != numbers or len(data) > most:
            raise ProtocolError("files that were not requested")
        self._grow(len(data) - sum(map(self._size, numbers)))
        for number, size, _ in found:
            if size == GONE:
                self._missed.append(number)
                self._advance(self._size(number))
            else:
                self.report.sent += 1
        self._writing.append((self._target.ask("store", found, data), len(data)))

    def _pass_piece(self, number: int, at: int, size: int, is_changed: bool, data: Any) -> None:
        if len(data) > size:
            raise ProtocolError(f"{len(data)} bytes where {size} were requested")
        self._is_changed |= is_changed
        self._is_cut |= len(data) < size
        if not self._is_cut:
            self._writing.append((self._target.ask("piece", number, at, data), len(data)))

    def _wait_for_writing(self, most: int) -> None:
        while len(self._writing) > most:
            reply, size = self._writing.popleft()
            reply.result()
            self.arrived(size)

    def _advance(self, size: int) -> None:
        self._done = min(self._done + size, self._total)
        self._progress(self._done, self._total)
