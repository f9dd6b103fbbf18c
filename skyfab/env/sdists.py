"""Builds wheels on this machine from packages that exist only as source: an archive, a git address or a folder."""

from __future__ import annotations

import json
import platform
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from skyfab._util.cache import cache_folder
from skyfab._util.versions import machine, numbers
from skyfab.env import uv
from skyfab.env.facts import Target
from skyfab.env.resolve import LockError
from skyfab.env.wheels import Wheel, fetch
from skyfab.protocol.blobs import name_of


def is_built(wheel: Wheel) -> bool:
    """Whether a wheel was built here: no index has it."""
    return wheel.url.startswith((cache_folder() / "built").as_uri())


class Source:
    """Where the source of a package is: an archive with its sha256, a commit of a git repository, or a folder."""

    def __init__(self, name: str, url: str, *, sha256: str = "", commit: str = "", inner: str = "") -> None:
        self.name, self.url, self.sha256, self.commit, self.inner = name, url, sha256, commit, inner

    @classmethod
    def of(cls, package: Mapping[str, Any], base: Path) -> Source | None:
        """The source of a package in a pylock.toml, whose relative paths are relative to `base`.

        None for a package that has wheels.
        """
        found = package.get("vcs") or package.get("directory") or package.get("archive") or package.get("sdist")
        if package.get("wheels") or found is None or ("vcs" in package and "commit-id" not in found):
            return None
        url = found.get("url") or (base / found["path"]).absolute().as_uri()
        if url.endswith(".whl"):
            return None
        sha256 = found.get("hashes", {}).get("sha256", "")
        if not (sha256 or "vcs" in package or "directory" in package):
            raise LockError(f"{package['name']}: its source has no sha256 in the lock")
        return cls(
            package["name"], url, sha256=sha256, commit=found.get("commit-id", ""), inner=found.get("subdirectory", "")
        )

    def wheel(self, target: Target) -> Wheel:
        """Builds the wheel, if it was not built before. Raises LockError, also if it does not run on the target."""
        folder = uv.made(cache_folder() / "built" / self.key, lambda work: _build(self, work))
        (path,) = folder.glob("*.whl")
        if not path.name.endswith("-none-any.whl"):
            _check_platform(self.name, target)
        version = path.name.split("-")[1]
        digest = name_of(path.read_bytes())
        return Wheel(package=self.name, version=version, filename=path.name, url=path.as_uri(), sha256=digest)

    @property
    def key(self) -> str:
        what = self.sha256 or self.commit or uv.stamp(_path(self.url), self.inner)
        parts = [uv.bare(self.url), what, self.inner, sys.version, platform.machine()]
        return uv.sum_of(json.dumps(parts))


def _path(url: str) -> Path:
    return Path(unquote(urlsplit(url).path))


def _build(source: Source, work: Path) -> None:
    where = uv.redact(source.url)
    try:
        place = _brought(source, work)
        options = ("--wheel", "--no-create-gitignore", "--python", sys.executable, "--out-dir", str(work / "out"))
        uv.run_uv("build", *options, str(place / source.inner), env={"UV_PYTHON_DOWNLOADS": "never"}, cwd=work)
    except uv.UvFailed as failed:
        raise LockError(
            f"cannot build {source.name} from {where}\n{failed}",
            hint="choose a version that has a wheel, or ask the package's maintainer",
        ) from None


def _brought(source: Source, work: Path) -> Path:
    """The source as a file or folder of this machine."""
    if source.commit:
        clone = work / "clone"
        clone.mkdir()
        for words in (
            ("clone", "-q", "--no-checkout", "--filter=blob:none", source.url, "."),
            ("checkout", "-q", source.commit),
            ("submodule", "update", "-q", "--init", "--recursive"),
        ):
            uv.run("git", *words, env={"GIT_TERMINAL_PROMPT": "0"}, cwd=clone)
        return clone
    if source.sha256:
        filename = _path(source.url).name
        archive = Wheel(package=source.name, version="", filename=filename, url=source.url, sha256=source.sha256)
        return fetch([archive])[source.sha256]
    return _path(source.url)


def _check_platform(name: str, target: Target) -> None:
    """Raises LockError if a wheel with compiled code that was built here cannot run on the target."""
    here = (platform.system(), machine(platform.machine()))
    libc, version = platform.libc_ver()
    known, release = target.c_library
    same = here == (target.system, target.machine) and (here[0] != "Linux" or libc == known)
    if not same or numbers(version)[:2] > release:
        raise LockError(
            f"{name} has no wheel, and one built on this machine does not run on {uv.described(target)}",
            hint=f"build a wheel on the host and name the folder that it is in: --index=FOLDER={name} or PipIndex",
        )
