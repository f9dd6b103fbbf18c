"""Mirrors of hosts over SSH: what comes home while functions write it, over cut cables, and by the command line."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from stage import labs
from stage.projects import inventory, skyfab
from stage.spot import until

import skyfab as sky
from skyfab.files.draft import part_of
from skyfab.files.source import PIECE
from skyfab.lab import Lab
from skyfab.ui.events import Event, FilesWritten, Notice

pytestmark = pytest.mark.lab

MB = 1 << 20


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, for which each host has a working folder."""
    made = tmp_path / "here"
    made.mkdir()
    monkeypatch.chdir(made)
    return made


def train(steps: int, size: int, seconds: float) -> int:
    """Writes checkpoints as programs do: one in several writes, one as a draft, one in place of another, a log."""
    folder = Path("ckpt")
    folder.mkdir(exist_ok=True)
    with (folder / "log.txt").open("a") as log:
        for step in range(steps):
            with (folder / f"slow{step}.bin").open("wb") as file:
                for _ in range(4):
                    file.write(bytes([step]) * (size // 4))
                    file.flush()
                    time.sleep(seconds / 8)
            (folder / "draft").write_bytes(bytes([step]) * size)
            (folder / "draft").rename(folder / f"renamed{step}.bin")
            (folder / "draft").write_bytes(bytes([step]) * size)
            (folder / "draft").rename(folder / "last.bin")
            log.write(f"step {step}\n")
            log.flush()
            time.sleep(seconds / 2)
        return len(list(folder.iterdir()))


class Watch:
    """Reads all files of a folder again and again, as long as it is watched."""

    def __init__(self, folder: Path, sizes: set[int]) -> None:
        self._folder, self._sizes = folder, sizes
        self._over = threading.Event()
        self.wrong: list[str] = []
        self.seen: list[str] = []
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()
        assert not self.wrong, "only whole files have a name"

    def _run(self) -> None:
        while not self._over.wait(0.02):
            for path in self._folder.glob("*.bin"):
                content = path.read_bytes()
                if len(content) not in self._sizes or content != content[:1] * len(content):
                    self.wrong.append(f"{path.name}: {len(content)} bytes, {set(content)}")
                if path.name not in self.seen:
                    self.seen.append(path.name)


@pytest.mark.slow
def test_files_come_whole_while_they_are_written(here: Path, open_pool: Callable[..., sky.Compute]) -> None:
    size = 3 * MB
    pool = open_pool("openssh", count=1)
    events: list[Event] = []
    pool.events.subscribe(events.append)
    with Watch(here / "results" / "ckpt", {size}) as watch, pool.mirror("ckpt", to="results") as mirror:
        future = sky.function(train)(3, size, 4) > pool
        until(lambda: "slow0.bin" in watch.seen and "renamed0.bin" in watch.seen, 60)
        assert not future.done(), "they are here before the function returns"
        assert not (here / "results" / "ckpt" / "log.txt").exists(), "it is being written"
        assert future.result() == 8
    assert {path.name for path in (here / "results" / "ckpt").iterdir()} == {
        "last.bin",
        "log.txt",
        *(f"{kind}{step}.bin" for kind in ("slow", "renamed") for step in range(3)),
    }
    assert (here / "results" / "ckpt" / "last.bin").read_bytes() == bytes([2]) * size
    assert mirror.reports[0].sent >= 8
    pool.close()
    assert not [event for event in events if isinstance(event, (FilesWritten, Notice))], "all was fetched"


# ---- what fails


@pytest.fixture(scope="module")
def breakable() -> Iterator[Lab]:
    """A host of this module's own."""
    with labs.start_for_calls(1) as lab:
        yield lab


@pytest.mark.slow
@pytest.mark.parametrize("is_lost", [False, True], ids=["short", "lost"])
def test_a_mirror_goes_on_after_a_cut(namespaces: Lab, breakable: Lab, here: Path, is_lost: bool) -> None:
    """Within the lease and after it, when the host has another agent."""
    host = breakable.hosts[0]
    content = os.urandom(32 * MB)
    path = host.path("/tmp/ckpt/large.pt")
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(content)
    part = here / "ckpt" / os.fsdecode(part_of(b"large.pt"))
    events: list[Event] = []
    with sky.Compute(inventory=breakable.inventory, ui="none", lease=6 if is_lost else 60) as pool:
        pool.events.subscribe(events.append)
        session = pool.hosts[0].session
        host.slow(50)
        try:
            with pool.mirror("/tmp/ckpt") as mirror:
                until(lambda: part.exists() and part.stat().st_size >= 4 * PIECE)
                host.cut()
                try:
                    if is_lost:
                        until(lambda: [event for event in events if isinstance(event, Notice)])
                    else:
                        time.sleep(4)
                finally:
                    begun = part.stat().st_size
                    host.restore()
                assert begun < len(content)
                until(lambda: (here / "ckpt" / "large.pt").exists())
        finally:
            host.slow(None)
        assert (here / "ckpt" / "large.pt").read_bytes() == content
        assert not part.exists()
        assert (pool.hosts[0].session is not session) == is_lost
        if is_lost:
            assert mirror.reports[0].sent_size == len(content) - begun, "what was here is not sent again"
            assert next(event.text for event in events if isinstance(event, Notice)).startswith("not mirrored: ")
        else:
            assert session.moved[1] < 1.1 * len(content)


# ---- the command line


@pytest.fixture
def listed(tmp_path: Path, hosts_of: Callable[..., list[Any]]) -> Path:
    """An inventory of two hosts."""
    return inventory(tmp_path / "inventory.toml", hosts_of("openssh", 2))


WRITES = """
import os, sys, time
from pathlib import Path

rank = os.environ["RANK"]
Path("ckpt").mkdir(exist_ok=True)
Path(f"ckpt/first{rank}.pt").write_text("first" + rank)
print("saved", flush=True)
while not Path("end").exists():
    time.sleep(0.05)
Path("end").unlink()
log = open("ckpt/log.txt", "w")
log.write("lines")
log.flush()
if "fail" in sys.argv:
    raise SystemExit(3)
"""


def found(folder: Path) -> dict[str, str]:
    paths = (path for path in folder.rglob("*") if path.is_file() and path.suffix != ".py")
    return {str(path.relative_to(folder)): path.read_text() for path in paths}


def run_with_mirror(here: Path, listed: Path, *words: str) -> subprocess.Popen[str]:
    (here / "writes.py").write_text(WRITES)
    command = [sys.executable, "-m", "skyfab", "run", f"--inventory={listed}", *words]
    client = subprocess.Popen(command, cwd=here, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert client.stdout is not None
    assert client.stdout.readline().endswith("saved\n"), client.communicate()[1]
    return client


def test_run_with_a_mirror(here: Path, listed: Path) -> None:
    """Of a run that fails, which has the last files too."""
    words = ("--hosts=node1", "--mirror=ckpt:results", "--limit=20MB/s", "writes.py", "fail")
    with run_with_mirror(here, listed, *words) as client:
        until(lambda: found(here) == {"results/ckpt/first0.pt": "first0"})
        ended = skyfab(here, "exec", "--hosts=node1", "--", "touch", "end", inventory=listed)
        assert ended.returncode == 0, ended.stderr
        assert client.stderr is not None
        said = client.stderr.read()
        assert client.wait(60) == 1, said
    assert found(here) == {"results/ckpt/first0.pt": "first0", "results/ckpt/log.txt": "lines"}
    assert "node1: 2 files, 11 bytes; fetched 2, 11 bytes into results/, in " in said
    assert "to fetch" not in said, "all that was written has been fetched"


@pytest.mark.slow
def test_what_is_new_of_a_detached_run_comes_with_the_next_contact(here: Path, tmp_path: Path, listed: Path) -> None:
    (here / "writes.py").write_text(WRITES)
    words = ("--hosts=node1", "--detach", "--mirror=ckpt:results", "--name=mirrored", "writes.py")
    done = skyfab(here, "run", *words, inventory=listed)
    assert done.returncode == 0, done.stderr
    assert "fetch new files in ckpt:results" in done.stderr
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    run = done.stdout.strip()
    until(lambda: "saved" in skyfab(elsewhere, "logs", run, inventory=listed).stdout)
    said = skyfab(elsewhere, "logs", run, inventory=listed)
    assert found(here) == {"results/ckpt/first0.pt": "first0"}, said.stderr
    (here / "results" / "ckpt" / "first0.pt").unlink()
    got = skyfab(elsewhere, "get", "--run=mirrored", inventory=listed)
    assert got.returncode == 0, got.stderr
    assert found(here) == {"results/ckpt/first0.pt": "first0"}
    command = [sys.executable, "-m", "skyfab", "attach", run, f"--inventory={listed}"]
    with subprocess.Popen(command, cwd=elsewhere, stderr=subprocess.PIPE, text=True) as client:
        made = skyfab(here, "exec", "--hosts=node1", "--", "touch", "ckpt/second.pt", inventory=listed)
        assert made.returncode == 0, made.stderr
        until(lambda: "results/ckpt/second.pt" in found(here))  # while it is followed
        skyfab(here, "exec", "--hosts=node1", "--", "touch", "end", inventory=listed)
        assert client.stderr is not None
        said_last = client.stderr.read()
        assert client.wait(60) == 0, said_last
    assert found(here).keys() == {f"results/ckpt/{name}" for name in ("first0.pt", "second.pt", "log.txt")}
    assert "to fetch" not in said_last
    assert not list(elsewhere.iterdir())
