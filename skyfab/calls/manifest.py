"""Finds what a project says about its environment: PEP 723 block, pyproject.toml with uv.lock, requirements.txt."""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from packaging.requirements import InvalidRequirement, Requirement
from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.utils import canonicalize_name

from skyfab._util import schema, toml
from skyfab.calls.modules import folders_above
from skyfab.errors import UsageError

_BLOCK: Final = re.compile(r"(?m)^# /// script$\s(?P<content>(?:^#(?:| .*)$\s)+)^# ///$")
"""As PEP 723 has it."""
_FOR_VERSIONS: Final = frozenset(
    {"constraint-dependencies", "exclude-newer", "index", "override-dependencies", "prerelease", "resolution"}
)
"""Settings of uv that select other versions or indexes."""


@dataclass(frozen=True, slots=True)
class Manifest:
    """The packages that a script or project needs, and where it says so."""

    source: str
    """For the user: ``pyproject.toml with uv.lock``."""
    pip: tuple[str, ...] = ()
    lock: str | None = None


def find(path: Path, *, script_only: bool = False) -> Manifest | None:
    """The environment of a script or folder: its own, or else the nearest project's. Raises UsageError."""
    script = path.absolute() if path.is_file() else None
    if script is not None and (manifest := _of_script(script)) is not None:
        return manifest
    for folder in () if script_only else folders_above(path):
        if (file := folder / "pyproject.toml").is_file():
            manifest = _of_project(file)
            if manifest is not None:
                return manifest
        if (file := folder / "requirements.txt").is_file():
            return Manifest(_shown(file), tuple(listed(file)))
    return None


def _of_script(script: Path) -> Manifest | None:
    try:
        blocks = list(_BLOCK.finditer(script.read_text(encoding="utf-8-sig", errors="replace")))
    except OSError:
        return None  # running it reports the error
    if not blocks:
        return None
    shown = _shown(script)
    if len(blocks) > 1:
        raise UsageError(f"{shown} has {len(blocks)} blocks '# /// script'", hint="keep one of them")
    content = "".join(
        line[2:] if line.startswith("# ") else line[1:] for line in blocks[0]["content"].splitlines(keepends=True)
    )
    document = _parsed(content, shown)
    lock = script.with_name(f"{script.name}.lock")
    found = _manifest(document, shown, lock if lock.is_file() else None, packages=document)
    return replace(found, source=f"{shown} (PEP 723)" + (f" with {lock.name}" if found.lock else ""))


def _of_project(file: Path) -> Manifest | None:
    """None if the file says nothing about packages: it may hold only the settings of tools."""
    document, shown = read(file), _shown(file)
    project = document.get("project")
    if not isinstance(project, dict):
        return None
    if "dependencies" not in project:
        declared = project.get("dynamic", [])
        is_dynamic = isinstance(declared, list) and "dependencies" in declared
        if not is_dynamic or (file.parent / "requirements.txt").is_file():
            return None
        raise UsageError(
            f"{shown}: its dependencies are dynamic: only its build backend knows them",
            hint="list them in requirements.txt, or name them with --pip=…, or run with --no-project",
        )
    lock = _lock_of(file)
    manifest = _manifest(document, shown, lock, packages=project)
    return replace(manifest, source=shown + (f" with {lock.name}" if manifest.lock and lock else ""))


def _lock_of(file: Path) -> Path | None:
    """The uv.lock beside a pyproject.toml, or that of a workspace above that has it as a member."""
    for folder in folders_above(file):
        lock = folder / "uv.lock"
        if lock.is_file() and (folder == file.parent or file.parent.resolve() in _members(lock)):
            return lock
    return None


def _members(lock: Path) -> set[Path]:
    """The folders of this machine whose packages are in a uv.lock."""
    sources = [one.get("source", {}) for one in _locked(lock)]
    places = [source[kind] for source in sources for kind in ("virtual", "editable", "directory") if kind in source]
    return {(lock.parent / place).resolve() for place in places}


def _manifest(document: Mapping[str, Any], shown: str, lock: Path | None, *, packages: Mapping[str, Any]) -> Manifest:
    """Reads ``dependencies`` and ``requires-python`` of `packages`: a project, or the document of a PEP 723 block."""
    try:
        wanted = schema.parse(tuple[str, ...], packages.get("dependencies", []))
        tools = schema.parse(dict[str, Any], document.get("tool", {}))
        settings = schema.parse(dict[str, Any], tools.get("uv", {}))
        sources = schema.parse(dict[str, Any], settings.get("sources", {}))
    except schema.Invalid as error:
        raise UsageError(f"{shown}: dependencies, [tool.uv] or its sources: {error}") from None
    _check_python(packages.get("requires-python"), shown)
    needed = [_requirement(text, shown) for text in wanted]
    names = {canonicalize_name(one.name) for one in needed if one.marker is None or one.marker.evaluate()}
    sourced = names & set(map(canonicalize_name, sources))
    hint = "uv lock" if shown.endswith(".toml") else f"uv lock --script {shown}"
    if lock is None:
        reasons = [*(f"a source for {name}" for name in sorted(sourced)), *sorted(_FOR_VERSIONS & settings.keys())]
        if wanted and reasons:
            raise UsageError(f"{shown} has no lock, and its [tool.uv] has {reasons[0]}", hint=hint)
    elif sourced and (missing := sourced - {one.get("name") for one in _locked(lock)}):
        # The package of that name in an index would be another one.
        what = f"{lock.name} is out of date: {shown} has a source for {min(missing)}, which is not in it"
        raise UsageError(what, hint=hint)
    return Manifest(shown, wanted, lock=str(lock) if lock is not None and wanted else None)


def _locked(lock: Path) -> list[dict[str, Any]]:
    """The packages of a uv.lock. Raises UsageError."""
    try:
        return schema.parse(list[dict[str, Any]], read(lock).get("package", []))
    except schema.Invalid as error:
        raise UsageError(f"{_shown(lock)}: package{error}", hint="uv lock") from None


def _requirement(text: str, shown: str) -> Requirement:
    try:
        return Requirement(text)
    except InvalidRequirement:
        raise UsageError(f"{shown}: invalid requirement {text!r}", hint='as in "numpy>=2"') from None


def _check_python(wanted: object, shown: str) -> None:
    here = platform.python_version()
    try:
        fits = wanted is None or SpecifierSet(str(wanted)).contains(here, prereleases=True)
    except InvalidSpecifier:
        raise UsageError(f"{shown}: invalid requires-python: {wanted!r}", hint='as in ">=3.11"') from None
    if not fits:
        raise UsageError(
            f"{shown} requires Python {wanted}, but skyfab runs with {here}: hosts run the same Python",
            hint=f"uvx --python '{wanted}' skyfab …",
        )


def listed(path: Path, above: tuple[str, ...] = ()) -> list[str]:
    """The requirements in a file that those `above` include.

    Raises UsageError if it cannot be read or has options other than -r and --hash.
    """
    found: list[str] = []
    here = os.path.realpath(path)
    if here in above:
        raise UsageError(f"cannot read {path}: it includes itself", hint="remove the -r that leads back to it")
    text = re.sub(r"(?m)(^|[ \t])#.*", "", text_of(path))
    for line in text.replace("\\\n", " ").splitlines():
        line = line.strip()
        other = re.fullmatch(r"(?:-r\s*|--requirement[\s=]\s*)(\S.*)", line)
        if other:
            found += listed(path.parent / other[1].strip("\"'"), (*above, here))
        elif line.startswith("-") and not re.fullmatch(r"(-e|--editable)\s*\.", line):
            raise UsageError(f"{path}: only requirements are supported, not {line!r:.80}", hint="--index=URL=packages")
        elif line not in ("", ".") and not line.startswith("-"):  # the project's own modules are sent anyway
            found.append(" ".join(line.split()))
    return found


def read(file: Path) -> dict[str, Any]:
    """A pyproject.toml. Raises UsageError if it cannot be read."""
    return _parsed(text_of(file), _shown(file))


def text_of(path: Path) -> str:
    """Reads a file. Raises UsageError."""
    try:
        return path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from None


def _parsed(text: str, shown: str) -> dict[str, Any]:
    try:
        return toml.loads(text)
    except ValueError as error:
        raise UsageError(f"{shown}: invalid TOML: {error}") from None


def _shown(file: Path) -> str:
    """A path for messages: relative to the current folder if it is inside it or near."""
    near = os.path.relpath(file)
    return near if near.count("..") < 3 else str(file)
