"""The public face: the names are pinned, load lazily, and each says what it is."""

from __future__ import annotations

import ast
import doctest
import importlib
import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

import skyfab
from skyfab import errors

NAMES = [
    "ActorLost",
    "AuthenticationRefused",
    "BroadcastError",
    "Call",
    "CallCancelled",
    "CallError",
    "CallTimeout",
    "Compute",
    "Container",
    "DeviceError",
    "Function",
    "Host",
    "HostError",
    "HostKeyRefused",
    "HostLost",
    "HostUnfit",
    "Image",
    "InstanceInfo",
    "Inventory",
    "InventoryError",
    "NotPicklable",
    "PeersUnreachable",
    "PipIndex",
    "PoolError",
    "ProtocolError",
    "Ref",
    "RemoteError",
    "RemoteTraceback",
    "Run",
    "SkyfabError",
    "UnknownHost",
    "Unreachable",
    "UntrustedResult",
    "UsageError",
    "Vagrant",
    "WorkerDied",
    "attach",
    "attach_device",
    "fetch",
    "function",
    "gather",
    "instance_info",
    "keep",
    "load_on",
    "memory",
    "merge",
    "prefetch",
    "remote",
    "report",
    "run_on",
    "runs",
    "shard",
    "silent",
    "stderr",
    "stdout",
    "stream",
    "synchronize",
]
"""A name is added or taken away here on purpose, or not at all."""

MODULES = ["device", "lab", "plugins"]
"""Reached as ``sky.device``, ``sky.lab`` and ``sky.plugins``."""

SOURCE = Path(skyfab.__file__)


def test_the_public_names_are_these() -> None:
    assert skyfab.__all__ == NAMES == sorted(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_a_public_name_loads_and_has_a_docstring(name: str) -> None:
    value = getattr(skyfab, name)
    assert inspect.isclass(value) or callable(value)
    assert (value.__doc__ or "").strip(), f"{name} has no docstring"
    assert not (value.__doc__ or "").startswith(f"{name}("), "the docstring that dataclass makes up says nothing"


def public_members() -> list[tuple[str, object]]:
    """The public functions, methods and properties of the public classes that are our own."""
    found = []
    for name in NAMES:
        value = getattr(skyfab, name)
        if inspect.isclass(value):
            for member, thing in vars(value).items():
                if not member.startswith("_") and (
                    inspect.isfunction(thing) or isinstance(thing, (property, classmethod))
                ):
                    found.append((f"{name}.{member}", thing))
    return found


def test_public_methods_have_docstrings() -> None:
    """Those of errors and values that only repeat their name may go without: they are listed here."""
    obvious = {"BroadcastError.derive", "PoolError.derive", "Function.label"}
    bare = {name for name, thing in public_members() if not (getattr(thing, "__doc__", None) or "").strip()}
    assert bare <= obvious


def callables() -> dict[str, object]:
    """What users call: functions and constructors of the face, methods of its classes, plugins and the lab's tasks."""
    made_by_us = {"Call", "Function", "Ref", "Run"}
    found: dict[str, object] = {
        name: value
        for name in NAMES
        if not (inspect.isclass(value := getattr(skyfab, name)) and issubclass(value, Exception))
        and name not in made_by_us
    }
    for name, member in public_members():
        if not isinstance(member, property) and not name.endswith(".derive"):  # what ExceptionGroup asks for
            found[name] = getattr(member, "__func__", member)
    found |= {f"plugins.{name}": getattr(skyfab.plugins, name) for name in ("Plugin", *skyfab.plugins.REGISTRY)}
    found |= {
        f"Plugin.{name}": value for name, value in vars(skyfab.plugins.Plugin).items() if inspect.isfunction(value)
    }
    found |= {f"lab.{name}": getattr(skyfab.lab, name) for name in ("up", "down", "status")}
    return found


@pytest.mark.parametrize("name", callables())
def test_help_explains_every_parameter(name: str) -> None:
    """By its name, as code: `name`, or in an example of a call."""
    thing = callables()[name]
    text = inspect.getdoc(thing) or ""
    if inspect.isclass(thing) and "__init__" in vars(thing):
        text += inspect.getdoc(thing.__init__) or ""
    names = [one for one in inspect.signature(thing).parameters if one != "self" and one != "cls"]  # type: ignore[arg-type]
    assert [one for one in names if not re.search(rf"`[^`]*\b{one}\b[^`]*`", text)] == []


@pytest.mark.parametrize("name", MODULES)
def test_a_public_module_is_reached_from_the_face(name: str) -> None:
    assert getattr(skyfab, name) is importlib.import_module(f"skyfab.{name}")
    assert name in dir(skyfab)


def typed_names() -> dict[str, str]:
    """What type checkers see, from the TYPE_CHECKING block: the public name and its module. Errors have a star."""
    (block,) = (
        node
        for node in ast.parse(SOURCE.read_text()).body
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)
    )
    return {
        alias.asname: str(statement.module).removeprefix("skyfab").removeprefix(".")
        for statement in block.body
        if isinstance(statement, ast.ImportFrom)
        for alias in statement.names
        if alias.asname is not None
    }


def test_type_checkers_see_what_is_loaded() -> None:
    """The block for type checkers and the table for loading name the same things in the same modules."""
    typed = {name: module for name, module in typed_names().items() if name not in MODULES}
    assert typed == {name: module for name, module in skyfab._HOME.items() if module != "errors"}


def test_no_public_name_is_hidden_by_a_module() -> None:
    """``skyfab/function.py`` would replace ``sky.function`` as soon as it is imported."""
    modules = {path.stem for path in SOURCE.parent.iterdir() if path.suffix == ".py" or path.is_dir()}
    assert not modules & set(NAMES)


def test_importing_skyfab_loads_no_library() -> None:
    """A host imports it with the standard library alone, and a program waits for nothing it does not use."""
    code = (
        "import sys, skyfab\n"
        "print(*[m for m in sys.modules if m.partition('.')[0] in"
        " ('fabric', 'invoke', 'paramiko', 'rich', 'cloudpickle', 'torch', 'numpy', 'pathspec')])\n"
        "print(*[m for m in sys.modules if m.startswith('skyfab.')])\n"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert shown.split() == []


# ---- examples

WITH_EXAMPLES = [
    ".".join(("skyfab", *path.relative_to(SOURCE.parent).with_suffix("").parts)).removesuffix(".__init__")
    for path in sorted(SOURCE.parent.rglob("*.py"))
    if ">>> " in path.read_text()
]


@pytest.mark.parametrize("module", WITH_EXAMPLES)
def test_the_examples_in_docstrings_do_what_they_say(module: str) -> None:
    done = doctest.testmod(importlib.import_module(module), optionflags=doctest.ELLIPSIS)
    assert done.attempted
    assert not done.failed


# ---- the tree of errors


def drawn() -> dict[str, tuple[str | None, str | None]]:
    """The tree as it is drawn at the top of errors.py: each name with its parent and the builtin it also is."""
    tree: dict[str, tuple[str | None, str | None]] = {}
    above: dict[int, str] = {}
    for line in (errors.__doc__ or "").splitlines():
        found = re.match(r"    ((?:│   |    |├── |└── )*)(\w+)(?: \((\w+)\))?(?:  |$)", line)
        if found:
            depth = len(found[1]) // 4
            above[depth] = found[2]
            tree[found[2]] = (above[depth - 1] if depth else None, found[3])
    return tree


def defined() -> dict[str, tuple[str | None, str | None]]:
    """The tree as it is."""
    tree: dict[str, tuple[str | None, str | None]] = {}
    for name, kind in vars(errors).items():
        if (
            inspect.isclass(kind)
            and issubclass(kind, Exception)
            and kind.__module__ == errors.__name__
            and name[0] != "_"
        ):
            ours = [base for base in kind.__mro__[1:] if base.__module__ == errors.__name__ and base.__name__[0] != "_"]
            builtin = [
                base.__name__
                for parent in (kind, *(b for b in kind.__mro__ if b.__name__.startswith("_")))
                for base in parent.__bases__
                if base.__module__ in ("builtins", "exceptiongroup") and base not in (Exception, object)
            ]
            tree[name] = (ours[0].__name__ if ours else None, builtin[0] if builtin else None)
    return tree


def test_the_tree_of_errors_is_the_one_that_is_drawn() -> None:
    found = {name: place for name, place in defined().items() if name != "ExceptionGroup"}
    assert drawn() == found


def samples() -> list[Exception]:
    place = {"host": "node1", "rank": 3, "hint": "try again"}
    found: list[Exception] = [skyfab.RemoteTraceback("Traceback …", "node1", 3)]
    for name in drawn():
        kind = getattr(skyfab, name)
        if kind is skyfab.RemoteTraceback:
            continue
        if issubclass(kind, (skyfab.PoolError, skyfab.BroadcastError)):
            found.append(kind("two failed", [skyfab.HostLost("gone", **place), ValueError("x")]))
        else:
            found.append(kind("what went wrong", **place))
    return found


@pytest.mark.parametrize("error", samples(), ids=lambda error: type(error).__name__)
def test_an_error_keeps_what_it_carries_when_it_is_pickled(error: Exception) -> None:
    """Errors cross processes: type, text, host, rank and hint arrive."""
    import pickle

    again = pickle.loads(pickle.dumps(error))
    assert type(again) is type(error)
    assert str(again) == str(error)
    for name in ("host", "rank", "hint", "message", "text", "exitcode", "kind"):
        assert getattr(again, name, None) == getattr(error, name, None)


@pytest.mark.parametrize(
    ("name", "hint"),
    [("AWS", "hosts="), ("Worker", "slots=N"), ("Options", "arguments of Compute"), ("Volume", "upload")],
)
def test_names_of_skyward_have_a_hint(name: str, hint: str) -> None:
    with pytest.raises(AttributeError, match=rf"no attribute '{name}' \(hint: .*{hint}"):
        getattr(skyfab, name)
    with pytest.raises(AttributeError, match=r"no attribute 'Nothing'$"):
        _ = skyfab.Nothing  # type: ignore[attr-defined]
