"""What all messages have in common: fields that are checked, and their encoding as JSON."""

from __future__ import annotations

import functools
import json

from skyfab.errors import ProtocolError

TYPE_CHECKING = False  # see frames.py
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any, ClassVar, TypeVar

    from typing_extensions import dataclass_transform

    M = TypeVar("M", bound="Message")
else:

    def dataclass_transform(**_):
        return lambda kind: kind


@dataclass_transform(kw_only_default=True, frozen_default=True)
class Message:
    """Base class of all messages.

    The fields are the annotations, as in a dataclass; importing `dataclasses` would double an agent's first start time.
    """

    op: ClassVar[str] = ""
    _names: ClassVar[tuple[str, ...]]
    _checks: ClassVar[dict[str, tuple[Any, Any]]]

    def __init_subclass__(cls) -> None:
        fields = {name: kind for name, kind in cls.__annotations__.items() if not kind.startswith("ClassVar")}
        cls._names = tuple(fields)
        cls._checks = {name: (_TYPES[kind], _ELEMENTS.get(kind)) for name, kind in fields.items()}
        _ALL[cls.op] = cls

    def __init__(self, **values: Any) -> None:
        for name in self._names:
            if name not in values and not hasattr(type(self), name):
                raise TypeError(f"{self.op} needs {name}")
        for name in values:
            if name not in self._names:
                raise TypeError(f"{self.op} has no {name}")
        self.__dict__.update(values)

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"{self.op} is frozen")

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and self._document() == other._document()

    def __hash__(self) -> int:
        return hash(self.op)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{n}={getattr(self, n)!r}' for n in self._names)})"

    def _document(self) -> dict[str, Any]:
        return {"op": self.op, **{name: getattr(self, name) for name in self._names}}

    def encode(self) -> bytes:
        return _dumps(self._document()).encode()

    @classmethod
    @functools.lru_cache(maxsize=1024)
    def head(cls, **fields: Any) -> bytes:
        """An encoded message, cached: the calls to a busy worker often differ only in their data."""
        return cls(**fields).encode()


_ALL: dict[str, type[Message]] = {}
_TYPES: dict[str, type | tuple[type, ...]] = {
    "str": str,
    "str | None": (str, type(None)),
    "int": int,
    "int | None": (int, type(None)),
    "bool": bool,
    "float": (int, float),
    "float | None": (int, float, type(None)),
    "Mapping[str, str]": dict,
    "Mapping[str, Any]": dict,
    "Sequence[Part]": (list, tuple),
    "Sequence[str]": (list, tuple),
    "list[int]": list,
    "list[str]": list,
    "list[list[str]]": list,
}
_ELEMENTS: dict[str, Callable[[object], bool]] = {
    "Mapping[str, str]": lambda inner: isinstance(inner, str),
    "Sequence[Part]": lambda inner: type(inner) in (int, list),
    "Sequence[str]": lambda inner: isinstance(inner, str),
    "list[int]": lambda inner: type(inner) is int,
    "list[str]": lambda inner: isinstance(inner, str),
    "list[list[str]]": lambda inner: isinstance(inner, list) and all(isinstance(word, str) for word in inner),
}
_OFTEN = (b'{"op":"call"', b'{"op":"result"')


_dumps = json.JSONEncoder(separators=(",", ":")).encode  # ASCII: so that text with lone surrogates can be sent
_loads = json.JSONDecoder().decode


def decode(data: bytes) -> Message:
    """Decodes the message in `data`. Raises ProtocolError for anything else.

    Calls and results are cached, because the same ones arrive many times.
    """
    return _decode_often(data) if data.startswith(_OFTEN) and len(data) <= 512 else _decode(data)


def _decode(data: bytes) -> Message:
    try:
        document = _loads(data.decode())
        kind = _ALL[document.pop("op")]
        message = kind(**document)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ProtocolError(f"not a message: {data[:80]!r}") from error
    for name, (whole, element) in kind._checks.items():  # noqa: SLF001 - a message of this module
        value = getattr(message, name)
        fits = isinstance(value, whole) and (whole is bool or not isinstance(value, bool))
        if fits and element is not None:
            fits = all(map(element, value.values() if isinstance(value, dict) else value))
        if not fits:
            raise ProtocolError(f"{kind.op}.{name} is a {type(value).__name__} that does not belong there")
    return message


_decode_often = functools.lru_cache(maxsize=1024)(_decode)


def expect(kind: type[M], data: bytes) -> M:
    """Decodes the message in `data`. Raises ProtocolError if it is not of this kind."""
    message = decode(data)
    if not isinstance(message, kind):
        raise ProtocolError(f"{message.op} where {kind.op} was expected")
    return message
