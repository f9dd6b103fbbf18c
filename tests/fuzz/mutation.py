"""Mutations: recorded conversations with something wrong in them, as hypothesis draws it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, TypeVar

from hypothesis import strategies as st
from recording import Frame, corpus

from skyfab.protocol.frames import ACK, BYE, COUNT, CREDIT, DATA, HEAD, HELLO, LIMIT, PING, PONG

T = TypeVar("T")

RECORDED = corpus()
ALL = [frame for sides in RECORDED.values() for said in sides.values() for frame in said]

_COUNTS = st.sampled_from([0, 1, 7, 2**32, 2**63, 2**64 - 1]).map(COUNT.pack)
CONTROL = st.one_of(
    st.builds(lambda kind, count: Frame(kind, 0, 0, count), st.sampled_from([ACK, CREDIT]), _COUNTS),
    st.sampled_from([Frame(kind, 0, 0, b"") for kind in (PING, PONG, BYE, ACK, HEAD, DATA, HELLO)]),
)
"""What the recordings lack."""
_STREAMS = st.sampled_from([0, 1, 2, 3, 4, 5, 7, 9, 2**31, 2**32 - 1])
_KINDS = st.sampled_from([0, HELLO, ACK, PING, PONG, BYE, HEAD, DATA, CREDIT, 19, 255])
_NUMBERS = st.sampled_from([-1, 0, 1, 3, 2**31, 2**63, 2**64, 10**40, 1.5, float("inf"), float("-inf"), float("nan")])
ODD: st.SearchStrategy[Any] = st.recursive(
    st.none()
    | st.booleans()
    | _NUMBERS
    | st.sampled_from(["", "0", "../x", "/", "a\0b", "\ud800", "x" * 3000, "é", "0" * 64]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["rank", "peers", "é"]), inner),
    max_leaves=4,
)
"""Values that do not belong in a message, and some that do."""


def _place(draw: st.DrawFn, items: Sequence[T]) -> int:
    return draw(st.integers(0, max(0, len(items) - 1)))


def _drop(draw: st.DrawFn, said: list[Frame]) -> None:
    del said[_place(draw, said)]


def _repeat(draw: st.DrawFn, said: list[Frame]) -> None:
    said.insert(_place(draw, said), said[_place(draw, said)])


def _swap(draw: st.DrawFn, said: list[Frame]) -> None:
    a, b = _place(draw, said), _place(draw, said)
    said[a], said[b] = said[b], said[a]


def _splice(draw: st.DrawFn, said: list[Frame]) -> None:
    """Something of another conversation, or of the other side."""
    said.insert(_place(draw, said), draw(st.sampled_from(ALL) | CONTROL))


def _relabel(draw: st.DrawFn, said: list[Frame]) -> None:
    """Another header before the same payload."""
    at = _place(draw, said)
    size = len(said[at].payload)
    changes: dict[str, st.SearchStrategy[int]] = {
        "kind": _KINDS,
        "stream": _STREAMS,
        "head": st.sampled_from([0, 1, min(size, 65535), min(size + 1, 65535), 65535]),
        "length": st.sampled_from([0, max(0, size - 1), size + 1, LIMIT, LIMIT + 1, 2**40, 2**64 - 1]),
    }
    name = draw(st.sampled_from(sorted(changes)))
    said[at] = said[at]._replace(**{name: draw(changes[name])})


def _reword(draw: st.DrawFn, said: list[Frame]) -> None:
    """A message in which a field is another, is missing or is one too many."""
    heads = [at for at, frame in enumerate(said) if frame.kind in (HEAD, HELLO) and frame.payload[:1] == b"{"]
    if not heads:
        return
    at = draw(st.sampled_from(heads))
    frame = said[at]
    size = frame.head or len(frame.payload)
    try:
        document = json.loads(frame.payload[:size])
    except ValueError:  # an earlier mutation was here
        return
    name = draw(st.sampled_from([*document, "more"]))
    if draw(st.booleans()):
        document[name] = draw(ODD)
    else:
        document.pop(name, None)
    head = json.dumps(document, separators=(",", ":")).encode()
    said[at] = frame._replace(head=len(head) if frame.head else 0, payload=head + frame.payload[size:])


def _spoil(draw: st.DrawFn, said: list[Frame]) -> None:
    """Other bytes in a payload."""
    at = _place(draw, said)
    payload = said[at].payload
    start = draw(st.integers(0, len(payload)))
    end = min(len(payload), start + draw(st.sampled_from([0, 1, 8, 4096])))
    said[at] = said[at]._replace(payload=payload[:start] + draw(st.binary(max_size=12)) + payload[end:])


_CHANGES = (_drop, _repeat, _swap, _splice, _relabel, _relabel, _reword, _reword, _reword, _spoil)


@st.composite
def mutated(draw: st.DrawFn, side: str, *, greet: bool = True, most: int = 5) -> bytes:
    """What one side says, with some of it changed, and perhaps cut short. With `greet` mostly not its hello."""
    said = list(draw(st.sampled_from([sides[side] for sides in RECORDED.values()])))
    first = said[:1] if greet and draw(st.integers(0, 3)) else []
    rest = said[len(first) :]
    for change in draw(st.lists(st.sampled_from(_CHANGES), min_size=1, max_size=most)):
        if rest:
            change(draw, rest)
    data = b"".join(frame.encode() for frame in (*first, *rest))
    return data[: draw(st.integers(0, len(data)))] if draw(st.integers(0, 4)) == 0 else data


PIECES = st.lists(st.sampled_from([1, 3, 15, 16, 17, 100, 5000, 1 << 20]), min_size=1, max_size=4)
"""How much arrives at a time, over and over."""


class Source:
    """Bytes that arrive piece by piece, and then the end; as a `recv_into`."""

    def __init__(self, data: bytes, pieces: Sequence[int] = (1 << 20,)) -> None:
        # What is large comes in large pieces, or it would take all day.
        self._data = memoryview(data)
        self._pieces = [max(piece, len(data) // 200) for piece in pieces]
        self._reads = 0

    @property
    def left(self) -> int:
        return len(self._data)

    def __call__(self, view: memoryview) -> int:
        assert len(view), "it asks for nothing, and would take that for the end"
        assert self._reads < 20_000, "it reads without getting on"
        size = min(len(view), len(self._data), self._pieces[self._reads % len(self._pieces)])
        view[:size] = self._data[:size]
        self._data = self._data[size:]
        self._reads += 1
        return size
