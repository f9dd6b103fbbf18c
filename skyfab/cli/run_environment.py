"""The environment of `skyfab run`: that of the options, or else of the script, [tool.skyfab] or the project."""

from __future__ import annotations

import functools
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from skyfab._util import schema
from skyfab._util.suggest import did_you_mean
from skyfab.calls.image import Image
from skyfab.calls.manifest import find, read, text_of
from skyfab.calls.modules import folders_above
from skyfab.cli.run_options import ImageOptions, ScriptOptions
from skyfab.errors import UsageError
from skyfab.inventory.host import CHECKS, Host, checked, expanded
from skyfab.inventory.inventory import is_word
from skyfab.plugins import REGISTRY
from skyfab.plugins.base import Plugin

if TYPE_CHECKING:
    from skyfab.pool.compute import Compute


def project_of(options: ScriptOptions, script: Path) -> ProjectSettings:
    """Continues with the Python of the script's project. Returns the project's settings. Raises UsageError."""
    from skyfab.cli.interpreter import hand_over

    if not options.no_project:
        hand_over(script)
    return ProjectSettings.of(script)


def pool_of(
    options: ScriptOptions,
    script: Path,
    settings: ProjectSettings,
    *,
    ranks: int | None,
    here: int,
    plugins: Sequence[Plugin],
) -> Compute:
    """The pool for a script; without hosts and inventory, with `here` ranks on this machine. Raises UsageError."""
    from skyfab.cli.host_selection import selected
    from skyfab.pool.compute import Compute

    hosts = options.hosts or settings.hosts
    found, chosen = selected(hosts, options.inventory or settings.inventory)
    if options.container:
        chosen = tuple(host.in_container(options.container) for host in chosen)
    if hosts is None and found.source is None:
        ranks = ranks or here
    image = image_of(script, options, settings, chosen, no_project=options.no_project)
    return Compute(
        chosen,
        inventory=found,
        where=options.where,
        nodes=options.nodes,
        ranks=ranks or "auto",
        image=replace(image, program=str(script)),
        plugins=plugins,
        env=variables_of(options.env, options.env_file, settings),
        workdir=settings.workdir if options.workdir == "auto" else options.workdir,
    )


def image_of(
    script: Path, given: ImageOptions | None, settings: ProjectSettings, hosts: Sequence[Host], *, no_project: bool
) -> Image:
    """The image for a script on these hosts; unless `given` is None, says where it comes from. Raises UsageError."""
    tell, given = given is not None, given or ImageOptions()
    image, source = given.image(), "the command line"
    if not given.name_packages and (found := _found(script, given, settings, hosts, no_project=no_project)):
        source, described = found
        extra = {index for index in image.pip_indexes if index not in described.pip_indexes}
        install = image.install if given.install != "auto" else described.install
        image = replace(described, pip_indexes=(*extra, *described.pip_indexes), install=install)
        source += " and --with" if given.with_ else ""
    image = given.added_to(image)
    if tell and (image.pip or image.lock or image.apt or image.python != "auto"):
        print(f"environment: {_described(image)}, from {source}", file=sys.stderr)
    return replace(image, setup=settings.setup)


def _found(
    script: Path, given: ImageOptions, settings: ProjectSettings, hosts: Sequence[Host], *, no_project: bool
) -> tuple[str, Image] | None:
    """The image that the script or its project describes, and for the user, where."""
    # This machine, and interpreters that the inventory names, have what the project needs, but not what is added.
    are_ready = not given.with_ and all(host.is_here or host.python.startswith("/") for host in hosts)
    in_settings = settings.image.name_packages
    manifest = None if no_project else find(script, script_only=in_settings or are_ready)
    if manifest is not None:
        return manifest.source, Image.of_manifest(manifest)
    return ("[tool.skyfab]", settings.image.image()) if in_settings else None


def _described(image: Image) -> str:
    if image.python.startswith("/"):
        return image.python
    names = [re.split(r"[^\w.-]", text.strip(), maxsplit=1)[0] for text in (*image.pip, *image.apt)]
    if not names:
        return image.lock or f"Python {image.python}"
    names = [*dict.fromkeys(names)]
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


def plugins_of(names: Sequence[str]) -> list[Plugin]:
    """The plugins with these names. Raises UsageError."""
    for name in names:
        if name not in REGISTRY:
            raise UsageError(
                f"unknown plugin {name!r}", hint=did_you_mean(name, REGISTRY) or f"one of: {', '.join(REGISTRY)}"
            )
    return [REGISTRY[name]() for name in dict.fromkeys(names)]


# ---- settings of a project


@dataclass(frozen=True, kw_only=True)
class ProjectSettings:
    """[tool.skyfab] in a project's pyproject.toml: the defaults of `skyfab run`. Each field is a key of the table."""

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
        """Those of the nearest pyproject.toml with such a table. Raises UsageError."""
        for folder in folders_above(script):
            if (file := folder / "pyproject.toml").is_file():
                tools = read(file).get("tool")
                if isinstance(tools, Mapping) and "skyfab" in tools:
                    return _settings(tools["skyfab"], file)
        return cls()


def _settings(table: object, file: Path) -> ProjectSettings:
    if not isinstance(table, Mapping):
        raise UsageError(f"{file}: [tool.skyfab] must be a table, not {schema.name_of(table)}")
    try:
        values = schema.parse_table(table, _CHECKS)
    except schema.Mistake as error:
        where = f"{file}: [tool.skyfab]" + (f" {error.key}" if error.key in _CHECKS else "")
        raise UsageError(f"{where}: {error.problem}", hint=error.hint) from None
    for key in values.keys() & {"inventory", "requirements", "lock"}:
        if key == "inventory" and is_word(values[key]):
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


# ---- variables


def variables_of(given: Sequence[str], files: Sequence[str], settings: ProjectSettings) -> Mapping[str, str]:
    """The variables of --env, which override those of --env-file, which override the project's. Raises UsageError."""
    found = dict(settings.env)
    for file in (*settings.env_file, *files):
        found |= read_file(Path(file).expanduser())
    for text in given:
        name, equals, value = text.partition("=")
        if not equals and name not in os.environ:
            raise UsageError(f"--env={name}: not set in this shell", hint=f"--env={name}=VALUE")
        found[name] = value if equals else os.environ[name]
    env: Mapping[str, str] = checked("env", found, "--env")
    return env


def read_file(path: Path) -> dict[str, str]:
    """The variables of a file with a line ``NAME=VALUE`` for each. Raises UsageError, without the values.

    ``export`` may come first and comments follow; in double quotes, ``\\n``, ``\\"``, ``\\$`` and ``\\\\`` are escapes,
    and quoted values may have several lines. Nothing is expanded.
    """
    text = text_of(path)
    found: dict[str, str] = {}
    at = 0
    while at < len(text):
        match = _LINE.match(text, at)
        if match is None:
            raise UsageError(
                f"{path}: line {text.count(chr(10), 0, at) + 1} is not valid",
                hint="write NAME=VALUE, or # and a comment",
            )
        at = match.end()
        name, plain, single, double = match.groups()
        if name and double is not None:
            found[name] = re.sub(r"\\(.)", lambda one: {"n": "\n", "t": "\t", "r": "\r"}.get(one[1], one[1]), double)
        elif name:
            found[name] = (plain or "").strip() if single is None else single
    return found


_LINE = re.compile(
    r"""[ \t]*(?:
        (?:export[ \t]+)?([A-Za-z_]\w*)[ \t]*=[ \t]*
        (?: ((?!["'])(?:(?![ \t]\#)[^\n])*) | '([^']*)' | "((?:[^"\\]|\\.)*)" )
    )?[ \t]*(?:(?<![^\s"'])\#[^\n]*)?\r?(?:\n|\Z)""",
    re.VERBOSE | re.DOTALL | re.ASCII,
)
