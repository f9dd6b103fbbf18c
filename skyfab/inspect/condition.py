"""Conditions on hosts: ``gpu.memory >= 40GB and not busy``. Parsed as a Python expression, and never run as one."""

from __future__ import annotations

import ast
import itertools
import operator
import re
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

from skyfab._util.sizes import readable
from skyfab._util.suggest import did_you_mean
from skyfab.errors import UsageError
from skyfab.inspect.survey import Survey
from skyfab.inventory.host import Host

Value = Any
"""A number, a string, a tuple of strings, or None for what a host does not have."""

NAMES: Final[Mapping[str, Callable[[Host, Survey], Value]]] = {
    "gpus": lambda host, survey: survey.gpus_of(host),
    "gpu.memory": lambda host, survey: min(_known(gpu.memory for gpu in survey.gpus), default=None),
    "gpu.free": lambda host, survey: min(_known(gpu.memory_free for gpu in survey.gpus), default=None),
    "gpu.use": lambda host, survey: max(_known(gpu.use for gpu in survey.gpus), default=None),
    "gpu.name": lambda host, survey: ", ".join(gpu.name for gpu in survey.gpus),
    "gpus.free": lambda host, survey: survey.free_gpus(host),
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
    "KB": 1000,
    "kiB": 1024,
}
_SIZE: Final = re.compile(r"""(?P<string>"[^"]*"|'[^']*')|\b(?P<number>[0-9]+(?:\.[0-9]+)?) ?(?P<unit>[kKMGT]i?B)\b""")
_SIZES: Final = ("gpu.memory", "gpu.free", "memory", "memory.free", "disk.free")
_LEAST_SIZE: Final = 1_000_000
"""A smaller number of bytes without a unit is a slip: every host would meet ``memory >= 40``."""
_COMPARISONS: Final[Mapping[type[ast.cmpop], Callable[[Any, Any], bool]]] = {
    ast.GtE: operator.ge,
    ast.LtE: operator.le,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Gt: operator.gt,
    ast.Lt: operator.lt,
}
_HINT: Final = 'as in "gpu.memory >= 40GB and not busy"'

Test = Callable[[Mapping[str, Value]], Value]


def _known(values: Iterable[Value]) -> list[Value]:
    return [value for value in values if value is not None]


class Condition:
    """A parsed condition: true or false for a host and its survey. Nodes that a condition has no use for are errors."""

    def __init__(self, text: str) -> None:
        """Raises UsageError, which says what is wrong and where."""
        if not isinstance(text, str):
            raise UsageError(f"where must be a string, not {text!r}", hint=_HINT)
        self.text = re.sub(r"\s", " ", text).strip()
        self._python = _SIZE.sub(_in_bytes, self.text)
        self._names: dict[str, None] = {}
        self._test = self._compiled(self._parsed())

    def fits(self, host: Host, survey: Survey) -> bool:
        return bool(self._test({name: NAMES[name](host, survey) for name in self._names}))

    def values(self, host: Host, survey: Survey) -> str:
        """What a host has of what the condition asks for, for messages: ``gpu.memory 24 GB, busy``."""
        return ", ".join(_shown(name, NAMES[name](host, survey)) for name in self._names)

    def _parsed(self) -> ast.expr:
        with warnings.catch_warnings():  # about escapes in strings
            warnings.simplefilter("ignore")
            try:
                return ast.parse(self._python, mode="eval").body
            except SyntaxError as error:
                hint = "compare with ==" if re.search(r"[^<>=!]=[^=]", self.text) else None
                raise self._error(error.msg, hint) from None

    def _error(self, what: str, hint: str | None = None) -> UsageError:
        return UsageError(f"invalid condition {self.text!r}: {what}", hint=hint or _HINT)

    def _compiled(self, node: ast.expr) -> Test:
        if isinstance(node, ast.BoolOp):
            tests = [self._compiled(value) for value in node.values]
            combine = all if isinstance(node.op, ast.And) else any
            return lambda values: combine(test(values) for test in tests)
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            operand = self._compiled(node.operand)
            return lambda values: not operand(values)
        if isinstance(node, ast.Compare):
            return self._comparison(node)
        if isinstance(node, (ast.Name, ast.Attribute)):
            return self._name(node)
        if isinstance(node, ast.Constant) and type(node.value) in (int, float, str):
            constant = node.value
            return lambda values: constant
        what = f"unsupported: {ast.unparse(node)[:40]!r}"
        raise self._error(what, "use and, or, not, comparisons, names, numbers and quoted strings")

    def _name(self, node: ast.Name | ast.Attribute) -> Test:
        name = ast.unparse(node)
        if name not in NAMES:
            hint = did_you_mean(name, NAMES) or f"known names: {', '.join(NAMES)}; put strings in quotes"
            raise self._error(f"unknown name {name!r}"[:80], hint)
        self._names[name] = None
        return lambda values: values[name]

    def _comparison(self, node: ast.Compare) -> Test:
        operands = [node.left, *node.comparators]
        for one, other in itertools.pairwise(operands):
            self._check_unit(one, other)
            self._check_unit(other, one)
        tests = [self._compiled(operand) for operand in operands]
        signs = [type(sign) for sign in node.ops]
        if ast.Is in signs or ast.IsNot in signs:
            raise self._error("unsupported comparison: is", "compare with ==")

        def test(values: Mapping[str, Value]) -> bool:
            pairs = itertools.pairwise(operand(values) for operand in tests)
            return all(_compare(sign, *pair) for sign, pair in zip(signs, pairs, strict=True))

        return test

    def _check_unit(self, name: ast.expr, number: ast.expr) -> None:
        value = number.value if isinstance(number, ast.Constant) else None
        if isinstance(value, int) and ast.unparse(name) in _SIZES and 0 < value < _LEAST_SIZE:
            raise self._error(f"{value} has no unit, and {ast.unparse(name)} is a size", f"write {value}GB")


def _shown(name: str, value: Value) -> str:
    if value is None or value == "" or value == ():
        return f"no {name}"
    if isinstance(value, bool):
        return name if value else f"not {name}"
    if isinstance(value, int) and value > 100_000:
        return f"{name} {readable(value)}"
    if isinstance(value, float):
        value = round(value, 1)
    return f"{name} {', '.join(value) if isinstance(value, tuple) else value}"


def _in_bytes(match: re.Match[str]) -> str:
    """Replaces ``40GB``, which is not Python, by a number of bytes with a decimal point."""
    return match["string"] or repr(float(match["number"]) * _UNITS[match["unit"]])


def _compare(sign: type[ast.cmpop], one: Value, other: Value) -> bool:
    """Strings and numbers compare with their own kind; otherwise, or if a host has no such value, only != is true."""
    if sign in (ast.In, ast.NotIn):
        return _is_in(one, other) == (sign is ast.In)
    alike = any(isinstance(one, kind) and isinstance(other, kind) for kind in (str, (int, float)))
    return _COMPARISONS[sign](one, other) if alike else sign is ast.NotEq


def _is_in(one: Value, other: Value) -> bool:
    """A string is part of another one, in any case; or one of several."""
    if isinstance(other, tuple):
        return one in other
    return isinstance(one, str) and isinstance(other, str) and one.casefold() in other.casefold()
