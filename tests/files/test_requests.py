"""What a transfer asks of its two sides, how far ahead, and what it refuses of their replies."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from skyfab.errors import ProtocolError
from skyfab.files.entries import FILE, FOLDER, LARGEST, Entry, walk
from skyfab.files.source import SMALL, Source
from skyfab.files.target import EQUAL_SIZE, MISSING, Target
from skyfab.files.transfer import Here, Report, Side, Transfer


class Watched:
    """A side that notes what it is asked, and how many requests have no reply yet."""

    def __init__(self, side: Source | Target) -> None:
        self._here = Here(side)
        self.asked: list[tuple[Any, ...]] = []
        self.open: set[int] = set()
        self.most = 0

    def ask(self, request: str, *arguments: Any) -> Any:
        number = len(self.asked)
        self.asked.append((request, *arguments))
        self.open.add(number)
        self.most = max(self.most, len(self.open))
        reply = self._here.ask(request, *arguments)

        class Reply:
            def result(_self) -> Any:
                self.open.discard(number)
                return reply.result()

        return Reply()

    def of(self, request: str) -> list[tuple[Any, ...]]:
        return [arguments for name, *arguments in self.asked if name == request]


def move(tmp_path: Path, fits: Callable[[int], None] = lambda size: None) -> tuple[Transfer, Watched, Watched]:
    with (
        contextlib.closing(Source(walk(os.fsencode(tmp_path / "from"), b"", []), [])) as source,
        contextlib.closing(Target(os.fsencode(tmp_path / "to"))) as target,
    ):
        sides = Watched(source), Watched(target)
        transfer = Transfer(*sides, lambda done, total: None)
        transfer.run(fits)
    assert {path.name: path.read_bytes() for path in (tmp_path / "from").iterdir()} == {
        path.name: path.read_bytes() for path in (tmp_path / "to").iterdir()
    }
    assert sides[0].open <= {number for number, asked in enumerate(sides[0].asked) if asked == ("rows",)}
    assert not sides[1].open, "a reply that nobody waits for may be an error"
    return transfer, *sides


def fill(tmp_path: Path, *sizes: int) -> None:
    (tmp_path / "from").mkdir()
    for number, size in enumerate(sizes):
        (tmp_path / "from" / f"{number:04}").write_bytes(os.urandom(size))


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files of more than 4 bytes are large, and are sent in pieces of 10."""
    monkeypatch.setattr("skyfab.files.transfer.SMALL", 4)
    monkeypatch.setattr("skyfab.files.transfer.PIECE", 10)


def test_requests_are_sent_ahead_but_not_without_limit(tmp_path: Path, tiny: None) -> None:
    fill(tmp_path, 900, 7)
    _, source, target = move(tmp_path)
    assert 10 < source.most < 20
    assert 10 < target.most < 20


def test_what_is_there_needs_no_room(tmp_path: Path) -> None:
    fill(tmp_path, 100, 10)
    (tmp_path / "to").mkdir()
    (tmp_path / "to" / "0000").write_bytes(bytes(30))
    needed: list[int] = []
    move(tmp_path, needed.append)
    assert needed == [80]


def test_progress_is_that_of_what_is_sent(tmp_path: Path) -> None:
    fill(tmp_path, 100, 10, SMALL + 1)
    (tmp_path / "to").mkdir()
    (tmp_path / "to" / "0001").write_bytes((tmp_path / "from" / "0001").read_bytes())
    steps: list[tuple[int, int | None]] = []
    with (
        contextlib.closing(Source(walk(os.fsencode(tmp_path / "from"), b"", []), [])) as source,
        contextlib.closing(Target(os.fsencode(tmp_path / "to"))) as target,
    ):
        Transfer(Here(source), Here(target), lambda *step: steps.append(step)).run(lambda size: None)
    total = 100 + SMALL + 1
    assert steps.pop(0) == (3, None), "what was compared"
    assert (steps[0], steps[-1]) == ((0, total), (total, total))
    assert {100, 100 + SMALL + 1} <= {done for done, _ in steps}
    assert [done for done, _ in steps] == sorted(done for done, _ in steps)


# ---- replies that are not to be trusted


class Replies:
    """A side that replies what it is given; a list of several, one after another."""

    def __init__(self, **replies: Any) -> None:
        self._replies = replies
        self.asked: list[tuple[Any, ...]] = []

    def ask(self, request: str, *arguments: Any) -> Any:
        self.asked.append((request, *arguments))
        found = self._replies.get(request)

        class Reply:
            def result(_self) -> Any:
                return found.pop(0) if isinstance(found, Queue) else found

        return Reply()


class Queue(list[Any]):
    """Several replies."""


def listed(*entries: Entry) -> Queue:
    return Queue([([entry.row for entry in entries], []), ([], []), ([], [])])


def run(source: Side, target: Side) -> Report:
    transfer = Transfer(source, target, lambda done, total: None)
    transfer.run(lambda size: None)
    return transfer.report


@pytest.mark.parametrize(
    "wanted",
    [
        [[0, MISSING, 0, ""], [0, MISSING, 0, ""]],
        [[1, MISSING, 0, ""]],
        [[2, MISSING, 0, ""]],
        [[-2, MISSING, 0, ""]],
        [[0, MISSING, -1, ""]],
        [[0, MISSING, 3 * LARGEST, ""]],
        [[0, EQUAL_SIZE, -1, ""]],
    ],
    ids=["twice", "folder", "beyond", "below", "less than nothing", "too much", "equal"],
)
def test_a_target_that_wants_what_is_not_a_file_of_the_transfer(wanted: list[Any]) -> None:
    rows = listed(Entry(b"a", FILE, 3), Entry(b"d", FOLDER))
    with pytest.raises(ProtocolError):
        run(Replies(rows=rows), Replies(compare=wanted))


def test_files_that_neither_side_can_read_are_not_equal() -> None:
    """The digest of such a file is empty."""
    source = Replies(rows=listed(Entry(b"a", FILE, 3)), digest="", pack=([[0, 3, 1]], b"abc"))
    target = Replies(compare=[[0, EQUAL_SIZE, 3, ""]])
    assert run(source, target).sent == 1
    assert [name for name, *_ in target.asked] == ["compare", "store", "finish"]


@pytest.mark.parametrize(("begun", "resumes"), [(-3, False), (0, False), (7, True), (8, False)])
def test_a_file_is_resumed_within_its_size(tiny: None, begun: int, resumes: bool) -> None:
    rows = listed(Entry(b"a", FILE, 7))
    source = Replies(rows=rows, digest="same", piece=(False, b"" if resumes else b"abcdefg"))
    run(source, Replies(compare=[[0, MISSING, 0, ""]], begin=(begun, "same")))
    (piece,) = [asked for asked in source.asked if asked[0] == "piece"]
    assert piece == (("piece", 0, 7, 0) if resumes else ("piece", 0, 0, 7))


def test_a_piece_that_is_too_long_is_refused(tiny: None) -> None:
    for number in range(2):
        pieces = Queue([(False, bytes(10)), (False, bytes(5))])
        pieces[number] = (False, pieces[number][1] + b"x")
        source = Replies(rows=listed(Entry(b"a", FILE, 15)), piece=pieces)
        with pytest.raises(ProtocolError, match="bytes where"):
            run(source, Replies(compare=[[0, MISSING, 0, ""]], begin=(0, "")))


@pytest.mark.parametrize("short", [0, 1])
def test_a_file_that_has_become_shorter_is_tried_twice_and_left_out(tiny: None, short: int) -> None:
    pieces = [(False, bytes(10)), (False, bytes(5))]
    pieces[short] = (True, bytes(3))
    source = Replies(rows=listed(Entry(b"a", FILE, 15)), piece=Queue(2 * pieces), reopen=(15, 0))
    target = Replies(compare=[[0, MISSING, 0, ""]], begin=(0, ""))
    report = run(source, target)
    assert (report.sent, report.skipped) == (0, [("a", "removed, changed or not readable")])
    assert target.asked[-2:] == [("discard", 0), ("finish",)]
    assert ("piece", 0, 10, bytes(5)) not in target.asked, "with it, the file would be complete"


@pytest.mark.parametrize("changed", [0, 1])
@pytest.mark.parametrize("is_equal", [True, False], ids=["appended to", "rewritten"])
def test_a_file_that_was_changed_is_compared_before_its_last_piece(tiny: None, changed: int, is_equal: bool) -> None:
    pieces = [(number == changed, bytes(size)) for number, size in enumerate((10, 5))]
    digests = Queue(["same" if is_equal else "other", "same"])
    source = Replies(rows=listed(Entry(b"a", FILE, 15)), piece=Queue(2 * pieces), digest=digests, reopen=(15, 0))
    target = Replies(compare=[[0, MISSING, 0, ""]], begin=(0, ""), drafted="same")
    assert run(source, target).sent == 1
    sent = [at for name, _, at, _ in (one for one in target.asked if one[0] == "piece")]
    assert sent == ([0, 10] if is_equal else [0, 0, 10])
    assert ("digest", 0, 10) in source.asked


def test_not_everything_that_is_left_out_is_kept() -> None:
    report = Report()
    for number in range(1001):
        report.note(str(number), "why")
    assert [path for path, _ in report.skipped] == [str(number) for number in range(1000)]


@pytest.mark.parametrize("year", [1960, 2400])
def test_a_file_of_any_time_arrives_with_it(tmp_path: Path, year: int) -> None:
    """Clocks of laboratory equipment may be wrong by centuries."""
    (tmp_path / "from").mkdir()
    path = tmp_path / "from" / "measured"
    path.write_text("data")
    time = (year - 1970) * 31_556_952
    os.utime(path, (time, time))
    if path.stat().st_mtime != time:
        pytest.skip("this file system has no such time")
    move(tmp_path)
    assert (tmp_path / "to" / "measured").stat().st_mtime == time
