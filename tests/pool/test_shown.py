"""How values show at a prompt and in a notebook, and that futures can be awaited."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import pytest
from stage.spot import until

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


def test_a_pool_of_many_hosts_is_shown_in_one_line() -> None:
    pool = sky.Compute([f"node{number}" for number in range(20)], inventory=sky.Inventory(hosts={}))
    assert repr(pool) == "<Compute node0, node1, node2, node3, node4, node5, node6, node7, …: not open>"


def test_text_is_escaped() -> None:
    future = CallFuture()
    future.label = "<script>"
    assert "<script>" not in cells(future)


def test_an_image_shows_what_was_said_and_no_secret() -> None:
    image = sky.Image(pip=["torch"], env={"TOKEN": "hush"})
    assert repr(image) == "Image(pip=('torch',), env={'TOKEN': [secret]})"
    assert "hush" not in cells(image)
    assert repr(sky.Image()) == "Image()"


def test_an_inventory() -> None:
    inventory = sky.Inventory(hosts={"node1": sky.Host(name="node1", address="10.0.0.1")}, groups={"gpu": ("node1",)})
    assert repr(inventory) == "<Inventory without a file: 1 host, 1 group>"
    assert "<td>gpu</td>" in cells(inventory)


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


def test_cancelling_a_task_cancels_its_call(open_pool: Callable[..., sky.Compute]) -> None:
    pool = open_pool("local", count=1)
    future: Any = pool.submit(sleep(60))

    async def give_up() -> None:
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(future, 0.2)

    asyncio.run(give_up())
    until(future.cancelled)
    assert double(1) >> pool == 2
