"""`skyfab init`: from ssh_config and known_hosts to an inventory.toml with hosts that work."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from stage.labs import start
from stage.projects import skyfab
from stage.typist import Typist

from skyfab.inventory.inventory import Inventory

ODD = """
Host github.com gitlab.example.com
  User git
Host *.example.com !bad.example.com
  ForwardAgent no
Match host weird
  Port 99
Host "quoted one" all none local
Host = equals
Host dup dup
DEAD
Host ümlaut under_score plus+sign dot.ted
  HostName 127.0.0.1
  Port 1
Host *
  ConnectTimeout 5
  ServerAliveInterval 30
"""


def config(folder: Path, lines: str) -> dict[str, str]:
    """Writes an ssh_config; returns the variables of a shell in which it is the user's."""
    (folder / "config").write_text(lines)
    return {"SKYFAB_SSH_CONFIG": str(folder / "config")}


def test_a_file_that_is_there_is_not_changed(tmp_path: Path) -> None:
    (tmp_path / "inventory.toml").write_text("mine")
    done = skyfab(tmp_path, "init", "--yes", **config(tmp_path, "Host a\n"))
    assert done.returncode == 2 and "inventory.toml already exists" in done.stderr
    assert (tmp_path / "inventory.toml").read_text() == "mine"


def test_a_link_that_leads_nowhere_is_there_too(tmp_path: Path) -> None:
    (tmp_path / "inventory.toml").symlink_to("elsewhere")
    assert skyfab(tmp_path, "init", "--yes", **config(tmp_path, "Host a\n")).returncode == 2
    assert not (tmp_path / "elsewhere").exists()


@pytest.mark.lab
@pytest.mark.timeout(200)
def test_forty_odd_entries(tmp_path: Path) -> None:
    """Two of them work: one whose key is on record, and one whose key is recorded."""
    with start(2) as lab:
        known = tmp_path / "known_hosts"
        first, second = lab.hosts
        known.write_text(f"{first.address} {first.host_key}\n")
        dead = "".join(f"Host dead{number}\n  HostName 127.0.0.{number + 2}\n  Port 1\n" for number in range(20))
        lines = [f"Host works{n}\n HostName {one.address}\n User root\n" for n, one in enumerate(lab.hosts)]
        general = f'  IdentityFile "{first.identity}"\n  UserKnownHostsFile "{known}"\n  GlobalKnownHostsFile none\n'
        environ = config(tmp_path, "".join(lines) + ODD.replace("DEAD\n", dead) + general)
        done = skyfab(tmp_path, "init", "--yes", **environ)
        assert done.returncode == 0, done.stdout + done.stderr
        assert list(Inventory.of(tmp_path / "inventory.toml").hosts) == ["works0", "works1"]
        assert "skipped dot.ted: same login as ümlaut" in done.stderr
        assert 'skipped github.com: "User git" is a Git server' in done.stderr and "skipped quoted one" in done.stderr
        assert "works1: hello from " in done.stdout and "dead7: not usable" in done.stdout
        assert done.stdout.endswith("wrote inventory.toml with 2 hosts\nnext: skyfab doctor\n")
        assert second.host_key in known.read_text()
        assert skyfab(tmp_path, "hosts", **environ).returncode == 0


@pytest.mark.lab
@pytest.mark.timeout(200)
def test_three_questions(tmp_path: Path) -> None:
    with start(2) as lab:
        first = lab.hosts[0]
        lines = [f"Host works{n}\n HostName {one.address}\n User root\n" for n, one in enumerate(lab.hosts)]
        lines += ["Host dead\n  HostName 127.0.0.1\n  Port 1\nHost *\n"]
        known = f'  UserKnownHostsFile "{tmp_path}/known"\n  GlobalKnownHostsFile none\n'
        environ = config(tmp_path, "".join(lines) + f'  IdentityFile "{first.identity}"\n' + known)
        words = [sys.executable, "-m", "skyfab", "init"]
        with Typist(words, tmp_path, **environ) as typist:
            for question, answer in (
                (r"Which hosts\?.*", "works*,dead"),
                ("record them in .*", "y"),
                ("Skip the unusable host.*", "n"),
            ):
                typist.sees(question)
                typist.types(answer)
            assert typist.ends() == 0, typist.said
        assert list(Inventory.of(tmp_path / "inventory.toml").hosts) == ["works0", "works1", "dead"]
