"""The programs that a host needs before it has an environment, uv and Python, as files on this machine for upload."""

from __future__ import annotations

import os
import platform
import re
import shutil
import tempfile
import zipfile
from functools import cache
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
    path = cache_folder() / "tools" / name / "uv"
    if not path.exists():
        with uv.making(path):
            if not path.exists():
                (wheel,) = make_lock(Image(pip=(f"uv=={uv.version()}",)), target).wheels
                _unpack(fetch([wheel])[wheel.sha256], path)
    return path


def _unpack(wheel: Path, path: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if re.fullmatch(r"uv-[^/]+\.data/scripts/uv", name)]
        if not names:
            raise LockError(f"{wheel.name} does not contain uv")
        atomic.write(path, archive.read(names[0]), mode=0o755)


@cache
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
    folder = cache_folder() / "pythons" / key
    with uv.making(folder):
        if not folder.exists():
            _get(key, folder, target)
    (archive,) = folder.iterdir()
    return archive


_ALLOWED = {"UV_PYTHON_PREFERENCE": "", "UV_NO_MANAGED_PYTHON": "", "UV_MANAGED_PYTHON": "", "UV_PYTHON_DOWNLOADS": ""}
"""Clears settings of the user that restrict uv on this machine: they do not apply to hosts."""


def _download(target: Target) -> str:
    """uv's name for an interpreter of the target's minor version: ``cpython-3.11-linux-x86_64-gnu``."""
    system = {"Linux": "linux", "Darwin": "macos"}.get(target.system, target.system)
    libc = {"glibc": "gnu", "musl": "musl"}.get(target.c_library[0], "none")
    return f"cpython-{target.python}-{system}-{target.machine}-{libc}"


def _get(key: str, folder: Path, target: Target) -> None:
    folder.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".new-{key}-"))
    try:
        # uv keeps the archives that it downloads in this folder. It can verify one only by unpacking it.
        kept = work / "kept"
        env = {**_ALLOWED, "UV_PYTHON_CACHE_DIR": str(kept)}
        uv.run_uv("python", "install", "--no-bin", "--install-dir", str(work / "tried"), key, env=env, cwd=work)
        os.rename(kept, folder)  # noqa: PTH104 - the target does not exist
    except uv.UvFailed as failed:
        raise LockError(
            f"cannot download Python {target.python} for {uv.described(target)}\n{failed}",
            hint=f"install Python {target.python} on the host, or set a mirror: UV_PYTHON_INSTALL_MIRROR",
        ) from None
    finally:
        shutil.rmtree(work, ignore_errors=True)
