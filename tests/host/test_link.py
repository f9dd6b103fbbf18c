"""Links to agents that hang or cannot start; and where an agent may live: nowhere that others could replace it."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from stage.labs import IN_USER_NAMESPACE

import skyfab as sky
from skyfab.host.agent.cleanup import is_dead
from skyfab.host.agent.link import _check

knows_root = pytest.mark.skipif(IN_USER_NAMESPACE, reason="a user namespace does not know the owner of /tmp")


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder outside of the home folder."""
    monkeypatch.setenv("HOME", "/nowhere/home")
    made = tmp_path / "shared" / "mine" / "run"
    made.mkdir(parents=True, mode=0o700)
    return made


@knows_root
def test_folders_of_ones_own_are_accepted(place: Path) -> None:
    _check(str(place))
    place.parent.chmod(0o775)  # the group is often one's own
    _check(str(place))


@knows_root
def test_a_folder_that_all_may_write_to_is_accepted_where_they_cannot_take_things_away(place: Path) -> None:
    """As /tmp is."""
    place.parents[1].chmod(0o1777)
    _check(str(place))


@pytest.mark.parametrize("above", [0, 1, 2])
def test_a_part_that_all_may_write_to_is_refused(place: Path, above: int) -> None:
    part = (place, *place.parents)[above]
    part.chmod(0o777)
    with pytest.raises(PermissionError, match=f"{part} is writable by others"):
        _check(str(place))


@pytest.mark.skipif(os.getuid() != 0, reason="needs folders of another user")
@pytest.mark.parametrize("above", [0, 1, 2])
def test_a_part_of_another_user_is_refused(place: Path, above: int) -> None:
    part = (place, *place.parents)[above]
    os.chown(part, 65534, 65534)
    with pytest.raises(PermissionError, match=f"{part} belongs to another user"):
        _check(str(place))


@pytest.mark.skipif(os.getuid() != 0, reason="needs a link of another user")
@knows_root
def test_a_link_of_another_user_is_refused(place: Path) -> None:
    """It leads to a folder of ours now."""
    link = place.parents[1] / "link"
    link.symlink_to(place.parent)
    _check(str(link / "run"))
    os.lchown(link, 65534, 65534)
    with pytest.raises(PermissionError, match=f"{link} belongs to another user"):
        _check(str(link / "run"))


def test_what_is_above_the_home_folder_is_not_looked_at(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(place.parent))
    place.parents[1].chmod(0o777)
    _check(str(place))


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
