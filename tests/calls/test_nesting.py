"""Pools inside pools: on purpose and to a depth; never because a rank imports a module."""

from __future__ import annotations

import ast
from collections.abc import Callable
from pathlib import Path

import pytest
from stage.projects import skyfab

import skyfab as sky

UNGUARDED = """
import skyfab as sky


@sky.function
def mean(numbers=(1, 2)):
    return sum(numbers) / len(numbers)


with sky.Compute("local", ranks=2) as compute:
    print(mean() @ compute)
"""
GUARD = 'if __name__ == "__main__":'


@pytest.mark.slow
def test_a_file_with_an_unguarded_pool_ends_with_an_error_and_not_with_ever_more_processes(tmp_path: Path) -> None:
    (tmp_path / "unguarded.py").write_text(UNGUARDED)
    ran = skyfab(tmp_path, "run", "unguarded.py:mean", processes=200, timeout=170)
    assert ran.returncode == 2
    assert "unguarded.py, line 10: the module opens a pool while a rank imports it" in ran.stderr
    assert GUARD in ran.stderr


@pytest.mark.slow
def test_a_script_that_opens_a_pool_is_not_run_as_a_rank(tmp_path: Path) -> None:
    (tmp_path / "unguarded.py").write_text(UNGUARDED)
    ran = skyfab(tmp_path, "run", "unguarded.py", processes=200, timeout=170)
    assert ran.returncode == 2
    assert "unguarded.py, line 10: the script opens a pool while every rank runs it" in ran.stderr
    assert "python unguarded.py" in ran.stderr


def test_a_module_with_an_unguarded_pool_cannot_be_used_by_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, open_pool: Callable[..., sky.Compute]
) -> None:
    """Also where a function imports it later, and where what opens the pool is called at the module's top."""
    (tmp_path / "opens_at_its_top.py").write_text(
        "import skyfab as sky\ndef main():\n    with sky.Compute('local'):\n        pass\nmain()\n"
    )
    (tmp_path / "imports_it.py").write_text("def late():\n    import opens_at_its_top\n")
    monkeypatch.syspath_prepend(tmp_path)
    import imports_it

    with pytest.raises(sky.UsageError, match=r"opens_at_its_top.py, line 5: the module opens a pool") as caught:
        sky.function(imports_it.late)() >> open_pool()
    assert GUARD in str(caught.value)


def test_a_function_may_open_a_pool_of_its_own(open_pool: Callable[..., sky.Compute]) -> None:
    def inner(x: int) -> int:
        return x + 1

    def outer(x: int) -> int:
        with sky.Compute("local", ui="none") as compute:
            return sky.function(inner)(x) >> compute

    assert sky.function(outer)(1) >> open_pool() == 2


@pytest.mark.slow
def test_pools_inside_pools_have_a_depth(open_pool: Callable[..., sky.Compute]) -> None:
    def dig(deep: int = 1) -> int:
        try:
            with sky.Compute("local", ui="none") as compute:
                return int(sky.function(dig)(deep + 1) >> compute)
        except sky.UsageError as error:
            return deep if "3 deep" in str(error) else -1

    assert sky.function(dig)() >> open_pool() == 3


EXAMPLES = sorted((Path(__file__).parents[2] / "examples").rglob("*.py"))


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_no_example_opens_a_pool_while_it_is_imported(example: Path) -> None:
    """At its top a file only defines: what does something is in a function, or below the guard."""
    _, *body = ast.parse(example.read_text()).body  # the first one is its docstring
    calls = [node.value for node in body if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)]
    assert not [node for node in body if isinstance(node, (ast.With, ast.For))]
    assert not [call for call in calls if isinstance(call.func, ast.Name)]  # main(); sys.path.insert(…) may be
