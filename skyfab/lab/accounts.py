"""User accounts of a namespace host: edits passwd, shadow and group below its root folder, and creates homes."""

from __future__ import annotations

import ctypes
import ctypes.util
import os
import secrets
from dataclasses import dataclass
from pathlib import Path

from skyfab.errors import UsageError


@dataclass(frozen=True, slots=True, kw_only=True)
class Account:
    """One entry of passwd."""

    name: str
    uid: int
    gid: int
    home: str
    shell: str


def find(root: Path, name: str) -> Account:
    """The user of that name in the host's passwd. Raises UsageError if there is none."""
    for line in (root / "etc/passwd").read_text().splitlines():
        fields = line.split(":")
        if fields[0] == name:
            return Account(name=name, uid=int(fields[2]), gid=int(fields[3]), home=fields[5], shell=fields[6])
    raise UsageError(f"the host has no user {name!r}", hint=f"host.add_user({name!r})")


def add(
    root: Path, name: str, *, shell: str = "/bin/sh", home: str | None = None, password: str | None = None
) -> Account:
    """Adds a user, with an empty home folder that only this user can access. Raises UsageError for an invalid name."""
    home = home or f"/home/{name}"
    if ":" in name + home + shell or "\n" in name + home + shell:
        raise UsageError("a user's name, home and shell must not contain a colon or a line break")
    number = _free(root)
    account = Account(name=name, uid=number, gid=number, home=home, shell=shell)
    _append(root / "etc/group", f"{name}:x:{number}:")
    _append(root / "etc/shadow", f"{name}:{'*' if password is None else hashed(password)}:20000:0:99999:7:::")
    _append(root / "etc/passwd", f"{name}:x:{number}:{number}::{home}:{shell}")
    folder = root / home.lstrip("/")
    folder.mkdir(parents=True, exist_ok=True)
    folder.chmod(0o700)
    os.chown(folder, number, number)
    return account


def set_shell(root: Path, name: str, shell: str) -> None:
    """Changes a user's login shell. Raises UsageError if there is no such user."""
    find(root, name)
    passwd = root / "etc/passwd"
    lines = [line.split(":") for line in passwd.read_text().splitlines()]
    passwd.write_text("".join(":".join([*f[:-1], shell] if f[0] == name else f) + "\n" for f in lines))


def unlock(root: Path, name: str) -> None:
    """Allows login by key: without PAM, sshd refuses a user whose password field begins with `!`."""
    shadow = root / "etc/shadow"
    lines = [line.split(":") for line in shadow.read_text().splitlines()]
    shadow.write_text("".join(":".join([f[0], "*", *f[2:]] if f[0] == name else f) + "\n" for f in lines))


def hashed(password: str) -> str:
    """The password hash for shadow, made by the library that sshd itself uses to check it."""
    crypt = ctypes.CDLL(ctypes.util.find_library("crypt")).crypt
    crypt.restype = ctypes.c_char_p
    crypt.argtypes = [ctypes.c_char_p, ctypes.c_char_p]
    found = crypt(password.encode(), f"$6${secrets.token_hex(8)}$".encode())
    if not isinstance(found, bytes) or not found.startswith(b"$6$"):
        raise UsageError("this machine's crypt library cannot make a password hash")
    return found.decode()


def _free(root: Path) -> int:
    taken = {int(line.split(":")[2]) for line in (root / "etc/passwd").read_text().splitlines() if line}
    taken |= {int(line.split(":")[2]) for line in (root / "etc/group").read_text().splitlines() if line}
    return next(number for number in range(1000, 60_000) if number not in taken)


def _append(path: Path, line: str) -> None:
    text = path.read_text()
    path.write_text(text + ("" if not text or text.endswith("\n") else "\n") + line + "\n")
