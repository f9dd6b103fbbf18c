"""messages: each one comes back as it was sent; anything else is ProtocolError and nothing but ProtocolError."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from skyfab.errors import ProtocolError
from skyfab.protocol import messages
from skyfab.protocol.messages import Message, decode, expect

KINDS: list[type[Message]] = sorted(Message.__subclasses__(), key=lambda kind: kind.op)

# Lone surrogates are what os.fsdecode makes of names that are not UTF-8: they stand in paths and error texts.
text = st.one_of(st.text(max_size=30), st.text(st.characters(codec=None), max_size=10), st.just("caf\udce9"))
sizes = st.integers(0, 2**63)
name = st.from_regex(r"[0-9a-f]{64}", fullmatch=True)
parts = st.lists(st.one_of(sizes, st.tuples(name, sizes).map(list)), max_size=5)
plain = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-(2**70), 2**70), st.floats(allow_nan=False), text),
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(text, inner, max_size=4)),
    max_leaves=8,
)
VALUES: dict[str, st.SearchStrategy[Any]] = {
    "str": text,
    "str | None": st.one_of(st.none(), text),
    "int": st.integers(-(2**63), 2**63),
    "int | None": st.one_of(st.none(), st.integers(-255, 255)),
    "bool": st.booleans(),
    "float": st.floats(allow_nan=False, allow_infinity=False),
    "float | None": st.one_of(st.none(), st.floats(0, 1e9)),
    "Sequence[Part]": parts,
    "list[int]": st.lists(st.integers(0, 255), max_size=5),
    "Sequence[str]": st.lists(text, max_size=5),
    "list[str]": st.lists(text, max_size=5),
    "list[list[str]]": st.lists(st.tuples(text, name).map(list), max_size=5),
    "Mapping[str, str]": st.dictionaries(text, text, max_size=4),
    "Mapping[str, Any]": st.dictionaries(text, plain, max_size=4),
}


def fields(kind: type[Message]) -> dict[str, str]:
    """The fields of a message and how their types are written."""
    return {name: hint for name, hint in kind.__annotations__.items() if not hint.startswith("ClassVar")}


def required(kind: type[Message]) -> set[str]:
    return {name for name in fields(kind) if name not in vars(kind)}


@st.composite
def any_message(draw: st.DrawFn) -> Message:
    kind = draw(st.sampled_from(KINDS))
    return kind(**{name: draw(VALUES[hint]) for name, hint in fields(kind).items()})


def test_every_type_of_a_field_is_known_here() -> None:
    """A new message with a new kind of field needs a line in VALUES and in SAMPLES."""
    hints = {hint for kind in KINDS for hint in fields(kind).values()}
    assert hints <= set(VALUES)
    assert hints <= set(SAMPLES)


@settings(deadline=None, max_examples=60)
@given(any_message())
def test_every_message_comes_back_as_it_was_sent(message: Message) -> None:
    """All kinds, any text in any field: also what is not valid Unicode, and numbers past 32 bits."""
    again = decode(message.encode())
    assert type(again) is type(message)
    for field in fields(type(message)):
        assert getattr(again, field) == getattr(message, field)
    assert expect(type(message), message.encode()) == message


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.op)
def test_defaults_may_be_left_out_on_the_wire(kind: type[Message]) -> None:
    """Fields with a default can be added without raising the version."""
    sample = {name: SAMPLES[hint][0] for name, hint in fields(kind).items()}
    least = {name: value for name, value in sample.items() if name in required(kind)}
    assert decode(json.dumps({"op": kind.op, **least}).encode()) == kind(**least)


SAMPLES: dict[str, list[Any]] = {
    "str": ["text", None, 1, True, [], {}],
    "str | None": ["text", 1, True, [], {}],
    "int": [1, None, "1", 1.5, True, [], {}],
    "int | None": [1, "1", 1.5, True, [], {}],
    "bool": [True, None, 1, "true", []],
    "float": [1.5, None, "1", True, [], {}],
    "float | None": [1.5, "1", True, [], {}],
    "Sequence[Part]": [[1], None, 1, "1", {}, True],
    "list[int]": [[1], None, 1, "1", {}, ["1"], [None], [1.5], [[1]]],
    "Sequence[str]": [["text"], None, "text", {}, [1], [None], [["text"]], [{}]],
    "list[str]": [["text"], None, "text", {}, [1], [None], [["text"]], [{}]],
    "list[list[str]]": [[["path", "name"]], None, "text", {}, [1], ["ab"], [["path", 1]], [[None]], [{}], [[[]]]],
    "Mapping[str, str]": [{"A": "1"}, None, [], "text", {"A": 1}, {"A": None}, {"A": []}],
    "Mapping[str, Any]": [{"rank": 0}, None, [], "text", 1],
}
"""A right value, then wrong ones."""


def is_refused(document: dict[str, Any]) -> bool:
    try:
        decode(json.dumps(document).encode())
    except ProtocolError:
        return True
    return False


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.op)
def test_a_field_that_is_missing_or_of_the_wrong_type_is_refused(kind: type[Message]) -> None:
    """Also inside lists and mappings: what passes here is used without another look."""
    right = {"op": kind.op, **{field: SAMPLES[hint][0] for field, hint in fields(kind).items()}}
    assert not is_refused(right)
    for name, hint in fields(kind).items():
        for wrong in SAMPLES[hint][1:]:
            assert is_refused({**right, name: wrong}), (name, wrong)
    for name in required(kind):
        assert is_refused({key: value for key, value in right.items() if key != name}), name


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"null",
        b"1",
        b'"done"',
        b"[]",
        b'["op"]',
        b"{}",
        b'{"op": null}',
        b'{"op": ["done"]}',
        b'{"op": {}}',
        b'{"op": ""}',
        b'{"op": "message"}',
        b'{"op": "nothing like it"}',
        b'{"op": "done", "more": 1}',
        b'{"op": "done", "self": 1}',
        b'{"op": "done", "_names": []}',
        b'{"op": "done"',
        b'{"op": "done"}{"op": "done"}',
        b"\xff\xfe",
        b'{"op": "done", "text": "\xff"}',
        b'{"op": "exited", "worker": "", "generation": ' + b"9" * 10_000 + b"}",
        b'{"op": "exited", "worker": "", "generation": 1e999}',
        b'{"op": "exited", "worker": "", "generation": NaN}',
        b"[" * 100_000,
        b'{"op":' * 100_000,
        b'{"op": "missing", "names": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    ],
    ids=lambda data: repr(data[:40]),
)
def test_what_is_no_message_is_refused(data: bytes) -> None:
    with pytest.raises(ProtocolError):
        decode(data)


def test_nesting_of_any_depth_is_refused_or_read_never_a_recursion_error() -> None:
    """Also where the parser just manages what the error message then has to print."""
    limit = sys.getrecursionlimit()
    for depth in (10, 100, *range(limit - 150, limit + 10, 3), 2 * limit, 20 * limit):
        nested = b"[" * depth + b"]" * depth
        with pytest.raises(ProtocolError):
            decode(b'{"op":"exited","worker":"","generation":%s}' % nested)
        for document in (b'{"op":"has","names":%s}', b'{"op":"result","parts":%s}', b'{"op":"done","text":{"a":%s}}'):
            try:
                decode(document % nested)
            except ProtocolError:
                pass


def test_expect_refuses_another_message() -> None:
    with pytest.raises(ProtocolError, match="done where missing was expected"):
        expect(messages.Missing, messages.Done().encode())


def test_short_calls_are_cached_and_other_messages_are_not() -> None:
    short = messages.Call(worker="", function="", parts=[])
    fill = "w" * (512 - len(short.encode()))
    for message, cached in (
        (messages.Call(worker=fill, function="", parts=[]), True),
        (messages.Call(worker=fill, function="f", parts=[]), False),
        (messages.Missing(names=["a"]), False),
    ):
        assert (decode(message.encode()) is decode(message.encode())) is cached


def test_error_texts_stay_short() -> None:
    """A hostile megabyte is not repeated in the error that refuses it."""
    for data in (b"x" * 1_000_000, b'{"op":"exited","worker":"","generation":"%s"}' % (b"x" * 1_000_000)):
        with pytest.raises(ProtocolError) as caught:
            decode(data)
        assert len(str(caught.value)) < 500


def test_a_head_that_is_made_without_its_message_is_that_of_the_message() -> None:
    assert messages.Result.head(parts=(3,)) == messages.Result(parts=(3,)).encode()
    fields: dict[str, Any] = {"worker": "w", "function": "f", "parts": (1,), "timeout": None}
    for _ in range(2):
        assert messages.Call.head(**fields) == messages.Call(**fields).encode()
