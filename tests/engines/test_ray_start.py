"""What is made of the ways in which ``ray start`` ends, by a program that stands in for it."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from stage.spot import until

import skyfab as sky
from skyfab.plugins.ray import Ray

STAND_IN = """
import sys, time
from pathlib import Path

given = dict(word.partition("=")[::2] for word in sys.argv)
folder = Path(given["--temp-dir"])
with (folder / "tries").open("a") as file:
    file.write(given["--dashboard-port"] + " ")
tried = (folder / "tries").read_text().split()
if len(tried) < {good}:
    sys.exit("{said}")
(folder / "ray_current_cluster").write_text("address/" + "/".join(tried))
time.sleep(60)
"""


@pytest.fixture
def ray_that(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, open_pool: Callable[..., sky.Compute]
) -> Callable[..., sky.Compute]:
    """``ray_that("says this", good=2)``: a pool whose ``ray start`` says this and ends, until the second time."""

    def pool(said: str, *, good: int, authentication: str = "authentication") -> sky.Compute:
        for name in ("ray", "ray/scripts", "ray/_private", f"ray/_private/{authentication}"):
            (tmp_path / name).mkdir()
            (tmp_path / name / "__init__.py").write_text("")
        (tmp_path / "ray/scripts/scripts.py").write_text(STAND_IN.format(said=said, good=good))
        monkeypatch.chdir(tmp_path)
        return open_pool(plugins=[sky.plugins.ray()], image=sky.Image(includes=["ray"]))

    return pool


def test_a_ray_that_checks_no_tokens_is_refused(ray_that: Callable[..., sky.Compute]) -> None:
    pool = ray_that("", good=1, authentication="none")
    with pytest.raises(sky.HostUnfit, match="its Ray does not check tokens"), pool.ray():
        pass


def test_only_a_ray_outside_of_containers_is_in_the_way(ray_that: Callable[..., sky.Compute], tmp_path: Path) -> None:
    program = tmp_path / "raylet"
    shutil.copy2("/bin/sleep", program)
    pool = ray_that("", good=1)
    with subprocess.Popen([program, "100"]) as other:
        with pytest.raises(sky.HostUnfit, match=f"another Ray of this user is running, pid {other.pid}"), pool.ray():
            pass
        other.kill()
    argv = ["unshare", "--pid", "--fork", "--kill-child", program, "100"]
    if subprocess.run([*argv[:-1], "0"], stderr=subprocess.DEVNULL).returncode:
        pytest.skip("this user may not make namespaces")
    with subprocess.Popen(argv) as container:
        while not Path(f"/proc/{container.pid}/task/{container.pid}/children").read_text():
            time.sleep(0.01)
        time.sleep(0.1)  # until the child is that program
        with pool.ray() as address:
            assert address.startswith("address/")
        container.kill()


def test_without_any_host_it_is_lost(ray_that: Callable[..., sky.Compute]) -> None:
    pool = ray_that("", good=1)
    pool.hosts[0].lost = sky.HostLost("gone", host="here1")
    with pytest.raises(sky.HostLost), pool.ray():
        pass


def test_variables_of_the_user_are_back_after_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "mine")
    monkeypatch.delenv("RAY_AUTH_TOKEN", raising=False)
    info: Any = None
    with Ray(variables={"RAY_ADDRESS": "ours", "RAY_AUTH_TOKEN": "secret"}).around_call(info):
        assert (os.environ["RAY_ADDRESS"], os.environ["RAY_AUTH_TOKEN"]) == ("ours", "secret")
    assert (os.environ["RAY_ADDRESS"], os.environ.get("RAY_AUTH_TOKEN")) == ("mine", None)


def test_ctrl_c_while_it_starts_ends_it(ray_that: Callable[..., sky.Compute], tmp_path: Path) -> None:
    pool = ray_that("", good=1)
    begun = tmp_path / "pid"
    (tmp_path / "ray/scripts/scripts.py").write_text(
        f"import os, pathlib, time\npathlib.Path({str(begun)!r}).write_text(str(os.getpid()))\ntime.sleep(600)\n"
    )

    def interrupt() -> None:
        until(lambda: begun.exists() and begun.read_text())
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt), pool.ray():
        pass
    thread.join()
    until(lambda: not Path(f"/proc/{begun.read_text()}").exists())
    assert sky.function(len)("free") >> pool == 4
    (tmp_path / "ray/scripts/scripts.py").write_text(STAND_IN.format(said="", good=1))
    with pool.ray() as address:
        assert address.startswith("address/")


@pytest.mark.parametrize(("said", "good"), [("no space left", 2)])
def test_an_error_has_what_ray_said(ray_that: Callable[..., sky.Compute], said: str, good: int) -> None:
    pool = ray_that(said, good=good)
    with pytest.raises(sky.HostUnfit, match=f"`ray start` ended with code 1: {said}") as raised, pool.ray():
        pass
    assert raised.value.host == "here1"
    assert sky.function(len)("free") >> pool == 4
