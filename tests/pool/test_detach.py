"""Detached runs of a pool on this machine: what hosts are told of them, and what is left of the pool's part."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from stage.fakes import EndsTheProgram, result
from stage.spot import until

import skyfab as sky
from skyfab.pool.detach import Detacher
from skyfab.pool.node import Node


@pytest.fixture
def hosts(home: Path) -> list[sky.Host]:
    """Two hosts that are this machine."""
    return [sky.Host(name=f"here{number}", transport="local", cache=str(home / f"cache{number}")) for number in (1, 2)]


@pytest.fixture
def pool(hosts: list[sky.Host], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[sky.Compute]:
    monkeypatch.chdir(tmp_path)
    with sky.Compute(hosts, ui="none") as compute:
        yield compute


@sky.function
def wait_for(path: str) -> int:
    """Returns its rank when the file exists; -1 if it does not within some seconds."""
    deadline = time.monotonic() + 20
    while not Path(path).exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    return sky.instance_info().rank if Path(path).exists() else -1


def test_a_run_on_one_host_is_launched_before_it_has_ended(pool: sky.Compute, tmp_path: Path) -> None:
    run = pool.launch(wait_for(str(tmp_path / "go")), on="here2", name="waits")
    (tmp_path / "go").touch()
    (part,) = run.parts
    assert (part.about.ranks, part.about.world, part.about.on, part.about.elastic) == ((0,), 1, "one", False)
    assert (part.about.name, part.about.function) == ("waits", "wait_for")
    assert run.result(60) == 0


def test_a_broadcast_becomes_a_run(pool: sky.Compute, tmp_path: Path) -> None:
    future = pool.submit(wait_for(str(tmp_path / "go")), on="all")
    run = pool.detach(name="overnight")
    with pytest.raises(sky.CallCancelled, match=rf"wait_for continues as run {run.id[:8]}$"):
        future.result(20)
    (tmp_path / "go").touch()
    assert run.result(60) == [0, 1]
    assert run.name == "overnight"


@sky.function
def first_waits_for(path: str) -> dict[str, int]:
    """The first rank as `wait_for`; the others return at once."""
    rank = sky.instance_info().rank
    return {"rank": rank or wait_for.fn(path)}


def test_ranks_that_have_returned_are_part_of_the_run(pool: sky.Compute, tmp_path: Path) -> None:
    """As a script whose first rank evaluates or saves alone at the end."""
    future = pool.submit(first_waits_for(str(tmp_path / "go")), on="all")
    until(lambda: len(pool._broadcasts._active._open) == 1)
    run = pool.detach()
    with pytest.raises(sky.CallCancelled):
        future.result(20)
    (tmp_path / "go").touch()
    assert run.result(60) == [{"rank": 0}, {"rank": 1}]
    assert run.state == "done"


@sky.function
def second_fails(path: str) -> int:
    if sky.instance_info().rank:
        raise KeyError(path)
    return wait_for.fn(path)


def test_a_broadcast_that_has_failed_cannot_be_detached(pool: sky.Compute, tmp_path: Path) -> None:
    pool.submit(second_fails(str(tmp_path / "go")), on="all")
    until(lambda: pool._broadcasts._active.has_failed)
    with pytest.raises(sky.BroadcastError) as caught:
        pool.detach()
    assert isinstance(caught.value.exceptions[0], KeyError)


def test_hosts_of_a_run_cannot_share_a_cache(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    hosts = [sky.Host(name=name, transport="local", cache=str(home / "cache")) for name in ("here1", "here2")]
    with (
        sky.Compute(hosts, ui="none") as compute,
        pytest.raises(sky.SkyfabError, match="shares its cache folder") as caught,
    ):
        compute.launch(wait_for("/"))
    assert "cache" in str(caught.value.hint)
    assert not list((home / "cache" / "runs").iterdir()), "the part of the first host is removed"


def test_a_run_of_a_wary_pool_unpickles_nothing_that_a_host_sends_at_once(
    hosts: list[sky.Host], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def call(*_: object, caller: Any, **__: object) -> None:
        caller.answered(*result(EndsTheProgram()))

    monkeypatch.chdir(tmp_path)
    with sky.Compute(hosts, ui="none", results="data") as pool:
        monkeypatch.setattr(Node, "call", call)
        with pytest.raises(sky.BroadcastError) as caught:
            pool.launch(wait_for("/"), on="all")
    assert [type(error) for error in caught.value.exceptions] == [sky.UntrustedResult] * 2


@pytest.mark.parametrize("name", ["", "  ", "a\nb", "\x1b[1m", "x" * 101])
def test_a_name_that_cannot_be_shown(name: str) -> None:
    with pytest.raises(sky.UsageError, match="invalid name of a run"):
        Detacher([], [], label="f", name=name)
