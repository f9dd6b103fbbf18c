"""Links to agents that hang or cannot start."""

from __future__ import annotations

import contextlib
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import skyfab as sky
from skyfab.host.agent.cleanup import is_dead


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder outside of the home folder."""
    monkeypatch.setenv("HOME", "/nowhere/home")
    made = tmp_path / "shared" / "mine" / "run"
    made.mkdir(parents=True, mode=0o700)
    return made


def test_the_error_for_such_a_place_says_what_to_do(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place.parents[1].chmod(0o777)
    with pytest.raises(sky.HostUnfit, match="shared, which is writable by others") as caught:
        sky.Compute([sky.Host(name="here", transport="local", cache=str(place))], ui="none").open()
    assert "cache = …" in str(caught.value.hint)


def test_an_agent_that_cannot_start_says_why(tmp_path: Path) -> None:
    """Its log may be on a full disk."""
    program = (
        "import sys; sys.modules['skyfab.host.agent.zygote'] = None;"
        "from skyfab.host.agent import link; link.main(sys.argv[1:])"
    )
    words = [sys.executable, "-c", program, str(tmp_path / "cache"), "a-0", "start"]
    done = subprocess.run(words, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=170)
    assert done.stderr.startswith("skyfab: ModuleNotFoundError: import of skyfab.host.agent.zygote halted"), done.stderr


@pytest.fixture
def hung(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The run folder of an agent that accepts no connections."""
    folder = tmp_path / "run" / socket.gethostname() / "a-0"
    folder.mkdir(parents=True, mode=0o700)
    monkeypatch.chdir(folder)  # the length of socket paths is limited
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.socket(socket.AF_UNIX))
        listener.bind("agent.sock")
        listener.listen(1)
        with contextlib.suppress(BlockingIOError):
            while True:
                client = stack.enter_context(socket.socket(socket.AF_UNIX))
                client.setblocking(False)
                client.connect("agent.sock")
        yield folder


def test_an_agent_that_hangs_delays_no_other_one(hung: Path) -> None:
    """Other agents look whether it still runs."""
    assert not is_dead(str(hung))


def test_a_link_does_not_wait_forever_for_an_agent_that_hangs(hung: Path, tmp_path: Path) -> None:
    program = "import sys; from skyfab.host.agent import link; link._LONGEST_WAIT = 1; link.main(sys.argv[1:])"
    words = [sys.executable, "-c", program, str(tmp_path), "a-0", "resume"]
    assert subprocess.run(words, stdin=subprocess.DEVNULL, timeout=60).returncode == -signal.SIGALRM
