"""Do the tests notice? Changes one place of a module at a time and runs the tests beside it.

    ./inv mutate pool/scheduler            20 random changes
    ./inv mutate session/reader --count=50

A change is a comparison turned around, `and` for `or`, a condition negated, a statement left out, a number one larger,
or True for False. Docstrings, decorators, type annotations, imports for type checkers and the numbers of constants,
which are chosen and not computed, stay as they are. It is made in a copy of the package, never in the checkout. What
no test notices is printed.
"""

from __future__ import annotations

import ast
import copy
import os
import random
import re
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

WITH_TORCH = ("device", "protocol")
"""Packages whose tests are not in the fast tier, or not all, because they need torch; but they need no hosts. Workers
of devices are forks of the tests' process instead."""

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

Change = Callable[[ast.AST], str]
"""Makes it in a tree, and says what it was."""


def code(tree: ast.AST) -> Iterator[ast.AST]:
    """The nodes of a tree that do something when the program runs, and are not the value of a constant."""
    for child in ast.iter_child_nodes(tree):
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            continue
        if isinstance(tree, (ast.Module, ast.ClassDef)) and isinstance(child, (ast.Assign, ast.AnnAssign)):
            continue
        if child in (getattr(tree, "annotation", None), getattr(tree, "returns", None)):
            continue
        if child in getattr(tree, "decorator_list", ()):
            continue
        yield child
        yield from code(child)


def places(tree: ast.AST) -> Iterator[tuple[int, Change]]:
    """Every change that can be made: the number of its node in a walk, and what is done there."""
    for number, node in enumerate(code(tree)):
        if isinstance(node, ast.Compare) and type(node.ops[0]) in COMPARISONS:
            yield number, turn_around
        elif isinstance(node, ast.BoolOp):
            yield number, swap
        elif isinstance(node, (ast.If, ast.IfExp)) and not isinstance(node.test, ast.Compare):
            yield number, negate
        elif isinstance(node, ast.Constant) and type(node.value) is bool:
            yield number, flip
        elif isinstance(node, ast.Constant) and type(node.value) in (int, float) and node.value:
            yield number, off_by_one
        elif isinstance(node, ast.FunctionDef) and droppable(node):
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
    assert isinstance(node, (ast.If, ast.IfExp))
    before = ast.unparse(node.test)
    node.test = ast.UnaryOp(op=ast.Not(), operand=node.test)
    return f"if {before} → if {ast.unparse(node.test)}"


def flip(node: ast.AST) -> str:
    assert isinstance(node, ast.Constant)
    node.value = not node.value
    return f"{not node.value} → {node.value}"


def off_by_one(node: ast.AST) -> str:
    assert isinstance(node, ast.Constant)
    before = node.value
    node.value = before + 1  # type: ignore[operator]
    return f"{before!r} → {node.value!r}"


def droppable(function: ast.AST) -> list[tuple[list[ast.stmt], int]]:
    """The statements of a function, also inner ones, each as a list and the place in it."""
    bodies = [
        body
        for node in ast.walk(function)
        for name in ("body", "orelse", "finalbody")
        if isinstance(body := getattr(node, name, None), list)
    ]
    return [
        (body, at)
        for body in bodies
        for at, statement in enumerate(body)
        if not isinstance(statement, (ast.Pass, ast.Assert, ast.FunctionDef, ast.Import, ast.ImportFrom))
        if not (isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant))
    ]


def drop(node: ast.AST) -> str:
    body, at = random.choice(droppable(node))
    gone = body[at]
    body[at] = ast.Pass()
    return f"{ast.unparse(gone).splitlines()[0]} → pass (line {gone.lineno})"


def mutants(source: str, count: int) -> Iterator[tuple[str, str]]:
    """What was changed, with the line, and the source that has it."""
    tree = ast.parse(source)
    found = list(places(tree))
    for number, change in random.sample(found, min(count, len(found))):
        changed = copy.deepcopy(tree)
        node = next(node for at, node in enumerate(code(changed)) if at == number)
        line = getattr(node, "lineno", "?")
        what = change(node)
        yield f"{line}: {what}", ast.unparse(changed)


def tests_of(module: str) -> list[str]:
    """The tests that need no SSH: those of its own name, and those that import it; else all beside it."""
    package, _, name = module.partition("/")
    folder = ROOT / "tests" / package
    own = folder / f"test_{name}.py"
    imports = re.compile(rf"skyfab\.{package}(\.| import .*\b){name}\b")
    near = sorted(folder.glob("test_*.py"))
    if package not in WITH_TORCH:
        near += sorted(folder.parent.glob("test_*.py"))
    others = [path for path in near if path != own and imports.search(path.read_text())]
    found = [*([own] if own.exists() else []), *others] or [folder]
    return [*map(str, found), *([] if package in WITH_TORCH else ["--fast"])]


def fails(options: list[str], seconds: float) -> bool:
    """Whether the tests do, in a fork of this process: what takes long to import is imported once."""
    import pytest

    child = os.fork()
    if not child:
        os.setsid()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        nowhere = os.open(os.devnull, os.O_RDWR)
        for number in range(3):
            os.dup2(nowhere, number)
        code = 1
        try:
            code = pytest.main(["-x", "-q", "-p", "no:cacheprovider", "--assert=plain", *options])
        finally:
            os._exit(code)  # the parent's cleanup must not run in this process
    deadline = time.monotonic() + seconds
    try:
        while time.monotonic() < deadline:
            ended, status = os.waitpid(child, os.WNOHANG)
            if ended:
                return status != 0
            time.sleep(0.02)
    except BaseException:
        os.killpg(child, signal.SIGKILL)
        raise
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return True  # a loop without an end is noticed too


def run(module: str, count: int, tests: list[str]) -> int:
    """Returns 0 when nine of ten changes were noticed."""
    source = (ROOT / "skyfab" / f"{module}.py").read_text()
    noticed, total = 0, 0
    with tempfile.TemporaryDirectory(prefix="skyfab-mutate-") as folder:
        shutil.copytree(ROOT / "skyfab", f"{folder}/skyfab", ignore=shutil.ignore_patterns("__pycache__"))
        target = Path(folder) / "skyfab" / f"{module}.py"
        os.environ |= {"PYTHONPATH": folder, "HYPOTHESIS_STORAGE_DIRECTORY": f"{folder}/examples"}
        os.environ |= {"SKYFAB_TEST_DEVICE": "process"}
        sys.path.insert(0, folder)
        import cloudpickle  # noqa: F401  # before the first fork, as pytest

        if module.startswith(WITH_TORCH):
            import torch  # noqa: F401
        from hypothesis import Phase, settings

        settings.register_profile("mutate", max_examples=50, phases=(Phase.explicit, Phase.reuse, Phase.generate))
        settings.load_profile("mutate")  # nobody reads which example failed: it need not be a small one
        begun = time.monotonic()
        if fails(tests, 300):
            print("the tests fail without any change")
            return 2
        seconds = 5 + 3 * (time.monotonic() - begun)
        for what, text in mutants(source, count):
            total += 1
            target.write_text(text)
            os.utime(target, (total, total))  # else a bytecode file of the same second would be taken for its own
            if fails(tests, seconds):
                noticed += 1
            else:
                print(f"not noticed: skyfab/{module}.py:{what}", flush=True)
    print(f"{module}: {noticed} of {total} noticed")
    return 0 if noticed >= 0.9 * total else 1


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the tests end too, and the copy is removed
    name, count, seed, *tests = sys.argv[1:]
    random.seed(int(seed))
    sys.exit(run(name, int(count), tests or tests_of(name)))
