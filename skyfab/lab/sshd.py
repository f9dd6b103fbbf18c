"""The SSH server of a lab host: finds sshd, writes its keys and settings."""

from __future__ import annotations

import os
import shutil
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
    port: int = 22,
    listen: str = "0.0.0.0",
    passwords: bool = False,
    keys: bool = True,
    codes: bool = False,
    strict: bool = True,
    mark: str = "",
) -> str:
    """The sshd_config: fast logins, no messages, default limits.

    With `codes`, PAM asks the user, instead of sshd. Without `strict`, sshd does not check the owners of the key files,
    whose parent folders may belong to others. `mark` is ``NAME=value`` for the environment of everything that an SSH
    session runs. `other` are settings by name: they come first in the file, so that they are the ones that hold.
    """
    found: dict[str, str | int | bool] = {
        "Port": port,
        "ListenAddress": listen,
        "HostKey": f'"{host_key}"',
        "AuthorizedKeysFile": f'"{authorized_keys}"',
        "StrictModes": strict,
        "PubkeyAuthentication": keys,
        "PasswordAuthentication": passwords,
        "KbdInteractiveAuthentication": codes,
        "PermitRootLogin": "prohibit-password",
        "UsePAM": codes,
        "UseDNS": False,
        "KexAlgorithms": "-sntrup761*",  # takes 0.3 s of processor time for each login, in Debian 12
        "PrintMotd": False,
        "PrintLastLog": False,
        "PidFile": "none",
        "Subsystem": "sftp internal-sftp",
    }
    if mark:
        found["SetEnv"] = f'"{mark}"'
    if _knows("PerSourcePenalties no"):  # tests make many logins fail on purpose
        found["PerSourcePenalties"] = False
    words = {True: "yes", False: "no"}
    lines = [f"{name} {words[value] if isinstance(value, bool) else value}" for name, value in found.items()]
    return "\n".join([*(f"{name} {value}" for name, value in other.items()), *lines, ""])


def program() -> str:
    """The absolute path of sshd, which refuses to start by a relative one. Raises UsageError if it is missing."""
    path = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/usr/local/sbin", "/sbin"])
    found = shutil.which("sshd", path=path)
    if found is None or shutil.which("ssh-keygen") is None:
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
