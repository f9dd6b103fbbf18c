"""The bundle: skyfab's own source code, packed for upload to hosts.

It contains this package and cloudpickle, so that a host needs only a Python interpreter, and both sides always run
the same code: the agent, and what functions may import, for example to open a pool of their own.
"""

from __future__ import annotations

import functools
import os
import re
import sys
import threading
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from skyfab.protocol.blobs import name_of

File = tuple[str, bytes]
"""A relative path and its content."""

_LEFT_OUT: Final = ("cli/", "inspect/doctor/", "inspect/top/", "pytest_plugin.py")
"""The command line, what it alone uses, and the plugin for pytest are not needed on hosts."""
_IF_IMPORTED: Final = ("demo/", "lab/")
"""Included only if the program imports them: modules of the program that do so may contain functions for hosts."""
_MAIN: Final = """import os, sys
if sys.version_info < (3, 10):
    sys.exit(sys.version.split()[0])
for fd in range(3):  # the login shell may have closed some: files and sockets would take their numbers
    try:
        os.fstat(fd)
    except OSError:
        os.open(os.devnull, os.O_RDWR)
here = sys.path[0]
try:  # after a power cut, files may be empty
    with open(here + "/sizes") as file:
        sizes = [line.split() for line in file]
    is_whole = sizes[-1] == ["end"] and all(os.path.getsize(f"{here}/{path}") == int(size) for size, path in sizes[:-1])
except (OSError, ValueError, IndexError):
    is_whole = False
print("=sky" + "fab=" + sys.argv[2] + ("=link" if is_whole else "=bundle"), flush=True)
if not is_whole:  # as session/bootstrap.sh does without a bundle
    import shutil
    shutil.rmtree(here, ignore_errors=True)
    sys.argv.insert(2, os.path.basename(here))
    exec(sys.stdin.buffer.read(int(sys.stdin.buffer.readline())))
disk = os.statvfs(here)
if disk.f_frsize * disk.f_bavail < 16_000_000:  # Python would keep bytecode that is cut off, and fail from then on
    sys.dont_write_bytecode = True
from skyfab.host.agent.link import main
sys.exit(main(sys.argv[1:]))
"""
_QUOTES: Final = b'"' * 3  # as in all code that is sent: three in a row begin or end a string
_COMMENT: Final = re.compile(rb"(?m)^ +#.*|^#.*")
_PACKING: Final = threading.Lock()
"""Many hosts may request the bundle at once: it is packed once."""


@dataclass(frozen=True)
class Bundle:
    """The files, identified by a digest; packed only when a host requests them."""

    digest: str
    files: tuple[File, ...]

    @property
    def archive(self) -> bytes:
        """The files, compressed: for each a line with its size and path, and its content."""
        with _PACKING:
            return _archive(self.files)


@functools.cache
def _archive(files: tuple[File, ...]) -> bytes:
    parts = []
    for path, content in files:
        content = without_prose(content) if path.endswith(".py") else content
        parts += [f"{len(content)} {path}\n".encode(), content]
    return zlib.compress(b"".join(parts))


def without_prose(source: bytes) -> bytes:
    """Python code without docstrings and lines of comment, a third of its packed size. Its lines keep their numbers."""
    parts = source.split(_QUOTES)
    for number in range(0, len(parts), 2):  # the others are in quotes
        is_docstring = number + 1 < len(parts) and not parts[number].rpartition(b"\n")[2].strip()
        parts[number] = _COMMENT.sub(b"", parts[number])
        if is_docstring:
            parts[number + 1] = b"\n" * parts[number + 1].count(b"\n")
    return _QUOTES.join(parts)


@functools.cache
def bundle() -> Bundle:
    """The bundle of this program; its files are read once."""
    files = tuple(_files())
    pieces = (piece for path, content in files for piece in (path.encode(), b"\0", name_of(content).encode()))
    return Bundle(name_of(*pieces), files)


def _files() -> Iterator[File]:
    yield "__main__.py", _MAIN.encode()
    unused = [package for package in _IF_IMPORTED if f"skyfab.{package[:-1]}" not in sys.modules]
    left_out = (*_LEFT_OUT, *unused)
    cloudpickle = find_spec("cloudpickle")  # importing it takes longer than most commands
    assert cloudpickle is not None and cloudpickle.origin is not None
    for package in (Path(__file__).parents[1], Path(cloudpickle.origin).parent):
        above = len(f"{package.parent}/")
        found = (f"{folder}/{name}" for folder, _, names in os.walk(package) for name in names)
        for path in sorted(path for path in found if path.endswith((".py", ".sh"))):
            if not path.startswith(left_out, len(f"{package}/")):
                yield path[above:], Path(path).read_bytes()
