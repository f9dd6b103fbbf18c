"""agent.store: a name that exists is whole, nothing is written outside, and mapped blobs belong to nobody else."""

from __future__ import annotations

import errno
import os
import random
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from stage.threads import at_once

from skyfab.errors import ProtocolError
from skyfab.host.agent.store import NotStored, Store, map_blob, mark_used
from skyfab.protocol.blobs import name_of

CONTENT = random.Random(1).randbytes(300_000)
NAME = name_of(CONTENT)
TREE = name_of(b"a tree")


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(run=str(tmp_path / "run"), cache=str(tmp_path / "cache"))


def put(store: Store, content: bytes, *, keep: bool = False) -> str:
    name = name_of(content)
    writer = store.writer(name, keep=keep)
    writer.write(memoryview(content))
    writer.commit()
    return name


def place_of(store: Store, digest: str) -> Path:
    """Where a tree is laid out."""
    return Path(store.folders[1]).parent / "trees" / digest


def names(folder: Path | str) -> list[str]:
    return sorted(path.name for path in Path(folder).iterdir())


def files(folder: Path) -> list[str]:
    """Every file below a folder, by its relative path."""
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if not path.is_dir())


# ---- blobs


@pytest.mark.parametrize("keep", [False, True])
def test_a_blob_is_found_once_it_is_committed_and_not_before(store: Store, keep: bool) -> None:
    writer = store.writer(NAME, keep=keep)
    writer.write(memoryview(CONTENT)[:1000])
    assert store.missing([NAME]) == [NAME]
    writer.write(memoryview(CONTENT)[1000:])
    assert store.missing([NAME]) == [NAME]
    writer.commit()
    assert store.missing([NAME]) == []
    assert bytes(map_blob(store.folders, NAME)) == CONTENT


def test_kept_blobs_are_for_later_pools_and_others_are_not(tmp_path: Path) -> None:
    first = Store(run=str(tmp_path / "1"), cache=str(tmp_path / "cache"))
    kept, own = put(first, b"kept", keep=True), put(first, b"own")
    second = Store(run=str(tmp_path / "2"), cache=str(tmp_path / "cache"))
    assert second.missing([kept, own]) == [own]


def test_damaged_content_is_refused_and_leaves_nothing(store: Store, tmp_path: Path) -> None:
    for damaged in (CONTENT[:-1], CONTENT + b"x", b"", b"\0" + CONTENT[1:]):
        writer = store.writer(NAME, keep=True)
        writer.write(memoryview(damaged))
        with pytest.raises(ProtocolError):
            writer.commit()
        assert files(tmp_path) == []
    put(store, CONTENT, keep=True)


@pytest.mark.parametrize("name", ["../../etc/passwd", "x", "", NAME.upper(), NAME + "/x", None, 3])
def test_a_writer_takes_no_name_that_is_not_a_sha256(store: Store, tmp_path: Path, name: str) -> None:
    with pytest.raises(ProtocolError):
        store.writer(name, keep=True)
    with pytest.raises(ProtocolError):
        store.missing([NAME, name])
    assert files(tmp_path) == []


def test_a_killed_writer_leaves_no_name(store: Store, tmp_path: Path) -> None:
    """SIGKILL between the last byte and the rename: the blob is missing, and the next writer is not disturbed."""
    code = (
        "import sys, os, signal\n"
        "from skyfab.host.agent.store import Store\n"
        "store = Store(run=sys.argv[1], cache=sys.argv[2])\n"
        "writer = store.writer(sys.argv[3], keep=True)\n"
        "writer.write(memoryview(sys.stdin.buffer.read()))\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    argv = [sys.executable, "-c", code, str(tmp_path / "run"), str(tmp_path / "cache"), NAME]
    assert subprocess.run(argv, input=CONTENT).returncode == -signal.SIGKILL
    assert store.missing([NAME]) == [NAME]
    with pytest.raises(NotStored):
        map_blob(store.folders, NAME)
    put(store, CONTENT, keep=True)
    assert bytes(map_blob(store.folders, NAME)) == CONTENT


def test_many_processes_write_one_blob_at_once(tmp_path: Path) -> None:
    """Two programs with the same environment, on one host: everyone succeeds, whoever is first."""
    code = (
        "import sys\n"
        "from skyfab.host.agent.store import Store, map_blob\n"
        "store = Store(run=sys.argv[1], cache=sys.argv[2])\n"
        "content = sys.stdin.buffer.read()\n"
        "for _ in range(20):\n"
        "    writer = store.writer(sys.argv[3], keep=True)\n"
        "    for at in range(0, len(content), 30_000):\n"
        "        writer.write(memoryview(content)[at:at + 30_000])\n"
        "    writer.commit()\n"
        "    assert bytes(map_blob(store.folders, sys.argv[3])) == content\n"
    )
    started = [
        subprocess.Popen(
            [sys.executable, "-c", code, str(tmp_path / str(n)), str(tmp_path / "cache"), NAME], stdin=subprocess.PIPE
        )
        for n in range(3)
    ]
    for process in started:
        assert process.stdin
        process.stdin.write(CONTENT)
        process.stdin.close()
    assert [process.wait() for process in started] == [0, 0, 0]
    assert files(tmp_path) == [f"cache/blobs/{NAME}"]


def test_blobs_are_for_their_owner_only(store: Store, tmp_path: Path) -> None:
    put(store, CONTENT, keep=True)
    store.lay_out(TREE, [["0/a.py", NAME]])
    for path in tmp_path.rglob("*"):
        if path.is_dir() and path != tmp_path / "cache":
            assert not stat.S_IMODE(path.stat().st_mode) & 0o077, path
    assert not stat.S_IMODE(Path(store.folders[1], NAME).stat().st_mode) & 0o077


# ---- damage


@pytest.mark.parametrize("how", ["changed", "emptied", "longer", "replaced", "a link", "a folder", "a pipe"])
def test_a_damaged_blob_is_neither_used_nor_reported_as_there(store: Store, how: str) -> None:
    name = put(store, CONTENT)
    path = Path(store.folders[0], name)
    assert bytes(map_blob(store.folders, name)) == CONTENT
    if how == "changed":
        with path.open("r+b") as file:
            file.write(b"X")
    elif how == "emptied":
        os.truncate(path, 0)
    elif how == "longer":
        with path.open("ab") as file:
            file.write(b"X")
    else:
        path.unlink()
        if how == "replaced":
            path.write_bytes(bytes(len(CONTENT)))
        elif how == "a link":
            path.symlink_to("/etc/passwd")
        elif how == "a folder":
            path.mkdir()
        else:
            os.mkfifo(path)
    with pytest.raises(NotStored):
        map_blob(store.folders, name)
    assert store.missing([name]) == [name]


def test_a_blob_without_its_seal_is_compared_once(store: Store) -> None:
    """As after a copy of the cache folder, or on a file system with coarse times."""
    name = put(store, CONTENT, keep=True)
    path = Path(store.folders[1], name)
    os.utime(path)
    assert bytes(map_blob(store.folders, name)) == CONTENT
    assert store.missing([name]) == []
    sealed = path.stat().st_mtime_ns
    mark_used(str(path))
    assert path.stat().st_mtime_ns % 10**9 == sealed % 10**9


def test_what_a_power_cut_has_damaged_is_found(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """The time of a file may be on the disk, and its content not."""
    name, other = put(store, CONTENT, keep=True), put(store, b"other", keep=True)
    trees = [[["0/a.py", name]], [["0/b.py", other]]]
    damaged, intact = (Path(store.lay_out(digest, files)) for digest, files in zip((TREE, NAME), trees, strict=True))
    for path in (Path(store.folders[1], name), damaged / "0/a.py"):
        time = path.stat().st_mtime_ns
        os.truncate(path, 0)
        os.utime(path, ns=(time, time))
    assert store.missing([name, other]) == []
    inode = intact.stat().st_ino
    monkeypatch.setattr("skyfab.host.agent.store._started", lambda: 2e9 * 2)
    assert store.missing([name, other]) == [name]
    put(store, CONTENT, keep=True)
    for how in ("emptied", "missing"):
        if how == "missing":
            (damaged / "0/a.py").unlink()
        for digest, files in zip((TREE, NAME), trees, strict=True):
            store.lay_out(digest, files)
        assert (damaged / "0/a.py").read_bytes() == CONTENT, how
    assert intact.stat().st_ino == inode, "other hosts that share the cache may be using it"


# ---- mapped memory


def test_a_mapped_blob_is_private(store: Store) -> None:
    """Writing to it changes neither the file nor another map of it: eight ranks share a page until one writes."""
    put(store, CONTENT, keep=True)
    first, second = map_blob(store.folders, NAME), map_blob(store.folders, NAME)
    assert not first.readonly
    first[:10] = b"0123456789"
    assert bytes(first[:10]) == b"0123456789"
    assert bytes(second) == CONTENT
    assert Path(store.folders[1], NAME).read_bytes() == CONTENT
    assert bytes(map_blob(store.folders, NAME)) == CONTENT


def test_mapping_leaves_no_descriptor_open(store: Store) -> None:
    put(store, CONTENT, keep=True)
    view = map_blob(store.folders, NAME)
    del view
    before = len(names("/proc/self/fd"))
    for _ in range(20):
        map_blob(store.folders, NAME)
    assert len(names("/proc/self/fd")) == before


# ---- trees


def test_a_tree_is_laid_out_with_all_its_files(store: Store) -> None:
    one, two = put(store, b"one"), put(store, b"two", keep=True)
    target = Path(store.lay_out(TREE, [["0/a.py", one], ["0/pkg/b.py", two], ["1/ü x.py", one], ["0/c'\n.py", two]]))
    assert target == place_of(store, TREE)
    assert store.roots(TREE) == [str(target / "0"), str(target / "1")]
    assert files(target) == sorted(["0/a.py", "0/pkg/b.py", "1/ü x.py", "0/c'\n.py"])
    assert (target / "0/pkg/b.py").read_bytes() == b"two"


def test_a_tree_that_is_there_is_used_as_it_is(store: Store) -> None:
    one = put(store, b"one")
    first = store.lay_out(TREE, [["a.py", one]])
    os.utime(first, (1, 1))
    assert store.lay_out(TREE, [["a.py", one]]) == first
    assert Path(first).stat().st_mtime > 1e9


def test_files_of_a_tree_that_were_changed_or_deleted_are_replaced(store: Store) -> None:
    """By a function that writes beside its module, or by hand. A pool may be using the others."""
    one, two = put(store, b"one"), put(store, b"two")
    wanted = [["0/a.py", one], ["0/b.py", one], ["0/c/d.py", two], ["0/kept.py", two]]
    tree = Path(store.lay_out(TREE, wanted)) / "0"
    kept = (tree / "kept.py").stat().st_ino
    (tree / "a.py").write_bytes(b"ONE")
    (tree / "b.py").unlink()
    (tree / "b.py").symlink_to("kept.py")
    (tree / "c/d.py").unlink()
    (tree / "c").rmdir()
    store.lay_out(TREE, wanted)
    assert [(tree / name).read_text() for name in ("a.py", "b.py", "c/d.py", "kept.py")] == ["one", "one", "two", "two"]
    assert (tree / "kept.py").stat().st_ino == kept
    assert files(tree) == ["a.py", "b.py", "c/d.py", "kept.py"]


def test_what_may_be_executed_here_may_be_executed_there(store: Store) -> None:
    one = put(store, b"one")
    before = os.umask(0o022)
    try:
        tree = Path(store.lay_out(TREE, [["0/run.sh", one, "x"], ["0/data", one]])) / "0"
    finally:
        os.umask(before)
    assert [stat.S_IMODE((tree / name).stat().st_mode) for name in ("run.sh", "data")] == [0o755, 0o644]


def test_a_missing_blob_leaves_no_tree(store: Store, tmp_path: Path) -> None:
    """All or nothing."""
    one = put(store, b"one", keep=True)
    with pytest.raises(FileNotFoundError):
        store.lay_out(TREE, [["a.py", one], ["b.py", NAME]])
    assert files(tmp_path) == [f"cache/blobs/{one}"]
    assert names(tmp_path / "cache/trees") == []


HOSTILE = [
    "../x",
    "/etc/x",
    "a/../../x",
    "..",
    "a/..",
    "",
    ".",
    "./..",
    "a/b/../../..",
    "//etc/x",
    "..//x",
    "a/../..//x",
    "\0",
    "a\0b",
    "x" * 300,
    "/".join("x" * 200 for _ in range(30)),
]


@pytest.mark.parametrize("path", HOSTILE, ids=lambda path: repr(path[:20]))
def test_a_hostile_path_is_refused_and_nothing_is_written(store: Store, tmp_path: Path, path: str) -> None:
    """A typed error, no file outside, and no half a tree; also behind files that are fine."""
    one = put(store, b"one", keep=True)
    outside = tmp_path / "outside"
    outside.mkdir()
    with pytest.raises((ProtocolError, OSError)):
        store.lay_out(TREE, [["good.py", one], [path.replace("/etc", str(outside)), one]])
    assert files(tmp_path) == [f"cache/blobs/{one}"]
    assert not place_of(store, TREE).exists()


@pytest.mark.parametrize("digest", ["", "..", "../x", NAME[:-1], NAME.upper(), 3])
def test_a_tree_has_a_sha256_for_a_name(store: Store, tmp_path: Path, digest: str) -> None:
    with pytest.raises(ProtocolError):
        store.lay_out(digest, [])
    with pytest.raises(ProtocolError):
        store.roots(digest)
    assert files(tmp_path) == []


def test_a_blob_that_is_a_link_to_elsewhere_does_not_make_the_tree_one(store: Store, tmp_path: Path) -> None:
    """Trees hold copies: a link in the store, or at the place of the tree, is never written through."""
    secret = tmp_path / "outside"
    secret.write_bytes(b"mine")
    one = put(store, b"one", keep=True)
    (tmp_path / "cache/trees").mkdir()
    (tmp_path / "cache/trees" / TREE).symlink_to(secret)
    with pytest.raises(OSError):
        store.lay_out(TREE, [["a.py", one]])
    assert secret.read_bytes() == b"mine"
    assert files(tmp_path) == sorted([f"cache/blobs/{one}", "outside", f"cache/trees/{TREE}"])


def test_several_agents_lay_out_one_tree_at_once(tmp_path: Path) -> None:
    stores = [Store(run=str(tmp_path / str(n)), cache=str(tmp_path / "cache")) for n in range(4)]
    contents = [bytes([n]) * 1000 for n in range(60)]
    wanted = [[f"0/{n}.py", put(stores[0], content, keep=True)] for n, content in enumerate(contents)]
    assert at_once(lambda store: len(files(Path(store.lay_out(TREE, wanted)))), stores) == [60] * 4
    assert names(tmp_path / "cache/trees") == [TREE]


# ---- a full disk


@pytest.fixture
def full_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of one megabyte."""
    folder = tmp_path / "disk"
    folder.mkdir()
    if os.getuid() or subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)]).returncode:
        pytest.skip("a small disk takes root to mount")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def test_a_full_disk_is_a_clean_error_and_leaves_no_temporary_file(full_disk: Path) -> None:
    store = Store(run=str(full_disk / "run"), cache=str(full_disk / "cache"))
    content = bytes(3_000_000)
    writer = store.writer(name_of(content), keep=True)
    with pytest.raises(OSError) as caught:
        writer.write(memoryview(content))
    assert caught.value.errno == errno.ENOSPC
    writer.abort()
    assert files(full_disk) == []
    put(store, bytes(500_000), keep=True)


def test_a_tree_that_does_not_fit_leaves_nothing(full_disk: Path) -> None:
    store = Store(run=str(full_disk / "run"), cache=str(full_disk / "cache"))
    name = put(store, bytes(400_000), keep=True)
    with pytest.raises(OSError) as caught:
        store.lay_out(TREE, [[f"{n}.bin", name] for n in range(5)])
    assert caught.value.errno == errno.ENOSPC
    assert files(full_disk) == [f"cache/blobs/{name}"]
    assert names(full_disk / "cache/trees") == []
