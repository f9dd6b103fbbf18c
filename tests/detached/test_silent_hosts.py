"""Commands about detached runs, and `skyfab get`, while one of two hosts does not respond."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from stage.projects import inventory, skyfab

import skyfab as sky
from skyfab.lab import Lab

pytestmark = pytest.mark.lab


@pytest.fixture
def hosts(namespaces: Lab, hosts_of: Callable[..., list[sky.Host]]) -> list[sky.Host]:
    return hosts_of("openssh", 2)


Ran = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def ran(tmp_path: Path, hosts: list[sky.Host]) -> Ran:
    """Runs a command in a folder, and compares its exit code."""
    listed = inventory(tmp_path / "inventory.toml", list(hosts))
    (tmp_path / "here").mkdir()

    def run(*words: str, code: int = 0) -> subprocess.CompletedProcess[str]:
        done = skyfab(tmp_path / "here", *words, inventory=listed)
        assert done.returncode == code, (words, done)
        return done

    return run


@pytest.fixture
def cut(namespaces: Lab) -> Iterator[Callable[[], None]]:
    """Cuts the second host off until the end of the test."""
    yield namespaces.hosts[1].cut
    namespaces.hosts[1].restore()


@pytest.mark.slow
def test_files_are_fetched_from_hosts_that_respond(ran: Ran, cut: Callable[[], None], tmp_path: Path) -> None:
    here = tmp_path / "here"
    (here / "save.py").write_text("import os\nopen('ckpt' + os.environ['RANK'], 'w').write('x')\n")
    words = ("--hosts=node1,node2", "--detach", "save.py")
    ids = [ran("run", "--get=ckpt*", *words).stdout.strip(), ran("run", *words).stdout.strip()]
    for one in ids:
        ran("logs", "-f", "--hosts=node1,node2", one)
    for path in here.glob("ckpt*"):
        path.unlink()
    cut()
    done = ran("attach", ids[0], code=3)
    assert "node1: 1 file" in done.stdout and "error: node2: " in done.stderr
    assert [path.name for path in here.glob("ckpt*")] == ["ckpt0"]
    done = ran("get", "--run", ids[1], "--to=of_run", code=3)
    assert "node2: no response, so nothing was fetched from it\n" in done.stderr
    assert (here / "of_run" / "ckpt0").exists()
    done = ran("get", "ckpt*", "--hosts=node1,node2", "--to=named", code=3)
    assert done.stdout.startswith("node1: 1 file, 1 byte; fetched 1, 1 byte into named/")
    assert done.stderr.count("error: node2: ") == 1
    assert (here / "named" / "ckpt0").exists()
    assert "node1: no file matches nothing" in ran("get", "nothing", "--hosts=node1,node2", code=2).stderr
    ran("get", "ckpt*", "--hosts=node2", code=3)


@pytest.mark.slow
def test_several_runs_are_stopped_by_their_names(ran: Ran, cut: Callable[[], None], tmp_path: Path) -> None:
    (tmp_path / "here" / "wait.py").write_text("import time\ntime.sleep(600)\n")
    for name in ("day", "night"):
        ran("run", "--hosts=node1", "--detach", f"--name={name}", "wait.py")
    ran("run", "--hosts=node1,node2", "--detach", "--name=both", "wait.py")
    done = ran("stop", "day", "nihgt", "night", code=2)
    assert "error: no run 'nihgt'" in done.stderr and "day" in done.stdout
    done = ran("stop", "day", "night")
    day, night = done.stdout.splitlines()
    assert day.endswith("day has already ended: stopped") and night.split()[1:] == ["stopped", "night"]
    ran("stop", "both")
