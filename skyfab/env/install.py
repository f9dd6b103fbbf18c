"""Builds an environment on a host: uploads what the host cannot download, and runs the scripts beside this file.

Below the host's cache folder: ``packages/SHA256/FILE`` (wheels, uv, interpreters and locks, named by content),
``envs/DIGEST`` (environments), ``pythons/SHA256`` (interpreters, unpacked), ``uv`` (uv's own cache, to which
environments have hard links). Everything is created under a temporary name, and renamed when it is complete.
"""

from __future__ import annotations

import functools
import re
import tarfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, Protocol

from skyfab._util.scripts import given, read
from skyfab._util.sizes import readable
from skyfab._util.versions import numbers
from skyfab.calls.image import Image
from skyfab.env import probe
from skyfab.env.facts import Facts, Target
from skyfab.env.lock import Lock
from skyfab.env.sdists import is_built
from skyfab.env.tools import python_for, uv_for
from skyfab.env.uv import is_public, origin, reason, redact
from skyfab.env.wheels import Wheel, delete_damaged, fetch
from skyfab.errors import HostUnfit
from skyfab.protocol.blobs import name_of
from skyfab.session.shell import ScriptFailed, Shell

_MISSING: Final = read("env/missing.sh")
_PUSH: Final = read("env/push.sh")
_UNPACK_PYTHON: Final = read("env/unpack_python.sh")
_APT: Final = read("env/apt.sh")
_BUILD: Final = read("env/build.sh")
_NO_APT: Final = {3: "the host has no apt-get", 4: "its user is not allowed to install packages"}
"""Exit codes of apt.sh; its output is the packages that are missing."""
_CHUNK: Final = 1024 * 1024
_OLDEST_UV: Final = (0, 8)
"""Older versions cannot read a pylock.toml."""
_PYTHONS: Final = "https://github.com/astral-sh/python-build-standalone"
"""Where uv downloads interpreters: a host that can reach it may do so itself."""
_ROOM: Final = "free some space on it (skyfab gc), or put the cache on another disk (cache = … in the inventory)"


class Report(Protocol):
    """Shows the progress to the user."""

    def step(self, text: str) -> None:
        """A new step begins: ``probing``."""

    def moved(self, what: str, done: int, total: int) -> None:
        """`done` of `total` bytes have been transferred: ``pushing`` 61 of 155 MB."""

    def note(self, text: str) -> None:
        """Something that the user should know afterwards too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Package:
    """A file that a host may need, named by its content."""

    sha256: str
    filename: str
    size: int
    content: Path | bytes | Wheel
    """A wheel may have to be fetched first."""
    program: bool = False
    """Whether it is executable."""

    @property
    def place(self) -> str:
        """Its path below ``packages``."""
        return f"{self.sha256}/{self.filename}"

    @classmethod
    def of_file(cls, path: Path, *, program: bool = False) -> Package:
        sha256 = name_of(path.read_bytes())
        return cls(sha256=sha256, filename=path.name, size=path.stat().st_size, content=path, program=program)

    @classmethod
    def of_wheel(cls, wheel: Wheel) -> Package:
        return cls(sha256=wheel.sha256, filename=wheel.filename, size=wheel.size or 0, content=wheel)

    @classmethod
    def of_text(cls, filename: str, text: str) -> Package:
        content = text.encode()
        return cls(sha256=name_of(content), filename=filename, size=len(content), content=content)


def enter(shell: Shell, digest: str) -> str | None:
    """Starts the environment's interpreter; ``absent`` if there is none."""
    home = f'"$c"/envs/{digest}'
    return shell.go(f"{home}/bin/python", provided=f"test -x {home}/bin/python && true >{home}/.used")


def install_apt(shell: Shell, packages: Sequence[str]) -> None:
    """Installs missing Debian packages. Raises HostUnfit if that is not possible, and ScriptFailed if it fails."""
    try:
        shell.run(given(*packages) + _APT)
    except ScriptFailed as failed:
        why = _NO_APT.get(failed.status)
        if why is None:
            raise
        said = failed.output.split()
        lacking = [package for package in packages if package in said] or packages
        raise HostUnfit(
            f"missing apt packages: {', '.join(lacking)} ({why})",
            hint=f"ask an administrator: sudo apt-get install {' '.join(lacking)}",
        ) from None


def fetched(packages: Sequence[Package], progress: Callable[[int, int], None]) -> list[Package]:
    """The same packages, after their wheels were downloaded to this machine."""
    files = fetch([one.content for one in packages if isinstance(one.content, Wheel)], progress=progress)
    return [
        replace(one, content=path, size=path.stat().st_size) if (path := files.get(one.sha256)) else one
        for one in packages
    ]


def missing(shell: Shell, packages: Sequence[Package]) -> list[Package]:
    """Returns the packages that the host does not have, or has damaged."""
    listed = "\n".join(f"{package.size} {package.place}" for package in packages)
    lacking = set(shell.run(given(packages=listed) + _MISSING).splitlines())
    return [package for package in packages if package.place in lacking]


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
    assert isinstance(package.content, Path), "it was not fetched"
    with package.content.open("rb") as file:
        left = package.size
        while left:
            piece = file.read(min(left, _CHUNK))
            if not piece:
                raise OSError(f"{package.filename} was truncated while it was read")
            left -= len(piece)
            yield piece


@dataclass(frozen=True, slots=True, kw_only=True)
class Installation:
    """Builds one environment on one host."""

    shell: Shell
    session: str
    report: Report
    image: Image
    facts: Facts
    target: Target
    lock: Lock
    python: str | None
    """An interpreter of the host that has the right version."""
    share: Callable[[Sequence[Package]], bool] = lambda lacking: False
    """Has hosts that lack the same packages pass them on to each other. Returns whether this one may have got some."""

    def build(self, digest: str) -> None:
        """Builds the environment, unless another process was faster. Raises ScriptFailed with uv's output."""
        if built := [f"{wheel.package} {wheel.version}" for wheel in self.lock.wheels if is_built(wheel)]:
            self.report.note(f"built from source on this machine: {', '.join(built)}")
        if older := re.search("^# (older than the newest version: .*)", self.lock.text, re.MULTILINE):
            self.report.note(older[1])
        pushed, python_there = self._pushed()
        text = self.lock.placed(lambda wheel: f"../{wheel.sha256}/{wheel.filename}" if wheel in pushed else None)
        listed = Package.of_text("pylock.toml", text)
        uv, tools = self._uv()
        archive = None if self.python or python_there else self._interpreter()
        wheels = [Package.of_wheel(wheel) for wheel in pushed]
        packages = [listed, *tools, *([archive] if archive else ()), *wheels]
        self._provide(packages)
        self.report.step("installing")
        offline = len(pushed) == len(self.lock.wheels) and not python_there
        values = {
            "digest": digest,
            "session": self.session,
            "uv": uv,
            "python": self._unpacked(archive) if archive else self.python or self.target.python,
            "lock": listed.place,
            "offline": "1" if offline else "",
        }
        try:
            self.shell.run(given(**values) + _BUILD)
        except ScriptFailed as failed:
            changed = _mismatched(failed) or _unreadable(failed)
            if not changed:
                raise
            if wheels:  # one of them was damaged on the host or on this machine
                delete_damaged(pushed)
                names = " ".join(f"packages/{wheel.sha256} blobs/{wheel.sha256}" for wheel in wheels)
                self.shell.run(f'cd "$c" && rm -rf {names}')
                self._provide(packages)
            # uv's cache may have a wheel that was replaced under the same name and version. It is deleted from it:
            # uv's own refresh options skip what an index has declared immutable.
            self.shell.run(given(*changed, **values) + _BUILD)

    def _pushed(self) -> tuple[list[Wheel], bool]:
        """The wheels that the host cannot download by itself, and whether it can download an interpreter."""
        wheels, install = self.lock.wheels, self.image.install
        if install == "push":
            return [*wheels], False
        asked = {wheel: f"{origin(wheel.url)}/" for wheel in wheels if is_public(wheel.url)}
        python = self.facts.pythons[0].path if self.facts.pythons else ""
        script = probe.script((*dict.fromkeys(asked.values()), _PYTHONS), python)
        reached = {*probe.parse(self.shell.run(script)).reachable}
        if install == "fetch":
            reached.update(asked.values())
        return [wheel for wheel in wheels if asked.get(wheel) not in reached], _PYTHONS in reached

    def _uv(self) -> tuple[str, list[Package]]:
        """The path of uv on the host or below ``packages``, and the packages that must be uploaded for it."""
        found = self.facts.uv
        if found is not None and numbers(found.version) >= _OLDEST_UV:
            return found.path, []
        package = Package.of_file(uv_for(self.target), program=True)
        return package.place, [package]

    def _interpreter(self) -> Package:
        """The archive of an interpreter for the host. Uploads it if the host has none at all, which relays need."""
        self.report.step(f"fetching Python {self.target.python}")
        archive = Package.of_file(python_for(self.target))
        if not self.facts.pythons:
            self._send(missing(self.shell, [archive]))
            self._unpacked(archive)
        return archive

    def _provide(self, packages: Sequence[Package]) -> None:
        """Brings the packages that the host does not have to it."""
        lacking = missing(self.shell, packages)
        if self.share([package for package in lacking if not isinstance(package.content, bytes)]):
            lacking = missing(self.shell, packages)
        self._send(lacking)

    def _send(self, lacking: Sequence[Package]) -> None:
        """Uploads packages."""
        if not lacking:
            return
        packages = fetched(lacking, functools.partial(self.report.moved, "fetching"))
        total = sum(package.size for package in packages)
        if self.facts.free and total > self.facts.free:
            what = f"the packages need {readable(total)}, but its disk has {readable(self.facts.free)} free"
            raise HostUnfit(what, hint=_ROOM)
        progress = functools.partial(self.report.moved, "pushing")
        push(self.shell, packages, session=self.session, progress=progress)

    def _unpacked(self, archive: Package) -> str:
        """Unpacks an interpreter from its archive; returns its path on the host."""
        said = self.shell.run(given(digest=archive.sha256, archive=archive.place) + _UNPACK_PYTHON)
        return said.splitlines()[-1]


def _mismatched(failed: ScriptFailed) -> list[str]:
    """The packages whose wheels, according to uv, do not match the lock."""
    return re.findall(r"hash mismatch for `?([\w.-]+)", failed.output, re.IGNORECASE)


def _unreadable(failed: ScriptFailed) -> list[str]:
    """The packages whose wheels uv cannot unpack, which it does before it compares hashes."""
    if "Failed to extract" not in failed.output:
        return []
    return re.findall(r"Failed to (?:download|read|install) `?([\w.-]+?)(?:==|`)", failed.output)


def unfit(failed: ScriptFailed, host: str) -> HostUnfit:
    """Converts the output of a failed script to an error of its host."""
    text = redact(reason(failed.output)) or f"a script exited with {failed.status}"
    hint = None
    if any(word in text for word in ("No space left", "quota exceeded", "Disk quota")):
        hint = _ROOM
    elif _mismatched(failed):
        hint = "the file in the index has changed since it was locked; to lock it again: skyfab prepare --upgrade"
    elif any(word in text for word in ("Permission denied", "Read-only")):
        hint = "choose a writable folder (cache = … in the inventory)"
    return HostUnfit(f"cannot build its environment: {text}", host=host, hint=hint)
