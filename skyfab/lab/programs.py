"""The system programs that a lab needs: finds the missing ones, and installs them (as root on Debian)."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from skyfab.errors import UsageError

SERVER = {"sshd": "openssh-server", "ssh": "openssh-client", "ssh-keygen": "openssh-client"}
"""Required by every lab: each program, and the Debian package that contains it."""
NETWORK = {"ip": "iproute2", "mount": "mount"} | dict.fromkeys(("unshare", "nsenter", "pivot_root"), "util-linux")
"""Also required by namespace hosts."""
USERS = {"newuidmap": "uidmap"}
"""Also required by namespace hosts of an ordinary user."""
_WAIT = ("-o", "DPkg::Lock::Timeout=300")  # another apt may be at work
SYSTEMD = Path("/run/systemd/system")


def require() -> None:
    """Installs what a lab on this machine needs. Raises UsageError, with the command to type, if it may not."""
    root = os.geteuid() == 0
    left = install(SERVER | NETWORK if root and sys.platform == "linux" else SERVER)
    if any(package in SERVER.values() for package in left):  # without those of NETWORK, a lab falls back to loopback
        raise UsageError(f"a lab needs programs that this machine lacks: {', '.join(left)}", hint=command(left))


def install(programs: Mapping[str, str]) -> list[str]:
    """Installs the packages of missing programs, if possible; returns those that are still missing."""
    packages = missing(programs)
    if not packages or os.geteuid() != 0 or not shutil.which("apt-get"):
        return packages
    print(f"installing for the lab: {' '.join(packages)}", file=sys.stderr)
    _run("apt-get", "-qq", "update")
    for package in [packages, *([package] for package in packages)]:  # one that apt does not have makes all fail
        if missing(programs):
            _run("apt-get", "-qq", *_WAIT, "install", "-y", "--no-install-recommends", *package)
    if "openssh-server" in packages and SYSTEMD.exists():
        # Only the program is needed: a lab must not leave port 22 open.
        _run("systemctl", "disable", "--now", "ssh.service", "ssh.socket")
    return missing(programs)


def missing(programs: Mapping[str, str]) -> list[str]:
    """The packages of missing programs, each once."""
    return list(dict.fromkeys(package for program, package in programs.items() if find(program) is None))


def find(program: str) -> str | None:
    """The path of a program, or of a file that is named by its path, if it is installed."""
    if program.startswith("/"):
        return program if Path(program).exists() else None
    path = os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin", "/usr/local/sbin", "/sbin"])
    return shutil.which(program, path=path)


def command(packages: list[str]) -> str:
    """The command for the user to install them."""
    if shutil.which("apt-get") is None:
        return f"install with your package manager: {' '.join(packages)}"
    return f"{'' if os.geteuid() == 0 else 'sudo '}apt-get install {' '.join(packages)}"


def _run(*words: str) -> None:
    """Runs a program; its output goes to stderr, since stdout is the caller's. The caller checks the effect later."""
    subprocess.run(
        words,
        env={**os.environ, "DEBIAN_FRONTEND": "noninteractive"},
        stdin=subprocess.DEVNULL,
        stdout=sys.stderr.fileno(),
        check=False,
    )
