"""`Source` by itself: what it lists, and how files are read that change meanwhile."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from skyfab.files.entries import FILE, walk
from skyfab.files.source import GONE, Source, expected, matching


@pytest.fixture
def top(tmp_path: Path) -> Path:
    (tmp_path / "top").mkdir()
    for name in "abcde":
        (tmp_path / "top" / name).write_text(name * 10)
    return tmp_path / "top"


@pytest.fixture
def source(top: Path) -> Iterator[Source]:
    with contextlib.closing(Source(list(walk(os.fsencode(top), b"", [])), [])) as made:
        yield made


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def test_more_entries_than_a_transfer_may_have(source: Source, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("skyfab.files.source.MOST_ENTRIES", 4)
    with pytest.raises(OSError, match="more than 4 files and folders") as raised:
        source.rows()
    assert raised.value.errno == errno.E2BIG
    monkeypatch.setattr("skyfab.files.source.MOST_ENTRIES", 5)
    assert source.rows() == ([], [])


def test_digests_are_of_the_beginning_and_empty_for_what_is_shorter_or_gone(source: Source, top: Path) -> None:
    source.rows()
    (top / "b").unlink()
    (top / "c").unlink()
    (top / "c").mkdir()
    assert source.digest(0, 10) == sha256(b"a" * 10)
    assert source.digest(0, 4) == sha256(b"a" * 4)
    assert source.digest(0, 11) == ""
    assert source.digest(1, 10) == ""
    assert source.digest(2, 1) == "", "a folder has taken its place"


def test_files_are_packed_one_after_another(source: Source, top: Path) -> None:
    source.rows()
    os.utime(top / "c", ns=(7, 7))
    (top / "b").unlink()
    found, data = source.pack([1, 2, 0], 100)
    assert (found[0], found[1], found[2][:2]) == ([1, GONE, 0], [2, 10, 7], [0, 10])
    assert data == b"c" * 10 + b"a" * 10
    assert [size for _, size, _ in source.pack([2, 3, 0, 4], 30)[0]] == [10, 10, 10, GONE]
    assert source.pack([1], 100) == ([[1, GONE, 0]], b"")


@pytest.mark.parametrize("content", [b"new", b"b" * 10, b"b" * 20], ids=len)
@pytest.mark.parametrize("times", [1, 2])
@pytest.mark.parametrize("keeps_time", [True, False])
def test_a_small_file_that_changes_while_it_is_read_is_read_once_more(
    source: Source, top: Path, monkeypatch: pytest.MonkeyPatch, content: bytes, times: int, keeps_time: bool
) -> None:
    """A write that has begun no longer changes the time."""
    source.rows()
    read, changes = os.read, [content, b"other"][:times]
    modified = (top / "a").stat().st_mtime_ns
    later = modified if keeps_time else modified + 1

    def read_and_change(fd: int, size: int) -> bytes:
        found = read(fd, size)
        if changes:
            (top / "a").write_bytes(changes.pop(0))
            os.utime(top / "a", ns=(later, later))
        return found

    monkeypatch.setattr(os, "read", read_and_change)
    assert source.pack([0], 100) == (([[0, len(content), later]], content) if times == 1 else ([[0, GONE, 0]], b""))


def test_what_an_error_of_the_disk_makes_unreadable_is_left_out(top: Path) -> None:
    (top / "bb").symlink_to("/proc/self/mem")  # reading fails with EIO, as on a broken disk
    with contextlib.closing(Source(list(walk(os.fsencode(top), b"", [])), [])) as source:
        assert len(source.rows()[0]) == 6
        assert [size for _, size, _ in source.pack([0, 1, 2], 100)[0]] == [10, 10, GONE]
        assert source.digest(2, 5) == ""


def test_pieces_are_of_the_file_that_was_opened_for_the_first_one(source: Source, top: Path) -> None:
    source.rows()
    assert source.piece(0, 5, 5) == (True, b""), "none was opened"
    assert source.piece(0, 0, 5) == (False, b"aaaaa")
    assert source.piece(1, 5, 5) == (True, b""), "another one was opened"
    assert source.piece(0, 5, 5) == (False, b"aaaaa")
    assert source.piece(0, 8, 5) == (True, b"aa")
    assert source.piece(0, 20, 5) == (True, b"")
    (top / "a").write_text("b" * 20)
    assert source.piece(0, 5, 5) == (True, b"bbbbb")
    assert source.reopen(0)[0] == 20
    assert source.piece(0, 0, 5) == (False, b"bbbbb")
    (top / "a").unlink()
    assert source.piece(0, 5, 5) == (False, b"bbbbb")
    assert source.reopen(0) == (GONE, 0)
    assert source.piece(0, 0, 5) == (True, b"")


@pytest.mark.parametrize("make", [os.mkdir, os.mkfifo])
def test_a_large_file_whose_place_something_else_has_taken(
    source: Source, top: Path, make: Callable[[Path], None]
) -> None:
    source.rows()
    (top / "a").unlink()
    make(top / "a")
    assert source.piece(0, 0, 5) == (True, b"")
    assert source.reopen(0) == (GONE, 0)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "here" / "d" / "e").mkdir(parents=True)
    for path in ("x", "here/y", "here/d/z", "here/d/e/f", "here/d/.hidden", "here/we[i]rd"):
        (tmp_path / path).touch()
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path / "here"


@pytest.mark.parametrize(
    ("patterns", "found"),
    [
        ("../x", "x"),
        ("../here/d", "d/.hidden d/e/f d/z"),
        ("..", "here/d/.hidden here/d/e/f here/d/z here/we[i]rd here/y x"),
        (".", "d/.hidden d/e/f d/z we[i]rd y"),
        ("d/**", "d/.hidden d/e/f d/z"),
        ("d/e d", "d/.hidden d/e/f d/z"),
        ("d d/e", "d/.hidden d/e/f d/z"),
        ("../here/d/e ../here/d", "d/.hidden d/e/f d/z e/f"),
        ("y y ./y", "y"),
        ("missing", ""),
        ("*/e ../here/d/e/*", "d/e/f f"),
        ("we[i]rd", "we[i]rd"),
    ],
)
def test_patterns_list_each_file_once_at_its_place(here: Path, patterns: str, found: str) -> None:
    listed = [entry.path.decode() for entry, _ in matching(patterns.encode().split(), []) if entry.kind == FILE]
    assert sorted(listed) == found.split()


def test_of_several_matches_with_one_name_the_first_is_listed(here: Path) -> None:
    (here / "d" / "y").touch()
    skipped: list[tuple[bytes, str]] = []
    patterns = [b"y", os.fsencode(here / "*" / "y"), os.fsencode(here / "d"), b"d/e"]
    listed = [entry.path for entry, _ in matching(patterns, skipped)]
    assert len(listed) == len(set(listed))
    why = "another match has this name"
    assert skipped == [(os.fsencode(here / "d" / "y"), why), (b"d/e", why)]
    skipped.clear()
    listed = [entry.path for entry, _ in matching([b"d/e", os.fsencode(here / "d")], skipped)]
    assert len(listed) == len(set(listed))
    assert skipped == [(b"d/e", why)]


@pytest.mark.parametrize(
    ("pattern", "accepted", "refused"),
    [
        ("ckpt", "ckpt ckpt/a/b", "ckptx train.py .ssh/authorized_keys"),
        ("ckpt/*", "ckpt/a ckpt/a/.b", "ckpt/.a ckpt other"),
        ("*", "train.py a/.b", ".bashrc .git/hooks/post-checkout"),
        ("**/*.pt", "c.pt a/b/c.pt", ".git/c.pt a/c.py"),
        ("**", "a a/b/.c", ".ssh"),
        ("d/**", "d d/.a/b", "e"),
        (".", "a .ssh/b", ""),
        ("/data/x", "x x/y", "data/x y"),
        ("../d/e*", "ef", "d/ef f"),
        ("~", "ada ada/.bashrc", ".ssh/a"),
        ("./a/../b/", "b b/c", "a"),
        ("a[1].txt", "a[1].txt a1.txt", "a2.txt"),
        ("/", "a .ssh/b", ""),
        ("a/../..", "a .ssh/b", ""),
        ("/data/*/x", "x x/y", "data a/x y"),
        ("a/**/b", "a/b a/c/b a/c/d/b a/b/.x", "a a/c b a/.c/b"),
        ("a/?", "a/b", "a/bc a"),
        ("/x/.cfg/**", ".cfg .cfg/a", ".ssh a cfg"),
        ("~/*/.cfg/**/**", ".cfg .cfg/a", ".ssh a"),
        ("/x/*/**", "a a/.b", ".ssh"),
        ("../**", "a .ssh/b", ""),
    ],
)
def test_paths_that_a_pattern_may_list(pattern: str, accepted: str, refused: str) -> None:
    expects = expected([pattern.encode()])
    assert [path for path in accepted.split() if not expects(path.encode())] == []
    assert [path for path in refused.split() if expects(path.encode())] == []


@pytest.mark.parametrize(
    "pattern", ["{here}/d/**", "{here}/.cfg/**", "{here}/**/**", "{here}/*/**", "../**", "../here/**/e/**"]
)
def test_what_patterns_with_all_folders_below_list_is_expected(here: Path, pattern: str) -> None:
    (here / ".cfg" / ".inner").mkdir(parents=True)
    patterns = [os.fsencode(pattern.format(here=here))]
    listed = [entry.path for entry, _ in matching(patterns, [])]
    assert listed and all(map(expected(patterns), listed))


def test_links_that_a_pattern_matches_are_left_out_if_they_lead_nowhere_or_to_folders_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that is named is followed, or is an error."""
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "secret").write_text("x")
    out = tmp_path / "out"
    (out / "step2").mkdir(parents=True)
    (out / "step2" / "model").write_text("x")
    for name, target in {
        "latest": "step2",
        "file": "../elsewhere/secret",
        "folder": str(tmp_path / "elsewhere"),
        "gone": "nothing",
        "loop": "loop",
    }.items():
        (out / name).symlink_to(target)
    monkeypatch.chdir(tmp_path)
    skipped: list[tuple[bytes, str]] = []
    listed = {entry.path for entry, _ in matching([b"out/*"], skipped) if entry.kind == FILE}
    assert listed == {b"out/file", b"out/latest/model", b"out/step2/model"}
    missing = "missing, or a broken link"
    assert dict(skipped) == {
        b"out/folder": "a link to a folder outside it",
        b"out/gone": missing,
        b"out/loop": missing,
    }
    listed = {entry.path for entry, _ in matching([b"out/folder"], []) if entry.kind == FILE}
    assert listed == {b"out/folder/secret"}
    with pytest.raises(FileNotFoundError):
        list(matching([b"out/gone"], []))


@pytest.fixture
def unreadable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The current folder: one file in it can be read. (root would read the others too.)"""
    out = tmp_path / "out"
    for name in ("closed/inner", "locked/inner", "ok"):
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        (out / name).write_text("x")
    (out / "link").symlink_to(out / "locked" / "inner")
    monkeypatch.chdir(out)
    user, modes = os.geteuid(), {tmp_path: 0o755, out / "closed": 0o444, out / "locked": 0}
    for path, mode in modes.items():
        path.chmod(mode)
    if user == 0:
        os.seteuid(12345)
    yield out
    os.seteuid(user)
    for path in modes:
        path.chmod(0o755)


@pytest.mark.parametrize("pattern", [b".", b"*"])
def test_what_this_user_may_not_read_is_left_out(unreadable: Path, pattern: bytes) -> None:
    skipped: list[tuple[bytes, str]] = []
    assert [entry.path for entry, _ in matching([pattern], skipped) if entry.kind == FILE] == [b"ok"]
    assert dict(skipped) == dict.fromkeys([b"closed/inner", b"link", b"locked"], "not readable")
