"""Labs of a test's own, and their hosts as an SSH client finds them."""

from __future__ import annotations

import os
import socket
import subprocess
import time
from pathlib import Path

import pytest

from skyfab.errors import UsageError
from skyfab.lab import Lab, LabHost, root
from stage import stand_in

IN_USER_NAMESPACE = Path("/proc/self/uid_map").exists() and (
    Path("/proc/self/uid_map").read_text().split()[2] != "4294967295"
)
"""As the tests of an ordinary user are: root there is not root of this machine."""
needs_taps = pytest.mark.skipif(not os.access("/dev/net/tun", os.W_OK), reason="a delay needs /dev/net/tun")


def start(count: int = 1, **options: object) -> Lab:
    """A lab of namespace hosts; where there can be none, the test is skipped (in CI it fails)."""
    try:
        return Lab.start(count, kind="namespace", **options)  # type: ignore[arg-type]
    except UsageError as error:
        if os.environ.get("CI"):
            raise
        pytest.skip(str(error))


def start_for_calls(count: int = 1, **options: object) -> Lab:
    """The same, with hosts that have the system's own Python and can import test modules."""
    lab = start(count, python=root.python_to_lend(), **options)
    try:
        put_stand_ins(lab)
    except BaseException:
        lab.stop()
        raise
    return lab


def put_stand_ins(lab: Lab) -> None:
    """Lets hosts with a Python of their own import test modules."""
    look = "import sys; print(next(path for path in sys.path if path.endswith('-packages')))"
    for host in lab.hosts:
        if host.lent_python or host.kind != "namespace":  # it has what this program has, or is this machine itself
            continue
        folder = host.path(host.run([host.python, "-c", look]).stdout.strip())
        for name in ("pytest", "hypothesis"):
            (folder / f"{name}.py").write_text(Path(stand_in.__file__).read_text())
            (folder / f"{name}.py").chmod(0o644)


def ssh(host: LabHost, command: str, user: str | None = None) -> str:
    """Runs a command by the ssh program, with the host's key checked and nothing of the user's read."""
    known = host.folder / "known_hosts"
    known.write_text(f"[{host.address}]:{host.port} {host.host_key}\n{host.address} {host.host_key}\n")
    options = {
        "UserKnownHostsFile": f'"{known}"',
        "StrictHostKeyChecking": "yes",
        "BatchMode": "yes",
        "ConnectTimeout": "5",
    }
    argv = ["ssh", "-F", "none", "-i", str(host.identity), "-p", str(host.port), "-o", "IdentitiesOnly=yes"]
    for name, value in options.items():
        argv += ["-o", f"{name}={value}"]
    done = subprocess.run([*argv, f"{user or host.user}@{host.address}", command], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def answers(host: LabHost, timeout: float = 0.5) -> bool:
    """Whether its SSH server greets."""
    try:
        with socket.create_connection((host.address, host.port), timeout) as connection:
            return connection.recv(4) == b"SSH-"
    except OSError:
        return False


def greeting(host: LabHost) -> float:
    """Seconds until its SSH server has greeted, the least of three times."""
    taken = []
    for _ in range(3):
        began = time.monotonic()
        assert answers(host, 10)
        taken.append(time.monotonic() - began)
    return min(taken)
