"""What `skyfab run` and `put` are given: is it there, and has the file a function of that name. Says what is near."""

from __future__ import annotations

import ast
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from skyfab._util.suggest import nearest
from skyfab.errors import UsageError

_DYNAMIC: Final = frozenset({"globals", "locals", "vars", "exec", "eval", "setattr", "__getattr__", "__dict__"})
"""A module that uses one of these may have names that cannot be seen in its text."""
_MOST: Final = 8
"""Functions that are named."""
_Scope = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)


def near(path: Path, suffix: str = "") -> str | None:
    """A hint with the file or folder that may have been meant by a path that does not exist."""
    try:
        names = [one.name for one in path.parent.iterdir() if one.name.endswith(suffix)]
    except OSError:
        return None
    name = nearest(path.name, names)
    return None if name is None else f"did you mean {shlex.quote(str(path.with_name(name)))}?"


def check_function(script: Path, shown: str, function: str) -> None:
    """Raises UsageError if a file, which the user called `shown`, cannot have a function of that name."""
    try:
        tree = ast.parse(script.read_bytes())
    except (OSError, SyntaxError, ValueError, RecursionError):  # hosts say what is wrong with it
        return
    bound = set(_bound(tree))
    if function in bound or "*" in bound or _is_dynamic(tree):
        return
    names = [one.name for one in _statements(tree) if isinstance(one, (ast.FunctionDef, ast.AsyncFunctionDef))]
    names = [name for name in dict.fromkeys(names) if not name.startswith("_")]
    has = f"it defines {', '.join(names[:_MOST])}{', …' if len(names) > _MOST else ''}" if names else "it defines none"
    meant = nearest(function, names)
    hint = None if meant is None else f"did you mean {shlex.quote(f'{shown}:{meant}')}?"
    raise UsageError(f"{shown} has no function {function}: {has}", hint=hint)


def _is_dynamic(tree: ast.Module) -> bool:
    found = (getattr(node, key, None) for node in ast.walk(tree) for key in ("id", "attr", "name"))
    return not _DYNAMIC.isdisjoint(found)


def _statements(tree: ast.AST) -> Iterator[ast.AST]:
    """All nodes that belong to the module itself, not to a function or class in it."""
    for child in ast.iter_child_nodes(tree):
        yield child
        if not isinstance(child, _Scope):
            yield from _statements(child)


def _bound(tree: ast.Module) -> Iterator[str]:
    """The names that a module binds, with ``*`` for those of a star import."""
    for node in _statements(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield node.name
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            yield from ((alias.asname or alias.name).partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, (ast.MatchAs, ast.MatchStar)) and node.name:
            yield node.name
        elif isinstance(node, ast.MatchMapping) and node.rest:
            yield node.rest
    for node in ast.walk(tree):
        if isinstance(node, ast.Global):
            yield from node.names
