"""[tool.skyfab] in a project's pyproject.toml: the defaults of `skyfab run`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from skyfab.cli.image_options import ImageOptions
from skyfab.errors import UsageError
from skyfab.inventory.host import CHECKS, did_you_mean, kind


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
                    raise UsageError(f"{file}: [tool] must be a table, not {kind(tools)}")
                if (table := tools.get("skyfab")) is not None:
                    return _settings(table, file)
        return cls()


def _settings(table: object, file: Path) -> ProjectSettings:
    if not isinstance(table, Mapping):
        raise UsageError(f"{file}: [tool.skyfab] must be a table, not {kind(table)}")
    values, mistakes = dict[str, Any](), list[str]()
    for key, value in table.items():
        check = _KEYS.get(key)
        if check is None:
            hint = did_you_mean(key, _KEYS) or f"the keys are {', '.join(_KEYS)}"
            mistakes.append(f"{key} is no key of it ({hint})")
            continue
        try:
            values[key.replace("-", "_")] = check(value, file.parent)
        except UsageError as error:
            mistakes.append(f"{key} {error.message}" + (f" ({error.hint})" if error.hint else ""))
    if mistakes:
        raise UsageError("\n  ".join([f"{file}: [tool.skyfab]", *mistakes]))
    about = {name: values.pop(name) for name in [*values] if name in ImageOptions.__dataclass_fields__}
    return ProjectSettings(image=ImageOptions(**about), **values)


def _text(value: object, _: Path) -> str:
    if not isinstance(value, str) or not value.strip():
        raise UsageError(f"must be a string, not {kind(value) if value != '' else 'empty'}")
    return value


def _number(value: object, _: Path) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise UsageError("must be a whole number from 1 on")
    return value


def _texts(value: object, _: Path) -> tuple[str, ...]:
    items = [value] if isinstance(value, str) else value
    if not isinstance(items, list) or not all(isinstance(item, str) for item in items):
        raise UsageError(f"must be an array of strings, not {kind(value)}")
    return tuple(items)


def _hosts(value: object, base: Path) -> str:
    return ",".join(_texts(value, base))


def _path(value: object, base: Path) -> str:
    return str(base / Path(_text(value, base)).expanduser())


def _paths(value: object, base: Path) -> tuple[str, ...]:
    return tuple(_path(item, base) for item in _texts(value, base))


def _as_for_hosts(key: str) -> Callable[[object, Path], Any]:
    """Checks a value as an inventory's key of that name."""
    return lambda value, _: CHECKS[key](value)


_KEYS: Final[Mapping[str, Callable[[object, Path], Any]]] = {
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
