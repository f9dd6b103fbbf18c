"""Entries: what is listed of a folder, and which rows of another machine are refused."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any

import pytest

from skyfab.errors import ProtocolError
from skyfab.files.entries import FILE, FOLDER, LINK, Entry, leads_inside, name, shown, text, walk, words

ODD = [b"plain", b" spaces ", b"new\nline", b"quo'te\"s", b"-dash", b"\xff\xfe", "ünïcode".encode(), b"*?[a]", b"\\"]


def listed(top: Path, place: bytes = b"") -> tuple[dict[bytes, Entry], list[tuple[bytes, str]]]:
    skipped: list[tuple[bytes, str]] = []
    return {entry.path: entry for entry, _ in walk(os.fsencode(top), place, skipped)}, skipped


def row(
    path: str = "a", kind: str = FILE, size: Any = 1, time: Any = 2, mode: Any = 0o644, link: str = ""
) -> list[Any]:
    return [path, kind, size, time, mode, link]


@pytest.mark.parametrize("odd", ODD)
def test_any_name_survives_as_text(odd: bytes) -> None:
    assert name(text(odd)) == odd
    assert Entry.parse(Entry(odd, FILE).row).path == odd


def test_a_folder_is_listed_with_what_is_in_it(tmp_path: Path) -> None:
    (tmp_path / "sub" / "empty").mkdir(parents=True)
    (tmp_path / "sub" / "run.sh").write_bytes(b"12345")
    (tmp_path / "sub" / "run.sh").chmod(0o750)
    os.utime(tmp_path / "sub" / "run.sh", ns=(1, 1_234_567_890_123_456_789))
    for similar in (".skyfab-0a1b2c3d.part", ".skyfab-x", "x.part"):
        (tmp_path / similar).touch()
    found, skipped = listed(tmp_path, b"data")
    assert skipped == []
    assert {path: entry.kind for path, entry in found.items()} == {
        b"data": FOLDER,
        b"data/sub": FOLDER,
        b"data/.skyfab-x": FILE,
        b"data/x.part": FILE,
        b"data/sub/empty": FOLDER,
        b"data/sub/run.sh": FILE,
    }
    file = found[b"data/sub/run.sh"]
    assert (file.size, file.mode, file.time) == (5, 0o750, 1_234_567_890_123_456_789)


def test_links_inside_stay_and_others_are_files_or_left_out(tmp_path: Path) -> None:
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "file").write_text("content")
    top = tmp_path / "top"
    (top / "sub").mkdir(parents=True)
    (top / "real").write_text("x")
    for link, target in {
        "near": "real",
        "sub/up": "../real",
        "far": "../outside/file",
        "absolute": str(top / "real"),
        "folder": "../outside",
        "nowhere": "../missing",
    }.items():
        (top / link).symlink_to(target)
    found, skipped = listed(top, b"in")
    assert (found[b"in/near"].kind, found[b"in/near"].link) == (LINK, b"real")
    assert (found[b"in/sub/up"].kind, found[b"in/sub/up"].link) == (LINK, b"../real")
    assert (found[b"in/far"].kind, found[b"in/far"].size) == (FILE, 7)
    assert (found[b"in/absolute"].kind, found[b"in/absolute"].size) == (FILE, 1)
    assert dict(skipped) == {
        b"in/folder": "a link to a folder outside it",
        b"in/nowhere": "missing, or a broken link",
    }


def test_sockets_and_pipes_are_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    os.mkfifo("pipe")
    with socket.socket(socket.AF_UNIX) as made:
        made.bind("socket")
        found, skipped = listed(tmp_path)
    assert found == {}
    assert sorted(skipped) == [(b"pipe", "neither a file nor a folder"), (b"socket", "neither a file nor a folder")]


@pytest.mark.parametrize(
    ("path", "link", "inside"),
    [
        (b"a", b"b", True),
        (b"a/b", b"../c", True),
        (b"a", b"./b/c", True),
        (b"a/b", b"..", True),
        (b"a", b"..", False),
        (b"a", b"../a", False),
        (b"a/b", b"../../c", False),
        (b"a", b"/etc/passwd", False),
        (b"a/b", b"c/../../..", False),
        (b"p/q/e", b"d/../x", False),  # d may be a link to the top, whose parent is outside
        (b"a", b"b\0c", False),
        (b"a", b"x" * 4096, True),
        (b"a", b"x" * 4097, False),
        (b"a/b/c", b"..//./../d", True),
    ],
)
def test_a_link_leads_inside_or_not(path: bytes, link: bytes, inside: bool) -> None:
    assert leads_inside(path, link) is inside


@pytest.mark.parametrize(
    "bad",
    [
        row(path=""),
        row(path="/etc/passwd"),
        row(path="../x"),
        row(path="a/../../x"),
        row(path="a/"),
        row(path="a\0b"),
        row(path="\ud800"),
        row(path="a/" * 3000 + "b"),
        row(path="a/" * 201 + "b"),
        row(path=3),  # type: ignore[arg-type]
        row(kind="x"),
        row(size=-1),
        row(size=1 << 60),
        row(size=True),
        row(time=1 << 100),
        row(mode=0o4755),
        row(kind=LINK, link="../x"),
        row(kind=LINK, link=""),
        [],
        "a row",
        [*row(), 1],
    ],
)
def test_a_row_that_could_do_harm_is_refused(bad: Any) -> None:
    with pytest.raises(ProtocolError):
        Entry.parse(bad)


def test_rows_at_the_limits_are_accepted() -> None:
    for good in (row(size=1 << 50), row(size=0), row(mode=0o777), row(mode=0), row(time=-1), row(path="x" * 4096)):
        assert Entry.parse(good).row == good
    linked = row(path="a/b", kind=LINK, link="../c")
    assert Entry.parse(linked).row == linked


def test_paths_and_errors_are_shown_to_people() -> None:
    assert [shown(path) for path in (b"plain", "ünï", b"\xff", "a\x1b[2J")] == ["plain", "ünï", "\\udcff", "a\\x1b[2J"]
    assert words(FileNotFoundError(2, "No such file", b"a\nb")) == "No such file: a\\nb"
    assert words(OSError("odd")) == "odd"
    assert words(PermissionError(13, "Permission denied")) == "Permission denied"


def test_a_folder_is_listed_in_the_order_of_names_and_as_it_is_chosen(tmp_path: Path) -> None:
    for folder in ("b", "a", "c"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "x").touch()
    (tmp_path / "top").symlink_to("a")
    found = walk(os.fsencode(tmp_path), b"in", [], lambda child, path: path not in (b"in/b", b"in/c/x"))
    assert [entry.path for entry, _ in found] == [b"in", b"in/a", b"in/c", b"in/top", b"in/a/x"]


def test_what_is_nested_too_deep_is_left_out(tmp_path: Path) -> None:
    """The other side would refuse it, and with it the whole transfer."""
    deep = Path(*["d"] * 201)
    (tmp_path / deep).mkdir(parents=True)
    (tmp_path / deep / "x").touch()
    found, skipped = listed(tmp_path)
    assert max(found, key=len) == os.fsencode(deep)
    assert skipped == [(os.fsencode(deep / "x"), "nested more than 200 folders deep")]
    for entry in found.values():
        Entry.parse(entry.row)
