"""Runs the shell scripts that build an environment on a host, and uploads the files that they need.

Below the host's cache folder: ``packages/SHA256/FILE`` (wheels, uv, interpreters and locks, named by content),
``envs/DIGEST`` (environments), ``pythons/SHA256`` (interpreters, unpacked), ``uv`` (uv's own cache, to which
environments have hard links). Everything is created under a temporary name, and renamed when it is complete.
"""

from __future__ import annotations

import tarfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from skyfab._util.scripts import given, read
from skyfab.env.uv import digest_of
from skyfab.env.wheels import Wheel
from skyfab.errors import HostUnfit
from skyfab.protocol.blobs import name_of
from skyfab.session.shell import ScriptFailed, Shell

_MISSING: Final = read("env/missing.sh")
_PUSH: Final = read("env/push.sh")
_UNPACK_PYTHON: Final = read("env/unpack_python.sh")
_APT: Final = read("env/apt.sh")
_BUILD: Final = read("env/build.sh")
_NO_APT: Final = {3: "the host has no apt-get", 4: "its user may not install packages"}
"""Exit codes of apt.sh; its output is the packages that are missing."""
_CHUNK: Final = 1024 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Package:
    """A file that a host may need, named by its content."""

    sha256: str
    filename: str
    size: int
    content: Path | bytes
    program: bool = False
    """Whether it is executable."""

    @property
    def place(self) -> str:
        """Its path below ``packages``."""
        return f"{self.sha256}/{self.filename}"

    @classmethod
    def of_file(cls, path: Path, *, sha256: str | None = None, program: bool = False) -> Package:
        if sha256 is None:
            sha256 = digest_of(path)
        return cls(sha256=sha256, filename=path.name, size=path.stat().st_size, content=path, program=program)

    @classmethod
    def of_wheel(cls, wheel: Wheel) -> Package:
        """From the lock alone, without content: enough to check whether the host has it."""
        return cls(sha256=wheel.sha256, filename=wheel.filename, size=wheel.size or 0, content=b"")

    @classmethod
    def of_text(cls, filename: str, text: str) -> Package:
        content = text.encode()
        return cls(sha256=name_of(content), filename=filename, size=len(content), content=content)


# ---- what the host has


def enter(shell: Shell, digest: str) -> str | None:
    """Starts the environment's interpreter; ``absent`` if there is none."""
    home = f'"$c"/envs/{digest}'
    return shell.go(f"{home}/bin/python", provided=f"test -x {home}/bin/python && true >{home}/.used")


def missing(shell: Shell, packages: Sequence[Package]) -> list[Package]:
    """Returns the packages that the host does not have."""
    lacking = set(shell.run(given(packages="\n".join(package.place for package in packages)) + _MISSING).splitlines())
    return [package for package in packages if package.place in lacking]


def discard(shell: Shell, packages: Sequence[Package]) -> None:
    """Deletes packages whose content may not match their digest."""
    shell.run(f'cd "$c/packages" && rm -rf {" ".join(package.sha256 for package in packages)}')


# ---- pushing


def push(shell: Shell, packages: Sequence[Package], *, session: str, progress: Callable[[int, int], None]) -> None:
    """Uploads packages as one tar archive. Raises ScriptFailed with tar's output.

    SSH protects the data in transit, and uv verifies each wheel against the lock: no hash is checked here.
    """
    total = sum(package.size for package in packages)
    shell.run(given(session=session) + _PUSH, feed=_archive(packages, total, progress))


def _archive(packages: Sequence[Package], total: int, progress: Callable[[int, int], None]) -> Iterator[bytes]:
    """A tar archive of the packages, in pieces."""
    done = size = 0
    for package in packages:
        entry = tarfile.TarInfo(package.place)
        entry.size = package.size
        entry.mode = 0o700 if package.program else 0o600
        header = entry.tobuf(tarfile.GNU_FORMAT)
        yield header
        for piece in _pieces(package):
            yield piece
            done += len(piece)
            progress(done, total)
        padding = -package.size % tarfile.BLOCKSIZE
        yield bytes(padding)
        size += len(header) + package.size + padding
    # tar reads whole records, and would wait for the rest of an incomplete last one.
    yield bytes(-(size + 2 * tarfile.BLOCKSIZE) % tarfile.RECORDSIZE + 2 * tarfile.BLOCKSIZE)


def _pieces(package: Package) -> Iterator[bytes]:
    if isinstance(package.content, bytes):
        yield package.content
        return
    with package.content.open("rb") as file:
        left = package.size
        while left:
            piece = file.read(min(left, _CHUNK))
            if not piece:
                raise OSError(f"{package.filename} became shorter while it was read")
            left -= len(piece)
            yield piece


# ---- building


def unpack_python(shell: Shell, archive: Package) -> str:
    """Unpacks an interpreter from its archive; returns its path on the host."""
    said = shell.run(given(digest=archive.sha256, archive=archive.place) + _UNPACK_PYTHON)
    return said.splitlines()[-1]


def install_apt(shell: Shell, packages: Sequence[str]) -> None:
    """Installs missing Debian packages. Raises HostUnfit if that is not possible, and ScriptFailed if it fails."""
    try:
        shell.run(given(*packages) + _APT)
    except ScriptFailed as failed:
        reason = _NO_APT.get(failed.status)
        if reason is None:
            raise
        lacking = failed.output.split()
        raise HostUnfit(
            f"missing apt packages: {', '.join(lacking)} ({reason})",
            hint=f"ask an administrator: sudo apt-get install {' '.join(lacking)}",
        ) from None


def build(
    shell: Shell,
    digest: str,
    *,
    session: str,
    uv: str,
    python: str,
    lock: Package,
    offline: bool,
    refresh: Sequence[str] = (),
) -> None:
    """Builds the environment, unless another process was faster. Raises ScriptFailed with uv's output.

    `uv` is a path on the host, or the place of a package; `python` a path, or a version that uv finds or downloads.
    The packages in `refresh` are deleted from uv's cache: uv's own refresh options skip what an index has declared
    immutable.
    """
    values = given(
        *refresh,
        digest=digest,
        session=session,
        uv=uv,
        python=python,
        lock=lock.place,
        offline="1" if offline else "",
    )
    shell.run(values + _BUILD)
