"""The root folder of a namespace host: this machine's system below, its own files above, nothing private in sight."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from skyfab.errors import UsageError

from . import accounts, sshd

SHARED = {"bin", "boot", "etc", "lib", "lib32", "lib64", "libx32", "opt", "sbin", "srv", "usr", "var"}
"""What hosts see of this machine's root, copied when they write. All else they have empty."""
PRIVATE = {"/var/tmp": 0o1777, "/etc/ssh": 0o755}
"""Folders in the shared ones that are empty too."""
MODES = {"/root": 0o711, "/tmp": 0o1777}


def prepare(upper: Path, *, name: str, names: Mapping[str, str], key: Path, client_key: str, password: str) -> None:
    """Fills the upper layer of a host's root before its first boot.

    `names` are the addresses of the whole lab. `ada` is an ordinary user, `pat` one with a password.
    """
    upper.mkdir()
    upper.chmod(0o755)
    for folder, mode in _hidden().items():
        _empty(upper, folder, mode)
    etc = upper / "etc"
    for table in ("passwd", "group", "shadow"):
        shutil.copy2(f"/etc/{table}", etc / table)
    accounts.unlock(upper, "root")
    accounts.add(upper, "ada", shell="/bin/bash" if Path("/bin/bash").exists() else "/bin/sh")
    accounts.add(upper, "pat", password=password)
    _write(etc / "hostname", f"{name}\n")
    _write(etc / "hosts", "127.0.0.1 localhost\n::1 localhost\n" + "".join(f"{a} {n}\n" for n, a in names.items()))
    _write(etc / "resolv.conf", "")  # no resolver to wait for
    _server(etc / "ssh", key, client_key)


def lent(python: str, folders: Sequence[str]) -> list[str]:
    """The folders a host must be lent, read-only, for the interpreter to run there, and those asked for.

    That is the interpreter's installation, and each one that its links pass through, where it is out of sight.
    """
    hidden = [Path(folder) for folder in _hidden()]
    disk = Path("/").stat().st_dev
    found: list[Path] = []
    for folder in sorted({*_installations(Path(python)), *(Path(folder).absolute() for folder in folders)}):
        if not folder.is_dir():
            raise UsageError(f"{folder} is no folder that a host could be lent")
        private = any(above in (folder, *folder.parents) for above in hidden)
        if (private or folder.stat().st_dev != disk) and not any(above in folder.parents for above in found):
            found.append(folder)
    return [str(folder) for folder in found]


def _installations(python: Path) -> Iterator[Path]:
    yield python.parents[1]
    while python.is_symlink():
        python = Path(os.path.normpath(python.parent / python.readlink()))
        yield python.parents[1]
    yield python.resolve().parents[1]


def _hidden() -> dict[str, int]:
    """The folders of this machine that hosts have empty, and their modes there."""
    top = (entry for entry in Path("/").iterdir() if entry.is_dir() and not entry.is_symlink())
    return {str(entry): MODES.get(str(entry), 0o755) for entry in top if entry.name not in SHARED} | PRIVATE


def _empty(upper: Path, folder: str, mode: int) -> None:
    """Puts a folder in the upper layer that hides the one below it."""
    place = upper
    for part in Path(folder).parts[1:-1]:
        place /= part
        if not place.exists():
            place.mkdir()
            shutil.copystat(Path("/") / place.relative_to(upper), place)
    place /= Path(folder).name
    place.mkdir()
    place.chmod(mode)
    os.setxattr(place, "trusted.overlay.opaque", b"y")


def _server(folder: Path, key: Path, client_key: str) -> None:
    settings = sshd.Settings(
        host_key=Path("/etc/ssh/ssh_host_ed25519_key"),
        authorized_keys=Path("/etc/ssh/authorized_keys"),
        passwords=True,
    )
    _write(folder / "sshd_config", settings.text())
    _write(folder / "authorized_keys", f"{client_key}\n")
    shutil.copy2(key, folder / "ssh_host_ed25519_key")


def _write(path: Path, text: str) -> None:
    path.write_text(text)
    path.chmod(0o644)
