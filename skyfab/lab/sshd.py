"""The SSH server of a lab host: finds sshd, writes its keys and settings."""

from __future__ import annotations

import os
import socket
import subprocess
from collections.abc import Mapping
from functools import cache
from pathlib import Path

from skyfab.errors import UsageError

from . import programs


def settings(
    *,
    host_key: Path,
    authorized_keys: Path,
    other: Mapping[str, str],
    passwords: bool = False,
) -> str:
    """The sshd_config: fast logins, no messages, default limits.

    `other` are settings by name: they come first in the file, so that they are the ones that hold.
    """
    found: dict[str, str | bool] = {
        "HostKey": f'"{host_key}"',
        "AuthorizedKeysFile": f'"{authorized_keys}"',
        "PasswordAuthentication": passwords,
        "KbdInteractiveAuthentication": False,
        "PermitRootLogin": "prohibit-password",
        "UsePAM": False,
        "UseDNS": False,
        "KexAlgorithms": "-sntrup761*",  # takes 0.3 s of processor time for each login, in Debian 12
        "PrintMotd": False,
        "PrintLastLog": False,
        "PidFile": "none",
        "Subsystem": "sftp internal-sftp",
    }
    if _knows("PerSourcePenalties no"):  # tests make many logins fail on purpose
        found["PerSourcePenalties"] = False
    words = {True: "yes", False: "no"}
    lines = [f"{name} {words[value] if isinstance(value, bool) else value}" for name, value in found.items()]
    return "\n".join([*(f"{name} {value}" for name, value in other.items()), *lines, ""])


def program() -> str:
    """The absolute path of sshd, which refuses to start by a relative one. Raises UsageError if it is missing."""
    found = programs.find("sshd")
    if found is None or programs.find("ssh-keygen") is None:
        hint = programs.command(programs.missing(programs.SERVER))
        raise UsageError("a lab needs sshd and ssh-keygen, which this machine does not have", hint=hint)
    return str(Path(found).absolute())


def make_key(path: Path, comment: str) -> str:
    """Creates an ed25519 key pair at `path` and returns the public key without its comment."""
    subprocess.run(
        ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", comment, "-f", str(path)],
        check=True,
        stdin=subprocess.DEVNULL,
    )
    return " ".join(path.with_name(f"{path.name}.pub").read_text().split()[:2])


def greets(address: str, port: int) -> bool:
    """Whether an SSH server sends its banner there."""
    try:
        with socket.create_connection((address, port), timeout=1.0) as connection:
            return connection.recv(4) == b"SSH-"
    except OSError:
        return False


@cache
def _knows(line: str) -> bool:
    """Whether this sshd supports the option; older ones refuse to start with it."""
    tried = subprocess.run(
        [program(), "-G", "-f", os.devnull, "-o", line], capture_output=True, text=True, stdin=subprocess.DEVNULL
    )
    return "Bad configuration option" not in tried.stderr and "unknown option" not in tried.stderr
