"""[tool.skyfab] in a project's pyproject.toml: the defaults of `skyfab run`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from skyfab._util import schema
from skyfab.cli.image_options import ImageOptions
from skyfab.errors import UsageError
from skyfab.inventory import detect
from skyfab.inventory.host import CHECKS, expanded


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
        from skyfab.calls.manifest import read
        from skyfab.calls.modules import folders_above

        for folder in folders_above(script):
            if (file := folder / "pyproject.toml").is_file():
                tools = read(file).get("tool")
                if isinstance(tools, Mapping) and "skyfab" in tools:
                    return _settings(tools["skyfab"], file)
        return cls()


def _settings(table: object, file: Path) -> ProjectSettings:
    if not isinstance(table, Mapping):
        raise UsageError(f"{file}: [tool.skyfab] must be a table, not {schema.name_of(table)}")
    values, mistakes = schema.parse_table(table, _CHECKS)
    if mistakes:
        lines = [
            (f"{key}: {problem}" if key in _CHECKS else problem) + (f" ({hint})" if hint else "")
            for key, problem, hint in mistakes
        ]
        raise UsageError("\n  ".join([f"{file}: [tool.skyfab]", *lines]))
    for key in values.keys() & {"inventory", "requirements", "lock"}:
        if key == "inventory" and detect.is_word(values[key]):
            continue
        values[key] = str(file.parent / expanded(values[key]))
    if "env-file" in values:
        values["env-file"] = tuple(str(file.parent / expanded(path)) for path in values["env-file"])
    if "hosts" in values:
        values["hosts"] = ",".join(values["hosts"])
    values = {key.replace("-", "_"): value for key, value in values.items()}
    about = {name: values.pop(name) for name in [*values] if name in ImageOptions.__dataclass_fields__}
    return ProjectSettings(image=ImageOptions(**about), **values)


def _texts(value: object) -> tuple[str, ...]:
    return schema.parse(tuple[str, ...], [value] if isinstance(value, str) else value)


def _number(value: object) -> int:
    if (number := schema.parse(int, value)) < 1:
        raise UsageError("must be 1 or more")
    return number


_text = functools.partial(schema.parse, str)
_CHECKS: Final[Mapping[str, Callable[[Any], Any]]] = {
    "hosts": _texts,
    "inventory": _text,
    "ranks": _number,
    "workdir": CHECKS["workdir"],
    "pip": _texts,
    "index": _texts,
    "requirements": _text,
    "apt": _texts,
    "install": _text,
    "python": CHECKS["python"],
    "lock": _text,
    "env": CHECKS["env"],
    "env-file": _texts,
    "setup": CHECKS["setup"],
    "plugins": _texts,
}
"""For each key, the function that checks its value; some values are checked as those of hosts in an inventory."""
