"""The programs that a host needs before it has an environment, uv and Python, as files on this machine for upload."""

from __future__ import annotations

import functools
import platform
import re
import zipfile
from pathlib import Path

from skyfab._util import atomic
from skyfab._util.cache import cache_folder
from skyfab._util.versions import machine, numbers
from skyfab.calls.image import Image
from skyfab.env import uv
from skyfab.env.facts import Target
from skyfab.env.lock import make_lock
from skyfab.env.resolve import LockError
from skyfab.env.wheels import fetch


def uv_for(target: Target) -> Path:
    """A uv that runs on the target: this machine's own if it does, else the same version for the target's platform.

    Raises LockError if no index has it.
    """
    here = Path(uv.program())
    if _runs_on(here, target):
        return here
    name = f"uv-{uv.version()}-{uv.platform_of(target)}"
    return uv.made(cache_folder() / "tools" / name, functools.partial(_get_uv, target)) / "uv"


def _get_uv(target: Target, work: Path) -> None:
    (wheel,) = make_lock(Image(pip=(f"uv=={uv.version()}",)), target).wheels
    with zipfile.ZipFile(fetch([wheel])[wheel.sha256]) as archive:
        names = [name for name in archive.namelist() if re.fullmatch(r"uv-[^/]+\.data/scripts/uv", name)]
        if not names:
            raise LockError(f"{wheel.filename} does not contain uv")
        atomic.write(work / "out" / "uv", archive.read(names[0]), mode=0o755)


@functools.cache
def _runs_on(program: Path, target: Target) -> bool:
    """Whether a program of this machine runs on the target, judged by its file."""
    if (platform.system(), machine(platform.machine())) != (target.system, target.machine):
        return False
    libc, oldest = platform.libc_ver(str(program)) if target.system == "Linux" else ("", "")
    known, release = target.c_library
    return not libc or (libc == known and numbers(oldest)[:2] <= release)


def python_for(target: Target) -> Path:
    """The archive with the newest interpreter of the minor version that uv would download for the target.

    uv itself downloads it, with its own hashes, mirrors (UV_PYTHON_INSTALL_MIRROR, UV_PYTHON_DOWNLOADS_JSON_URL),
    certificates and proxies. Raises LockError.
    """
    key = _download(target)
    (archive,) = uv.made(cache_folder() / "pythons" / key, functools.partial(_get_python, key, target)).iterdir()
    return archive


_ALLOWED = {"UV_PYTHON_PREFERENCE": "", "UV_NO_MANAGED_PYTHON": "", "UV_MANAGED_PYTHON": "", "UV_PYTHON_DOWNLOADS": ""}
"""Clears settings of the user that restrict uv on this machine: they do not apply to hosts."""


def _download(target: Target) -> str:
    """uv's name for an interpreter of the target's minor version: ``cpython-3.11-linux-x86_64-gnu``."""
    system = {"Linux": "linux", "Darwin": "macos"}.get(target.system, target.system)
    libc = {"glibc": "gnu", "musl": "musl"}.get(target.c_library[0], "none")
    return f"cpython-{target.python}-{system}-{target.machine}-{libc}"


def _get_python(key: str, target: Target, work: Path) -> None:
    # uv keeps the archives that it downloads in this folder. It can verify one only by unpacking it.
    env = {**_ALLOWED, "UV_PYTHON_CACHE_DIR": str(work / "out")}
    try:
        uv.run_uv("python", "install", "--no-bin", "--install-dir", str(work / "tried"), key, env=env, cwd=work)
    except uv.UvFailed as failed:
        raise LockError(
            f"cannot download Python {target.python} for {uv.described(target)}\n{failed}",
            hint=f"install Python {target.python} on the host, or set a mirror: UV_PYTHON_INSTALL_MIRROR",
        ) from None
