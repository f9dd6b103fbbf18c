"""Do the tests notice? Changes one place of a module at a time and runs the tests beside it.

    ./inv mutate pool/scheduler            20 random changes
    ./inv mutate session/reader --count=50

A change is a comparison turned around, `and` for `or`, `not` dropped or added, a statement left out, or a number one
larger. It is made in a copy of the package, never in the checkout. What no test notices is printed.
"""

from __future__ import annotations

import ast
import copy
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.GtE,
    ast.GtE: ast.Lt,
    ast.Gt: ast.LtE,
    ast.LtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}

PYTEST = "import sys; sys.path.remove(''); import pytest; sys.exit(pytest.main(sys.argv[1:]))"
"""Else the checkout, as the current folder, is found before the copy."""

Change = Callable[[ast.AST], str]
"""Makes it in a tree, and says what it was."""


def places(tree: ast.AST) -> Iterator[tuple[int, Change]]:
    """Every change that can be made: the number of its node in a walk, and what is done there."""
    for number, node in enumerate(ast.walk(tree)):
        if isinstance(node, ast.Compare) and type(node.ops[0]) in COMPARISONS:
            yield number, turn_around
        elif isinstance(node, ast.BoolOp):
            yield number, swap
        elif isinstance(node, ast.If):
            yield number, negate
        elif isinstance(node, ast.Constant) and type(node.value) in (int, float) and node.value:
            yield number, off_by_one
        if isinstance(node, ast.FunctionDef) and len(node.body) > 1:
            yield number, drop


def turn_around(node: ast.AST) -> str:
    assert isinstance(node, ast.Compare)
    before = ast.unparse(node)
    node.ops[0] = COMPARISONS[type(node.ops[0])]()
    return f"{before} → {ast.unparse(node)}"


def swap(node: ast.AST) -> str:
    assert isinstance(node, ast.BoolOp)
    before = ast.unparse(node)
    node.op = ast.Or() if isinstance(node.op, ast.And) else ast.And()
    return f"{before} → {ast.unparse(node)}"


def negate(node: ast.AST) -> str:
    assert isinstance(node, ast.If)
    before = ast.unparse(node.test)
    node.test = ast.UnaryOp(op=ast.Not(), operand=node.test)
    return f"if {before} → if not"


def off_by_one(node: ast.AST) -> str:
    assert isinstance(node, ast.Constant)
    before = node.value
    node.value = before + 1  # type: ignore[operator]
    return f"{before!r} → {node.value!r}"


def drop(node: ast.AST) -> str:
    assert isinstance(node, ast.FunctionDef)
    at = random.randrange(len(node.body))
    gone = node.body[at]
    node.body[at] = ast.Pass()
    return f"without: {ast.unparse(gone).splitlines()[0]}"


def mutants(source: str, count: int) -> Iterator[tuple[str, str]]:
    """What was changed, with the line, and the source that has it."""
    tree = ast.parse(source)
    found = list(places(tree))
    for number, change in random.sample(found, min(count, len(found))):
        changed = copy.deepcopy(tree)
        node = next(node for at, node in enumerate(ast.walk(changed)) if at == number)
        what = change(node)
        text = ast.unparse(changed)
        if text != ast.unparse(tree):
            yield f"line {getattr(node, 'lineno', '?')}: {what}", text


def tests_of(module: str) -> list[str]:
    """The tests beside a module: of its own name, else all of its package that need no lab."""
    package, _, name = module.partition("/")
    own = ROOT / "tests" / package / f"test_{name}.py"
    return [str(own)] if own.exists() else [str(ROOT / "tests" / package)]


def run(module: str, count: int, tests: list[str], seconds: float) -> int:
    """Returns 0 when nine of ten changes were noticed."""
    source = (ROOT / "skyfab" / f"{module}.py").read_text()
    noticed, survivors = 0, []
    with tempfile.TemporaryDirectory(prefix="skyfab-mutate-") as folder:
        shutil.copytree(ROOT / "skyfab", f"{folder}/skyfab", ignore=shutil.ignore_patterns("__pycache__"))
        target = Path(folder) / "skyfab" / f"{module}.py"
        words = [sys.executable, "-c", PYTEST, "-x", "-q", "-p", "no:cacheprovider", *tests]
        env = {**os.environ, "PYTHONPATH": folder, "PYTHONDONTWRITEBYTECODE": "1"}
        for what, text in [("", source), *mutants(source, count)]:
            target.write_text(text)
            try:
                done = subprocess.run(words, cwd=ROOT, env=env, capture_output=True, timeout=seconds).returncode
            except subprocess.TimeoutExpired:
                done = 1  # a loop without an end is noticed too
            if not what and done:
                print("the tests fail without any change")
                return 2
            if what and done:
                noticed += 1
            elif what:
                survivors.append(what)
                print(f"not noticed: {what}", flush=True)
    total = noticed + len(survivors)
    print(f"{module}: {noticed} of {total} changes noticed")
    return 0 if noticed >= 0.9 * total else 1
