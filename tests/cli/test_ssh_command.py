"""`skyfab ssh`: a shell on a host, typed at a terminal, and commands without one."""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
from stage.typist import Typist

import skyfab as sky
from skyfab.detached.written import project
from skyfab.lab import Lab

pytestmark = [pytest.mark.lab, pytest.mark.programs]
PROGRAM = [sys.executable, "-m", "skyfab"]


@pytest.fixture
def folder(lab: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project with an inventory: variables for node1, an interpreter for node2, node3 behind node1, and temporary
    files of its own."""
    text = re.sub("^python = .*\n", "", lab.inventory.read_text(), flags=re.MULTILINE)  # loopback hosts are lent one
    for name, more in (
        ("node1", 'env = { TOKEN = "it\'s $ecret" }\nsetup = "export LEVEL=7"'),
        ("node2", 'python = "/opt/own/bin/python3"'),
        ("node3", 'jump = "node1"'),
    ):
        assert f"[hosts.{name}]\n" in text
        text = text.replace(f"[hosts.{name}]\n", f"[hosts.{name}]\n{more}\n")
    (tmp_path / "inventory.toml").write_text(text)
    (tmp_path / "work").mkdir()
    (tmp_path / "tmp").mkdir()
    monkeypatch.setenv("SKYFAB_INVENTORY", str(tmp_path / "inventory.toml"))
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    monkeypatch.setattr(tempfile, "tempdir", None)
    return tmp_path / "work"


def hostname(lab: Lab, name: str) -> str:
    """That of this machine for loopback hosts."""
    return lab[name].run(["hostname"]).stdout.strip()


def ssh(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [*PROGRAM, "ssh", *words], cwd=folder, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=170
    )
    left = [path.name for path in (folder.parent / "tmp").iterdir() if path.name.startswith("skyfab-")]
    assert not left, f"left behind: {left}"
    return done


def test_a_shell_at_a_terminal(lab: Lab, folder: Path) -> None:
    with Typist([*PROGRAM, "ssh", "node2"], folder) as user:
        user.sees(r"[$#] ")
        user.types("tty; pwd; echo first=${PATH%%:*}; hostname")
        user.sees(r"/dev/pts/\d+\n")
        user.sees(rf"/files/{project(str(folder))}\n")
        user.sees(r"first=/opt/own/bin\n")
        user.sees(rf"{hostname(lab, 'node2')}\n")
        user.types("exit 7")
        assert user.ends() == 7
    assert not list((folder.parent / "tmp").glob("skyfab-*"))


def test_a_command_has_setup_lines_and_variables_which_are_in_no_command_line(lab: Lab, folder: Path) -> None:
    look = "echo \"$LEVEL $TOKEN\"; cat /proc/[0-9]*/cmdline | tr '\\0' ' ' | grep -c ecret; pwd; exit 3"
    done = ssh(folder, "node1", "--", look)
    lines = done.stdout.splitlines()
    assert lines[:1] == ["7 it's $ecret"], done.stderr
    assert int(lines[1]) <= 2, "this command itself, which names it"
    assert lines[2].endswith(f"/files/{project(str(folder))}")
    assert done.returncode == 3
    assert done.stderr == "node1: this project has no environment\n"
    home = Path(lines[2]).parents[1]
    assert not list(lab.hosts[0].path(str(home)).glob("ssh-*"))


def test_a_host_behind_another_one(lab: Lab, folder: Path) -> None:
    done = ssh(folder, "node3", "--", "hostname")
    assert (done.returncode, done.stdout) == (0, f"{hostname(lab, 'node3')}\n"), done.stderr


def test_this_machine(folder: Path) -> None:
    done = ssh(folder, "local", "--", "pwd; command -v python; exit 5")
    assert done.stdout.splitlines() == [str(folder), str(Path(sys.executable).parent / "python")]
    assert done.returncode == 5


def test_the_folder_and_environment_of_a_run(
    folder: Path, hosts_of: Callable[..., list[sky.Host]], lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    with sky.Compute("node2", inventory=lab.inventory, ui="none", workdir="~/elsewhere") as pool:
        run = pool.launch(sky.function(sum)([1, 2]), name="adds")
        assert run.result() == [3]
    done = ssh(folder, "node2", "--run=adds", "--", "pwd; command -v python3; echo ${PATH%%:*}")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].endswith("/elsewhere")
    if lab.kind == "namespace":  # on loopback, files of whoever runs the tests may change PATH
        assert lines[1].startswith(f"{lines[2]}/")
    done = ssh(folder, "node2", "--run=never-started")
    assert (done.returncode, "no run 'never-started' on these hosts" in done.stderr) == (2, True)
