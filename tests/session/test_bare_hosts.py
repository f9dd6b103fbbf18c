"""Hosts whose Python has the standard library and nothing else: all that is run or imported there works."""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

import skyfab as sky

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
