"""Transfers between two folders of this machine: what is sent, what is kept, and what no source can do to a target."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import itertools
import json
import os
import shutil
import stat
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from test_entries import ODD

from skyfab.errors import HostUnfit, ProtocolError
from skyfab.files import draft, entries
from skyfab.files.draft import Draft, part_of
from skyfab.files.entries import FILE, FOLDER, LINK, Entry, walk
from skyfab.files.source import GONE, PIECE, SMALL, Source, expected
from skyfab.files.target import Target
from skyfab.files.transfer import Here, Report, Transfer
from skyfab.host.ask.files import serve
from skyfab.pool.file_worker import Answer
from skyfab.protocol import messages


def move(
    top: Path,
    to: Path,
    *,
    progress: Callable[[int, int], None] = lambda done, total: None,
    keep_newer: bool = False,
) -> Report:
    skipped: list[Any] = []
    target = Target(os.fsencode(to), keep_newer=keep_newer)
    try:
        with contextlib.closing(Source(walk(os.fsencode(top), b"", skipped), skipped)) as source:
            transfer = Transfer(Here(source), Here(target), progress)
            transfer.run(lambda size: None)
        return transfer.report
    finally:
        target.close()


def state(top: Path) -> dict[bytes, Any]:
    """Everything below a folder: content or link, mode and time."""
    found: dict[bytes, Any] = {}
    for path in top.rglob("*"):
        about = path.lstat()
        inner = os.fsencode(path.relative_to(top))
        if stat.S_ISLNK(about.st_mode):
            found[inner] = str(path.readlink())
        else:
            content = path.read_bytes() if stat.S_ISREG(about.st_mode) else None
            found[inner] = (content, about.st_mode & 0o777, about.st_mtime_ns)
    return found


@pytest.mark.parametrize("keep_newer", [True, False])
def test_a_file_that_is_newer_there_stays_if_that_is_wanted(tmp_path: Path, keep_newer: bool) -> None:
    """A checkpoint that was fetched, and sent again by the next run, took the place of a newer one."""
    here, there = tmp_path / "here", tmp_path / "there"
    here.mkdir()
    there.mkdir()
    for name in ("last.pt", "train.csv"):
        (here / name).write_text("old")
        (there / name).write_text("other")
    os.utime(here / "last.pt", (1000, 1000))
    os.utime(there / "last.pt", (2000, 2000))
    os.utime(there / "train.csv", (1000, 1000))
    report = move(here, there, keep_newer=keep_newer)
    assert (there / "last.pt").read_text() == ("other" if keep_newer else "old")
    assert (there / "train.csv").read_text() == "old"
    assert report.skipped == ([("last.pt", "newer on the host: kept")] if keep_newer else [])


@pytest.fixture
def top(tmp_path: Path) -> Path:
    """A folder with something of everything."""
    made = tmp_path / "top"
    (made / "sub" / "empty").mkdir(parents=True)
    for folder in (made, made / "sub"):
        for number, odd in enumerate(ODD):
            (folder / os.fsdecode(odd)).write_bytes(odd * number)
    (made / "run.sh").write_text("#!/bin/sh\n")
    (made / "run.sh").chmod(0o755)
    (made / "secret").write_text("s")
    (made / "secret").chmod(0o600)
    (made / "large").write_bytes(os.urandom(2 * PIECE + 12345))
    (made / "exact").write_bytes(os.urandom(2 * PIECE))
    (made / "limit").write_bytes(os.urandom(SMALL))
    (made / "sub" / "link").symlink_to("../large")
    (made / "sub" / "empty").chmod(0o700)
    for path in (made / "large", made / "sub"):
        os.utime(path, ns=(10**18, 10**18 + 7))
    return made


def test_everything_arrives_as_it_was(top: Path, tmp_path: Path) -> None:
    report = move(top, tmp_path / "to")
    assert state(tmp_path / "to") == state(top)
    assert report.sent == report.files == sum(1 for path in top.rglob("*") if path.is_file() and not path.is_symlink())
    assert report.sent_size == report.size


def test_only_what_has_changed_is_sent(top: Path, tmp_path: Path) -> None:
    move(top, tmp_path / "to")
    (top / "new").write_text("new!")
    (top / "run.sh").write_text("#!/bin/sh\ntrue\n")
    (top / "sub" / "plain").write_bytes(b"")  # the same, at another time
    os.utime(top / "large")
    (top / "secret").chmod(0o640)
    report = move(top, tmp_path / "to")
    assert (report.sent, report.sent_size) == (2, 4 + 15)
    assert state(tmp_path / "to") == state(top)
    report = move(top, tmp_path / "to")
    assert (report.sent, report.sent_size) == (0, 0)


def test_equal_size_and_other_content_is_sent(tmp_path: Path) -> None:
    for folder, content in (("from", b"abc"), ("to", b"xyz")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "file").write_bytes(content)
        os.utime(tmp_path / folder / "file", ns=(1, len(folder)))
    assert move(tmp_path / "from", tmp_path / "to").sent == 1
    assert (tmp_path / "to" / "file").read_bytes() == b"abc"


def test_other_files_of_the_target_stay(tmp_path: Path) -> None:
    (tmp_path / "from").mkdir()
    (tmp_path / "to").mkdir()
    (tmp_path / "from" / "new").write_text("x")
    (tmp_path / "to" / "other").write_text("y")
    move(tmp_path / "from", tmp_path / "to")
    assert sorted(path.name for path in (tmp_path / "to").iterdir()) == ["new", "other"]


class Cut(Exception):
    """The program ends here."""


def test_a_large_file_goes_on_where_it_stopped(tmp_path: Path) -> None:
    (tmp_path / "from").mkdir()
    (tmp_path / "from" / "large").write_bytes(os.urandom(40 * PIECE + 1))

    def progress(done: int, total: int) -> None:
        if done >= 2 * PIECE:
            raise Cut

    with pytest.raises(Cut):
        move(tmp_path / "from", tmp_path / "to", progress=progress)
    assert not (tmp_path / "to" / "large").exists()
    begun = (tmp_path / "to" / os.fsdecode(part_of(b"large"))).stat().st_size
    assert 2 * PIECE <= begun < 40 * PIECE
    report = move(tmp_path / "from", tmp_path / "to")
    assert (report.sent, report.sent_size) == (1, 40 * PIECE + 1 - begun)
    assert state(tmp_path / "to") == state(tmp_path / "from")


def test_what_another_file_has_left_is_not_taken(tmp_path: Path) -> None:
    (tmp_path / "from").mkdir()
    (tmp_path / "to").mkdir()
    (tmp_path / "from" / "large").write_bytes(os.urandom(PIECE + 1))
    (tmp_path / "to" / os.fsdecode(part_of(b"large"))).write_bytes(b"other content")
    move(tmp_path / "from", tmp_path / "to")
    assert state(tmp_path / "to") == state(tmp_path / "from")


def test_two_at_once_write_drafts_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draft, "_PATIENCE", 0.0)
    folder = os.open(tmp_path, os.O_RDONLY)
    try:
        one, other = Draft(folder, b"name", 0o644), Draft(folder, b"name", 0o644)
        one.write(memoryview(b"one"))
        other.write(memoryview(b"the other"))
        other.commit(1)
        assert (tmp_path / "name").read_text() == "the other"
        one.commit(1)
        assert (tmp_path / "name").read_text() == "one"
        assert [path.name for path in tmp_path.iterdir()] == ["name"]
    finally:
        os.close(folder)


def test_a_draft_waits_for_one_that_makes_no_progress(tmp_path: Path) -> None:
    """Its program may have been killed, and its worker ends soon."""
    folder = os.open(tmp_path, os.O_RDONLY)
    try:
        one = Draft(folder, b"name", 0o644)
        one.write(memoryview(b"begun"))
        ending = threading.Timer(0.1, one.close)
        ending.start()
        other = Draft(folder, b"name", 0o644)
        ending.join()
        assert other.size == 5
        other.discard()
    finally:
        os.close(folder)


def test_what_killed_transfers_have_left_is_removed_after_a_day(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "from").mkdir()
    (tmp_path / "from" / "new").write_text("x")
    (tmp_path / "to").mkdir()
    left = tmp_path / "to" / f".skyfab-{'0' * 16}.part"
    left.write_text("left")
    move(tmp_path / "from", tmp_path / "to")
    assert left.exists()
    monkeypatch.setattr(time, "time", lambda now=time.time: now() + 100_000)
    (tmp_path / "from" / "new").write_text("newer")
    move(tmp_path / "from", tmp_path / "to")
    assert not left.exists()


@pytest.mark.skipif(not Path("/proc/version").exists(), reason="a file system of Linux")
def test_a_file_that_has_no_size_arrives_whole(tmp_path: Path) -> None:
    (tmp_path / "from").mkdir()
    (tmp_path / "from" / "version").symlink_to("/proc/version")  # a link to something elsewhere: the file is sent
    move(tmp_path / "from", tmp_path / "to")
    assert (tmp_path / "to" / "version").read_text() == Path("/proc/version").read_text()


def test_files_that_grow_while_they_are_read(tmp_path: Path) -> None:
    """One that has grown a little arrives as it is; many that have grown much are left for the next time."""
    for name in ("a", "b", "c"):
        (tmp_path / name).write_text(name)
    source = Source(list(walk(os.fsencode(tmp_path), b"", [])), [])
    source.rows()
    (tmp_path / "a").write_text("grown")
    (tmp_path / "b").write_bytes(bytes(SMALL))
    (tmp_path / "c").write_bytes(bytes(SMALL + 1))
    found, data = source.pack([0, 1, 2], 2 * SMALL)
    assert ([size for _, size, _ in found], len(data)) == ([5, SMALL, GONE], 5 + SMALL)
    found, data = source.pack([1, 0], SMALL)
    assert ([size for _, size, _ in found], len(data)) == ([SMALL, GONE], SMALL)


class Grows(Source):
    """Its files are larger than it has listed them."""

    def pack(self, numbers: Sequence[int], most: int) -> Any:
        self._grow(500_000)
        return super().pack(numbers, most)

    def reopen(self, number: int) -> tuple[int, int]:
        self._grow(3 * SMALL)
        return super().reopen(number)

    def _grow(self, size: int) -> None:
        for path in self.paths:
            Path(os.fsdecode(path)).write_bytes(bytes(size))


@pytest.mark.parametrize(("listed", "sent"), [(1, 500_000), (2 * SMALL, 3 * SMALL)])
def test_files_that_have_grown_must_fit(tmp_path: Path, listed: int, sent: int) -> None:
    (tmp_path / "from").mkdir()
    (tmp_path / "from" / "a").write_bytes(bytes(listed))
    needed: list[int] = []

    def fits(size: int) -> None:
        needed.append(size)
        if len(needed) == 2:
            raise OSError(errno.ENOSPC, "full")

    target = Target(os.fsencode(tmp_path / "to"))
    source = Grows(walk(os.fsencode(tmp_path / "from"), b"", []), [])
    with contextlib.closing(target), contextlib.closing(source), pytest.raises(OSError, match="full"):
        Transfer(Here(source), Here(target), lambda done, total: None).run(fits)
    assert needed == [listed, sent]
    assert not (tmp_path / "to" / "a").exists()


LARGE = 5 * PIECE + 7


@pytest.fixture
def large(tmp_path: Path) -> Path:
    """A large file, and a small one beside it."""
    (tmp_path / "from").mkdir()
    (tmp_path / "from" / "small").write_text("small")
    made = tmp_path / "from" / "large"
    made.write_bytes(b"a" * LARGE)
    return made


def move_while(change: Callable[[int], None], large: Path) -> tuple[Report, Path]:
    """Moves the folder of a large file, with one request ahead. Calls `change` after each piece, with its number."""
    calls = itertools.count(1)
    to = large.parent.parent / "to"
    skipped: list[Any] = []
    target = Target(os.fsencode(to))

    class Watched(Source):
        def piece(self, number: int, at: int, size: int) -> tuple[bool, bytes]:
            found = super().piece(number, at, size)
            change(next(calls))
            return found

    with (
        contextlib.closing(target),
        contextlib.closing(Watched(walk(os.fsencode(large.parent), b"", skipped), skipped)) as source,
    ):
        transfer = Transfer(Here(source), Here(target), lambda done, total: None)
        transfer.run(lambda size: None)
    assert (to / "small").read_text() == "small"
    return transfer.report, to / "large"


def test_a_file_that_is_replaced_while_it_is_read_arrives_as_it_was(large: Path) -> None:
    def replace(number: int) -> None:
        if number == 3:
            other = large.with_name("other")
            other.write_bytes(b"b" * LARGE)
            other.replace(large)

    report, arrived = move_while(replace, large)
    assert arrived.read_bytes() == b"a" * LARGE
    assert report.skipped == []


def test_a_file_that_is_changed_all_the_time_is_left_out(large: Path) -> None:
    """What is there stays, and no draft is left."""
    to = large.parent.parent / "to"
    to.mkdir()
    (to / "large").write_text("of yesterday")
    report, arrived = move_while(lambda number: large.write_bytes(bytes([number]) * LARGE), large)
    assert arrived.read_text() == "of yesterday"
    assert report.skipped == [("large", "removed, changed or not readable")]
    assert report.sent == 1
    assert sorted(path.name for path in to.iterdir()) == ["large", "small"]


def test_a_log_that_grows_while_it_is_read_arrives(large: Path) -> None:
    def append(number: int) -> None:
        with large.open("ab") as file:
            file.write(b"more")

    report, arrived = move_while(append, large)
    assert arrived.read_bytes() == b"a" * LARGE
    assert report.skipped == []


def move_after(change: Callable[[], object], large: Path) -> tuple[Report, Path]:
    """Moves what is changed once it has been listed."""
    entries, to = list(walk(os.fsencode(large.parent), b"", [])), large.parent.parent / "to"
    change()
    with contextlib.closing(Target(os.fsencode(to))) as target, contextlib.closing(Source(entries, [])) as source:
        transfer = Transfer(Here(source), Here(target), lambda done, total: None)
        transfer.run(lambda size: None)
    return transfer.report, to


@pytest.mark.parametrize("size", [SMALL + 1, LARGE])
def test_a_small_file_that_has_grown_large_arrives(large: Path, size: int) -> None:
    content = os.urandom(size)
    report, to = move_after(lambda: large.with_name("small").write_bytes(content), large)
    assert (to / "small").read_bytes() == content
    assert (report.sent, report.skipped) == (2, [])
    assert sorted(path.name for path in to.iterdir()) == ["large", "small"]


@pytest.mark.parametrize(("gone", "rest"), [("large", "small"), ("small", "large")])
def test_a_file_that_vanishes_is_left_out(large: Path, gone: str, rest: str) -> None:
    report, to = move_after(large.with_name(gone).unlink, large)
    assert report.skipped == [(gone, "removed, changed or not readable")]
    assert [path.name for path in to.iterdir()] == [rest]


@pytest.mark.parametrize("size", [0, LARGE - 1, LARGE, LARGE + 3 * PIECE])
@pytest.mark.parametrize("is_another", [True, False], ids=["another file", "the same file"])
def test_a_file_that_is_changed_after_it_was_listed_arrives_whole(large: Path, size: int, is_another: bool) -> None:
    """Of a larger one that had its name by then, only a part arrived."""
    content = os.urandom(size)

    def change() -> None:
        new = large.with_name("new") if is_another else large
        new.write_bytes(content)
        new.replace(large)

    report, to = move_after(change, large)
    assert (to / "large").read_bytes() == content
    assert (to / "large").stat().st_mtime_ns == large.stat().st_mtime_ns
    assert (report.sent, report.skipped) == (2, [])
    assert sorted(path.name for path in to.iterdir()) == ["large", "small"]


def test_a_resumed_file_is_the_one_that_was_compared(large: Path) -> None:
    """Another one gets its name between the comparison with what is there and the next piece."""
    source = Source(list(walk(os.fsencode(large), b"large", [])), [])
    source.rows()
    with contextlib.closing(source):
        assert source.digest(0, PIECE) == digest_of_bytes(b"a" * PIECE)
        large.with_name("other").write_bytes(b"b" * LARGE)
        large.with_name("other").replace(large)
        assert source.piece(0, PIECE, PIECE) == (False, b"a" * PIECE)
        assert source.digest(0, LARGE) == digest_of_bytes(b"a" * LARGE)


def digest_of_bytes(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def test_a_folder_that_vanishes_while_it_is_listed_is_left_out(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").touch()
    skipped: list[Any] = []
    found = walk(os.fsencode(tmp_path), b"", skipped)
    names = [next(found)[0].path, next(found)[0].path]
    shutil.rmtree(tmp_path / "b")
    names += [entry.path for entry, _ in found]
    assert names == [b"a", b"b", b"a/file"]
    assert skipped == [(b"b", "removed while it was read")]


@pytest.mark.parametrize("planted", ["link", "owner"])
def test_a_draft_that_another_user_may_have_planted_is_not_used(tmp_path: Path, large: Path, planted: str) -> None:
    (tmp_path / "to").mkdir()
    draft_file = tmp_path / "to" / os.fsdecode(part_of(b"large"))
    draft_file.write_bytes(b"a" * PIECE)
    if planted == "link":
        os.link(draft_file, tmp_path / "theirs")
    elif os.geteuid():
        pytest.skip("needs root")
    else:
        os.chown(draft_file, 12345, 12345)
    move(large.parent, tmp_path / "to")
    assert (tmp_path / "to" / "large").read_bytes() == large.read_bytes()
    assert draft_file.read_bytes() == b"a" * PIECE


# ---- what was requested


def test_what_was_not_requested_is_not_written(tmp_path: Path) -> None:
    with contextlib.closing(Target(os.fsencode(tmp_path), expects=expected([b"ckpt/*.pt"]))) as target:
        target.compare([Entry(b"ckpt/a.pt", FILE, 1, 0, 0o644).row])
        for row in (Entry(b"train.py", FILE, 1), Entry(b".ssh", FOLDER, mode=0o777), Entry(b"b", LINK, link=b"ckpt")):
            with pytest.raises(ProtocolError, match="was not requested"):
                target.compare([row.row])
    assert [path.name for path in tmp_path.iterdir()] == ["ckpt"]


@pytest.mark.parametrize("reply", [b'{"errno": Infinity, "text": ""}', b'{"errno": []}', b"[]", b"\xff", b"[" * 9999])
def test_hostile_replies_to_a_transfer_are_typed_errors(reply: bytes) -> None:
    answer = Answer("node1", "begin")
    answer.answered(messages.Result(parts=()), [memoryview(reply)])
    with pytest.raises(ProtocolError, match="not a reply to begin"):
        answer.result()
    with pytest.raises(ProtocolError, match="not a path"):
        entries.name("\ud800")
    report = Report()
    report.note("\ud800\x1b[2J", "\x07")
    assert report.skipped == [("\\ud800\\x1b[2J", "\\x07")]


@pytest.mark.parametrize("why", ["died", "unstarted"])
def test_a_transfer_whose_process_is_killed_says_so(why: str) -> None:
    """Its next process knows nothing of the transfer."""
    answer = Answer("node1", "piece")
    answer.answered(messages.Ended(why=why), [])
    with pytest.raises(HostUnfit, match="the process of the transfer was killed") as raised:
        answer.result()
    assert raised.value.hint == "run it again: it resumes where it stopped"
    for request in (("piece", 0, 0, b""), ("fetched", [b"ckpt"])):
        found = json.loads(serve(*request).data)
        assert found == {"errno": errno.ESTALE, "text": "the process of the transfer was killed"}


def test_folders_that_were_there_keep_their_modes(tmp_path: Path) -> None:
    for folder in ("from/old", "from/new", "to/old"):
        (tmp_path / folder).mkdir(parents=True)
    for folder in ("old", "new"):
        (tmp_path / "from" / folder).chmod(0o777)
    (tmp_path / "to" / "old").chmod(0o700)
    move(tmp_path / "from", tmp_path / "to")
    modes = [(tmp_path / "to" / folder).stat().st_mode & 0o777 for folder in ("old", "new")]
    assert modes == [0o700, 0o777]


# ---- sources that are not to be trusted


class Reply:
    def __init__(self, value: Any) -> None:
        self._value = value

    def result(self) -> Any:
        return self._value


class Liar:
    """A source that says what it likes."""

    def __init__(self, listed: list[Any], **replies: Any) -> None:
        self._rows = [(listed, []), ([], []), ([], [])]
        self._replies = replies

    def ask(self, request: str, *arguments: Any) -> Reply:
        if request == "rows" and "rows" not in self._replies:
            return Reply(self._rows.pop(0))
        return Reply(self._replies[request])


def receive(to: Path, liar: Liar) -> None:
    target = Target(os.fsencode(to))
    try:
        Transfer(liar, Here(target), lambda done, total: None).run(lambda size: None)
    finally:
        target.close()


def file(path: bytes, size: int = 3) -> list[Any]:
    return Entry(path, FILE, size, 1, 0o644).row


def pack(*found: list[int], data: bytes) -> Any:
    return [list(found), data]


@pytest.mark.parametrize(
    ("rows", "replies"),
    [
        ([file(b"../out")], {}),
        ([file(b"/tmp/out")], {}),
        ([file(b"a"), file(b"a")], {}),
        ([file(b".skyfab-00000000.part")], {}),
        ([Entry(b"l", LINK, link=b"../..").row], {}),
        ([], {"rows": "rows"}),
        ([], {"rows": [[1], []]}),
        ([], {"rows": [[], [[1, 2]]]}),
        ([file(b"a")], {"pack": pack([0, 3, 1], data=b"abcd")}),
        ([file(b"a")], {"pack": pack([0, 3, 1], data=b"ab")}),
        ([file(b"a")], {"pack": pack([1, 3, 1], data=b"abc")}),
        ([file(b"a")], {"pack": pack([-1, 3, 1], data=b"abc")}),
        ([file(b"a"), Entry(b"d", FOLDER).row], {"pack": pack([1, 3, 1], data=b"abc")}),
        ([file(b"a"), file(b"b")], {"pack": pack([0, -2, 1], [1, 5, 1], data=b"abc")}),
        ([file(b"a")], {"pack": pack(data=b"")}),
        (
            [file(b"%d" % n) for n in range(3)],
            {"pack": pack(*([n, SMALL, 1] for n in range(3)), data=bytes(3 * SMALL))},
        ),
        ([file(b"a")], {"pack": pack([0, -5, 1], data=b"abc")}),
        ([file(b"a")], {"pack": [[[0, 3, 1]], 7, b"abc"]}),
        ([file(b"a")], {"pack": [[[0, 3, 1]], "x", b"abc"]}),
        ([file(b"a")], {"pack": [[[0, 3]], 7, b"abc"]}),
        ([file(b"a", SMALL + 1)], {"piece": [0, b""]}),
        ([file(b"a", SMALL + 1)], {"piece": [bytes(SMALL + 2)]}),
        ([file(b"a", SMALL + 1)], {"piece": [1, bytes(SMALL + 1)]}),
        ([file(b"a", SMALL + 1)], {"piece": [bytes(SMALL + 1)]}),
    ],
)
def test_a_lie_is_a_protocol_error_and_writes_nothing(tmp_path: Path, rows: list[Any], replies: dict[str, Any]) -> None:
    with pytest.raises(ProtocolError):
        receive(tmp_path / "to", Liar(rows, **replies))
    assert [path.name for path in tmp_path.iterdir()] == ["to"]
    names = [path.name for path in (tmp_path / "to").iterdir() if path.is_file()]
    assert not [name for name in names if not name.startswith(".skyfab-")]


def test_too_many_entries_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("skyfab.files.target.MOST_ENTRIES", 3)
    with pytest.raises(ProtocolError):
        receive(tmp_path / "to", Liar([file(b"%d" % number) for number in range(4)]))


@pytest.mark.parametrize("inner", [True, False], ids=["of the transfer", "of the user"])
def test_nothing_is_written_through_a_link(tmp_path: Path, inner: bool) -> None:
    """Neither through one that the source has sent, nor through one that was there."""
    (tmp_path / "out").mkdir()
    (tmp_path / "to").mkdir()
    rows = [Entry(b"sub", FOLDER, 0, 1, 0o755).row, Entry(b"link", LINK, link=b"sub").row, file(b"link/a")]
    if not inner:
        (tmp_path / "to" / "link").symlink_to(tmp_path / "out")
        del rows[1]
    with pytest.raises(OSError, match="expected a folder, found a link or a file"):
        receive(tmp_path / "to", Liar(rows, pack=pack([2 if inner else 1, 3, 1], data=b"abc")))
    assert list((tmp_path / "out").iterdir()) == []


def test_a_link_that_is_there_is_replaced_by_a_file(tmp_path: Path) -> None:
    (tmp_path / "out").write_text("mine")
    (tmp_path / "to").mkdir()
    (tmp_path / "to" / "a").symlink_to(tmp_path / "out")
    receive(tmp_path / "to", Liar([file(b"a")], pack=pack([0, 3, 1], data=b"abc")))
    assert (tmp_path / "out").read_text() == "mine"
    assert (tmp_path / "to" / "a").read_text() == "abc"
    assert not (tmp_path / "to" / "a").is_symlink()
