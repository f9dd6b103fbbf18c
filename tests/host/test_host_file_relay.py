"""The workers of a relay of files, two of them in this process: what they write, read again, refuse and resume."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from stage.spot import until
from test_host_relay import Noted

from skyfab._util.certificate import new_certificate
from skyfab.files.draft import part_of
from skyfab.files.entries import Entry
from skyfab.files.target import Target
from skyfab.host import relay
from skyfab.host.relay import BROKEN, DAMAGED, FileRelay, chunks_of, hash_of

MIB = 1 << 20
TIME = 1_600_000_000_000_000_000
SIZES = {"a": 3 * MIB + 7, "b": 5, "c": 9, "d": 2 * MIB}
ITEMS = [[[0, SIZES["a"], TIME]], [[1, 5, TIME], [2, 9, TIME]], [[3, 2 * MIB, TIME]]]
"""A large file, a pack and another large one."""


@pytest.fixture
def content() -> dict[str, bytes]:
    return {name: os.urandom(size) for name, size in SIZES.items()}


@pytest.fixture
def chunks(content: dict[str, bytes]) -> list[bytes]:
    whole = [content["a"], content["b"] + content["c"], content["d"]]
    return [whole[item][start:end] for item, start, end in chunks_of([*map(len, whole)], MIB)]


@pytest.fixture
def make(tmp_path: Path, chunks: list[bytes], monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], FileRelay]]:
    made: list[tuple[FileRelay, Target]] = []
    monkeypatch.setattr(relay, "Channel", Noted)
    keys = new_certificate() or ("", "")
    hashes = b"".join(hash_of(chunk) for chunk in chunks)

    def make_one(name: str) -> FileRelay:
        target = Target(os.fsencode(tmp_path / name))
        rows = [Entry(name.encode(), "f", size, TIME, 0o640).row for name, size in SIZES.items()]
        target.compare(rows)
        made.append((FileRelay(target, ITEMS, MIB, keys), target))
        made[-1][0].look(0, 0, hashes)
        made[-1][0].resume()
        return made[-1][0]

    yield make_one
    for one, target in made:
        one.commit()
        one.close()
        target.close()
    for channel in Noted.made:
        channel.end()
    Noted.made.clear()


def fill(one: FileRelay, chunks: list[bytes], first: int = 0) -> None:
    for number in range(first, len(chunks)):
        assert send(one, chunks, number)[:2] == (number + 1, "")


def send(one: FileRelay, chunks: list[bytes], number: int) -> tuple[int, str, int]:
    return one.chunk(number, hash_of(chunks[number]), memoryview(chunks[number]))


def connect(host: FileRelay, source: FileRelay) -> None:
    (port,) = source.listen("child", ["127.0.0.1"])
    assert host.connect("parent", [("127.0.0.1", port)])


def test_files_are_passed_on_while_they_arrive_and_afterwards(
    make: Callable[[str], FileRelay], content: dict[str, bytes], chunks: list[bytes], tmp_path: Path
) -> None:
    first, second = make("1"), make("2")
    connect(second, first)
    send(first, chunks, 0)
    until(lambda: second.look(0, 0, b"")[0] == 1)
    assert not (tmp_path / "2/a").exists(), "it is not complete"
    fill(first, chunks, 1)
    assert second.look(60, 0, b"")[:2] == (len(chunks), "")
    assert first.commit() == second.commit() == []
    third = make("3")
    connect(third, second)
    assert third.look(60, 0, b"")[:2] == (len(chunks), "")
    for place in "123":
        assert {path.name: path.read_bytes() for path in (tmp_path / place).iterdir()} == content
        about = [path.stat() for path in (tmp_path / place).iterdir()]
        assert {(one.st_mode & 0o777, one.st_mtime_ns) for one in about} == {(0o640, TIME)}


@pytest.mark.parametrize(("name", "at"), [("a", 0), ("b", 4), ("d", 5)])
def test_a_file_of_a_neighbor_that_has_changed_is_refused(
    make: Callable[[str], FileRelay], chunks: list[bytes], tmp_path: Path, name: str, at: int
) -> None:
    first, second = make("1"), make("2")
    fill(first, chunks)
    with (tmp_path / "1" / name).open("r+b") as file:
        file.write(b"other")
    connect(second, first)
    assert second.look(60, 0, b"")[:2] == (at, DAMAGED)
    fill(second, chunks, at)


def test_a_file_of_a_neighbor_that_is_gone(
    make: Callable[[str], FileRelay], chunks: list[bytes], tmp_path: Path
) -> None:
    first, second = make("1"), make("2")
    fill(first, chunks)
    (tmp_path / "1/c").unlink()
    (tmp_path / "1/c").symlink_to("/etc/passwd")
    connect(second, first)
    assert second.look(60, 0, b"")[:2] == (4, BROKEN)


def test_a_file_that_has_changed_here_is_skipped_by_all(
    make: Callable[[str], FileRelay], content: dict[str, bytes], chunks: list[bytes], tmp_path: Path
) -> None:
    """The rest comes the same way."""
    first, second, third = make("1"), make("2"), make("3")
    connect(second, first)
    connect(third, second)
    for number, chunk in enumerate(chunks):
        first.chunk(number, hash_of(chunk), memoryview(b"" if number == 1 else chunk))
    for one in (first, second, third):
        assert one.look(60, 0, b"")[:2] == (len(chunks), "")
        assert one.commit() == [0]
    for place in "123":
        found = {path.name: path.read_bytes() for path in (tmp_path / place).iterdir() if path.name in SIZES}
        assert found == {name: content[name] for name in "bcd"}


def test_what_an_earlier_transfer_has_left_is_resumed_as_far_as_it_is_right(
    make: Callable[[str], FileRelay], content: dict[str, bytes], chunks: list[bytes], tmp_path: Path
) -> None:
    (tmp_path / "1").mkdir()
    (tmp_path / "1" / os.fsdecode(part_of(b"a"))).write_bytes(content["a"][: 2 * MIB + 5])
    (tmp_path / "1" / os.fsdecode(part_of(b"d"))).write_bytes(bytes(MIB) + content["d"][MIB:])
    one = make("1")
    assert one.lacks == [(0, 2 * MIB), (1, 0), (2, 0)]
    fill(one, chunks, 2)
    assert one.commit() == []
    assert {path.name: path.read_bytes() for path in (tmp_path / "1").iterdir()} == content


def test_what_is_incomplete_is_left_to_the_transfer(
    make: Callable[[str], FileRelay], content: dict[str, bytes], chunks: list[bytes], tmp_path: Path
) -> None:
    one = make("1")
    for number in (0, 1):
        send(one, chunks, number)
    assert one.commit() == [0, 1, 2]
    assert one._target.begin(0) == (2 * MIB, hashlib.sha256(content["a"][: 2 * MIB]).hexdigest())


def test_a_file_that_cannot_be_written(make: Callable[[str], FileRelay], chunks: list[bytes], tmp_path: Path) -> None:
    first, second = make("1"), make("2")
    (tmp_path / "2/b").mkdir()
    fill(first, chunks)
    connect(second, first)
    with pytest.raises(IsADirectoryError):
        second.look(60, 0, b"")
    assert second.commit() == [1, 2]
    assert (tmp_path / "2/a").exists()
