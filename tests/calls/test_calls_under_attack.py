"""What an attack from outside has found: each of these was wrong once."""

from __future__ import annotations

import gc
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from stage.spot import until

import skyfab as sky

OpenPool = Callable[..., sky.Compute]


def late(name: str, seconds: float) -> str:
    time.sleep(seconds)
    return name


class Leaves:
    """Unpickling it exits."""

    def __reduce__(self) -> Any:
        return sys.exit, (5,)


@pytest.mark.parametrize("other", ["broadcast", "single"])
@pytest.mark.slow
def test_a_broadcast_that_is_detached_keeps_its_own_result_whatever_else_the_pool_runs(
    hosts_of: Callable[..., list[sky.Host]], other: str
) -> None:
    call = sky.function(late)
    pool = sky.Compute(hosts_of("local", 1), ranks=2, ui="none")
    pool.open()
    first = pool.submit(call("first", 1.5), on="all")
    until(lambda: pool._broadcasts.at_work is not None)
    second = pool.submit(
        call("second", 0.1 if other == "broadcast" else 3), on="all" if other == "broadcast" else "one"
    )
    time.sleep(0.3)
    run = pool.detach()
    assert run.result(timeout=170) == ["first", "first"]
    for future in (first, second):
        assert isinstance(future.exception(10), sky.SkyfabError)


class Maker:
    def make(self) -> Leaves:
        return Leaves()


def raise_leaving() -> None:
    error = LookupError()
    error.why = Leaves()  # type: ignore[attr-defined]
    raise error


def test_a_result_that_exits_when_it_is_unpickled_is_an_error_of_its_call(open_pool: OpenPool) -> None:
    pool = open_pool("local", ranks=2)
    acts: dict[str, Callable[[], object]] = {
        "run": lambda: sky.function(Leaves)() >> pool,
        "broadcast": lambda: sky.function(Leaves)() @ pool,
        "map": lambda: pool.map(lambda _: Leaves(), range(3)),
        "generator": lambda: next(sky.function(lambda: (yield Leaves()))() >> pool),
        "actor": lambda: pool.actor(Maker).make(),
        "actors submit": lambda: pool.actor(Maker).make.submit().result(170),
        "executor": lambda: pool.executor().submit(Leaves).result(),
        "exception": lambda: sky.function(raise_leaving)() >> pool,
    }
    for way, act in acts.items():
        with pytest.raises((sky.NotPicklable, sky.BroadcastError, sky.RemoteError)):
            pytest.fail(f"{way}: {act()!r}")
        assert sky.function(late)("next", 0) @ pool == ["next", "next"]
        assert sky.function(late)("next", 0) >> pool == "next"


def test_a_forked_child_of_a_function_ends_as_a_program_would(open_pool: OpenPool) -> None:
    def child_of(how: str) -> int:
        pid = os.fork()
        if not pid:
            if how == "raises":
                raise ValueError("in the child")
            sys.exit(3)
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

    pool = open_pool()
    assert [sky.function(child_of)(how) >> pool for how in ("raises", "exits")] == [1, 3]


def test_names_that_are_no_text_travel(tmp_path: Path, open_pool: OpenPool) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    for name in (b"good.csv", b"bad\xff.csv"):
        (Path(os.fsdecode(os.fsencode(folder) + b"/" + name))).write_text("1")
    pool = open_pool("openssh", image=sky.Image(includes=[str(folder)]))
    found = sky.function(lambda: sorted(os.fsencode(path.name) for path in Path("data").iterdir()))() >> pool
    assert found == [b"bad\xff.csv", b"good.csv"]


def test_a_stream_of_results_that_is_dropped_before_its_first_one_stops_its_calls(open_pool: OpenPool) -> None:
    pool = open_pool()
    stream = sky.gather(*(sky.function(late)("x", 30) for _ in range(20)), stream=True) >> pool
    del stream
    gc.collect()
    assert (sky.function(late)("next", 0) > pool).result(25) == "next"
