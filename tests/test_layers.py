"""The layering: imports run one way (the picture is in docs and DESIGN.md), and big libraries stay where they belong.

Imports inside functions count like any other; those under ``if TYPE_CHECKING`` do not run and are free.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1] / "skyfab"

LAYERS = [
    # What stands in one line may import what stands in its own line and in the lines above it.
    "errors events context script nesting abreast cloud open_pools",  # what everybody shares
    "protocol",  # what the two sides of a connection share, and all they share
    "host selection inventory_file inventory image output calls",  # what the user says, as data
    "transport env bundle changes project parcel refs shell launch shells workdir records plugins outfit stacks",  # way
    "interrupts reader inbox timing backoff reconnect connection session",  # one agent on one host
    "answers node project_sync futures muster dispatch express addresses meeting",  # a pool: its hosts and calls
    "gang gangs elastic autopsy homecoming hearing spread",  # and those who work together
    "detached roster launcher",  # who belongs to it; runs without one
    "compute device",  # the pool itself
    "terminal view ui",  # what a person sees
    "commands cli",  # what a person types
]

AGENT_MAY_IMPORT = {"errors", "context", "protocol", "agent"}
"""It is shipped to hosts and meets nothing else there."""

LAB_MAY_IMPORT = {"errors", "lab"}
"""It makes machines and does not use them, so that tests of anything can use it."""
LAB_IS_IMPORTED_BY = {"cli", "commands", "lab"}

UPWARD = {
    # A module, what it imports against the order, and why that is right.
    ("compute", "ui"): "the pool opens its own view, unless it is told not to",
}

OUTSIDE = {
    # A library, and the only modules that may import it.
    "cloudpickle": {"protocol.codec", "bundle", "launch"},
    "exceptiongroup": {"errors"},
    "fabric": {"transport.fabric"},
    "invoke": {"cli"},
    "paramiko": {"transport.fabric"},
    "pathspec": {"project"},
    "packaging": {"env.lock", "env.resolve", "env.wheels"},
    "rich": {"ui"},
    "tomli": {"inventory_file", "env.lock"},
    "numpy": {"protocol.makers"},
    "torch": {"protocol.codec", "protocol.makers", "plugins", "device", "commands.train"},
    "jax": {"plugins"},
    "jaxlib": {"plugins"},
    "uv": {"env.uv"},
}
"""What is not here is not used at all."""

ONLY_INSIDE_FUNCTIONS = {"torch", "jax", "numpy", "rich"}
"""They take long to import, or are not everywhere: whoever does not need them does not wait for them."""


class Import:
    """One import statement of ours, resolved."""

    def __init__(self, module: str, target: str, *, line: int, lazy: bool) -> None:
        self.module, self.target, self.line, self.lazy = module, target, line, lazy

    def __repr__(self) -> str:
        return f"skyfab/{self.module.replace('.', '/')}.py:{self.line} imports {self.target}"

    @property
    def outside(self) -> str | None:
        """The library, where it is none of ours and not the standard library's."""
        top = self.target.partition(".")[0]
        return None if top == "skyfab" or top in sys.stdlib_module_names else top

    @property
    def source(self) -> str:
        return self.module.partition(".")[0]

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
    def walk(node: ast.AST, lazy: bool) -> Iterator[Import]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.dump(child.test):
                for other in child.orelse:
                    yield from walk(other, lazy)
            elif isinstance(child, ast.Import):
                for alias in child.names:
                    yield Import(module, alias.name, line=child.lineno, lazy=lazy)
            elif isinstance(child, ast.ImportFrom):
                origin = absolute(child, path)
                for alias in child.names:
                    inner = f"{origin}.{alias.name}"
                    is_module = inner.startswith("skyfab.") and inner.removeprefix("skyfab.") in MODULES
                    yield Import(module, inner if is_module else origin, line=child.lineno, lazy=lazy)
            else:
                yield from walk(child, lazy or isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)))

    yield from walk(ast.parse(path.read_text()), False)


MODULES = modules()
IMPORTS = [one for module, path in MODULES.items() for one in imports_of(module, path)]
RANK = {name: rank for rank, names in enumerate(LAYERS) for name in names.split()}


def test_every_module_has_its_place() -> None:
    """A new module is put into LAYERS by whoever adds it."""
    tops = {module.partition(".")[0] for module in MODULES} - {"", "agent", "lab"}
    assert tops - set(RANK) == set()


def test_imports_run_one_way() -> None:
    wrong = [
        one
        for one in IMPORTS
        if one.source in RANK and one.goal in RANK and RANK[one.goal] > RANK[one.source]
        if (one.source, one.goal) not in UPWARD
    ]
    assert not wrong


def test_the_exceptions_are_lazy_and_still_needed() -> None:
    """An import against the order stays inside a function; when it goes, its line in UPWARD goes too."""
    for exception in UPWARD:
        found = [one for one in IMPORTS if (one.source, one.goal) == exception]
        assert found, exception
        assert all(one.lazy for one in found), found


def test_no_module_imports_itself_in_a_circle() -> None:
    """Also within one line of the table."""
    edges: dict[str, set[str]] = {}
    for one in IMPORTS:
        target = one.target.removeprefix("skyfab.")
        if one.target.startswith("skyfab.") and not one.lazy and target != one.module:
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


def test_the_client_ships_the_agent_and_never_imports_it() -> None:
    assert not [one for one in IMPORTS if one.goal == "agent" and one.source != "agent"]


def test_the_agent_imports_nothing_of_the_client() -> None:
    wrong = [one for one in IMPORTS if one.source == "agent" and one.target.startswith("skyfab")]
    assert not [one for one in wrong if one.goal not in AGENT_MAY_IMPORT]


def test_what_hosts_run_needs_the_standard_library_and_cloudpickle() -> None:
    """errors may use exceptiongroup where there is one; numpy and torch are imported where theirs is unpickled."""
    shipped = [one for one in IMPORTS if one.source in AGENT_MAY_IMPORT]
    assert {one.outside for one in shipped} - {None} <= {"cloudpickle", "exceptiongroup", "numpy", "torch"}


def test_the_lab_stands_beside() -> None:
    wrong = [one for one in IMPORTS if one.source == "lab" and one.target.startswith("skyfab")]
    assert not [one for one in wrong if one.goal not in LAB_MAY_IMPORT]
    assert not [one for one in IMPORTS if one.goal == "lab" and one.source not in LAB_IS_IMPORTED_BY]


@pytest.mark.parametrize("library", sorted({one.outside for one in IMPORTS} - {None}))
def test_a_library_is_imported_only_where_it_belongs(library: str) -> None:
    allowed = OUTSIDE.get(library, set())
    wrong = [
        one for one in IMPORTS if one.outside == library and one.module not in allowed and one.source not in allowed
    ]
    assert not wrong


def test_slow_libraries_are_imported_inside_functions_only() -> None:
    assert not [one for one in IMPORTS if one.outside in ONLY_INSIDE_FUNCTIONS and not one.lazy]


def test_nobody_inside_imports_the_public_face() -> None:
    """`import skyfab` is for users; our modules name the module they need. `__version__` is the face's own."""
    assert not [one for one in IMPORTS if one.target == "skyfab" and one.source not in ("cli", "commands")]
