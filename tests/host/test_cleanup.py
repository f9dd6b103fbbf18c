"""Run folders of agents that are gone: who may remove which, where machines share a folder and a name."""

from __future__ import annotations

import fcntl
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from stage.spot import until

from skyfab.host.agent.cleanup import Presence, is_dead, remove_dead
from skyfab.host.agent.host_info import boot_id

MINUTE = 60


@pytest.fixture
def folder_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str, float], Path]:
    """``folder_of("a", boot, 300)``: of an agent that is dead, or on another machine; touched 300 s ago."""
    (tmp_path / "own").mkdir()
    monkeypatch.chdir(tmp_path / "own")  # the length of socket paths is limited

    def make(name: str, boot: str, seconds: float) -> Path:
        path = tmp_path / name
        path.mkdir()
        if boot:
            (path / "boot").write_text(boot)
        with socket.socket(socket.AF_UNIX) as listener:  # to connect is refused, as at one of another machine
            listener.bind(f"../{name}/agent.sock")
        os.utime(path, (time.time() - seconds,) * 2)
        return path

    return make


def test_an_agent_of_another_machine_with_this_name_keeps_its_folder(
    folder_of: Callable[[str, str, float], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder of another boot goes only when no agent has touched it for long."""
    kept = {folder_of(name, boot, 29 * MINUTE) for name, boot in (("other", "another-boot"), ("unknown", ""))}
    kept.add(folder_of("young", boot_id(), 30))
    gone = {folder_of("dead", boot_id(), 2 * MINUTE), folder_of("old", "another-boot", 31 * MINUTE)}
    started, begin = list[threading.Thread](), threading.Thread.start
    monkeypatch.setattr(threading.Thread, "start", lambda thread: started.append(thread))
    remove_dead(str(tmp_path / "own"))
    assert {path for path in kept | gone if path.exists()} == kept | gone, "the agent does not wait for this"
    monkeypatch.chdir("/")  # as an agent that ends
    for thread in started:
        begin(thread)
        thread.join()
    assert {path for path in kept | gone if path.exists()} == kept


def test_an_agent_says_since_when_and_that_it_runs(tmp_path: Path) -> None:
    presence = Presence(str(tmp_path))
    assert (tmp_path / "boot").read_text() == boot_id()
    os.utime(tmp_path, (0, 0))
    presence.renew()
    assert tmp_path.stat().st_mtime > time.time() - MINUTE
    assert 4 * MINUTE < presence.due - time.monotonic() <= 5 * MINUTE
    os.utime(tmp_path, (0, 0))
    presence.renew()
    assert tmp_path.stat().st_mtime == 0, "not each time"


def test_the_folder_of_an_agent_that_runs_is_touched(tmp_path: Path) -> None:
    program = "import sys; from skyfab.host.agent import cleanup, link; cleanup._PACE = 0.1; link.main(sys.argv[1:])"
    words = [sys.executable, "-c", program, str(tmp_path), "a-0", "start"]
    folder = tmp_path / "run" / socket.gethostname() / "a-0"
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as link:
        assert link.stdout is not None and link.stdout.read(1), "the agent says hello"
        os.utime(folder, (0, 0))
        until(lambda: folder.stat().st_mtime > 0)
        link.kill()
    until(lambda: not folder.exists())


def test_a_file_system_without_locks_keeps_no_dead_folder(
    folder_of: Callable[[str, str, float], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    dead = folder_of("dead", boot_id(), 2 * MINUTE)
    (dead / "lock").touch()
    with (dead / "lock").open() as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(BlockingIOError):
            is_dead("../dead")

    def flock(*_: object) -> None:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", flock)
    assert is_dead("../dead")
