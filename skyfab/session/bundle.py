"""The bundle: skyfab's own source code, packed for upload to hosts.

It contains this package and cloudpickle, so that a host needs only a Python interpreter, and both sides always run
the same code.
"""

from __future__ import annotations

import functools
import gzip
import io
import sys
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import cloudpickle

from skyfab.protocol.blobs import name_of

_LEFT_OUT: Final = ("examples", "cli")
"""The command line is not needed on hosts."""
_LAB: Final = "lab"
"""Included only if the program imports it: modules of the program that import it may contain functions for hosts."""
_MAIN: Final = """import sys
if sys.version_info < (3, 10):
    sys.exit(sys.version.split()[0])
from skyfab.agent.link import main
sys.exit(main(sys.argv[1:]))
"""


@dataclass(frozen=True)
class Bundle:
    """The files, identified by a digest; packed only when a host requests them."""

    digest: str
    files: tuple[tuple[str, bytes], ...]

    @functools.cached_property
    def archive(self) -> bytes:
        """A reproducible .tar.gz: the same files give the same bytes."""
        archive = io.BytesIO()
        with (
            gzip.GzipFile(fileobj=archive, mode="wb", mtime=0) as packed,
            tarfile.open(fileobj=packed, mode="w") as tar,
        ):
            for path, content in self.files:
                entry = tarfile.TarInfo(path)
                entry.size = len(content)
                entry.mode = 0o600
                tar.addfile(entry, io.BytesIO(content))
        return archive.getvalue()


@functools.cache
def bundle() -> Bundle:
    """The bundle of this program; its files are read once."""
    files = tuple(_files())
    pieces = (piece for path, content in files for piece in (path.encode(), b"\0", name_of(content).encode()))
    return Bundle(name_of(*pieces), files)


def _files() -> Iterator[tuple[str, bytes]]:
    yield "__main__.py", _MAIN.encode()
    left_out = _LEFT_OUT if f"skyfab.{_LAB}" in sys.modules else (*_LEFT_OUT, _LAB)
    for package in (Path(__file__).parents[1], Path(cloudpickle.__file__).parent):
        for file in sorted(file for kind in ("*.py", "*.sh") for file in package.rglob(kind)):
            inner = file.relative_to(package)
            if inner.parts[0] not in left_out:
                yield f"{package.name}/{inner.as_posix()}", file.read_bytes()
