"""The shell of `skyfab ssh`: where it begins and what it has, in a shell of this machine."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

from skyfab.errors import ProtocolError
from skyfab.host.ask.command import variables
from skyfab.inventory.host import Host
from skyfab.inventory.inventory import Inventory
from skyfab.session.interactive import InteractiveShell
from skyfab.session.question import Question


@pytest.fixture
def here(tmp_path: Path) -> Host:
    return Host(name="here", transport="local", cache=str(tmp_path / "cache"))


def output(shell: InteractiveShell) -> list[str]:
    done = subprocess.run(
        shell.argv(Inventory(hosts={}), terminal=False), capture_output=True, text=True, stdin=subprocess.DEVNULL
    )
    return (done.stdout + done.stderr).splitlines()


def test_a_command_in_a_folder_of_the_cache(here: Host) -> None:
    shell = InteractiveShell(host=here, folder="project-1", setup="MINE=set", command="pwd")
    assert output(shell) == [f"{here.cache}/files/project-1"]


def test_what_it_has(here: Host, tmp_path: Path) -> None:
    """Variables of the setup, the environment's programs first, and the modules of the project."""
    programs = Path(here.cache, "envs", "abc", "bin")
    programs.mkdir(parents=True)
    (programs / "python").touch(mode=0o755)
    Path(here.cache, "trees", "123", "0").mkdir(parents=True)
    shell = InteractiveShell(
        host=here,
        folder=str(tmp_path),
        programs="env/abc",
        otherwise="no environment yet",
        tree="123",
        setup="export MINE=set",
        command='echo "$MINE"; command -v python; echo "$PYTHONPATH"',
    )
    found = output(shell)
    assert found[:2] == ["set", str(programs / "python")]
    assert found[2].startswith(f"{here.cache}/trees/123/0")
    assert len(found) == 3


@pytest.mark.parametrize(("setup", "expected"), [("TOKEN=theirs", ["it's\n two "]), ("false", []), ("exit 3", [])])
def test_the_file_of_variables_is_removed_even_if_the_setup_fails(
    here: Host, tmp_path: Path, setup: str, expected: list[str]
) -> None:
    cache = Path(here.cache)
    cache.mkdir()
    name = variables(here.cache, values={"TOKEN": "it's\n two "})
    shell = InteractiveShell(host=here, folder=str(tmp_path), setup=setup, command='printf %s "$TOKEN"')
    done = subprocess.run(["/bin/sh", "-c", shell.script(name)], capture_output=True, text=True, check=False)
    assert done.stdout == "".join(expected)
    assert list(cache.iterdir()) == []


def test_an_environment_that_is_not_there(here: Host) -> None:
    shell = InteractiveShell(host=here, folder="", programs="env/abc", otherwise="no environment yet", command="true")
    assert output(shell) == ["no environment yet"]


def test_a_host_gets_it_all_in_one_word(tmp_path: Path) -> None:
    host = Host(name="node1", address="10.0.0.1")
    shell = InteractiveShell(host=host, folder="it's; rm -rf", command="echo 'x'")
    inventory = Inventory(hosts={"node1": host})
    plain, typed = (shell.argv(inventory, terminal=terminal) for terminal in (False, True))
    assert plain[0] == "ssh"
    assert plain[-1].startswith("exec /bin/sh -c '")
    assert "rm -rf" not in plain[-1]
    assert ("-t" in typed, "-t" in plain) == (True, False)


@pytest.mark.parametrize("reply", ["ssh-0123abc", "ssh-../x", "x"])
def test_values_of_variables_are_in_no_command_line(reply: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The host is asked to write them to a file, and must reply with the name of one."""
    asked: list[Any] = []

    class Asking:
        def __init__(self, *_: object) -> None:
            pass

        def __enter__(self) -> Asking:
            return self

        def __exit__(self, *_: object) -> None:
            pass

        def ask_one(self, question: Question[str], host: Host) -> str:
            asked.append((question.name, question.arguments, host.name))
            return reply

    monkeypatch.setattr("skyfab.session.interactive.Asker", Asking)
    host = Host(name="node1", address="10.0.0.1")
    shell = InteractiveShell(host=host, folder="", variables={"TOKEN": "hunter2"})
    assert "hunter2" not in repr(shell)
    if reply == "ssh-0123abc":
        argv = shell.argv(Inventory(hosts={"node1": host}), terminal=False)
        assert reply in argv[-1]
        assert not any("hunter2" in word for word in argv)
    else:
        with pytest.raises(ProtocolError, match="invalid reply to variables"):
            shell.argv(Inventory(hosts={"node1": host}), terminal=False)
    assert asked == [("command.variables", {"values": {"TOKEN": "hunter2"}}, "node1")]
