"""Private keys: which ones a login tries, and whether they have a passphrase or are in the ssh-agent."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from collections.abc import Sequence
from pathlib import Path

from skyfab.errors import AuthenticationRefused
from skyfab.inventory.host import Host, expanded
from skyfab.inventory.ssh_config import known_settings


def check(hops: Sequence[Host]) -> None:
    """Checks that the identities on the path to a host, which is the last one, can be read: ssh would try other logins.

    Raises AuthenticationRefused.
    """
    for hop in hops:
        path = Path(hop.identity or "")
        if hop.identity is not None and not (os.access(path, os.R_OK) and path.is_file()):
            whose = "" if hop is hops[-1] else f"of its jump host {hop.name} "
            raise AuthenticationRefused(
                f"the identity {whose}does not exist or is not readable: {path}",
                host=hops[-1].name,
                hint=f"ls -l {shlex.quote(str(path.parent))}",
            )


def locked(host: Host, files: Sequence[str]) -> str | None:
    """The first of these keys that has a passphrase and that no ssh-agent holds."""
    agents = [None, *known_settings(host).get("identityagent", [])]  # ssh_config may name another one
    held = {key for agent in agents for key in agent_keys(agent and str(expanded(agent)))}
    unheld = (file for file in files if fingerprint(Path(file)) not in {*held, None})
    return next(filter(_has_passphrase, unheld), None)


def _has_passphrase(file: str) -> bool:
    return "incorrect passphrase" in _run("ssh-keygen", "-y", "-P", "", "-f", file).stderr


def fingerprint(path: Path) -> str | None:
    """``SHA256:…`` of a private key, with or without passphrase; None if it cannot be known."""
    found = re.search(r"SHA256:\S+", _run("ssh-keygen", "-l", "-E", "sha256", "-f", str(path)).stdout)
    return found[0] if found else None


def agent_keys(socket: str | None = None) -> dict[str, str]:
    """The fingerprints of the keys in the ssh-agent, with their comments."""
    environ = {**os.environ, **({"SSH_AUTH_SOCK": socket} if socket else {})}
    lines = _run("ssh-add", "-l", "-E", "sha256", env=environ).stdout.splitlines()
    found = [re.fullmatch(r"\d+ (SHA256:\S+) (.*) \(\S+\)", line) for line in lines]
    return {match[1]: match[2] for match in found if match}


def _run(*words: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """Runs a program of OpenSSH; without it, nothing is known."""
    environ = {**(env or os.environ), "LC_ALL": "C"}
    try:
        return subprocess.run(
            words, capture_output=True, text=True, errors="replace", stdin=subprocess.DEVNULL, env=environ, timeout=10
        )
    except (FileNotFoundError, subprocess.TimeoutExpired):
        return subprocess.CompletedProcess(words, 1, "", "")


def tried(host: Host) -> list[str]:
    """The keys that a login tries, as a message names them: files, and those of the ssh-agent."""
    if host.identity is not None:
        return [host.identity]
    default = [f"~/.ssh/id_{kind}" for kind in ("rsa", "ecdsa", "ed25519")]
    files = [str(expanded(path)) for path in known_settings(host).get("identityfile", default)]
    return [path for path in dict.fromkeys(files) if Path(path).is_file()] + [
        f"{comment or 'a key'} (ssh-agent)" for comment in agent_keys().values()
    ]


def copy_command(host: Host, jumps: Sequence[Host], keys: Sequence[str], files: Sequence[str]) -> str:
    """The command that adds the first file to the keys that the host accepts; without keys, the one that makes one."""
    if not keys:
        return "ssh-keygen -t ed25519"
    words = ["ssh-copy-id", *(["-i", files[0]] if files else []), *(["-p", str(host.port)] if host.port else [])]
    if jumps:
        words += ["-o", f"ProxyJump={','.join(jump.login for jump in jumps)}"]
    place = host.destination if host.user is None else f"{host.user}@{host.destination}"
    return shlex.join([*words, re.sub(r"^\[(.*)\]$", r"\1", place)])
