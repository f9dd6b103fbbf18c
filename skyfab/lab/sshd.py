"""The SSH server of a lab host: finds sshd, writes its keys and settings, waits until it is ready."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from skyfab.errors import Unreachable, UsageError

from . import programs
from .host import LabHost


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The settings that differ between the servers of a lab."""

    host_key: Path
    authorized_keys: Path
    port: int = 22
    listen: str = "0.0.0.0"
    passwords: bool = False
    keys: bool = True
    codes: bool = False
    """Whether PAM asks the user, instead of sshd."""
    strict: bool = True
    """Whether sshd checks the owners of the key files. Off if the parent folders may belong to others."""
    mark: str = ""
    """`NAME=value`, set in the environment of everything that an SSH session runs."""
    other: Mapping[str, str] = field(default_factory=dict)
    """Settings by name. They come first in the file, so that they are the ones that hold."""

    def text(self) -> str:
        """The sshd_config: fast logins, no messages, default limits."""
        lines = [
            *(f"{name} {value}" for name, value in self.other.items()),
            f"Port {self.port}",
            f"ListenAddress {self.listen}",
            f'HostKey "{self.host_key}"',
            f'AuthorizedKeysFile "{self.authorized_keys}"',
            f"StrictModes {_word(self.strict)}",
            f"PubkeyAuthentication {_word(self.keys)}",
            f"PasswordAuthentication {_word(self.passwords)}",
            f"KbdInteractiveAuthentication {_word(self.codes)}",
            "PermitRootLogin prohibit-password",
            f"UsePAM {_word(self.codes)}",
            "UseDNS no",
            "KexAlgorithms -sntrup761*",  # takes 0.3 s of processor time for each login, in Debian 12
            "PrintMotd no",
            "PrintLastLog no",
            "PidFile none",
            "Subsystem sftp internal-sftp",
        ]
        if self.mark:
            lines.append(f'SetEnv "{self.mark}"')
        if _knows("PerSourcePenalties no"):  # tests make many logins fail on purpose
            lines.append("PerSourcePenalties no")
        return "\n".join(lines) + "\n"


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


def wait(host: LabHost, timeout: float = 60.0) -> None:
    """Waits for the banner of the host's server. Raises Unreachable, with the end of its log, on failure or timeout."""
    deadline = time.monotonic() + timeout
    while not (host.up and _greets(host.address, host.port)):
        if not host.up or time.monotonic() > deadline:
            raise Unreachable(f"its sshd did not start: {last_words(host.log)}", host=host.name)
        time.sleep(0.01)


def last_words(log: Path) -> str:
    """The end of a host's log, on one line."""
    words = log.read_text(errors="replace").strip().splitlines()[-5:] if log.exists() else []
    return " / ".join(words) or "no word from it"


def _greets(address: str, port: int) -> bool:
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


def _word(value: bool) -> str:
    return "yes" if value else "no"
