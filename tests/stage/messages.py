"""Messages for tests that are about one or two of their fields."""

from __future__ import annotations

from typing import Final, TypeVar

from skyfab.protocol.messages import Message

M = TypeVar("M", bound=Message)

_EMPTY: Final[dict[str, object]] = {
    "str": "",
    "int": 0,
    "float": 0.0,
    "bool": False,
    "Mapping[str, str]": {},
    "Mapping[str, Any]": {},
    "list[list[str]]": [],
    "Sequence[Part]": [],
}


def filled(kind: type[M], **values: object) -> M:
    """A message in which only what is named here is not empty: tests do not break when it gets another field."""
    hints = kind.__annotations__.items()
    return kind(**{**{name: _EMPTY[hint] for name, hint in hints if hint in _EMPTY}, **values})
