"""`Target` by itself: what it asks for, what it writes, and what it leaves as it was."""

from __future__ import annotations

import contextlib
import hashlib
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from skyfab.errors import ProtocolError
from skyfab.files.draft import part_of
from skyfab.files.entries import FILE, FOLDER, LINK, Entry
from skyfab.files.source import SMALL
from skyfab.files.target import EQUAL_SIZE, MISSING, NEWER, Target

SECOND = 1_000_000_000
LARGE = SMALL + 5


@pytest.fixture
def to(tmp_path: Path) -> Path:
    (tmp_path / "to").mkdir()
    return tmp_path / "to"


@pytest.fixture
def target(to: Path) -> Iterator[Target]:
    with contextlib.closing(Target(os.fsencode(to))) as made:
        yield made


def file(path: str, size: int = 3, time: int = 5 * SECOND, mode: int = 0o644) -> list[Any]:
    return Entry(path.encode(), FILE, size, time, mode).row


def folder(path: str, mode: int = 0o755, time: int = 5 * SECOND) -> list[Any]:
    return Entry(path.encode(), FOLDER, 0, time, mode).row


def link(path: str, to: str) -> list[Any]:
    return Entry(path.encode(), LINK, link=to.encode()).row


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


# ---- comparing


def test_a_file_of_the_same_size_and_time_is_not_compared(target: Target, to: Path) -> None:
    (to / "a").write_text("abc")
    for there, here, is_same in (
        (5 * SECOND, 5 * SECOND, True),
        (5 * SECOND + 7, 5 * SECOND + 7, True),
        (5 * SECOND, 5 * SECOND + 7, True),  # a file system that keeps whole seconds
        (5 * SECOND + 7, 5 * SECOND, True),
        (5 * SECOND + 7, 5 * SECOND + 8, False),
        (5 * SECOND, 6 * SECOND, False),
    ):
        os.utime(to / "a", ns=(there, there))
        with contextlib.closing(Target(os.fsencode(to))) as other:
            digest = hashlib.sha256(b"abc").hexdigest()
            assert other.compare([file("a", time=here)]) == ([] if is_same else [[0, EQUAL_SIZE, 3, digest]])


def test_files_that_stay_are_not_as_they_were_sent(to: Path) -> None:
    for name, time in (("same", 5), ("newer", 9)):
        (to / name).write_text("abc")
        os.utime(to / name, (time, time))
    with contextlib.closing(Target(os.fsencode(to), keep_newer=True)) as target:
        target.compare([folder("in"), file("in/new"), file("same"), file("newer")])
        assert target.settled() == [os.fsencode(to / name) for name in ("in/new", "same")]


def test_a_file_of_the_same_time_and_another_size_is_needed(target: Target, to: Path) -> None:
    (to / "a").write_text("abcd")
    os.utime(to / "a", ns=(5 * SECOND, 5 * SECOND))
    assert target.compare([file("a", 3)]) == [[0, MISSING, 4, ""]]


def test_a_link_in_place_of_a_file_is_not_followed(target: Target, to: Path) -> None:
    """Neither its target nor the length of its text says that the file is there."""
    (to / "real").write_text("abc")
    (to / "a").symlink_to("./x")
    os.utime(to / "a", ns=(5 * SECOND, 5 * SECOND), follow_symlinks=False)
    (to / os.fsdecode(part_of(b"large"))).symlink_to("real")
    assert target.compare([file("a", 3), file("large", LARGE)]) == [[0, MISSING, 3, ""], [1, MISSING, 4, ""]]


def test_what_is_there_of_a_large_file_is_counted(target: Target, to: Path) -> None:
    for name in (b"new", b"old", b"small"):
        (to / os.fsdecode(part_of(name))).write_bytes(b"x" * 10)
    (to / "old").write_text("abc")
    wanted = target.compare([file("new", LARGE), file("old", LARGE), file("small", SMALL)])
    assert wanted == [[0, MISSING, 10, ""], [1, MISSING, 13, ""], [2, MISSING, 0, ""]]


@pytest.mark.parametrize(("seconds", "state"), [(5, EQUAL_SIZE), (6, EQUAL_SIZE), (8, NEWER)])
def test_newer_means_by_more_than_a_second(to: Path, seconds: int, state: str) -> None:
    (to / "a").write_text("abc")
    os.utime(to / "a", ns=(seconds * SECOND + 1, seconds * SECOND + 1))
    with contextlib.closing(Target(os.fsencode(to), keep_newer=True)) as target:
        ((number, found, there, _),) = target.compare([file("a", time=5 * SECOND + 9)])
    assert (number, found, there) == (0, state, 0 if state == NEWER else 3)


# ---- writing


@pytest.fixture
def umask() -> Iterator[None]:
    before = os.umask(0o077)
    yield
    os.umask(before)


def test_modes_and_times_are_those_of_the_source(target: Target, to: Path, umask: None) -> None:
    wanted = target.compare(
        [folder("sub", 0o775), folder("sub/deep", 0o555), file("sub/deep/small", mode=0o666), file("large", LARGE)]
    )
    assert [number for number, *_ in wanted] == [2, 3]
    target.store([[2, 3, 7 * SECOND]], b"abc")
    assert target.begin(3) == (0, "")
    target.piece(3, 0, b"x" * LARGE)
    target.finish()
    for path, mode, seconds in (
        ("sub", 0o775, 5),
        ("sub/deep", 0o555, 5),
        ("sub/deep/small", 0o666, 7),
        ("large", 0o644, 5),
    ):
        assert (mode_of(to / path), (to / path).stat().st_mtime_ns) == (mode, seconds * SECOND), path


def test_a_file_that_has_the_content_gets_mode_and_time(target: Target, to: Path) -> None:
    (to / "a").write_text("abc")
    target.compare([file("a", mode=0o750)])
    target.adopt(0)
    assert (mode_of(to / "a"), (to / "a").stat().st_mtime_ns) == (0o750, 5 * SECOND)


@pytest.mark.parametrize(("seconds", "content"), [(5, "abc"), (7, "abc"), (7, "xyz")])
def test_another_name_of_a_file_keeps_its_mode_time_and_content(to: Path, seconds: int, content: str) -> None:
    """A copy of a working folder has files without write permission as hard links."""
    (to / "other").write_text("abc")
    (to / "other").chmod(0o444)
    os.utime(to / "other", (5, 5))
    (to / "a").hardlink_to(to / "other")
    with contextlib.closing(Target(os.fsencode(to))) as target:
        for _, _, _, digest in target.compare([file("a", time=seconds * SECOND)]):
            if digest == hashlib.sha256(content.encode()).hexdigest():
                target.adopt(0)
            else:
                target.store([[0, 3, seconds * SECOND]], content.encode())
    about = (to / "other").stat()
    assert (mode_of(to / "other"), about.st_mtime, (to / "other").read_text()) == (0o444, 5, "abc")
    assert (mode_of(to / "a"), (to / "a").stat().st_mtime, (to / "a").read_text()) == (0o644, seconds, content)


def test_folders_that_are_not_listed_are_made_for_everyone_to_read(target: Target, to: Path) -> None:
    before = os.umask(0o022)
    try:
        target.compare([file("one/two/a")])
    finally:
        os.umask(before)
    assert [mode_of(to / "one"), mode_of(to / "one" / "two")] == [0o755, 0o755]


def test_a_private_folder_is_private_from_its_beginning(target: Target, to: Path) -> None:
    """An interrupted transfer leaves it as it is."""
    target.compare([folder("secret", 0o700), folder("read-only", 0o500), file("read-only/a")])
    assert [mode_of(to / "secret"), mode_of(to / "read-only")] == [0o700, 0o700]


def test_many_folders_do_not_stay_open(target: Target, to: Path) -> None:
    rows = [row for number in range(200) for row in (folder(f"d{number}", 0o700), file(f"d{number}/a", 1))]
    before = len([*Path("/dev/fd").iterdir()])
    assert len(target.compare(rows)) == 200
    assert len([*Path("/dev/fd").iterdir()]) - before < 80
    target.store([[2 * number + 1, 1, 1] for number in range(200)], b"x" * 200)
    target.finish()
    assert {mode_of(to / f"d{number}") for number in range(200)} == {0o700}
    assert {(to / f"d{number}" / "a").read_text() for number in range(200)} == {"x"}


def test_what_cannot_be_written_leaves_no_draft(target: Target, to: Path) -> None:
    """A folder was made in its place meanwhile."""
    target.compare([file("small"), file("large", LARGE)])
    for name in ("small", "large", "link"):
        (to / name / "inner").mkdir(parents=True)
    with pytest.raises(OSError, match="directory"):
        target.store([[0, 3, 1]], b"abc")
    target.begin(1)
    with pytest.raises(OSError, match="directory") as raised:
        target.piece(1, 0, bytes(LARGE))
    assert raised.value.filename == str(to / "large")
    with pytest.raises(OSError, match="directory"):
        target.compare([link("link", "small")])
    assert names(to) == ["large", "link", "small"]


@pytest.mark.parametrize(("at", "size"), [(4, 1), (3, LARGE - 2), (0, LARGE + 1)], ids=["gap", "longer", "long"])
def test_a_piece_that_is_not_the_next_one_is_refused(target: Target, to: Path, at: int, size: int) -> None:
    target.compare([file("large", LARGE)])
    target.begin(0)
    target.piece(0, 0, b"abc")
    with pytest.raises(ProtocolError, match="a piece of large that is not the next one"):
        target.piece(0, at, bytes(size))
    assert target.drafted(0) == hashlib.sha256(b"abc").hexdigest()


@pytest.mark.parametrize(("left", "resumed"), [(LARGE, LARGE), (LARGE + 1, 0)])
def test_what_an_earlier_transfer_has_left_is_resumed_unless_it_is_longer(
    target: Target, to: Path, left: int, resumed: int
) -> None:
    (to / os.fsdecode(part_of(b"large"))).write_bytes(bytes(left))
    target.compare([file("large", LARGE)])
    assert target.begin(0) == (resumed, hashlib.sha256(bytes(resumed)).hexdigest() if resumed else "")


def test_links_are_made_replaced_and_kept(target: Target, to: Path) -> None:
    (to / "kept").symlink_to("real")
    (to / "replaced").symlink_to("other")
    (to / "file").write_text("abc")
    before = (to / "kept").lstat().st_ino
    target.compare([link(name, "real") for name in ("new", "kept", "replaced", "file")])
    assert {path.name: str(path.readlink()) for path in to.iterdir()} == dict.fromkeys(
        ("new", "kept", "replaced", "file"), "real"
    )
    assert (to / "kept").lstat().st_ino == before
