"""Finds what a project says about its environment: PEP 723 block, pyproject.toml with uv.lock, requirements.txt."""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from packaging.requirements import InvalidRequirement, Requirement
from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.utils import canonicalize_name

from skyfab._util import toml
from skyfab.calls.modules import folders_above
from skyfab.errors import UsageError

_BLOCK: Final = re.compile(r"(?m)^# /// script$\s(?P<content>(?:^#(?:| .*)$\s)+)^# ///$")
"""As PEP 723 has it."""
_TORCH: Final = frozenset({"torch", "torchvision", "torchaudio"})
_CONDITIONS: Final = frozenset({"marker", "extra", "group"})
"""Keys of a source that say when it is used."""
_FOR_VERSIONS: Final = frozenset(
    {"constraint-dependencies", "exclude-newer", "override-dependencies", "prerelease", "resolution"}
)
"""Settings of uv that select other versions."""


@dataclass(frozen=True, slots=True)
class Manifest:
    """The packages that a script or project needs, and where it says so."""

    source: str
    """For the user: ``pyproject.toml with uv.lock``."""
    pip: tuple[str, ...] = ()
    indexes: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """URLs of package indexes, and the packages that each of them serves."""
    lock: str | None = None


def find(path: Path, *, script_only: bool = False) -> Manifest | None:
    """The environment of a script or folder: its own, or else the nearest project's. Raises UsageError."""
    try:
        return _find(path, script_only)
    except (AttributeError, KeyError, TypeError) as error:
        what = f"{_shown(path)}: invalid [tool.uv] or uv.lock: {error!r}"
        raise UsageError(what, hint="uv lock") from error


def _find(path: Path, script_only: bool) -> Manifest | None:
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
    found = _manifest(document, document.get("tool", {}), shown, lock if lock.is_file() else None, script.parent)
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
    manifest = _manifest(project, document.get("tool", {}), shown, lock, file.parent)
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
    sources = [one.get("source", {}) for one in read(lock).get("package", [])]
    places = [source[kind] for source in sources for kind in ("virtual", "editable", "directory") if kind in source]
    return {(lock.parent / place).resolve() for place in places}


def _manifest(
    document: Mapping[str, Any], tool: Mapping[str, Any], shown: str, lock: Path | None, base: Path
) -> Manifest:
    """Reads ``dependencies`` and ``requires-python`` of a project or PEP 723 block."""
    wanted = document.get("dependencies", [])
    if not isinstance(wanted, list) or not all(isinstance(text, str) for text in wanted):
        raise UsageError(f"{shown}: dependencies must be an array of strings")
    _check_python(document.get("requires-python"), shown)
    sources = _Sources(tool.get("uv", {}), shown, base)
    if lock is not None and wanted:
        sources.check(wanted, lock)
        return Manifest(shown, tuple(wanted), lock=str(lock))
    return Manifest(shown, *sources.translated(wanted))


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


class _Sources:
    """[tool.uv.sources] and [[tool.uv.index]] of a project: translated if it has no uv.lock."""

    def __init__(self, settings: Mapping[str, Any], shown: str, base: Path) -> None:
        self._shown, self._base = shown, base
        self._settings = settings
        self._sources = {canonicalize_name(name): value for name, value in settings.get("sources", {}).items()}
        self._indexes = {str(one.get("name", "")): one for one in settings.get("index", [])}

    def check(self, wanted: Sequence[str], lock: Path) -> None:
        """Raises UsageError if the lock lacks a package that has a source: it would come from an index."""
        needed = [one for one in map(self._requirement, wanted) if one.marker is None or one.marker.evaluate()]
        names = {canonicalize_name(one.name) for one in needed} & self._sources.keys()
        if names and (missing := names - {one.get("name") for one in read(lock).get("package", [])}):
            raise UsageError(
                f"{lock.name} is out of date: {self._shown} has a source for {min(missing)}, which is not in it",
                hint="uv lock" if lock.name == "uv.lock" else f"uv lock --script {self._shown}",
            )

    def translated(self, wanted: Sequence[str]) -> tuple[tuple[str, ...], dict[str, tuple[str, ...]]]:
        """The requirements, and the indexes that serve some of them."""
        if wanted and (named := _FOR_VERSIONS & self._settings.keys()):
            raise self._refused(f"its [tool.uv] has {min(named)}")
        for name, index in self._indexes.items():
            if not index.get("explicit"):
                raise self._refused(f"its index {name or index.get('url')} serves all packages")
        scopes: dict[str, list[str]] = {}
        pip = [self._one(text, scopes) for text in wanted]
        return tuple(pip), {url: tuple(names) for url, names in scopes.items()}

    def _one(self, text: str, scopes: dict[str, list[str]]) -> str:
        requirement = self._requirement(text)
        name = canonicalize_name(requirement.name)
        source = self._sources.get(name)
        differs = isinstance(source, list) or (isinstance(source, dict) and not _CONDITIONS.isdisjoint(source))
        if source is None or (name in _TORCH and differs):  # each host has the torch that fits it
            return text
        if differs:
            raise self._refused(f"{name} has several sources, or one for some cases only")
        if "index" in source:
            index = self._indexes.get(source["index"])
            if index is None:
                raise UsageError(f"{self._shown}: {name} uses the index {source['index']!r}, which it does not define")
            scopes.setdefault(index["url"], []).append(requirement.name)
            return text
        extras = f"[{','.join(sorted(requirement.extras))}]" if requirement.extras else ""
        marker = f" ; {requirement.marker}" if requirement.marker else ""
        return f"{requirement.name}{extras} @ {self._url(name, source)}{marker}"

    def _requirement(self, text: str) -> Requirement:
        try:
            return Requirement(text)
        except InvalidRequirement:
            raise UsageError(f"{self._shown}: invalid requirement {text!r}", hint='as in "numpy>=2"') from None

    def _url(self, name: str, source: Mapping[str, Any]) -> str:
        inner = f"#subdirectory={source['subdirectory']}" if "subdirectory" in source else ""
        if "git" in source:
            revision = next((source[key] for key in ("rev", "tag", "branch") if key in source), None)
            return f"git+{source['git']}" + (f"@{revision}" if revision else "") + inner
        if "path" in source:
            return Path(self._base, source["path"]).resolve().as_uri() + inner
        if "url" in source:
            return f"{source['url']}{inner}"
        raise self._refused(f"{name} is a part of its workspace")

    def _refused(self, why: str) -> UsageError:
        if self._shown.endswith(".toml"):
            return UsageError(f"{self._shown} has no uv.lock, and {why}", hint="uv lock")
        return UsageError(f"{self._shown} has no lock, and {why}", hint=f"uv lock --script {self._shown}")


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
