"""User accounts of a namespace host: edits passwd, shadow and group below its root folder, and creates homes."""

from __future__ import annotations

import ctypes
import ctypes.util
import os
import pwd
import secrets
from pathlib import Path

from skyfab.errors import UsageError


def find(root: Path, name: str) -> pwd.struct_passwd:
    """The user of that name in the host's passwd. Raises UsageError if there is none."""
    for fields in _entries(root, "passwd"):
        if fields[0] == name:
            return pwd.struct_passwd((name, fields[1], int(fields[2]), int(fields[3]), *fields[4:]))
    raise UsageError(f"the host has no user {name!r}", hint=f"host.add_user({name!r})")


def add(
    root: Path, name: str, *, shell: str = "/bin/sh", home: str | None = None, password: str | None = None
) -> pwd.struct_passwd:
    """Adds a user, with an empty home folder that only this user can access."""
    home = home or f"/home/{name}"
    taken = {int(fields[2]) for table in ("passwd", "group") for fields in _entries(root, table)}
    number = next(number for number in range(1000, 60_000) if number not in taken)
    new = {
        "group": f"{name}:x:{number}:",
        "shadow": f"{name}:{'*' if password is None else hashed(password)}:20000:0:99999:7:::",
        "passwd": f"{name}:x:{number}:{number}::{home}:{shell}",
    }
    for table, line in new.items():
        _write(root, table, [*_entries(root, table), line.split(":")])
    folder = root / home.lstrip("/")
    folder.mkdir(parents=True, exist_ok=True)
    folder.chmod(0o700)
    os.chown(folder, number, number)
    return find(root, name)


def set_shell(root: Path, name: str, shell: str) -> None:
    """Changes a user's login shell. Raises UsageError if there is no such user."""
    find(root, name)
    _write(root, "passwd", [[*f[:-1], shell] if f[0] == name else f for f in _entries(root, "passwd")])


def lock_passwords(root: Path) -> None:
    """Makes a shadow without passwords. `!` would refuse keys too; and this machine's own may not be readable."""
    (root / "etc/shadow").touch(0o600)
    _write(root, "shadow", [[fields[0], "*", "20000", *[""] * 6] for fields in _entries(root, "passwd")])


def hashed(password: str) -> str:
    """The password hash for shadow, made by the library that sshd itself uses to check it."""
    crypt = ctypes.CDLL(ctypes.util.find_library("crypt")).crypt
    crypt.restype = ctypes.c_char_p
    crypt.argtypes = [ctypes.c_char_p, ctypes.c_char_p]
    found = crypt(password.encode(), f"$6${secrets.token_hex(8)}$".encode())
    if not isinstance(found, bytes) or not found.startswith(b"$6$"):
        raise UsageError("this machine's crypt library cannot make a password hash")
    return found.decode()


def _entries(root: Path, table: str) -> list[list[str]]:
    return [line.split(":") for line in (root / "etc" / table).read_text().splitlines() if line]


def _write(root: Path, table: str, entries: list[list[str]]) -> None:
    (root / "etc" / table).write_text("".join(":".join(fields) + "\n" for fields in entries))
