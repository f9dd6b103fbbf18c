"""The shape of replies. They may come from a host that is not trusted."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from skyfab.errors import ProtocolError

_BYTES: Final = (bytes, bytearray, memoryview)
_SHAPES: Final[Mapping[str, Any]] = {
    "receive": (str, str, int),
    "send": str,
    "rows": ([list], [(str, str)]),  # the target checks each row
    "digest": str,
    "compare": [(int, str, int, str)],
    "begin": (int, str),
    "pack": ([(int, int, int)], _BYTES),
    "piece": (_BYTES,),
}
"""For each request: a type, types for a list or tuple of that length, a list of one for any number of them."""


def check(request: str, value: Any) -> Any:
    """Returns a reply. Raises ProtocolError if it is not what the request is answered with."""
    if not _fits(value, _SHAPES[request]):
        raise ProtocolError(f"not a reply to {request}: {value!r:.200}")
    return value


def _fits(value: Any, shape: Any) -> bool:
    if shape is _BYTES:
        return isinstance(value, _BYTES)
    if isinstance(shape, type):
        return type(value) is shape
    if not isinstance(value, (list, tuple)):
        return False
    if isinstance(shape, list):
        return all(_fits(one, shape[0]) for one in value)
    return [*map(type, value)] == [*shape] or (len(value) == len(shape) and all(map(_fits, value, shape)))
