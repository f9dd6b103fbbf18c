"""The layering: imports run one way between packages, nobody is too large, and big libraries stay where they belong.

Imports inside functions and under ``if TYPE_CHECKING`` count like any other.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1] / "skyfab"

MAY_IMPORT = {
    # A package or module, and what of ours it may import besides itself.
    "errors": "",
    "scripts": "",
    "toml": "",
    "notebook": "",
    "sizes": "",
    "context": "errors",
    "protocol": "errors context",
    "agent": "errors context protocol",  # it is shipped to hosts and meets nothing else there
    "inventory": "errors toml notebook",
    "providers": "errors scripts inventory",
    "calls": "errors sizes toml notebook context protocol inventory",
    "plugins": "errors context protocol inventory calls",
    "session": "errors scripts protocol inventory ui",  # logins may ask the user
    "detached": "errors sizes notebook scripts context protocol inventory calls session ui",
    "env": "errors sizes scripts toml protocol inventory calls session detached",
    "ui": "errors sizes",
    "survey": "errors sizes inventory",  # one half of it runs on hosts
    "device": "errors context protocol agent",  # one half of it runs on hosts
    "files": "errors sizes protocol",  # one half of it runs on hosts
    "pool": "errors sizes notebook scripts context protocol inventory calls plugins session detached env ui device"
    " files survey providers",
    "doctor": "errors sizes toml protocol inventory calls session env ui survey pool",  # one half of it runs on hosts
    "top": "errors inventory calls session detached ui survey pool",
    "cli": "errors sizes toml context protocol inventory calls plugins session detached env ui files survey pool doctor"
    " top lab",
    "lab": "errors scripts",  # it makes machines and does not use them, so that tests of anything can use it
    "__main__": "cli",
    "pytest_plugin": "errors protocol calls lab",
}

LARGEST_MODULE = 450
"""Lines."""
LARGEST = {
    "protocol": 2490,
    "agent": 4430,
    "session": 4850,
    "pool": 5200,
    "env": 3000,
    "calls": 1775,
    "inventory": 2450,
    "providers": 700,
    "detached": 960,
    "files": 1170,
    "plugins": 1100,
    "survey": 790,
    "ui": 1740,
    "doctor": 1330,
    "top": 1000,
    "cli": 3810,
    "lab": 2370,
    "device": 5500,
}
"""Lines of a whole package."""
MOST_PARAMETERS = 6
"""Of a constructor, without self. Compute is the user's own: each option is one that somebody types."""

OUTSIDE = {
    # A library, and the only modules that may import it.
    "cryptography": {"device.copies"},  # paramiko brings it
    "cloudpickle": {"protocol.codec", "session.bundle", "session.bootstrap"},
    "exceptiongroup": {"errors"},
    "fabric": {"session.transport.fabric"},
    "invoke": {"cli.invoke_tasks"},
    "paramiko": {"session.transport.client", "session.transport.fabric"},
    "pathspec": {"calls.project"},
    "packaging": {"calls.manifest", "env.lock", "env.resolve", "env.wheels"},
    "pytest": {"pytest_plugin"},
    "rich": {"ui.table"},
    "tomli": {"toml"},
    "tomllib": {"toml"},  # of the standard library, from Python 3.11 on
    "numpy": {"protocol.safe_types"},
    "torch": {"protocol.codec", "protocol.safe_types", "plugins", "device", "doctor.host_speed", "cli.train"},
    "jax": {"plugins"},
    "jaxlib": {"plugins"},
    "uv": {"env.uv"},
    "yaml": {"inventory.yaml_nodes"},
}
"""What is not here is not used at all."""

ONLY_INSIDE_FUNCTIONS = {"torch", "jax", "numpy", "rich", "yaml"}
"""They take long to import, or are not everywhere: whoever does not need them does not wait for them."""
WITHOUT_TORCH = {
    "device",
    "device.batches",
    "device.devices",
    "device.entry",
    "device.places",
    "device.profile",
    "device.records",
    "device.stream",
    "device.ticker",
    "device.wire",
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

    yield from walk(ast.parse(path.read_text()), False, False)


MODULES = modules()
IMPORTS = [one for module, path in MODULES.items() for one in imports_of(module, path)]


def test_every_module_has_its_place() -> None:
    """A new package is put into MAY_IMPORT by whoever adds it."""
    assert {module.partition(".")[0] for module in MODULES} - {""} - set(MAY_IMPORT) == set()


def test_imports_run_one_way() -> None:
    wrong = [
        one
        for one in IMPORTS
        if one.module and one.target.startswith("skyfab.")
        if one.goal not in ("", one.source) and one.goal not in MAY_IMPORT[one.source].split()
    ]
    assert not wrong


def test_no_module_imports_itself_in_a_circle() -> None:
    """Also within one package."""
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


def test_what_hosts_run_needs_the_standard_library_and_cloudpickle() -> None:
    """errors may use exceptiongroup where there is one; numpy and torch are imported where theirs is unpickled."""
    shipped = [one for one in IMPORTS if one.source in ("errors", "context", "protocol", "agent")]
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
    assert not [one for one in early if one.source != "device" or one.module in WITHOUT_TORCH]


def test_nobody_inside_imports_the_public_face() -> None:
    """`import skyfab` is for users; our modules name the module they need. `__version__` is the face's own."""
    assert not [one for one in IMPORTS if one.target == "skyfab" and one.source != "cli"]


# ---- sizes


def lines(path: Path) -> int:
    return len(path.read_text().splitlines())


def test_no_module_is_too_long() -> None:
    assert {module: lines(path) for module, path in MODULES.items() if lines(path) > LARGEST_MODULE} == {}


@pytest.mark.parametrize("package", LARGEST)
def test_no_package_is_too_large(package: str) -> None:
    total = sum(lines(path) for module, path in MODULES.items() if module.partition(".")[0] == package)
    assert total <= LARGEST[package]


def test_constructors_take_few_parameters() -> None:
    found = {}
    for module, path in MODULES.items():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef) and node.name == "__init__":
                count = len(node.args.args) + len(node.args.kwonlyargs) - 1
                if count > MOST_PARAMETERS and module != "pool.compute":
                    found[f"{module}:{node.lineno}"] = count
    assert found == {}


# ---- the drawing


def drawn() -> set[str]:
    """The modules in the map of docs/how_it_works.md."""
    found, folder = set(), Path()
    text = (ROOT.parent / "docs" / "how_it_works.md").read_text().partition("\nskyfab/\n")[2].partition("```")[0]
    for line in text.splitlines():
        name = line.lstrip("│├└─ ").split()[0]
        depth = (len(line) - len(line.lstrip("│├└─ "))) // 4
        folder = Path(*folder.parts[: depth - 1])
        if name.endswith("/"):
            folder /= name
        else:
            found.add((folder / name).as_posix())
    return found


def test_the_drawing_of_the_house_is_the_folder_listing() -> None:
    files = {path.relative_to(ROOT).as_posix() for path in ROOT.rglob("*") if path.suffix in (".py", ".sh", ".typed")}
    assert drawn() == files
