"""A machine without the programs that a lab needs: they are installed, or the command that does it is said."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from stage.labs import start

from skyfab import lab as lab_module
from skyfab.lab import LabHost

pytestmark = pytest.mark.lab
PROJECT = Path(lab_module.__file__).parents[2]
TASKS = (str(PROJECT / "tasks.py"),)
SKYFAB = ("-m", "skyfab")

APT_GET = """#!/bin/sh
# Stands in for Debian's: its packages lie in /srv.
echo "$*" >>/srv/calls
test -e /srv/packages || exit 100
case $* in *install*) ;; *) exit 0 ;; esac
for word; do
    if test -d "/srv/packages/$word"; then cp -a "/srv/packages/$word/." /usr/bin/; fi
done
"""


@pytest.fixture(scope="module")
def machine() -> Iterator[LabHost]:
    """A machine that has this program, and a stand-in for apt-get."""
    with start(python=sys.executable, lend=[str(PROJECT)]) as lab:
        host = lab.hosts[0]
        host.path("/usr/local/bin/apt-get").write_text(APT_GET)
        host.path("/usr/local/bin/apt-get").chmod(0o755)
        yield host


@pytest.fixture
def without(machine: LabHost) -> LabHost:
    """That machine without an SSH server and without iproute2."""
    machine.run(["sh", "-c", "mkdir -p /srv/packages/openssh-server /srv/packages/iproute2; rm -f /srv/calls"])
    for program, package in (("sshd", "openssh-server"), ("ip", "iproute2")):
        keep = f'cp -aL "$(command -v {program})" /srv/packages/{package}/'
        where = " ".join(f"{folder}/{program}" for folder in ("/usr/sbin", "/usr/bin", "/sbin", "/bin"))
        machine.run(["sh", "-c", f"command -v {program} && {keep}; rm -f {where}"])
    return machine


def type_(host: LabHost, user: str, *words: str) -> subprocess.CompletedProcess[str]:
    env = ["env", "SKYFAB_LAB=/var/tmp/standing", f"PYTHONPATH={PROJECT}", "PYTHONDONTWRITEBYTECODE=1"]
    return host.run([*env, host.python, *words], user=user, check=False, timeout=170)


def test_lab_up_installs_what_is_missing(without: LabHost) -> None:
    done = type_(without, "root", *SKYFAB, "lab.up", "--count=1")
    try:
        assert done.returncode == 0, done.stderr
        assert done.stdout == "/var/tmp/standing/inventory.toml\n"
        assert "node1  root@198.18." in done.stderr
        update, install = without.path("/srv/calls").read_text().splitlines()
        assert update == "-qq update"
        assert install.split()[-2:] == ["openssh-server", "iproute2"]
    finally:
        type_(without, "root", *SKYFAB, "lab.down")


def test_tests_and_benchmarks_install_what_is_missing(without: LabHost) -> None:
    """Each is asked for something that ends soon."""
    for words in (("test", "--args=--version"), ("bench", "--only=nothing")):
        done = type_(without, "root", *TASKS, *words)
        assert "Traceback" not in done.stderr
        calls = without.path("/srv/calls").read_text()
        assert " openssh-server iproute2\n" in calls
        without.run(["sh", "-c", "rm /srv/calls /usr/bin/sshd /usr/bin/ip"])


@pytest.mark.parametrize(
    "words",
    [(*SKYFAB, "lab.up"), (*TASKS, "test")],
    ids=["lab.up", "test"],
)
def test_who_may_not_install_is_told_what_to_type(without: LabHost, words: tuple[str, ...]) -> None:
    done = type_(without, "ada", *words)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1] == "hint: sudo apt-get install openssh-server"
    assert done.stderr.splitlines()[-2].startswith("error: a lab needs ")
    assert "Traceback" not in done.stderr
    assert not without.path("/srv/calls").exists()
