"""Hosts whose Python has the standard library and nothing else: all that is run or imported there works."""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest
from stage.projects import inventory, skyfab

import skyfab as sky
from skyfab.detached.find import attach

USER_MODULE = """
from skyfab import Compute, Image, Inventory, attach, function
from skyfab import *
import skyfab as sky

POOL = "local"

@function
def double(x, compute: Compute = None):
    return 2 * x

@sky.function
def nested(x):
    with Compute(POOL) as compute:
        return double(x) >> compute
"""


@pytest.fixture
def hosts(hosts_of: Callable[..., list[sky.Host]]) -> list[sky.Host]:
    return hosts_of("openssh", 2)


@pytest.fixture
def project(tmp_path: Path) -> Path:
    (tmp_path / "plain.py").write_text("import os\nprint('rank', os.environ['RANK'])\n")
    (tmp_path / "named.py").write_text("def main(*words):\n    print('main', *words)\n")
    return tmp_path


def test_the_interpreter_is_bare(hosts: list[sky.Host]) -> None:
    """Else the tests below prove nothing."""

    def missing() -> bool:
        import importlib.util

        return importlib.util.find_spec("pathspec") is None

    with sky.Compute(hosts[:1], ui="none") as compute:
        assert sky.function(missing)() >> compute


@pytest.mark.slow
def test_a_script_and_a_function_of_one_run_there(project: Path, hosts: list[sky.Host], tmp_path: Path) -> None:
    place = inventory(tmp_path / "inventory.toml", [*hosts])
    ran = skyfab(project, "run", "--hosts=all", "plain.py", inventory=place)
    assert sorted(ran.stdout.splitlines()) == ["node1[0] rank 0", "node2[1] rank 1"], ran.stderr
    ran = skyfab(project, "run", "--hosts=node1", "named.py:main", "--", "a", "b", inventory=place)
    assert ran.stdout == "node1[0] main a b\n", ran.stderr


@pytest.mark.slow
def test_a_detached_script_runs_there(project: Path, hosts: list[sky.Host], tmp_path: Path) -> None:
    place = inventory(tmp_path / "inventory.toml", hosts[:1])
    ran = skyfab(project, "run", "--detach", "--hosts=node1", "plain.py", inventory=place)
    assert ran.returncode == 0, ran.stderr
    run = attach(ran.stdout.strip(), inventory=place)
    assert run.result(timeout=170) == [None]
    assert [line for _, _, line in run.logs()] == ["rank 0"]


def test_a_module_that_imports_names_of_the_client_runs_there(
    tmp_path: Path, hosts: list[sky.Host], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They load without their libraries, and open pools there."""
    (tmp_path / "bare_user_module.py").write_text(textwrap.dedent(USER_MODULE))
    monkeypatch.syspath_prepend(tmp_path)
    import bare_user_module as module

    with sky.Compute(hosts[:1], ui="none") as compute:
        assert module.double(21) >> compute == 42
        assert module.nested(1) >> compute == 2
