"""Drafts: incomplete files, which are resumed, not shared, and removed at some time."""

from __future__ import annotations

import errno
import fcntl
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from skyfab.files import draft
from skyfab.files.draft import Draft, own_part, part_of, remove_stale


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[int]:
    fd = os.open(tmp_path, os.O_RDONLY)
    yield fd
    os.close(fd)


def parts(tmp_path: Path) -> list[bytes]:
    return [os.fsencode(path.name) for path in tmp_path.iterdir()]


def test_a_draft_can_be_resumed_whatever_the_mode_of_its_file(tmp_path: Path, folder: int) -> None:
    """Only root could open one without write permission again."""
    for content in (b"begun", b", done"):
        made = Draft(folder, b"name", 0o440)
        made.write(memoryview(content))
        assert (tmp_path / os.fsdecode(part_of(b"name"))).stat().st_mode & 0o777 == 0o600
        if content == b"begun":
            made.close()
    made.commit(7)
    about = (tmp_path / "name").stat()
    assert (about.st_mode & 0o777, about.st_mtime_ns) == (0o440, 7)
    assert (tmp_path / "name").read_bytes() == b"begun, done"


def test_a_full_disk_leaves_no_draft(tmp_path: Path, folder: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def pwrite(*_: Any) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    made = Draft(folder, b"name", 0o600)
    monkeypatch.setattr(os, "pwrite", pwrite)
    with pytest.raises(OSError, match="No space left"):
        made.write(memoryview(b"abc"))
    assert parts(tmp_path) == []
    made.close()  # once more, as its target does at its end


def test_one_that_makes_no_progress_is_waited_for_until_the_deadline(
    tmp_path: Path, folder: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = Draft(folder, b"name", 0o600)
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    monkeypatch.setattr(time, "sleep", lambda seconds: now.__setitem__(0, now[0] + 1))
    other = Draft(folder, b"name", 0o600)
    assert now[0] == pytest.approx(100 + draft._PATIENCE, abs=1.5)
    assert len(parts(tmp_path)) == 2
    for each in (one, other):
        each.discard()


@pytest.mark.parametrize("then", ["committed", "discarded"])
def test_one_that_ends_while_it_is_opened(
    tmp_path: Path, folder: int, monkeypatch: pytest.MonkeyPatch, then: str
) -> None:
    """The file that was opened has another name by now, or none: it is not written to."""
    one = Draft(folder, b"name", 0o600)
    one.write(memoryview(b"done"))
    flock = fcntl.flock

    def flock_late(fd: int, how: int) -> None:
        monkeypatch.setattr(fcntl, "flock", flock)
        one.commit(1) if then == "committed" else one.discard()
        flock(fd, how)

    monkeypatch.setattr(fcntl, "flock", flock_late)
    monkeypatch.setattr(time, "sleep", lambda seconds: pytest.fail("it waits for nobody"))
    other = Draft(folder, b"name", 0o600)
    other.write(memoryview(b"other"))
    assert sorted(parts(tmp_path)) == sorted([part_of(b"name"), *([b"name"] if then == "committed" else [])])
    other.commit(1)
    assert (tmp_path / "name").read_bytes() == b"other"


def test_one_that_becomes_a_link_while_it_is_opened_is_not_used(
    tmp_path: Path, folder: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The link would get the name of the file."""
    part, moved = tmp_path / os.fsdecode(part_of(b"name")), tmp_path / "moved"
    flock = fcntl.flock

    def flock_late(fd: int, how: int) -> None:
        part.rename(moved)
        part.symlink_to(moved)
        flock(fd, how)

    monkeypatch.setattr(fcntl, "flock", flock_late)
    Draft(folder, b"name", 0o600).commit(1)
    assert (tmp_path / "name").is_file() and not (tmp_path / "name").is_symlink()


def test_without_locks_each_transfer_has_its_own(tmp_path: Path, folder: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def flock(fd: int, how: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", flock)
    one = Draft(folder, b"name", 0o600)
    one.write(memoryview(b"one"))
    assert (tmp_path / os.fsdecode(part_of(b"name"))).read_bytes() == b""
    assert {path.stat().st_mode & 0o777 for path in tmp_path.iterdir()} == {0o600}
    one.commit(1)
    assert (tmp_path / "name").read_bytes() == b"one"


def test_what_another_user_has_begun_is_left_alone(tmp_path: Path) -> None:
    """A draft can be read by its own user only. (root could open it.)"""
    part = tmp_path / os.fsdecode(part_of(b"name"))
    part.write_bytes(b"theirs")
    part.chmod(0)
    tmp_path.chmod(0o777)
    user, folder = os.geteuid(), os.open(tmp_path, os.O_RDONLY)
    try:
        if user == 0:
            os.seteuid(12345)
        Draft(folder, b"name", 0o600).commit(1)
    finally:
        os.seteuid(user)
        os.close(folder)
    assert (tmp_path / "name").read_bytes() == b""
    part.chmod(0o600)
    assert part.read_bytes() == b"theirs"


def test_only_old_drafts_that_nobody_finds_again_are_removed(
    tmp_path: Path, folder: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    own, found, link = own_part(), part_of(b"name"), own_part()
    kept = [found, b"x" * len(own), b".skyfab-results.part.of.mine"]
    for name in (own, *kept):
        (tmp_path / os.fsdecode(name)).touch()
    (tmp_path / os.fsdecode(link)).symlink_to("missing")
    now = time.time()
    for hours, rest in ((23, [own, link, *kept]), (25, kept)):
        monkeypatch.setattr(time, "time", lambda hours=hours: now + hours * 3600)
        remove_stale(folder)
        assert sorted(parts(tmp_path)) == sorted(rest)
