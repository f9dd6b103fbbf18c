"""Private keys: whether a file has a passphrase or is in the ssh-agent, and which keys a login tries."""

from __future__ import annotations

import functools
import os
import re
import shlex
import subprocess
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from skyfab._util.suggest import nearest
from skyfab.errors import IdentityLocked, IdentityMissing, InventoryError
from skyfab.inventory import ssh_config
from skyfab.inventory.host import Host, expanded
from skyfab.ui.prompt import TERMINAL


def check(hops: Sequence[Host]) -> None:
    """Checks the identities on the path to a host, which is the last one, before anything connects.

    Raises IdentityMissing, or IdentityLocked where a passphrase could not be asked for.
    """
    target = hops[-1]
    for hop in hops:
        if hop.identity is None:
            continue
        whose = "" if hop is target else f"of its jump host {hop.name} "
        path = Path(hop.identity)
        if problem := _problem(path):
            hint = f"ls -l {shlex.quote(str(path))}" if path.exists() else _other(path)
            raise IdentityMissing(f"the identity {whose}{problem}: {path}", host=target.name, hint=hint)
        if not TERMINAL.is_attended() and is_locked(path) and not _is_in_agent(hop):
            raise IdentityLocked(
                f"the identity {whose}has a passphrase, no ssh-agent holds it, and there is no terminal: {path}",
                host=target.name,
                hint=f"ssh-add {shlex.quote(str(path))}",
            )


def _problem(path: Path) -> str:
    try:
        path.open("rb").close()
    except FileNotFoundError:
        return "does not exist"
    except OSError as error:
        return f"is not readable ({error.strerror})"
    return "" if path.is_file() else "is not a file"


def _other(path: Path) -> str:
    """The command for a file that does not exist: the inventory may have a slip, else the key has to be made."""
    try:
        names = [entry.name.removesuffix(".pub") for entry in path.parent.glob("*.pub")]
    except OSError:
        names = []
    if near := nearest(path.name, names):
        return f'did you mean identity = "{path.parent / near}"?'
    return f"ssh-keygen -t ed25519 -f {shlex.quote(str(path))}"


def is_locked(path: Path) -> bool:
    """Whether this is a private key with a passphrase."""
    with _ASKING:
        return _has_passphrase(str(path), path.stat().st_mtime_ns)


_ASKING: Final = threading.Lock()
"""Hosts that are opened at the same time mostly have the same key."""


@functools.lru_cache
def _has_passphrase(path: str, _changed: int) -> bool:
    return "incorrect passphrase" in _run("ssh-keygen", "-y", "-P", "", "-f", path).stderr


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


def _is_in_agent(hop: Host) -> bool:
    """Whether an ssh-agent holds the key; True also where that cannot be known, so that ssh is tried."""
    own = fingerprint(Path(hop.identity or ""))
    if own is None or own in agent_keys():
        return True
    named = settings(hop).get("identityagent", [])  # ssh_config may name another agent
    return any(own in agent_keys(str(expanded(path))) for path in named)


def settings(host: Host) -> ssh_config.Settings:
    """What ssh would use for the host; empty if that cannot be known."""
    try:
        return ssh_config.settings(host)
    except InventoryError:
        return {}


def tried(host: Host) -> list[str]:
    """The keys that a login tries, as a message names them: files, and those of the ssh-agent."""
    if host.identity is not None:
        return [host.identity]
    default = [f"~/.ssh/id_{kind}" for kind in ("rsa", "ecdsa", "ed25519")]
    files = [str(expanded(path)) for path in settings(host).get("identityfile", default)]
    return [path for path in dict.fromkeys(files) if Path(path).is_file()] + [
        f"{comment or 'a key'} (ssh-agent)" for comment in agent_keys().values()
    ]


def copy_command(host: Host, jumps: Sequence[Host], keys: Sequence[str]) -> str:
    """The command that adds the first of these keys to what the host accepts; without any, the one that makes a key."""
    files = [key for key in keys if Path(key).is_file()]
    if not files and not keys:
        return "ssh-keygen -t ed25519"
    words = ["ssh-copy-id", *(["-i", files[0]] if files else []), *(["-p", str(host.port)] if host.port else [])]
    if jumps:
        words += ["-o", f"ProxyJump={','.join(jump.login for jump in jumps)}"]
    place = host.destination if host.user is None else f"{host.user}@{host.destination}"
    return shlex.join([*words, re.sub(r"^\[(.*)\]$", r"\1", place)])
