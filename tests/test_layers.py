"""The layering: imports run one way between packages, nobody is too large, and big libraries stay where they belong.

Imports inside functions and under ``if TYPE_CHECKING`` count like any other.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tools import code_map

ROOT = Path(__file__).parents[1] / "skyfab"

MAY_IMPORT = {
    # A package or module, and what of ours it may import besides itself.
    "_util": "",
    "errors": "",
    "context": "errors",
    "protocol": "errors context",
    "files": "errors _util protocol",  # it runs on both sides
    "host": "errors context protocol files",  # it is shipped to hosts and meets nothing else there
    "host.device": "errors context protocol",
    "inventory": "errors _util",
    "providers": "errors _util inventory",
    "calls": "errors _util context protocol inventory files",
    "engines": "errors _util context protocol inventory calls plugins host session ui",  # a pool is given to them
    "plugins": "errors context protocol inventory calls host engines",  # elastic ranks load functions as workers do
    "ui": "errors _util",
    "ssh": "errors _util protocol inventory ui",  # logins may ask the user
    "session": "errors _util protocol inventory ui ssh host",
    "inspect": "errors _util inventory host calls session",
    "detached": "errors _util context protocol inventory calls ssh session ui",
    "env": "errors _util protocol host inventory calls ssh session",
    "device": "errors _util context protocol host",
    "pool": "errors _util context protocol inventory calls plugins ssh session detached env ui device files host"
    " inspect providers engines",
    "inspect.doctor": "errors _util protocol inventory calls session env ui host pool",
    "inspect.top": "errors _util inventory calls session detached ui host pool",
    "demo": "context",
    "cli": "errors _util context protocol inventory calls plugins ssh session detached env ui files inspect pool lab"
    " demo host",
    "lab": "errors _util",  # it makes machines and does not use them, so that tests of anything can use it
    "__main__": "cli",
    "pytest_plugin": "errors protocol calls lab",
}
"""A subpackage may be named with more than its package has."""

LARGEST_MODULE = 450
"""Lines, unless a reason is given here."""
LARGER = {
    "pool.compute": "all that users do with a pool, with what each of them promises; most of it is docstrings",
}
"""Longer modules, each with the reason why it is one noun."""
LONGEST_FUNCTION = 60
"""Lines, unless a reason is given here."""
LONGER = {
    "cli.run:run": "the options of the command, one line each",
    "cli.sweep:sweep": "the options of the command, one line each",
    "lab.lab:start": "the options of a lab, each with a line of documentation",
    "pool.compute:__init__": "the options of a pool, each with its sentence",
}
"""Longer functions, each with the reason."""
MOST_PARAMETERS = 6
"""Of a constructor, without self. Compute is the user's own: each option is one that somebody types."""

OUTSIDE = {
    # A library, and the only modules that may import it.
    "cryptography": {"_util.certificate"},  # paramiko brings it
    "cloudpickle": {"protocol.codec"},
    "dask": {"engines.dask", "host.dask_host"},
    "distributed": {"engines.dask", "host.dask_host"},
    "exceptiongroup": {"errors"},
    "fabric": {"ssh.fabric"},
    "invoke": {"cli.invoke_tasks"},
    "paramiko": {"ssh.client", "ssh.fabric"},
    "pathspec": {"calls.gitignore"},
    "optuna": {"engines.study"},
    "packaging": {"calls.manifest", "env.lock", "env.resolve", "env.wheels"},
    "pytest": {"pytest_plugin"},
    "rich": {"inspect.top.view", "ui.table"},
    "shtab": {"cli.completion"},
    "tornado": {"host.dask_host"},  # distributed brings it
    "tomli": {"_util.toml"},
    "tomllib": {"_util.toml"},  # of the standard library, from Python 3.11 on
    "numpy": {"protocol.plain_data"},
    "torch": {
        "protocol.codec",
        "protocol.same_gpus",
        "protocol.plain_data",
        "plugins",
        "device",
        "host.device",
        "host.ask.measure",
        "cli.train",
        "demo.digits",
    },
    "joblib": {"engines.joblib_backend", "plugins"},
    "jax": {"plugins"},
    "jaxlib": {"plugins"},
    "uv": {"env.uv"},
}
"""What is not here is not used at all."""

ONLY_INSIDE_FUNCTIONS = {"torch", "jax", "numpy", "rich", "dask", "distributed", "optuna", "tornado"}
"""They take long to import, or are not everywhere: whoever does not need them does not wait for them."""
ENGINES = {"host.dask_host"}
"""What hosts import only if the user's image has the engine."""
WITHOUT_TORCH = {
    "device",
    "device.batches",
    "device.devices",
    "device.call_site",
    "device.profile",
    "device.storages",
    "device.stream",
    "host.device",
    "host.device.entry",
    "host.device.stay",
    "host.device.wire",
}
"""What the other packages import of `device`. Its other modules are imported when a device is asked for."""


class Import:
    """One import statement of ours, resolved."""

    def __init__(self, module: str, target: str, *, line: int, lazy: bool, typing: bool) -> None:
        self.module, self.target, self.line, self.lazy, self.typing = module, target, line, lazy, typing

    def __repr__(self) -> str:
        return f"skyfab/{self.module.replace('.', '/')}.py:{self.line} imports {self.target}"

    @property
    def outside(self) -> str | None:
        """The library, where it is none of ours and not the standard library's, and imported when the program runs."""
        top = self.target.partition(".")[0]
        return None if self.typing or top == "skyfab" or top in sys.stdlib_module_names else top

    @property
    def source(self) -> str:
        """The part of skyfab that imports: the longest name that MAY_IMPORT has."""
        names = [self.module.rsplit(".", cut)[0] for cut in range(self.module.count(".") + 1)]
        return next((name for name in names if name in MAY_IMPORT), names[-1])

    @property
    def goal(self) -> str:
        """Which part of skyfab is imported; empty for the package itself."""
        return self.target.removeprefix("skyfab").removeprefix(".").partition(".")[0]


def modules() -> dict[str, Path]:
    """Dotted names below skyfab; the package itself is the empty name."""
    found = {}
    for path in sorted(ROOT.rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def absolute(statement: ast.ImportFrom, path: Path) -> str:
    """Where ``from … import`` imports from, relative or not."""
    folders = ("skyfab", *path.relative_to(ROOT).parts[:-1])
    base = folders[: len(folders) - statement.level + 1] if statement.level else ()
    return ".".join((*base, *filter(None, [statement.module])))


def imports_of(module: str, path: Path) -> Iterator[Import]:
    def walk(node: ast.AST, lazy: bool, typing: bool) -> Iterator[Import]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Import):
                for alias in child.names:
                    yield Import(module, alias.name, line=child.lineno, lazy=lazy, typing=typing)
            elif isinstance(child, ast.ImportFrom):
                origin = absolute(child, path)
                for alias in child.names:
                    inner = f"{origin}.{alias.name}"
                    is_module = inner.startswith("skyfab.") and inner.removeprefix("skyfab.") in MODULES
                    yield Import(module, inner if is_module else origin, line=child.lineno, lazy=lazy, typing=typing)
            else:
                inside = isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
                types = isinstance(child, ast.If) and "TYPE_CHECKING" in ast.dump(child.test)
                yield from walk(child, lazy or inside, typing or types)

    yield from walk(TREES[module], False, False)


MODULES = modules()
TREES = {module: ast.parse(path.read_text()) for module, path in MODULES.items()}
IMPORTS = [one for module, path in MODULES.items() for one in imports_of(module, path)]


def test_every_module_has_its_place() -> None:
    """A new package is put into MAY_IMPORT by whoever adds it."""
    assert {module.partition(".")[0] for module in MODULES} - {""} - set(MAY_IMPORT) == set()


def test_imports_run_one_way() -> None:
    wrong = [
        one
        for one in IMPORTS
        if one.module and one.target.startswith("skyfab.")
        if one.goal not in ("", one.source.partition(".")[0]) and one.goal not in MAY_IMPORT[one.source].split()
    ]
    assert not wrong


def test_no_module_imports_itself_in_a_circle() -> None:
    """Also within one package, and by imports inside functions."""
    edges: dict[str, set[str]] = {}
    for one in IMPORTS:
        target = one.target.removeprefix("skyfab.")
        if one.target.startswith("skyfab.") and target != one.module:
            edges.setdefault(one.module, set()).add(target)
    done: set[str] = set()

    def visit(module: str, way: tuple[str, ...]) -> None:
        assert module not in way, " → ".join((*way, module))
        if module not in done:
            for target in sorted(edges.get(module, ())):
                visit(target, (*way, module))
            done.add(module)

    for module in sorted(edges):
        visit(module, ())


def test_what_hosts_run_needs_the_standard_library_and_cloudpickle() -> None:
    """errors may use exceptiongroup where there is one; numpy and torch are imported where theirs is unpickled."""
    shipped = [one for one in IMPORTS if one.source in ("errors", "context", "protocol", "files", "host")]
    shipped = [one for one in shipped if one.module not in ENGINES]
    assert {one.outside for one in shipped} - {None} <= {"cloudpickle", "exceptiongroup", "numpy", "torch"}


@pytest.mark.parametrize("library", sorted({one.outside for one in IMPORTS} - {None}))
def test_a_library_is_imported_only_where_it_belongs(library: str) -> None:
    allowed = OUTSIDE.get(library, set())
    wrong = [
        one for one in IMPORTS if one.outside == library and one.module not in allowed and one.source not in allowed
    ]
    assert not wrong


def test_slow_libraries_are_imported_inside_functions_only() -> None:
    early = [one for one in IMPORTS if one.outside in ONLY_INSIDE_FUNCTIONS and not one.lazy]
    assert not [
        one for one in early if one.source not in ("demo", "device", "host.device") or one.module in WITHOUT_TORCH
    ]


def test_nobody_inside_imports_the_public_face() -> None:
    """`import skyfab` is for users; our modules name the module they need. `__version__` is the face's own."""
    assert not [one for one in IMPORTS if one.target == "skyfab" and one.source != "cli"]


# ---- sizes


def lines(path: Path) -> int:
    return len(path.read_text().splitlines())


def test_no_module_is_too_long() -> None:
    found = {module: lines(path) for module, path in MODULES.items() if lines(path) > LARGEST_MODULE}
    assert found.keys() == LARGER.keys(), found


def test_no_function_is_too_long() -> None:
    found = {}
    for module, tree in TREES.items():
        for node in ast.walk(tree):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                length = (node.end_lineno or 0) - node.lineno + 1
                if length > LONGEST_FUNCTION:
                    found[f"{module}:{node.name}"] = length
    assert found.keys() == LONGER.keys(), found


def test_constructors_take_few_parameters() -> None:
    found = {}
    for module, tree in TREES.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef) and node.name == "__init__":
                count = len(node.args.args) + len(node.args.kwonlyargs) - 1
                if count > MOST_PARAMETERS and module != "pool.compute":
                    found[f"{module}:{node.lineno}"] = count
    assert found == {}


# ---- the drawing


def test_the_map_shows_every_module() -> None:
    """`python -m tools.code_map` draws it anew."""
    assert code_map.drawn(code_map.PAGE.read_text()) == code_map.drawing()
