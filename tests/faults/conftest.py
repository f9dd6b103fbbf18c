"""Hosts of these tests' own, made to fail: a lab for each module, so that no other test is disturbed.

Functions run on hosts whose cables are pulled, whose processes freeze, whose disks are full. What is random follows a
seed, which is a part of the test's name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import cable
import pytest
from stage import labs, remains

import skyfab as sky
from skyfab.lab import Lab
from skyfab.session import timing

HOSTS = 3


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    """In place of the one of the whole run."""
    with labs.start_for_calls(HOSTS) as lab:
        cable.settle(lab.hosts)
        yield lab


@pytest.fixture(scope="module")
def hosts_of(lab: Lab) -> Callable[..., list[sky.Host]]:
    """In place of the one of the whole run."""

    def hosts(transport: str, count: int = 2, *, user: str | None = None, **changes: Any) -> list[sky.Host]:
        found = list(sky.Inventory.of(lab.inventory).hosts.values())[:count]
        return [replace(host, transport=transport, user=user or "root", **changes) for host in found]

    return hosts


@pytest.fixture
def hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Silence is noticed in less than a second, for tests of minutes and not of hours."""
    monkeypatch.setattr(timing, "HEARTBEAT", 0.2)
    monkeypatch.setattr(timing, "SUSPECT_AFTER", 0.7)


@pytest.fixture(autouse=True)
def nothing_stays(lab: Lab) -> Iterator[None]:
    """After each test every cable is in, and nothing of it is on any host."""
    yield
    cable.restore(lab.hosts)
    for host in lab.hosts:
        if host.up:
            host.slow(None)
    left = remains.after(lab.hosts, seconds=15)
    remains.sweep(lab.hosts)
    assert not left, f"left behind: {sorted(left)}"
