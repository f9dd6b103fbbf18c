"""Inventories under mutation: a real file with something wrong in it, and selections of its hosts.

An inventory is read or is an InventoryError, a selection is hosts or a UsageError; nothing else is raised, and nothing
takes long, however large the numbers in it are.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from skyfab.errors import InventoryError, UsageError
from skyfab.inventory.inventory import Inventory

EXAMPLE = (Path(__file__).parents[2] / "inventory.example.toml").read_text()
PARTS = re.findall(r"[\w.-]+|\s+|[^\w\s]", EXAMPLE)
T = TypeVar("T")

SECONDS = 5.0
"""For one inventory or selection, on a machine that is busy."""
fuzz = settings(
    database=None,
    deadline=None,
    max_examples=60,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.large_base_example],
)

ODD_TEXT = st.sampled_from(
    [
        *("", "\0", "\n", "\t", '"', "'", "[", "]", "[[", "{", "}", "=", "!", ",", "#", "\\u", "=\n", "é", "\u2028"),
        *("[1-9999]", "[1-10000]", "[0-999999999]", "[9-1]", "[1-99][1-99][1-99]", "[1-2,,3]", "-oProxyCommand=x"),
        *("all", "none", "local", "node1", "node[1-4]", "!all", "*", "[!a]", "[z-a]", "ssh://", "a@b@c:22", "::1", "%"),
        *("9" * 400, "1e400", "-0", "inf", "nan", "0x" + "f" * 40, "1979-05-27T07:32:00Z", "[" * 60, "a." * 60, "true"),
    ]
)


@st.composite
def documents(draw: st.DrawFn) -> str:
    """The example that users copy, with some of its words dropped, doubled, moved or replaced; perhaps cut short."""
    parts = list(PARTS)
    for _ in range(draw(st.integers(1, 8))):
        at = draw(st.integers(0, len(parts) - 1))
        end = min(len(parts), at + draw(st.sampled_from([1, 1, 1, 5, 40])))
        what = draw(st.sampled_from(["drop", "double", "move", "replace", "replace", "insert"]))
        piece = parts[at:end]
        if what in ("drop", "move"):
            del parts[at:end]
        if what in ("double", "move"):
            place = draw(st.integers(0, len(parts)))
            parts[place:place] = piece
        if what == "replace":
            parts[at:end] = [draw(ODD_TEXT | st.text(max_size=5))]
        if what == "insert":
            parts.insert(at, draw(ODD_TEXT))
        if not parts:
            break
    text = "".join(parts)
    return text[: draw(st.integers(0, len(text)))] if draw(st.integers(0, 5)) == 0 else text


WORDS = [*re.findall(r"[\w.-]{2,}", EXAMPLE), "all", "local", "node[1-4]", "node*", "ada@10.0.0.5:2222"]
SELECTORS = st.lists(ODD_TEXT | st.sampled_from(WORDS) | st.just(","), max_size=6).map("".join)


def outcome(work: Callable[..., T], *arguments: Any, **keywords: Any) -> T | UsageError:
    """What comes of it, or the one kind of error that it may raise; in good time, and with few words."""
    began = time.thread_time()
    found: T | UsageError
    try:
        found = work(*arguments, **keywords)
    except UsageError as error:
        found = error
    assert time.thread_time() - began < SECONDS
    assert not isinstance(found, UsageError) or len(str(found)) < 100_000
    return found


def check_text(text: str) -> Inventory | None:
    found = outcome(Inventory.parse, text, "inventory.toml")
    if isinstance(found, Inventory):
        return found
    assert isinstance(found, InventoryError)
    assert str(found).startswith("inventory.toml:")
    return None


def check_selection(inventory: Inventory, words: object) -> None:
    hosts = outcome(inventory.select, words)
    if isinstance(hosts, UsageError):
        assert hosts.hint
        return
    assert len({host.name for host in hosts}) == len(hosts) > 0
    assert not any(host.login.startswith("-") or " " in host.login for host in hosts)
    for host in hosts[:9]:
        outcome(inventory.jump_chain, host)


def test_the_example_is_an_inventory() -> None:
    """Else mutations of it prove nothing."""
    assert "".join(PARTS) == EXAMPLE
    assert check_text(EXAMPLE)


@fuzz
@given(documents() | st.text(), SELECTORS)
@example("a = " + "1" * 5000, "")
@example("\ufeff", "")
@example("[hosts.a]\nport = 0x" + "f" * 5000, "")
@example("[hosts]\n" + "".join(f'"n{n}[1-9999]" = {{}}\n' for n in range(3)), "all,!n1*")
@example('[hosts.a]\njump = "b"\n[hosts.b]\njump = "a"\n', "a")
@example("[groups]\n" + "".join(f'g{n} = ["g{n + 1}"]\n' for n in range(500)) + 'g500 = ["a"]\n[hosts.a]\n', "g0")
def test_any_change_of_the_example_is_an_inventory_or_an_inventory_error(text: str, words: str) -> None:
    inventory = check_text(text)
    if inventory is not None:
        check_selection(inventory, words)


@fuzz
@given(st.lists(SELECTORS, max_size=3) | SELECTORS | st.text("node1234[]-,!*?@:.%ab \\", max_size=20))
@example("node[1-9999]" * 2)
@example(",".join(["node[1-999]"] * 8))
@example("[1-2]" * 200)
@example("*" * 60 + "b")
@example("[z-a]")
@example("node[" + "1" * 5000 + "]")
def test_any_selection_is_hosts_or_a_usage_error(words: str | list[str]) -> None:
    for inventory in (Inventory.parse(EXAMPLE), Inventory(hosts={})):
        check_selection(inventory, words)
