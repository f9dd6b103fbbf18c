"""[tool.skyfab] in a project's pyproject.toml: the defaults of `skyfab run`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from skyfab._util import schema
from skyfab.cli.image_options import ImageOptions
from skyfab.errors import UsageError
from skyfab.inventory.host import CHECKS


@dataclass(frozen=True, kw_only=True)
class ProjectSettings:
    """The defaults; each field is a key of the table."""

    hosts: str | None = None
    inventory: str | None = None
    ranks: int | None = None
    workdir: str = "auto"
    env: Mapping[str, str] = field(default_factory=dict)
    env_file: tuple[str, ...] = ()
    setup: str = ""
    plugins: tuple[str, ...] = ()
    image: ImageOptions = field(default_factory=ImageOptions)

    @classmethod
    def of(cls, script: Path) -> ProjectSettings:
        """Those of the nearest pyproject.toml with such a table. Raises UsageError with every mistake in it."""
        from skyfab.calls.manifest import folders_above, read

        for folder in folders_above(script):
            if (file := folder / "pyproject.toml").is_file():
                tools = read(file).get("tool", {})
                if not isinstance(tools, Mapping):
                    raise UsageError(f"{file}: [tool] must be a table, not {schema.name_of(tools)}")
                if (table := tools.get("skyfab")) is not None:
                    return _settings(table, file)
        return cls()


def _settings(table: object, file: Path) -> ProjectSettings:
    if not isinstance(table, Mapping):
        raise UsageError(f"{file}: [tool.skyfab] must be a table, not {schema.name_of(table)}")
    checks = {key: _relative(check, file.parent) for key, check in _KEYS.items()}
    values, mistakes = schema.parse_table(table, checks)
    if mistakes:
        lines = [
            (problem if key not in checks else f"{key}: {problem}") + (f" ({hint})" if hint else "")
            for key, problem, hint in mistakes
        ]
        raise UsageError("\n  ".join([f"{file}: [tool.skyfab]", *lines]))
    values = {key.replace("-", "_"): value for key, value in values.items()}
    about = {name: values.pop(name) for name in [*values] if name in ImageOptions.__dataclass_fields__}
    return ProjectSettings(image=ImageOptions(**about), **values)


def _relative(check: Callable[[object, Path], Any], base: Path) -> Callable[[object], Any]:
    """The check with `base` as the folder that paths are relative to."""
    return lambda value: check(value, base)


def _text(value: object, _base: Path) -> str:
    if not isinstance(value, str) or not value.strip():
        raise UsageError(f"must be a string, not {schema.name_of(value) if value != '' else 'empty'}")
    return value


def _number(value: object, _base: Path) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise UsageError("must be 1 or more")
    return value


def _texts(value: object, _base: Path) -> tuple[str, ...]:
    items = [value] if isinstance(value, str) else value
    if not isinstance(items, list) or not all(isinstance(item, str) for item in items):
        raise UsageError(f"must be an array of strings, not {schema.name_of(value)}")
    return tuple(items)


def _hosts(value: object, base: Path) -> str:
    return ",".join(_texts(value, base))


def _path(value: object, base: Path) -> str:
    return str(base / Path(_text(value, base)).expanduser())


def _paths(value: object, base: Path) -> tuple[str, ...]:
    return tuple(_path(item, base) for item in _texts(value, base))


def _as_for_hosts(key: str) -> Callable[..., Any]:
    """Checks a value as an inventory's key of that name."""
    return lambda value, base: CHECKS[key](value)


_KEYS: Final[Mapping[str, Callable[..., Any]]] = {
    "hosts": _hosts,
    "inventory": _path,
    "ranks": _number,
    "workdir": _as_for_hosts("workdir"),
    "pip": _texts,
    "index": _texts,
    "requirements": _path,
    "apt": _texts,
    "install": _text,
    "python": _as_for_hosts("python"),
    "lock": _path,
    "env": _as_for_hosts("env"),
    "env-file": _paths,
    "setup": _as_for_hosts("setup"),
    "plugins": _texts,
}
"""For each key, the function that checks its value; paths are relative to the pyproject.toml."""
