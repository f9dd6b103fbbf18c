"""`Image`: the specification of the environment that functions need on a host. Data only."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from skyfab._util.html import ShownAsTable
from skyfab.errors import UsageError
from skyfab.inventory.host import checked

if TYPE_CHECKING:
    from skyfab.calls.manifest import Manifest

_HASH = re.compile(r"\s+--hash[=\s]\s*(\S+)")


def split_hashes(text: str) -> tuple[str, tuple[str, ...]]:
    """A requirement without its ``--hash`` options, and their values."""
    return _HASH.sub("", text), tuple(_HASH.findall(text))


@dataclass(frozen=True, slots=True)
class PipIndex:
    """A package index at `url` that serves the named `packages` and no others."""

    url: str
    packages: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "packages", tuple(self.packages))


@dataclass(frozen=True, slots=True, kw_only=True)
class Image(ShownAsTable):
    """The interpreter, packages, variables and project code that a function needs.

    `python` is this machine's version (``"auto"``), another one (``"3.11"``), or the path of an interpreter on the
    host. `pip` are requirements as for pip, `pip_indexes` indexes for some of them, `lock` a pylock.toml or uv.lock
    with their versions. `install` says whether this machine sends them or hosts download them (``"push"``,
    ``"fetch"``, ``"auto"``). `apt` are Debian packages, `env` variables, `setup` shell lines that run before Python.

    `includes` are modules, folders and data files that are sent besides the caller's own project, and `excludes`
    patterns of those that are not. The project is that of `program`, a script; else that of this program.
    """

    python: str = "auto"
    """``"auto"``: this machine's major.minor; ``"3.11"``; or an absolute path on the host, used as it is."""
    pip: tuple[str, ...] = ()
    pip_indexes: tuple[PipIndex, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    apt: tuple[str, ...] = ()
    includes: tuple[str, ...] = ()
    """Local modules, folders and data files to send in addition to the caller's own project.

    They can be imported. They are also copied to the working folder, at the same path relative to the current folder;
    those outside of the current folder, under their base name.
    """
    excludes: tuple[str, ...] = ()
    """Patterns, as in .gitignore, of project files that are not sent."""
    lock: str | None = None
    """A pylock.toml to use as it is; or a uv.lock, which fixes the versions of the packages in `pip`."""
    install: Literal["auto", "push", "fetch"] = "auto"
    """``"push"``: this machine sends packages. ``"fetch"``: hosts download them. ``"auto"``: what works."""
    setup: str = ""
    """Shell lines that run on a host before Python, after those of the inventory: ``module load cuda``."""
    program: str | None = None
    """The script whose project is sent, and the modules next to it; None: this program's own.

    ``FOLDER/-m NAMES`` means the modules with these names, separated by spaces, that can be imported in the folder.
    """

    def _table(self) -> tuple[Sequence[str], Sequence[Sequence[object]]]:
        given = [(each.name, getattr(self, each.name)) for each in fields(self)]
        return ("field", "value"), [(name, value) for name, value in given if value not in ((), None, {}, "", "auto")]

    def __repr__(self) -> str:
        _, rows = self._table()
        return f"Image({', '.join(f'{name}={value!r}' for name, value in rows)})"

    def __post_init__(self) -> None:
        if self.install not in ("auto", "push", "fetch"):
            hint = 'expected "auto", "push" or "fetch"'
            raise UsageError(f"invalid install={self.install!r}", hint=hint)
        for name in ("pip", "pip_indexes", "apt", "includes", "excludes"):
            value = getattr(self, name)
            object.__setattr__(self, name, (value,) if isinstance(value, str) else tuple(value))
        for name in ("python", "env", "setup"):
            object.__setattr__(self, name, checked(name, getattr(self, name), name))
        for package in self.apt:
            if not re.fullmatch(r"[a-z0-9][a-z0-9+.:-]*(=[A-Za-z0-9.+:~-]+)?", package):
                raise UsageError(f"apt: {package!r} is not the name of a Debian package")

    @property
    def is_exact(self) -> bool:
        """Whether `lock` names every file: a pylock.toml, and not a uv.lock or that of a script, ``train.py.lock``."""
        return self.lock is not None and not (Path(self.lock).name == "uv.lock" or self.lock.endswith(".py.lock"))

    @classmethod
    def of_project(cls, path: str | os.PathLike[str] = ".") -> Image:
        """The image that a script or project describes, as `skyfab run` finds it.

        `path` is a script or a folder. Uses the first of: the script's PEP 723 block; the pyproject.toml, with its
        uv.lock, or the requirements.txt, of its folder or the nearest one above it in the repository. Raises UsageError
        if there is none.
        """
        from skyfab.calls.manifest import find

        found = find(Path(path).expanduser())
        if found is None:
            raise UsageError(
                f"{path}: no list of packages found",
                hint="add a pyproject.toml, a requirements.txt, or a PEP 723 block at the top of the script",
            )
        return cls.of_manifest(found)

    @classmethod
    def of_manifest(cls, found: Manifest) -> Image:
        """The image with the packages that a script or project needs, as `found`."""
        indexes = tuple(PipIndex(url, packages) for url, packages in found.indexes.items())
        return cls(pip=found.pip, pip_indexes=indexes, lock=found.lock)
