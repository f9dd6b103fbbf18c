"""Uploads to several hosts that fail on one of them, or whose files change: the others get all, nobody a mixture."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import cable
import pytest
from stage import labs
from stage.projects import skyfab
from stage.spot import until

import skyfab as sky
from skyfab.lab import Lab
from skyfab.ui.events import Event, Moved, Notice

pytestmark = pytest.mark.lab
MIB = 1 << 20
Open = Callable[..., sky.Compute]


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    with labs.start_for_calls(4) as lab:
        cable.settle(lab.hosts)
        yield lab


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    made = tmp_path / "here"
    made.mkdir()
    monkeypatch.chdir(made)
    return made


def listed(folder: str) -> dict[str, int]:
    found = (path for path in sorted(Path(folder).rglob("*")) if path.is_file())
    return {str(path): zlib.crc32(path.read_bytes()) for path in found}


state = sky.function(listed)


def left(lab: Lab) -> int:
    """Bytes that have left this machine for the hosts of the lab."""
    return int(Path(f"/sys/class/net/{lab.hosts[0].network.bridge}/statistics/tx_bytes").read_text())


def fill(folder: Path, files: int = 4, size: int = 6 * MIB) -> None:
    folder.mkdir(parents=True)
    for number in range(files):
        (folder / str(number)).write_bytes(os.urandom(size))


class Uploading:
    """An upload to all hosts of a pool, on a thread, over slow links."""

    def __init__(self, lab: Lab, pool: sky.Compute, folder: str, mbit: float = 50, to: str | None = None) -> None:
        self.notices: list[str] = []
        self.reports: list[Any] = []
        self.error: BaseException | None = None
        self.far = threading.Event()
        """A host has a quarter of it."""
        self._far: set[str] = set()
        for host in lab.hosts:
            host.slow(mbit)
        cancel = pool.events.subscribe(self._listen)

        def send() -> None:
            try:
                self.reports = pool.upload(folder, to=to)
            except BaseException as error:
                self.error = error
            finally:
                cancel()

        self._thread = threading.Thread(target=send)
        self._thread.start()

    def _listen(self, event: Event) -> None:
        if isinstance(event, Notice):
            self.notices.append(str(event))
        if isinstance(event, Moved) and event.done > event.total / 4:
            self.far.set()

    def join(self, lab: Lab) -> None:
        self._thread.join(150)
        assert not self._thread.is_alive()
        for host in lab.hosts:
            host.slow(None)


def has(pool: sky.Compute, folder: str, *hosts: int) -> None:
    for number in hosts:
        assert pool.submit(state(folder), on=f"node{number}").result() == listed(folder)


@pytest.mark.slow
@pytest.mark.usefixtures("hurry")
def test_a_host_that_is_lost(lab: Lab, open_pool: Open, here: Path) -> None:
    pool = open_pool("openssh", count=4, lease=15)
    name = "lost"
    fill(here / name)
    uploading = Uploading(lab, pool, name)
    assert uploading.far.wait(60)
    cable.silence([lab["node2"]])
    uploading.join(lab)
    assert isinstance(uploading.error, sky.HostLost)
    assert uploading.error.host == "node2"
    has(pool, name, 1, 3, 4)
    assert any(line.startswith("node3: node2 ") for line in uploading.notices), uploading.notices


@pytest.mark.slow
@pytest.mark.parametrize("how", ["replaced", "removed"])
def test_files_that_change_meanwhile(lab: Lab, open_pool: Open, here: Path, how: str) -> None:
    """Each arrives as one version, that which is there in the end; what is gone is left out."""
    pool = open_pool("openssh", count=3)
    fill(here / how, files=3)
    uploading = Uploading(lab, pool, how, mbit=20)
    assert uploading.far.wait(60)
    for path in (here / how / "1", here / how / "2"):
        if how == "replaced":
            (here / "new").write_bytes(os.urandom(5 * MIB))
            (here / "new").rename(path)
        else:
            path.unlink()
    uploading.join(lab)
    assert uploading.error is None
    found = state(how) @ pool
    assert found == [listed(how)] * 3
    skipped = [("1", "removed, changed or not readable"), ("2", "removed, changed or not readable")]
    assert [report.skipped for report in uploading.reports] == [skipped if how == "removed" else []] * 3


@pytest.mark.slow
def test_ctrl_c_and_again(lab: Lab, here: Path, open_pool: Open) -> None:
    """What has arrived does not leave this machine again."""
    fill(here / "again", files=2, size=16 * MIB)
    for host in lab.hosts:
        host.slow(50)
    command = [sys.executable, "-m", "skyfab", "put", "again", f"--inventory={lab.inventory}"]
    before = left(lab)
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        until(lambda: left(lab) - before > 24 * MIB)
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=60)
    assert process.returncode == 130
    for host in lab.hosts:
        host.slow(None)
    before = left(lab)
    done = skyfab(here, "put", "again", f"--inventory={lab.inventory}")
    assert done.returncode == 0, done.stderr
    assert left(lab) - before < 16 * MIB
    pool = open_pool("openssh", count=4)
    has(pool, "again", 1, 2, 3, 4)
