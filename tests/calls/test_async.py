"""``async def`` functions: they run in an event loop of their own, wherever they are sent."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

import skyfab as sky
from skyfab.ui.events import Output


@sky.function
async def double(x: int) -> int:
    await asyncio.sleep(0)
    print("doubling", x)
    return 2 * x


async def heard_twice() -> int:
    print("heard")
    await asyncio.sleep(0)
    print("heard")
    return sky.instance_info().rank


second = sky.stdout(only=lambda info: info.rank == 1)
quiet_above, quiet_below = second(sky.function(heard_twice)), sky.function(second(heard_twice))


@pytest.fixture(scope="module")
def pool(hosts_of: Callable[..., list[sky.Host]]):  # type: ignore[no-untyped-def]
    with sky.Compute(hosts_of("local", 1), ranks=2, ui="none") as compute:
        yield compute


def test_it_returns_its_result(pool: sky.Compute) -> None:
    assert double(21) >> pool == 42
    assert double(21) @ pool == [42, 42]
    assert (double(21) > pool).result() == 42
    assert (double(1) & double(2)) >> pool == (2, 4)


@pytest.mark.parametrize("function", [quiet_above, quiet_below], ids=["above", "below"])
def test_its_voice_is_limited_while_it_runs(pool: sky.Compute, function: sky.Function[[], int]) -> None:
    heard: list[object] = []
    unsubscribe = pool.events.subscribe(heard.append)
    try:
        assert function() @ pool == [0, 1]
    finally:
        unsubscribe()
    assert [event.rank for event in heard if isinstance(event, Output)] == [1, 1]


def test_plugins_are_around_it_until_it_ends(hosts_of: Callable[..., list[sky.Host]]) -> None:
    from contextlib import contextmanager

    class Marks(sky.plugins.Plugin):
        @contextmanager
        def around_call(self, info: sky.InstanceInfo):  # type: ignore[no-untyped-def]
            import builtins

            builtins.within = True  # type: ignore[attr-defined]
            yield
            builtins.within = False  # type: ignore[attr-defined]

    async def look() -> bool:
        import asyncio
        import builtins

        await asyncio.sleep(0)
        return builtins.within  # type: ignore[attr-defined, no-any-return]

    with sky.Compute(hosts_of("local", 1), plugins=[Marks()], ui="none") as compute:
        assert sky.function(look)() >> compute is True


def test_it_runs_detached(pool: sky.Compute) -> None:
    run = pool.launch(double(4), on="one")
    assert run.result(timeout=170) == 8
