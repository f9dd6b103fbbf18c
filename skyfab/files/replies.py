"""The shape of replies. They may come from a host that is not trusted."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from skyfab._util import schema
from skyfab.errors import ProtocolError

_SHAPES: Final[Mapping[str, Any]] = {
    "receive": tuple[str, str, int],
    "send": str,
    "rows": tuple[list[list[Any]], list[tuple[str, str]]],  # the target checks each row
    "digest": str,
    "compare": list[tuple[int, str, int, str]],
    "begin": tuple[int, str],
    "pack": tuple[list[tuple[int, int, int]], bytes],
    "piece": tuple[bytes],
}
"""For each request, the type of its reply."""


def check(request: str, value: Any) -> Any:
    """Returns a reply. Raises ProtocolError if it does not match the request."""
    try:
        return schema.parse(_SHAPES[request], value)
    except schema.Invalid as error:
        raise ProtocolError(f"invalid reply to {request}: {error}") from None
