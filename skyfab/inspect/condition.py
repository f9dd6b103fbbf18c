"""Conditions on hosts: ``gpu.memory >= 40GB and not busy``. Read by a parser of its own, never by Python's."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from skyfab.errors import UsageError
from skyfab.inspect.survey import Survey
from skyfab.inventory.host import Host, did_you_mean

Value = Any
"""A number, a text, a tuple of texts, or None for what a host does not have."""

NAMES: Final[Mapping[str, Callable[[Host, Survey], Value]]] = {
    "gpus": lambda host, survey: len(survey.gpus),
    "gpu.memory": lambda host, survey: _least(gpu.memory for gpu in survey.gpus),
    "gpu.free": lambda host, survey: _least(gpu.memory_free for gpu in survey.gpus),
    "gpu.use": lambda host, survey: max((gpu.use or 0 for gpu in survey.gpus), default=None),
    "gpu.name": lambda host, survey: ", ".join(gpu.name for gpu in survey.gpus),
    "memory": lambda host, survey: survey.memory,
    "memory.free": lambda host, survey: survey.memory_free,
    "disk.free": lambda host, survey: survey.disk_free,
    "cpus": lambda host, survey: survey.cpus,
    "load": lambda host, survey: survey.load,
    "busy": lambda host, survey: survey.is_busy,
    "os": lambda host, survey: survey.os,
    "name": lambda host, survey: host.name,
    "tags": lambda host, survey: host.tags,
}
"""What a condition may use. Of several GPUs the one with the least memory counts, and the one that is used most."""

_UNITS: Final = {
    **{f"{letter}B": 1000 ** (power + 1) for power, letter in enumerate("kMGT")},
    **{f"{letter}iB": 1024 ** (power + 1) for power, letter in enumerate("KMGT")},
}
_SIZES: Final = ("gpu.memory", "gpu.free", "memory", "memory.free", "disk.free")
_LEAST_SIZE: Final = 1_000_000
"""A smaller number of bytes without a unit is a slip: every host would meet ``memory >= 40``."""
_COMPARISONS: Final[Mapping[str, Callable[[Any, Any], bool]]] = {
    ">=": operator.ge,
    "<=": operator.le,
    "==": operator.eq,
    "!=": operator.ne,
    ">": operator.gt,
    "<": operator.lt,
}
_TOKEN: Final = re.compile(
    r"""\s*(?: (?P<number>[0-9]+(?:\.[0-9]+)?)\ ?(?P<unit>[kKMGT]i?B\b)?
        | (?P<text>"[^"]*"|'[^']*')
        | (?P<name>[A-Za-z_][\w.]*)
        | (?P<sign>>=|<=|==|!=|[<>()]) )""",
    re.VERBOSE,
)
_DEEPEST: Final = 50
_HINT: Final = 'as in "gpu.memory >= 40GB and not busy"'

Test = Callable[[Mapping[str, Value]], Value]


def _least(values: Any) -> Value:
    known = [value for value in values if value is not None]
    return min(known, default=None)


@dataclass(frozen=True, slots=True)
class Condition:
    """A condition that was read: true or false for a host and its survey."""

    text: str
    _test: Test
    _names: tuple[str, ...]

    @classmethod
    def parse(cls, text: str) -> Condition:
        """Reads a condition. Raises UsageError, which says where it is wrong."""
        if not isinstance(text, str):
            raise UsageError(f"where must be a text, not {text!r}", hint=_HINT)
        parser = _Parser(text)
        test = parser.either()
        if parser.token is not None:
            raise parser.unexpected("the end, and, or")
        return cls(text, test, tuple(dict.fromkeys(parser.names)))

    def fits(self, host: Host, survey: Survey) -> bool:
        return bool(self._test({name: NAMES[name](host, survey) for name in self._names}))

    def values(self, host: Host, survey: Survey) -> str:
        """What a host has of what the condition asks for, for messages: ``gpu.memory 24 GB, busy``."""
        return ", ".join(_shown(name, NAMES[name](host, survey)) for name in self._names)


def _shown(name: str, value: Value) -> str:
    from skyfab._util.sizes import readable

    if value is None or value == "" or value == ():
        return f"no {name}"
    if isinstance(value, bool):
        return name if value else f"not {name}"
    if isinstance(value, int) and value > 100_000:
        return f"{name} {readable(value)}"
    if isinstance(value, float):
        value = round(value, 1)
    return f"{name} {', '.join(value) if isinstance(value, tuple) else value}"


class _Parser:
    """Recursive descent: `either` is the whole, `both`, `negated` and `compared` bind closer."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._at = self._end = 0
        self._depth = 0
        self.names: list[str] = []
        self.token: re.Match[str] | None = None
        self._advance()

    def _advance(self) -> None:
        self._at = self._end
        rest = self._text[self._end :]
        self.token = _TOKEN.match(self._text, self._end)
        if self.token is None and rest.strip():
            raise self._error(f"{rest.strip()[:20]!r} cannot be read")
        if self.token is not None:
            self._end = self.token.end()

    def _is(self, *words: str) -> bool:
        return self.token is not None and (self.token["name"] in words or self.token["sign"] in words)

    def _error(self, what: str, hint: str | None = None) -> UsageError:
        return UsageError(f"the condition {self._text!r}: {what}", hint=hint or _HINT)

    def unexpected(self, wanted: str) -> UsageError:
        found = "its end" if self.token is None else repr(self.token[0].strip())
        return self._error(f"{found} where {wanted} was expected")

    def either(self) -> Test:
        self._depth += 1
        if self._depth > _DEEPEST:
            raise self._error("is nested too deeply")
        tests = [self._both()]
        while self._is("or"):
            self._advance()
            tests.append(self._both())
        self._depth -= 1
        return tests[0] if len(tests) == 1 else lambda values: any(test(values) for test in tests)

    def _both(self) -> Test:
        tests = [self._negated()]
        while self._is("and"):
            self._advance()
            tests.append(self._negated())
        return tests[0] if len(tests) == 1 else lambda values: all(test(values) for test in tests)

    def _negated(self) -> Test:
        negations = 0
        while self._is("not"):
            self._advance()
            negations += 1
        test = self._compared()
        return (lambda values: not test(values)) if negations % 2 else test

    def _compared(self) -> Test:
        if self._is("("):
            self._advance()
            test = self.either()
            if not self._is(")"):
                raise self.unexpected(")")
            self._advance()
            return test
        one, left = self.token, self._value()
        if self._is("in"):
            self._advance()
            return _contains(left, self._value())
        if self.token is None or self.token["sign"] not in _COMPARISONS:
            return left
        sign = self.token["sign"]
        self._advance()
        other, right = self.token, self._value()
        for size, number in ((one, other), (other, one)):
            if size is not None and number is not None and size["name"] in _SIZES and _lacks_unit(number):
                what = f"{number['number']} has no unit, and {size['name']} is a size"
                raise self._error(what, f"write {number['number']}GB")
        return _compares(left, sign, right)

    def _value(self) -> Test:
        token = self.token
        if token is None or token["sign"] or token["name"] in ("and", "or", "not", "in"):
            raise self.unexpected("a name, a number or a text")
        self._advance()
        if token["number"]:
            number = float(token["number"]) * _UNITS.get(_unit(token["unit"]), 1)
            return lambda values: number
        if token["text"]:
            text = token["text"][1:-1]
            return lambda values: text
        name = token["name"]
        if name not in NAMES:
            hint = did_you_mean(name, NAMES) or f"there are {', '.join(NAMES)}; texts are in quotes"
            raise self._error(f"there is no {name}", hint)
        self.names.append(name)
        return lambda values: values[name]


def _lacks_unit(token: re.Match[str]) -> bool:
    return bool(token["number"]) and not token["unit"] and 0 < float(token["number"]) < _LEAST_SIZE


def _unit(unit: str | None) -> str:
    """People write KB and kiB too."""
    if not unit:
        return ""
    return ("K" if "i" in unit else "k") + unit[1:] if unit[0] in "kK" else unit


def _compares(left: Test, sign: str, right: Test) -> Test:
    """False where a host does not have what is compared, or texts are compared with numbers."""

    def test(values: Mapping[str, Value]) -> bool:
        one, other = left(values), right(values)
        if one is None or other is None or isinstance(one, str) != isinstance(other, str):
            return sign == "!="
        return _COMPARISONS[sign](one, other)

    return test


def _contains(left: Test, right: Test) -> Test:
    """A text is part of another one, in any case; or one of several."""

    def test(values: Mapping[str, Value]) -> bool:
        one, other = left(values), right(values)
        if isinstance(other, tuple):
            return one in other
        return isinstance(one, str) and isinstance(other, str) and one.casefold() in other.casefold()

    return test
