"""The root file system of a namespace host: an overlay over this machine's system, with private folders hidden."""

from __future__ import annotations

import os
import re
import shutil
import stat
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from skyfab.errors import UsageError

from . import accounts, sshd
from .plan import Plan

SHARED = {"bin", "boot", "etc", "lib", "lib32", "lib64", "libx32", "opt", "sbin", "srv", "usr", "var"}
"""The folders of this machine's root that hosts see, copy-on-write. All others are empty there."""
PRIVATE = {"/var/tmp": 0o1777, "/etc/ssh": 0o755}
"""Folders within the shared ones that are empty there too."""
MODES = {"/root": 0o711, "/tmp": 0o1777}
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
"""The search path of hosts."""
PACKAGES = ("/usr/lib/python3/dist-packages", "/usr/local/lib/python3*/dist-packages")
"""Packages that this machine has added to its system Python. Hidden: hosts have the standard library only."""


def prepare_common(plan: Plan) -> None:
    """Creates the common part of the hosts' upper layers, once per lab: each host's layer starts as a copy of it.

    `ada` is an ordinary user, `pat` one with a password.
    """
    layer = plan.folder / "common"
    layer.mkdir()
    layer.chmod(0o755)
    for folder, mode in _hidden().items():
        _empty(layer, folder, mode)
    for folder in PATH.split(":"):  # else root of a user namespace could neither add nor remove a program
        _above(layer, str(Path(folder).resolve() / "program"))
    etc = layer / "etc"
    for table in ("passwd", "group"):
        shutil.copy2(f"/etc/{table}", etc / table)
    accounts.lock_passwords(layer)
    accounts.add(layer, "ada", shell="/bin/bash" if Path("/bin/bash").exists() else "/bin/sh")
    accounts.add(layer, "pat", password=plan.password)
    for user, shell in plan.shells.items():
        accounts.set_shell(layer, user, shell)
    _write(etc / "resolv.conf", "")  # no resolver, so that lookups do not wait for one
    _write(etc / "ssh/authorized_keys", f"{plan.client_key}\n")
    if not plan.python:
        _remove_pythons(layer)


def prepare(folder: Path, plan: Plan, name: str, *, names: Mapping[str, str]) -> None:
    """Creates the upper layer of one host before its first boot. `names` (name: address) are for its /etc/hosts."""
    layer = folder / "upper"
    subprocess.run(["cp", "-a", str(plan.folder / "common"), str(layer)], check=True)
    _write(layer / "etc/hostname", f"{name}\n")
    lines = "".join(f"{address} {name}\n" for name, address in names.items())
    _write(layer / "etc/hosts", f"127.0.0.1 localhost\n::1 localhost\n{lines}")
    shutil.copy2(folder / "key", layer / "etc/ssh/ssh_host_ed25519_key")
    settings = sshd.settings(
        host_key=Path("/etc/ssh/ssh_host_ed25519_key"),
        authorized_keys=Path("/etc/ssh/authorized_keys"),
        passwords=True,
        other=plan.sshd,
    )
    _write(layer / "etc/ssh/sshd_config", settings)


def system_python() -> str | None:
    """The system's interpreter that hosts see: of this program's version if there is one; None if there is none."""
    for name in (f"python3.{sys.version_info.minor}", "python3"):
        found = shutil.which(name, path=PATH)
        if found is not None and Path(found).resolve().parts[1] in SHARED:
            return found
    return None


def python_to_lend() -> str | None:
    """This program's interpreter, where the system has none of its version; else None.

    Functions run with the version of Python that has pickled them, and hosts of a lab cannot download one.
    """
    own = system_python()
    return None if own and Path(own).name == f"python3.{sys.version_info.minor}" else sys.executable


def lent(python: str | None, folders: Sequence[str]) -> list[str]:
    """The folders to mount read-only into a host: those that an interpreter needs to run there, and those requested.

    An interpreter needs its installation, and those that its symlinks lead through, if they are hidden.
    """
    hidden = [Path(folder) for folder in _hidden()]
    disk = Path("/").stat().st_dev
    found: list[Path] = []
    needed = _installations(Path(python)) if python else ()
    for folder in sorted({*needed, *(Path(folder).absolute() for folder in folders)}):
        if not folder.is_dir():
            raise UsageError(f"cannot lend this folder to a host: {folder}")
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
    """The folders of this machine that are empty on hosts, and their modes there."""
    top = (entry for entry in Path("/").iterdir() if entry.is_dir() and not entry.is_symlink())
    added = {str(folder): 0o755 for pattern in PACKAGES for folder in Path("/").glob(pattern[1:])}
    return {str(entry): MODES.get(str(entry), 0o755) for entry in top if entry.name not in SHARED} | PRIVATE | added


def _empty(layer: Path, folder: str, mode: int) -> None:
    """Creates a folder in a layer that hides the one in the lower layer."""
    place = _above(layer, folder)
    place.mkdir()
    place.chmod(mode)
    users = Path("/proc/self/uid_map").read_text().split()[2]
    kind = "trusted" if users == "4294967295" else "user"  # as in boot.sh: in a user namespace only the latter is seen
    os.setxattr(place, f"{kind}.overlay.opaque", b"y")


def _above(layer: Path, path: str) -> Path:
    """The location of a path in a layer; creates its parent folders with the attributes of those in the lower layer."""
    place = layer
    for part in Path(path).parts[1:-1]:
        place /= part
        if not place.exists():
            place.mkdir()
            shutil.copystat(Path("/") / place.relative_to(layer), place)
    return place / Path(path).name


def _remove_pythons(layer: Path) -> None:
    """Hides every interpreter that a login shell would find, with overlay whiteouts: character devices 0, 0."""
    folders = {Path(folder).resolve() for folder in PATH.split(":")}
    for program in sorted({found for folder in folders for found in folder.glob("py*")}):
        if re.fullmatch(r"(python|pypy)[\d.]*", program.name):
            os.mknod(_above(layer, str(program)), stat.S_IFCHR, os.makedev(0, 0))


def _write(path: Path, text: str) -> None:
    path.write_text(text)
    path.chmod(0o644)
