"""How values show at a prompt and in a notebook, and that futures can be awaited."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import skyfab as sky
from skyfab.pool.futures import CallFuture


@sky.function
def double(number: int) -> int:
    return 2 * number


@sky.function
def sleep(seconds: float) -> str:
    time.sleep(seconds)
    return "slept"


@sky.function
def fail() -> None:
    raise KeyError("x")


def cells(value: Any) -> str:
    found: str = value._repr_html_()
    assert found.startswith("<table>") and found.endswith("</table>")
    return found


def test_a_pool_and_its_hosts(open_pool: Callable[..., sky.Compute]) -> None:
    pool = open_pool("local", count=2)
    assert repr(pool) == "<Compute here1, here2: open>"
    assert repr(pool.hosts[0]) == "<Host here1: ready>"
    assert cells(pool).count("<tr>") == 3
    assert "<td>ready</td>" in cells(pool.hosts[0])
    hosts = pool.hosts
    pool.close()
    assert repr(pool) == "<Compute here1, here2: not open>"
    assert "not connected" in cells(pool)
    assert repr(hosts[0]) == "<Host here1: closed>"


def test_text_is_escaped() -> None:
    future = CallFuture()
    future.label = "<script>"
    assert "<script>" not in cells(future)


def test_an_image_shows_what_was_said_and_no_secret() -> None:
    image = sky.Image(pip=["torch"], env={"TOKEN": "hush"})
    assert repr(image) == "Image(pip=('torch',), env={'TOKEN': [secret]})"
    assert "hush" not in cells(image)
    assert repr(sky.Image()) == "Image()"


# ---- await


def test_futures_can_be_awaited_while_the_loop_goes_on(open_pool: Callable[..., sky.Compute]) -> None:
    pool = open_pool("local", count=1, host={"slots": 3})

    async def all_of_them() -> list[Any]:
        ticks: list[int] = []

        async def tick() -> None:
            for number in range(5):
                ticks.append(number)
                await asyncio.sleep(0.02)

        futures: list[Any] = [sleep(0.3) > pool, double(4) > pool, fail() > pool]
        found = await asyncio.gather(tick(), *futures, return_exceptions=True)
        return [ticks, *found[1:]]

    ticks, slept, doubled, error = asyncio.run(all_of_them())
    assert (ticks, slept, doubled) == ([0, 1, 2, 3, 4], "slept", 8)
    assert isinstance(error, KeyError)
