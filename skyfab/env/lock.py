"""Locks: the exact wheels that an image needs on a host. uv resolves them; the result is stored and reused."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit, urlunsplit

from packaging.markers import InvalidMarker
from packaging.utils import InvalidWheelFilename, parse_wheel_filename

from skyfab._util import atomic, toml
from skyfab._util.cache import cache_folder
from skyfab.calls.image import Image
from skyfab.env import uv
from skyfab.env.facts import Target
from skyfab.env.resolve import LockError, Pins, Request, Resolver, clean, requirement
from skyfab.env.sdists import Source, is_built
from skyfab.env.uvlock import check_files, files_of, read_pins
from skyfab.env.wheels import Wheel, applies, tags


@dataclass(frozen=True, slots=True, kw_only=True)
class Lock:
    """The wheels that an image needs on a host."""

    text: str
    """The pylock.toml (PEP 751), without credentials."""
    wheels: tuple[Wheel, ...]
    """The one wheel of each package that this target uses, sorted by package."""
    digest: str
    """Hash of the interpreter's minor version, the platform and the wheels, independent of where they come from."""

    @property
    def torch(self) -> str:
        """torch's version without its build label; empty if it is not a part."""
        return next((wheel.version.partition("+")[0] for wheel in self.wheels if wheel.package == "torch"), "")

    def placed(self, place: Callable[[Wheel], str | None]) -> str:
        """A pylock.toml in which each wheel has the path returned by `place`; its URL where that returns None."""
        parts = ['lock-version = "1.0"\ncreated-by = "skyfab"\n', "" if self.wheels else "packages = []\n"]
        for wheel in self.wheels:
            path = place(wheel)
            where = f"url = {toml.dumps(uv.bare(wheel.url))}" if path is None else f"path = {toml.dumps(path)}"
            entry = f"name = {toml.dumps(wheel.filename)}, {where}"
            parts.append(
                f"\n[[packages]]\nname = {toml.dumps(wheel.package)}\nversion = {toml.dumps(wheel.version)}\n"
                f'wheels = [{{ {entry}, hashes = {{ sha256 = "{wheel.sha256}" }} }}]\n'
            )
        return "".join(parts)


def make_lock(image: Image, target: Target, *, together: Sequence[Target] = (), upgrade: bool = False) -> Lock:
    """Returns the lock of an image for a target: the stored one, or a new one; `upgrade` always makes a new one.

    `together` are all targets of a pool: torch has the same version on all of them. Raises LockError.
    """
    lock = _lock_of(image, target, together, lambda request: _made(request, upgrade=upgrade))
    assert lock is not None
    return lock


def known_lock(image: Image, target: Target, *, together: Sequence[Target] = ()) -> Lock | None:
    """As `make_lock`; None if uv would have to resolve."""
    return _lock_of(image, target, together, _stored)


def _lock_of(
    image: Image, target: Target, together: Sequence[Target], found: Callable[[Request], Lock | None]
) -> Lock | None:
    if image.lock is not None and image.is_exact:
        return read_lock(image.lock, target)
    if not image.pip:
        return _lock(Lock(text="", wheels=(), digest="").placed(str), target)
    pins = Pins() if image.lock is None else read_pins(image.lock, target)
    request = Request.of(image, target, pins)
    lock = found(request)
    if lock and lock.torch and together and together[0] != target:
        first = _lock_of(image, together[0], (), found)
        if first is None:
            return None
        if first.torch not in {"", lock.torch}:
            lock = found(replace(request, torch=first.torch))
    return lock and _with_logins(lock, image)


def _made(request: Request, *, upgrade: bool) -> Lock:
    """The lock for a request: the stored one, or a new one from uv."""
    path = _path(request)
    with uv.making(path):
        known = None if upgrade else _stored(request)
        if known is None:
            text = clean(Resolver(request, refresh=upgrade).run())
            check_files(text, request.pins)
            known = _lock(text, request.target)
            _check_hashes(known, request.pins.allowed)
            atomic.write(path, f"# {uv.sum_of(text)}\n{text}", mode=0o644)
    return known


def _path(request: Request) -> Path:
    return cache_folder() / "locks" / f"{request.key()}.toml"


def _check_hashes(lock: Lock, allowed: Sequence[tuple[str, str]]) -> None:
    """Raises LockError if a package's file matches none of the ``--hash`` options of its requirement.

    Of a wheel that was built here, the source archive counts.
    """
    for wheel in lock.wheels:
        wanted = [one for name, one in allowed if name == wheel.package]
        files = {wheel.filename: wheel.sha256}
        if wanted and is_built(wheel):
            packages = [one for one in toml.loads(lock.text).get("packages", []) if one["name"] == wheel.package]
            files = {name: sha256 for one in packages for name, sha256 in files_of(one)}
        if wanted and not {f"sha256:{sha256}" for sha256 in files.values()} & {*wanted}:
            name, sha256 = next(iter(files.items()), (wheel.package, "unknown"))
            raise LockError(
                f"{name} matches none of the hashes of its requirement\nsha256 {sha256}\nallowed {', '.join(wanted)}",
                hint="if it is the right file for this platform, add its --hash=sha256:…; else ask its maintainer",
            )


def read_lock(path: str | Path, target: Target) -> Lock:
    """Reads a lock that the user provides; it is used unchanged. Raises LockError."""
    file = Path(path).expanduser()
    try:
        base = file.absolute().parent
        return _lock(file.read_text(encoding="utf-8"), target, base=base)
    except (OSError, UnicodeDecodeError) as error:
        raise LockError(f"cannot read the lock {path}: {getattr(error, 'strerror', None) or error}") from error
    except LockError as error:
        raise LockError(f"{path}: {error.message}", hint=error.hint) from None


# ---- from pylock.toml to wheels


def _lock(text: str, target: Target, *, base: Path = Path()) -> Lock:
    """Builds the packages that have only a source. Relative paths are relative to `base`."""
    try:
        document = toml.loads(text)
        groups = {*document.get("default-groups", ())}
        packages = [one for one in document.get("packages", []) if applies(one.get("marker", ""), target, groups)]
        order = {tag: rank for rank, tag in enumerate(tags(target))}
        wheels = [_choose(one, target, order, base) for one in packages]
    except LockError:
        raise
    except (ValueError, AttributeError, KeyError, TypeError, InvalidMarker) as error:
        raise LockError(f"not a pylock.toml: {error}") from error
    wheels.sort(key=lambda wheel: wheel.package)
    content = [target.python, uv.platform_of(target), *((one.package, one.version, one.sha256) for one in wheels)]
    return Lock(text=clean(text), wheels=tuple(wheels), digest=uv.sum_of(json.dumps(content)))


def _choose(package: Mapping[str, Any], target: Target, order: Mapping[Any, int], base: Path) -> Wheel:
    """The package's wheel whose tag comes first in the target's order, or the one that is built from its source."""
    source = Source.of(package, base)
    if source is not None:
        return source.wheel(target)
    name, offered = package["name"], [*package.get("wheels", ())]
    if "archive" in package:  # a direct URL
        offered.append(package["archive"])
    fitting: list[tuple[Any, ...]] = []
    for one in offered:
        url = one.get("url") or (base / one["path"]).absolute().as_uri()
        filename = one.get("name") or unquote(urlsplit(url).path).rpartition("/")[2]
        if "/" in filename:  # it becomes a path on the host, and not every version of packaging rejects it
            raise LockError(f"{name}: {filename!r} is not the name of a file")
        try:
            _, version, build, labels = parse_wheel_filename(filename)
        except InvalidWheelFilename:
            continue
        ranks = [order[label] for label in labels if label in order]
        if ranks:
            newest = tuple(-part if isinstance(part, int) else part for part in build)
            fitting.append((min(ranks), newest, filename, url, str(package.get("version") or version), one))
    if not fitting:
        raise LockError(
            f"{name} {package.get('version', '')} has no wheel for Python {target.python} on {uv.described(target)}",
            hint="lock it for that platform too, or choose a version that has a wheel for it",
        )
    *_, filename, url, version, one = min(fitting, key=lambda wheel: wheel[:2])
    sha256 = one.get("hashes", {}).get("sha256", "")
    if not re.fullmatch(r"[0-9a-f]{64}", sha256):
        raise LockError(f"{name}: {filename} has no sha256 in the lock")
    return Wheel(package=name, version=version, filename=filename, url=url, sha256=sha256, size=one.get("size"))


def _stored(request: Request) -> Lock | None:
    """Reads a stored lock; None if there is none, or it was changed."""
    try:
        first, _, text = _path(request).read_text(encoding="utf-8").partition("\n")
    except (OSError, UnicodeDecodeError):
        return None
    return _lock(text, request.target) if first == f"# {uv.sum_of(text)}" else None


def _with_logins(lock: Lock, image: Image) -> Lock:
    """Adds the credentials that only the image has to the wheels' URLs; they are never stored."""
    urls = [index.url for index in image.pip_indexes] + [one.url for one in map(requirement, image.pip) if one.url]
    own = {uv.origin(url): urlsplit(url).netloc.rpartition("@")[0] for url in urls if uv.userinfo(url)}

    def login(url: str) -> str:
        parts, user = urlsplit(url), own.get(uv.origin(url))
        return urlunsplit(parts._replace(netloc=f"{user}@{parts.netloc}")) if user else url

    return replace(lock, wheels=tuple(replace(wheel, url=login(wheel.url)) for wheel in lock.wheels)) if own else lock
