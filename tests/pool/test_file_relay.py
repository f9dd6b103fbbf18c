"""Uploads to several hosts: what several of them lack leaves this machine once, and arrives as it does from here."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import skyfab as sky
from skyfab.lab import Lab
from skyfab.ui.events import Event, Moved, Notice

pytestmark = pytest.mark.lab
MIB = 1 << 20


@pytest.fixture(scope="module")
def pool(lab: Lab, hosts_of: Callable[..., list[sky.Host]]) -> Iterator[sky.Compute]:
    if lab.kind != "namespace":
        pytest.skip(lab.limits[0])
    with sky.Compute(hosts_of("openssh", 4), ui="none", workdir="temp") as compute:
        yield compute


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "here" / "data").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path / "here"


def listed(folder: str) -> dict[str, tuple[int, int, int, int]]:
    """Of all files: the hash of their content, mode, time and size."""
    import zlib

    found = {}
    for path in sorted(Path(folder).rglob("*")):
        if path.is_file():
            about = path.stat()
            found[str(path)] = (zlib.crc32(path.read_bytes()), about.st_mode, about.st_mtime_ns, about.st_size)
    return found


state = sky.function(listed)


def left(lab: Lab) -> int:
    """Bytes that have left this machine for the hosts of the lab."""
    return int(Path(f"/sys/class/net/{lab.hosts[0].network.bridge}/statistics/tx_bytes").read_text())


def write(path: Path, size: int, mode: int = 0o644) -> int:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(os.urandom(size))
    path.chmod(mode)
    os.utime(path, ns=(1, 1_600_000_000_123_456_789 + size))
    return size


def test_files_leave_this_machine_once(lab: Lab, pool: sky.Compute, here: Path) -> None:
    size = write(here / "data/large", 9 * MIB + 5, 0o600) + write(here / "data/sub/script", 2 * MIB, 0o755)
    size += sum(write(here / f"data/many/{number}", 20_000 + number) for number in range(300))
    write(here / "data/empty", 0)
    events: list[Event] = []
    cancel = pool.events.subscribe(events.append)
    before = left(lab)
    reports = pool.upload("data")
    assert left(lab) - before < 1.15 * size
    cancel()
    assert listed("data") != {} and state("data") @ pool == [listed("data")] * 4
    assert [(one.sent, one.files, one.sent_size, one.skipped) for one in reports] == [(303, 303, size, [])] * 4
    assert not [event for event in events if isinstance(event, Notice)]
    for node in pool.hosts:
        moved = [event for event in events if isinstance(event, Moved) and event.host == node.name]
        assert moved[-1].done == moved[-1].total == size
        assert [event.done for event in moved] == sorted(event.done for event in moved)
    assert [one.sent for one in pool.upload("data")] == [0] * 4


def test_a_single_file_and_hosts_that_lack_different_ones(lab: Lab, pool: sky.Compute, here: Path) -> None:
    write(here / "parts/one", 6 * MIB)
    write(here / "parts/two", 7 * MIB)
    before = left(lab)
    assert [one.sent for one in pool.files.upload("parts/one", None, pool.hosts[:2])] == [1, 1]
    assert [one.sent for one in pool.files.upload("parts/two", None, pool.hosts[2:])] == [1, 1]
    assert left(lab) - before < 1.15 * 13 * MIB
    write(here / "parts/three", 5 * MIB)
    before = left(lab)
    assert [one.sent for one in pool.upload("parts")] == [2] * 4
    assert left(lab) - before < 1.15 * 18 * MIB
    assert state("parts") @ pool == [listed("parts")] * 4
    write(here / "parts/four", 5 * MIB)
    before = left(lab)
    assert [one.sent for one in pool.upload("parts/four", to="renamed", on="head")] == [1], "one host alone"
    assert left(lab) - before < 1.15 * 5 * MIB


def test_a_large_file_that_is_resumed_after_small_ones(lab: Lab, pool: sky.Compute, here: Path) -> None:
    """Hosts also get the hashes of what comes before the part that they have."""
    write(here / "rest/large", 9 * MIB)
    small = sum(write(here / f"rest/many/{number}", 50_000) for number in range(60))
    begun = (here / "rest/large").read_bytes()[: 6 * MIB]
    pool.broadcast(begin(begun))
    notices: list[Event] = []
    cancel = pool.events.subscribe(lambda event: notices.append(event) if isinstance(event, Notice) else None)
    before = left(lab)
    pool.upload("rest")
    assert left(lab) - before < 1.15 * (3 * MIB + small)
    cancel()
    assert notices == []
    assert state("rest") @ pool == [listed("rest")] * 4


@sky.function
def begin(content: bytes) -> None:
    from skyfab.files.draft import part_of

    Path("rest").mkdir()
    Path("rest", part_of(b"large").decode()).write_bytes(content)
