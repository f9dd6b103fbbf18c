"""Documents are checked against types, and errors name the path of the wrong value."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import pytest

from skyfab._util.schema import Invalid, Limits, Mistake, parse, parse_table
from skyfab.errors import UsageError


@dataclass(frozen=True)
class Card:
    name: str
    memory: int | None = None


@dataclass(frozen=True)
class Machine:
    load: float
    state: Literal["up", "down"] = "up"
    cards: tuple[Card, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    busy: bool = False


def test_objects_become_dataclasses_and_unknown_keys_are_ignored() -> None:
    found = parse(
        Machine, {"load": 1, "cards": [{"name": "a"}, {"name": "b", "memory": 3}], "new": 1, "env": {"A": "1"}}
    )
    assert found == Machine(load=1, cards=(Card("a"), Card("b", 3)), env={"A": "1"})


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ([], "expected a table, not an array"),
        ({}, "load: missing"),
        ({"load": "1"}, "load: expected a number, not a string"),
        ({"load": True}, "load: expected a number, not a boolean"),
        ({"load": float("nan")}, "load: out of range"),
        ({"load": 1, "busy": 1}, "busy: expected a boolean, not an integer"),
        ({"load": 1, "state": "off"}, "state: expected 'up' or 'down'"),
        ({"load": 1, "cards": {}}, "cards: expected an array, not a table"),
        ({"load": 1, "cards": [{"name": "a"}, {}]}, "cards[1].name: missing"),
        ({"load": 1, "cards": [{"name": "a", "memory": 2.5}]}, "cards[0].memory: expected an integer, not a float"),
        ({"load": 1, "cards": [{"name": "a", "memory": 2**66}]}, "cards[0].memory: out of range"),
        ({"load": 1, "cards": [{"name": None}]}, "cards[0].name: expected a string, not null"),
        ({"load": 1, "env": {"A": 1}}, "env.A: expected a string, not an integer"),
    ],
)
def test_an_error_names_the_path(value: Any, message: str) -> None:
    with pytest.raises(Invalid) as caught:
        parse(Machine, value)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("kind", "value", "parsed"),
    [
        (list[tuple[int, str]], [[1, "a"], (2, "b")], [(1, "a"), (2, "b")]),
        (tuple[bytes], [b"x"], (b"x",)),
        (dict[str, Any], {"a": []}, {"a": []}),
    ],
)
def test_types_without_a_dataclass(kind: Any, value: Any, parsed: Any) -> None:
    assert parse(kind, value) == parsed


@pytest.mark.parametrize(
    ("kind", "value", "message"),
    [
        (tuple[int, str], [1], "expected 2 items, not 1"),
        (list[tuple[int, str]], [[1, "a"], [1, 2]], "[1][1]: expected a string, not an integer"),
    ],
)
def test_errors_without_a_dataclass(kind: Any, value: Any, message: str) -> None:
    with pytest.raises(Invalid) as caught:
        parse(kind, value)
    assert str(caught.value) == message


def test_long_values_are_cut() -> None:
    limits = Limits(characters=3, items=2)
    assert parse(tuple[str, ...], ["abcdef", "b", "c"], limits) == ("abc", "b")
    assert parse(dict[str, str], {"a": "abcdef", "b": "", "c": ""}, limits) == {"a": "abc", "b": ""}


@pytest.mark.parametrize(
    ("table", "key", "problem", "hint"),
    [
        ({"port": 22, "prot": 1}, "prot", 'unknown key "prot"', "did you mean port?"),
        ({"zzz": 2}, "zzz", 'unknown key "zzz"', "known keys: port, b"),
        ({"b": 0}, "b", "must be 22", "write 22"),
    ],
)
def test_a_mistake_in_a_table(table: dict[str, Any], key: str, problem: str, hint: str) -> None:
    def port(value: object) -> int:
        if value != 22:
            raise UsageError("must be 22", hint="write 22")
        return 22

    with pytest.raises(Mistake) as caught:
        parse_table(table, {"port": port, "b": port})
    assert (caught.value.key, caught.value.problem, caught.value.hint) == (key, problem, hint)
    assert parse_table({"port": 22}, {"port": port}) == {"port": 22}
