"""What is made of the ways in which ``ray start`` ends, by a program that stands in for it."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from stage.spot import until

import skyfab as sky

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


def test_a_port_that_is_taken_meanwhile_is_chosen_again(ray_that: Callable[..., sky.Compute]) -> None:
    with ray_that("Failed to bind to 127.0.0.1:1 because it's already occupied.", good=3).ray() as address:
        name, *ports = address.split("/")
    assert name == "address"
    assert len(set(ports)) == 3


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


@pytest.mark.parametrize(("said", "good"), [("it's already occupied", 9)])
def test_an_error_has_what_ray_said(ray_that: Callable[..., sky.Compute], said: str, good: int) -> None:
    pool = ray_that(said, good=good)
    with pytest.raises(sky.HostUnfit, match=f"`ray start` ended with code 1: {said}") as raised, pool.ray():
        pass
    assert raised.value.host == "here1"
    assert sky.function(len)("free") >> pool == 4
