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
SMALL = "/small"
KILL = """
for fd in /proc/[0-9]*/fd/*; do
    case $(readlink $fd) in *.skyfab-*.part) pid=${fd#/proc/}; kill -9 ${pid%%/*} && exit;; esac
done
exit 1"""
"""Kills the process that writes a large file, on the host itself."""
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
@pytest.mark.parametrize("silently", [False, True])
def test_a_host_that_is_lost(lab: Lab, open_pool: Open, here: Path, silently: bool) -> None:
    pool = open_pool("openssh", count=4, lease=15)
    name = f"lost{silently}"
    fill(here / name)
    uploading = Uploading(lab, pool, name)
    assert uploading.far.wait(60)
    try:
        if silently:
            cable.silence([lab["node2"]])
        else:
            lab["node2"].kill()
        uploading.join(lab)
        assert isinstance(uploading.error, sky.HostLost)
        assert uploading.error.host == "node2"
        has(pool, name, 1, 3, 4)
        assert any(line.startswith("node3: node2 ") for line in uploading.notices), uploading.notices
    finally:
        if not silently:
            lab["node2"].reboot()
            lab["node2"].run(["rm", "-rf", "/root/.cache/skyfab/run"])  # as a host that was switched off leaves it


@pytest.mark.slow
def test_a_short_cut_of_all_cables(lab: Lab, open_pool: Open, here: Path) -> None:
    pool = open_pool("openssh", count=4, lease=60)
    fill(here / "cut")
    uploading = Uploading(lab, pool, "cut")
    with cable.Cable(lab, 27, [1.0, 4.0, 0.5], hosts=lab.hosts, longest=5) as cuts:
        cuts.wait()
    uploading.join(lab)
    assert uploading.error is None
    has(pool, "cut", 1, 2, 3, 4)


@pytest.mark.slow
def test_a_disk_that_is_too_small(lab: Lab, hosts_of: Callable[..., list[sky.Host]], here: Path) -> None:
    """One whose room is too small is sent nothing; one that fills up in the middle fails; the others have all."""
    host = lab["node2"]
    host.run(["mkdir", "-p", SMALL])
    host.small_disk(SMALL, 40)
    fill(here / "disk", files=3, size=8 * MIB)
    fill(here / "vast", files=1, size=48 * MIB)
    try:
        with sky.Compute(hosts_of("openssh", 3), ui="none") as pool:
            before = host.address, pool.hosts[1].session.moved[0]
            said: list[str] = []
            pool.events.subscribe(lambda event: said.append(str(event)) if isinstance(event, Notice) else None)
            with pytest.raises(sky.HostUnfit, match="not enough space for these files") as raised:
                pool.upload("vast", to=f"{SMALL}/")
            assert raised.value.host == "node2" and "use another disk" in str(raised.value.hint)
            assert [line.partition("; sent 1, 50 MB")[0] for line in sorted(said)] == [
                f"node{number}: 1 file, 50 MB" for number in (1, 3)
            ]
            assert pool.hosts[1].session.moved[0] - before[1] < MIB
            for number in (1, 3):
                assert pool.submit(state(f"{SMALL}/vast"), on=f"node{number}").result() == {
                    f"{SMALL}/{path}": content for path, content in listed("vast").items()
                }
            uploading = Uploading(lab, pool, "disk", mbit=80, to=f"{SMALL}/")
            assert uploading.far.wait(60)
            host.run(["sh", "-c", f"head -c 39000000 /dev/zero > {SMALL}/filler"], check=False)
            uploading.join(lab)
            assert isinstance(uploading.error, sky.HostUnfit) and uploading.error.host == "node2"
            assert "No space left" in str(uploading.error) and uploading.error.hint is not None
            for number in (1, 3):
                assert len(pool.submit(state(f"{SMALL}/disk"), on=f"node{number}").result()) == 3
            host.run(["rm", f"{SMALL}/filler"])
            pool.upload("disk", to=f"{SMALL}/")
            for number in (1, 2, 3):
                assert pool.submit(state(f"{SMALL}/disk"), on=f"node{number}").result() == {
                    f"{SMALL}/{path}": content for path, content in listed("disk").items()
                }
    finally:
        for each in lab.hosts:
            each.slow(None)
        host.run(["umount", SMALL])


@pytest.mark.slow
@pytest.mark.parametrize("how", ["replaced", "rewritten", "removed"])
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
        elif how == "rewritten":
            path.write_bytes(os.urandom(7 * MIB))
        else:
            path.unlink()
    uploading.join(lab)
    assert uploading.error is None
    found = state(how) @ pool
    assert found == [listed(how)] * 3
    skipped = [("1", "removed, changed or not readable"), ("2", "removed, changed or not readable")]
    assert [report.skipped for report in uploading.reports] == [skipped if how == "removed" else []] * 3


@pytest.mark.slow
def test_a_folder_that_is_removed_meanwhile(lab: Lab, open_pool: Open, here: Path) -> None:
    pool = open_pool("openssh", count=4)
    fill(here / "swept")
    uploading = Uploading(lab, pool, "swept")
    assert uploading.far.wait(60)
    lab["node3"].run(["sh", "-c", "rm -rf ~/.cache/skyfab/files/*/swept"])
    uploading.join(lab)
    assert isinstance(uploading.error, sky.HostUnfit) and uploading.error.host == "node3"
    has(pool, "swept", 1, 2, 4)


@pytest.mark.slow
def test_a_worker_that_is_killed(lab: Lab, open_pool: Open, here: Path) -> None:
    pool = open_pool("openssh", count=4)
    fill(here / "killed")
    uploading = Uploading(lab, pool, "killed")
    assert uploading.far.wait(60)
    until(lambda: lab["node2"].run(["sh", "-c", KILL], check=False).returncode == 0)
    uploading.join(lab)
    assert isinstance(uploading.error, sky.HostUnfit) and uploading.error.host == "node2"
    assert uploading.error.hint == "run it again: it resumes where it stopped"
    has(pool, "killed", 1, 3, 4)
    pool.upload("killed")
    has(pool, "killed", 2)


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


@pytest.mark.slow
def test_two_at_once(lab: Lab, open_pool: Open, here: Path) -> None:
    pools = [open_pool("openssh", count=3) for _ in range(2)]
    fill(here / "both")
    uploads = [Uploading(lab, pool, "both") for pool in pools]
    for one in uploads:
        one.join(lab)
        assert one.error is None
    has(pools[0], "both", 1, 2, 3)


@pytest.mark.slow
def test_hosts_that_do_not_reach_each_other(here: Path) -> None:
    fill(here / "apart", files=3, size=4 * MIB)
    with labs.start_for_calls(3, isolated=True) as lab:
        hosts = list(sky.Inventory.of(lab.inventory).hosts.values())
        with sky.Compute(hosts, ui="none") as pool:
            assert [report.sent for report in pool.upload("apart")] == [3] * 3
            has(pool, "apart", 1, 2, 3)
