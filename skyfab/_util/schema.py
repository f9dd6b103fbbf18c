"""Checks JSON and TOML documents against a type. Errors name the path of the wrong value.

`parse` takes a dataclass, or a type such as ``list[tuple[int, str]]``; `parse_table` takes a function for each key.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple, TypeVar

from skyfab._util.suggest import did_you_mean

T = TypeVar("T")
_NUMBERS: Final = 2**66
"""Larger numbers, and NaN, are invalid. Times of files in nanoseconds may be larger than 2**63."""


class Invalid(ValueError):
    """A value that does not match: `path` leads to it, as in ``("gpus", 0, "memory")``."""

    def __init__(self, problem: str, path: tuple[str | int, ...] = ()) -> None:
        self.problem, self.path = problem, path

    def __str__(self) -> str:
        """
        >>> str(Invalid("missing", ("gpus", 0, "name")))
        'gpus[0].name: missing'
        """
        steps = [f"[{step}]" if isinstance(step, int) else f".{step}" for step in self.path]
        return ": ".join(filter(None, ["".join(steps).lstrip("."), self.problem]))


class Limits(NamedTuple):
    """What is left of long values that others send."""

    characters: int
    """Of a string."""
    items: int
    """Of an array."""


def parse(kind: type[T], value: object, limits: Limits | None = None) -> T:
    """Returns `value` as a `kind`: objects become dataclasses, arrays tuples. Ignores unknown keys. Raises Invalid.

    >>> parse(tuple[int, ...], [1, 2])
    (1, 2)
    """
    try:
        return typing.cast("T", _parser(typing.cast("Any", kind), limits)(value))
    except RecursionError:
        raise Invalid("nested too deeply") from None


_Parser = Callable[[Any], Any]


@functools.cache
def _parser(kind: Any, limits: Limits | None) -> _Parser:
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if kind is Any:
        return lambda value: value
    if dataclasses.is_dataclass(kind):
        return _object(kind, limits)
    if origin is typing.Literal:
        return _literal(arguments)
    if origin in (typing.Union, types.UnionType):
        return _union(kind, limits)
    if origin is tuple and arguments[-1:] != (...,):
        return _fixed([_parser(one, limits) for one in arguments])
    if origin in (tuple, list, Sequence):
        inner = None if arguments[0] is Any else _parser(arguments[0], limits)
        return _array(inner, list if origin is list else tuple, limits)
    if origin in (dict, Mapping):
        return _mapping(_parser(arguments[1], limits), limits)
    return _scalar(kind, limits)


def _scalar(kind: Any, limits: Limits | None) -> _Parser:
    expected = "a number" if kind is float else _NAMES[kind]
    accepted: Any = {float: (int, float), bytes: (bytes, bytearray, memoryview)}.get(kind, kind)
    longest = limits and limits.characters

    def parse(value: Any) -> Any:
        if not isinstance(value, accepted) or (isinstance(value, bool) and kind is not bool):
            raise Invalid(f"expected {expected}, not {name_of(value)}")
        if kind in (int, float) and not abs(value) < _NUMBERS:
            raise Invalid("out of range")
        return value[:longest] if kind is str else value

    return parse


def _object(kind: Any, limits: Limits | None) -> _Parser:
    hints = typing.get_type_hints(kind)
    parsers = {field.name: _parser(hints[field.name], limits) for field in dataclasses.fields(kind)}
    nothing = (dataclasses.MISSING, dataclasses.MISSING)
    required = [one.name for one in dataclasses.fields(kind) if (one.default, one.default_factory) == nothing]

    def parse(value: Any) -> Any:
        table = _table(value)
        for name in required:
            if name not in table:
                raise Invalid("missing", (name,))
        return kind(**{name: _inside(name, parser, table[name]) for name, parser in parsers.items() if name in table})

    return parse


def _literal(choices: tuple[Any, ...]) -> _Parser:
    def parse(value: Any) -> Any:
        if value not in choices:
            raise Invalid(f"expected {' or '.join(map(repr, choices))}")
        return value

    return parse


def _union(kind: Any, limits: Limits | None) -> _Parser:
    """`X | None`, the only union that documents need."""
    (inner,) = (one for one in typing.get_args(kind) if one is not type(None))
    parser = _parser(inner, limits)
    return lambda value: None if value is None else parser(value)


def _fixed(parsers: list[_Parser]) -> _Parser:
    def parse(value: Any) -> Any:
        if len(_items(value)) != len(parsers):
            raise Invalid(f"expected {len(parsers)} items, not {len(value)}")
        return tuple(_inside(at, parser, one) for at, (parser, one) in enumerate(zip(parsers, value, strict=True)))

    return parse


def _array(parser: _Parser | None, kind: type[Any], limits: Limits | None) -> _Parser:
    most = limits and limits.items
    if parser is None:
        return lambda value: kind(_items(value)[:most])
    return lambda value: kind(_inside(at, parser, one) for at, one in enumerate(_items(value)[:most]))


def _mapping(parser: _Parser, limits: Limits | None) -> _Parser:
    most = limits and limits.items
    return lambda value: {name: _inside(name, parser, one) for name, one in [*_table(value).items()][:most]}


def _inside(step: str | int, parser: _Parser, value: Any) -> Any:
    try:
        return parser(value)
    except Invalid as error:
        raise Invalid(error.problem, (step, *error.path)) from None


def _items(value: Any) -> Any:
    if not isinstance(value, (list, tuple)):
        raise Invalid(f"expected an array, not {name_of(value)}")
    return value


def _table(value: Any) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise Invalid(f"expected a table, not {name_of(value)}")
    return value


_NAMES: Final[Mapping[type, str]] = {
    bool: "a boolean",  # before int, which it is too
    str: "a string",
    int: "an integer",
    float: "a float",
    bytes: "bytes",
    list: "an array",
    tuple: "an array",
    Mapping: "a table",
    type(None): "null",
}


def name_of(value: object) -> str:
    """The name of a value's type in messages. Never shows the value, which may be a secret."""
    return next((name for kind, name in _NAMES.items() if isinstance(value, kind)), f"a {type(value).__name__}")


def quoted(text: str) -> str:
    """A string in quotes, on one line."""
    return json.dumps(text, ensure_ascii=not text.isprintable())


# ---- the user's tables


class Mistake(ValueError):
    """What is wrong with a key of a table."""

    def __init__(self, key: str, problem: str, hint: str | None) -> None:
        super().__init__(f"{key}: {problem}")
        self.key, self.problem, self.hint = key, problem, hint


def parse_table(table: Mapping[str, Any], checks: Mapping[str, Callable[[Any], Any]]) -> dict[str, Any]:
    """The checked values of a table; a check raises an error with `message` and `hint`. Raises Mistake.

    >>> parse_table({"port": "22"}, {"port": int})
    {'port': 22}
    """
    values = dict[str, Any]()
    for key, value in table.items():
        if key not in checks:
            hint = did_you_mean(key, checks) or f"known keys: {', '.join(checks)}"
            raise Mistake(key, f"unknown key {quoted(key)}", hint)
        try:
            values[key] = checks[key](value)
        except ValueError as error:
            problem = getattr(error, "message", None) or str(error)
            raise Mistake(key, problem, getattr(error, "hint", None)) from None
    return values
