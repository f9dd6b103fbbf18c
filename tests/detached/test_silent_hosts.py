"""Commands about detached runs, and `skyfab get`, while one of two hosts does not respond."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from stage.projects import inventory, skyfab
from stage.remote import leave, wait_for
from stage.spot import Spot

import skyfab as sky
from skyfab.detached.find import attached
from skyfab.lab import Lab
from skyfab.session import bootstrap

pytestmark = pytest.mark.lab


@pytest.fixture
def hosts(namespaces: Lab, hosts_of: Callable[..., list[sky.Host]]) -> list[sky.Host]:
    return hosts_of("openssh", 2)


def count(go: str) -> None:
    rank = sky.instance_info().rank
    print(f"first of {rank}", flush=True)
    leave(f"{go}.{rank}")
    wait_for(go, 60)
    print(f"last of {rank}", flush=True)


@pytest.fixture
def counting(hosts: list[sky.Host], spot: Spot) -> sky.Run:
    """A run on two hosts that have printed their first lines; the last ones come after ``go``."""
    with sky.Compute(hosts, ui="none") as pool:
        run = pool.launch(sky.function(count)(spot / "go"), name="count")
    for rank in range(2):
        spot.wait(f"go.{rank}")
    return run


@pytest.fixture
def hang(namespaces: Lab, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], Callable[[], None]]]:
    """Logins at the second host do not end, until the function that it returns is called."""
    held, rc = (namespaces.hosts[1].path(path) for path in ("/root/held", "/root/.ssh/rc"))
    monkeypatch.setattr(bootstrap, "CONNECT", 1000.0)

    def begin() -> Callable[[], None]:
        rc.parent.mkdir(exist_ok=True)
        rc.write_text("while test -e /root/held; do sleep 0.1; done\n")
        held.touch()
        return held.unlink

    yield begin
    held.unlink(missing_ok=True)
    rc.unlink()


def test_lines_of_others_are_shown_while_a_login_hangs(
    counting: sky.Run, hosts: list[sky.Host], spot: Spot, hang: Callable[[], Callable[[], None]]
) -> None:
    end = hang()
    with attached("count", hosts, inventory=None, soon=True) as found:
        assert found.silent == ["node2"]
        lines = found.lines(follow=True)
        assert next(lines).text == "first of 0"
        spot.leave("go")
        assert next(lines).text == "last of 0", "it is not waited for later either"
        end()
        assert [line.text for line in lines] == ["first of 1", "last of 1"], "a slow host is"
        assert (found.state, found.silent) == ("done", [])


def test_lines_of_others_are_shown_while_a_host_is_silent(
    namespaces: Lab, counting: sky.Run, hosts: list[sky.Host], spot: Spot, cut: Callable[[], None]
) -> None:
    with attached("count", hosts, inventory=None, soon=True) as found:
        lines = found.lines(follow=True)
        assert sorted([next(lines).text, next(lines).text]) == ["first of 0", "first of 1"]
        cut()
        spot.leave("go")
        assert next(lines).text == "last of 0"
        namespaces.hosts[1].restore()
        assert [line.text for line in lines] == ["last of 1"]


@pytest.mark.parametrize(
    "words",
    [
        ["logs", "count"],
        ["stop", "--all", "--yes"],
    ],
)
def test_commands_show_what_is_known_while_a_login_hangs(
    counting: sky.Run,
    hosts: list[sky.Host],
    spot: Spot,
    hang: Callable[[], Callable[[], None]],
    words: list[str],
    tmp_path: Path,
) -> None:
    listed = inventory(tmp_path / "inventory.toml", list(hosts))
    environ = {**os.environ, "SKYFAB_INVENTORY": str(listed), "PYTHONUNBUFFERED": "1"}
    end = hang()
    argv = [sys.executable, "-m", "skyfab", *words, "--hosts=node1,node2"]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with subprocess.Popen(argv, cwd=tmp_path, env=environ, **pipes) as command:
        assert command.stdout is not None
        known = {"logs": "first of 0", "stop": "node2"}[words[0]]
        seen = next(line for line in command.stdout if known in line)
        assert "first of 1" not in seen
        end()
        rest = command.stdout.read()
    assert command.returncode == 0, rest
    assert {"logs": "first of 1", "stop": "stopped  count"}[words[0]] in rest


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
