"""Private keys: whether a file is one, has a passphrase or is in the ssh-agent, and which keys a login tries."""

from __future__ import annotations

import base64
import binascii
import difflib
import os
import re
import shlex
import shutil
import socket
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from skyfab.errors import IdentityLocked, IdentityMissing
from skyfab.inventory.host import Host, expanded
from skyfab.inventory.ssh_config import CONFIG
from skyfab.ui.prompt import TERMINAL

_MAGIC: Final = b"openssh-key-v1\0"
_LARGEST: Final = 1024 * 1024


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
        try:
            content = _read(path)
        except OSError as error:
            missing = not path.exists()
            what = "does not exist" if missing else f"cannot be read: {error.strerror}"
            hint = _other(path) if missing else f"ls -l {shlex.quote(str(path))}"
            raise IdentityMissing(f"the identity {whose}{what}: {path}", host=target.name, hint=hint) from None
        if is_locked(content) and not TERMINAL.is_attended() and not _is_in_agent(hop, content):
            raise IdentityLocked(
                f"the identity {whose}has a passphrase, is in no ssh-agent, and there is no terminal to ask at: {path}",
                host=target.name,
                hint=f"ssh-add {shlex.quote(str(path))}",
            )


def _read(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(_LARGEST)


def _other(path: Path) -> str:
    """The command for a file that does not exist: the inventory may have a slip, else the key has to be made."""
    try:
        names = [entry.name.removesuffix(".pub") for entry in path.parent.glob("*.pub")]
    except OSError:
        names = []
    near = difflib.get_close_matches(path.name, names, n=1)
    if near:
        return f'did you mean identity = "{path.parent / near[0]}"?'
    return f"ssh-keygen -t ed25519 -f {shlex.quote(str(path))}"


def is_locked(content: bytes) -> bool:
    """Whether this is a private key with a passphrase."""
    if b"-----BEGIN OPENSSH PRIVATE KEY" not in content:
        return b"Proc-Type: 4,ENCRYPTED" in content or b"BEGIN ENCRYPTED PRIVATE KEY" in content
    blob = _decoded(content)
    return blob.startswith(_MAGIC) and _strings(blob[len(_MAGIC) :], 1) != [b"none"]


def public_part(path: Path) -> bytes | None:
    """The public key that belongs to a private one, in its wire format; None if it cannot be known."""
    blob = _decoded(_read(path))
    if blob.startswith(_MAGIC):  # cipher, kdf, its options, the number of keys, the public key
        rest = blob[len(_MAGIC) :]
        for _ in range(3):
            rest = rest[4 + int.from_bytes(rest[:4], "big") :]
        found = _strings(rest[4:], 1)
        return found[0] if found else None
    try:
        return base64.b64decode(path.with_name(f"{path.name}.pub").read_text().split()[1])
    except (OSError, IndexError, ValueError):
        return None


def _decoded(content: bytes) -> bytes:
    lines = [line for line in content.splitlines() if line and not line.startswith(b"-----") and b":" not in line]
    try:
        return base64.b64decode(b"".join(lines))
    except (binascii.Error, ValueError):
        return b""


def _strings(blob: bytes, count: int) -> list[bytes]:
    """The first strings of a message of the SSH protocol."""
    found = []
    for _ in range(count):
        end = 4 + int.from_bytes(blob[:4], "big")
        if len(blob) < end:
            return []
        found.append(blob[4:end])
        blob = blob[end:]
    return found


def agent_keys(path: str | None = None) -> dict[bytes, str]:
    """The public keys in the ssh-agent, in their wire format, with their comments."""
    path = path or os.environ.get("SSH_AUTH_SOCK")
    if not path:
        return {}
    try:
        with socket.socket(socket.AF_UNIX) as agent:
            agent.settimeout(2)
            agent.connect(path)
            agent.sendall(b"\0\0\0\1\x0b")  # SSH_AGENTC_REQUEST_IDENTITIES
            with agent.makefile("rb") as answer:
                content = answer.read(int.from_bytes(answer.read(4), "big"))
    except OSError:
        return {}
    parts = _strings(content[5:], 2 * int.from_bytes(content[1:5], "big")) if content[:1] == b"\x0c" else []
    return {key: comment.decode(errors="replace") for key, comment in zip(parts[::2], parts[1::2], strict=True)}


def _is_in_agent(hop: Host, content: bytes) -> bool:
    """Whether an ssh-agent holds the key; True also where that cannot be known, so that ssh is tried."""
    public = public_part(Path(hop.identity or ""))
    if public is None or public in agent_keys():
        return True
    named = settings(hop).get("identityagent", [])  # ssh_config may name another agent
    return any(public in agent_keys(str(expanded(path))) for path in named)


def settings(host: Host) -> dict[str, list[str]]:
    """What ssh would use for the host, ssh_config included (`ssh -G`), by lower-case names; empty without ssh."""
    if shutil.which("ssh") is None:
        return {}
    config = os.environ.get(CONFIG)
    words = ["ssh", "-G", *(["-F", config] if config else []), *(["-p", str(host.port)] if host.port else [])]
    said = subprocess.run([*words, "--", host.destination], capture_output=True, text=True, stdin=subprocess.DEVNULL)
    found: dict[str, list[str]] = {}
    for line in said.stdout.splitlines():
        name, _, value = line.partition(" ")
        found.setdefault(name, []).append(value)
    return found


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
