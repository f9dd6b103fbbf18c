"""Compiled kernels of a host: the caches of Inductor, Triton and torch's C++ extensions, in its cache folder.

They are in ``compiled/KEY``: KEY stands for what compiled code depends on, so that hosts with the same one can use each
other's files (skyfab/pool/compiled.py).
"""

from __future__ import annotations

import functools
import glob
import os
import sys

TYPE_CHECKING = False  # importing `typing` would slow the start of a worker
if TYPE_CHECKING:
    from typing import Final

_CACHES: Final = {
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
    "TRITON_CACHE_DIR": "triton",
    "TORCH_EXTENSIONS_DIR": "extensions",
}
"""The variable that names each cache, and its folder."""
_NOT_CODE: Final = (b".lock", b".tmp", b"_CxxBuild")
"""How the names end of files and folders that only the host itself needs."""


_own = ""
"""The folder of this process."""


def use(cache: str) -> None:
    """Has libraries of this process, and of programs that it starts, keep kernels in the host's cache folder.

    Not those for which the user has chosen a folder, and not without torch.
    """
    global _own
    if key():
        _own = os.path.join(cache, "compiled", key())
        for variable, name in _CACHES.items():
            os.environ.setdefault(variable, os.path.join(_own, name))


def folder() -> str:
    """The folder of this process's kernels, whether or not it exists; empty if there is no torch."""
    return _own


@functools.cache  # the zygote calls it, and workers inherit the result
def key() -> str:
    """The name for what compiled code depends on: processor, GPUs, driver, packages. Empty if there is no torch."""
    libraries = next((path for path in sys.path if os.path.isdir(os.path.join(path, "torch"))), None)
    if libraries is None:
        return ""
    import hashlib  # imported late: OpenSSL is slow to load

    about = [os.uname().machine, sys.version, os.path.basename(sys.prefix), *_instructions()]
    for pattern in ("torch-*.dist-info", "triton-*.dist-info", "pytorch_triton*.dist-info"):
        about += sorted(map(os.path.basename, glob.glob(os.path.join(glob.escape(libraries), pattern))))
    for path in sorted(glob.glob("/proc/driver/nvidia/gpus/*/information")):
        about += [line for line in _lines(path) if line.startswith("Model:")]
    about += _lines("/proc/driver/nvidia/version")[:1]
    return hashlib.sha256("\n".join(about).encode()).hexdigest()[:40]


def _instructions() -> list[str]:
    """What the first processor can do."""
    return [line for line in _lines("/proc/cpuinfo") if line.startswith(("flags", "Features"))][:1]


def _lines(path: str) -> list[str]:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read(65536).splitlines()
    except OSError:
        return []


def is_code(child: os.DirEntry[bytes], _path: bytes) -> bool:
    """Whether a file or folder of the caches is of use to another host, and complete.

    Libraries are compiled into files with their final names. As long as that takes, Inductor has a folder of a similar
    name beside the file, and torch's extensions have a lock there.
    """
    if child.name in (b"locks", b"lock") or child.name.endswith(_NOT_CODE):
        return False
    stem, _, kind = child.path.rpartition(b".")
    lock = os.path.join(os.path.dirname(child.path), b"lock")
    return kind != b"so" or not (os.path.exists(stem + b"_CxxBuild") or os.path.exists(lock))
