"""Reads a project's uv.lock: the versions, indexes and hashes that it fixes for a target."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from skyfab._util import toml
from skyfab.calls.image import PipIndex
from skyfab.env import uv
from skyfab.env.facts import Target
from skyfab.env.resolve import TORCH, LockError, Pins, text_of
from skyfab.env.wheels import applies


def read_pins(path: str, target: Target) -> Pins:
    """Raises LockError if uv cannot read the lock."""
    file = Path(path).expanduser().absolute()
    try:
        content = file.read_text(encoding="utf-8")
        exported = toml.loads(_exported(file, uv.sum_of(content))).get("packages", [])
        project = text_of(str(file.with_name("pyproject.toml") if file.name == "uv.lock" else file.with_suffix("")))
        packages = [_fitting(one, content, project) for one in exported if applies(one.get("marker", ""), target)]
    except (OSError, UnicodeDecodeError) as error:
        raise LockError(f"cannot read the lock {path}: {getattr(error, 'strerror', None) or error}") from None
    except uv.UvFailed as failed:
        raise LockError(f"{path}: {failed}", hint="run uv lock to recreate it") from None
    scopes: dict[str, list[str]] = {}
    for one in packages:
        if one.get("index"):
            scopes.setdefault(one["index"], []).append(one["name"])
    return Pins(
        constraints=tuple(_constraint(one, file.parent) for one in packages),
        indexes=tuple(PipIndex(url, tuple(names)) for url, names in scopes.items()),
        hashes=tuple(sorted({pair for one in packages for pair in files_of(one)})),
    )


@cache
def _exported(file: Path, _content: str) -> str:
    """The lock as a pylock.toml, with all members of its workspace."""
    project = ("--all-packages", "--no-emit-project", "--no-default-groups")
    which = project if file.name == "uv.lock" else ("--script", str(file.with_suffix("")))
    options = ("--frozen", "--no-editable", "--no-header")
    return uv.run_uv(
        *("export", "--format", "pylock.toml", *options, *which, "--python", sys.executable),
        env={"UV_PYTHON_DOWNLOADS": "never"},
        cwd=file.parent,
    )


def _fitting(package: Mapping[str, Any], lock: str, project: str) -> Mapping[str, Any]:
    """A package of the lock without its index, unless the project names that; and torch then without its build.

    The other indexes are those of the machine where the lock was made, as is the build that fitted it: here others are
    configured, and each host has the build that fits it. `lock` and `project` are their texts.
    """
    name, url = package["name"], package.get("index", "").rstrip("/")
    if not url or url in project or re.search(rf'{{ name = "{name}",[^{{}}]*\bindex = "', lock):
        return package
    version = package["version"].partition("+")[0] if name in TORCH else package["version"]
    return {**package, "version": version, "index": ""}


def _constraint(package: Mapping[str, Any], base: Path) -> str:
    name = package["name"]
    source = package.get("vcs") or package.get("directory") or package.get("archive")
    if source is None:
        return f"{name}=={package['version']}"
    url = source.get("url") or (base / source["path"]).resolve().as_uri()
    inner = f"#subdirectory={source['subdirectory']}" if source.get("subdirectory") else ""
    return f"{name} @ git+{url}@{source['commit-id']}{inner}" if "vcs" in package else f"{name} @ {url}{inner}"


def files_of(package: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """The files of a package in a pylock.toml: pairs of name and sha256."""
    for one in (*package.get("wheels", ()), *(package[kind] for kind in ("sdist", "archive") if kind in package)):
        filename = one.get("name") or unquote(urlsplit(one.get("url") or one["path"]).path).rpartition("/")[2]
        if sha256 := one.get("hashes", {}).get("sha256", ""):
            yield filename, sha256


def check_files(text: str, pins: Pins) -> None:
    """Raises LockError if a file of a pylock.toml has another sha256 than in the uv.lock."""
    known = dict(pins.hashes)
    for package in toml.loads(text).get("packages", []):
        for filename, sha256 in files_of(package):
            if known.get(filename, sha256) != sha256:
                raise LockError(
                    f"{filename} does not match uv.lock\nsha256 {sha256}\nlocked {known[filename]}",
                    hint="the file in the index has changed: ask its maintainer, or run uv lock --upgrade-package"
                    f" {package['name']}",
                )
