"""Plain data: it comes back as it was, other types are named, and nothing that a host sends does anything else."""

from __future__ import annotations

import collections
import contextlib
import datetime
import decimal
import fractions
import json
import pathlib
import sys
import threading
import tracemalloc
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from skyfab.protocol import plain_data
from skyfab.protocol.plain_data import NotPlain


def again(value: object) -> Any:
    """The value, on the way that a result takes to a pool that does not trust its hosts."""
    payload = plain_data.dumps(value)
    return plain_data.loads(payload.data, [memoryview(bytearray(buffer)) for buffer in payload.buffers])


# ---- what is plain comes back as it was

PLAIN = [
    *(None, True, 0, -1, 2**63, 2**200, -(2**70), 1.5, -0.0, float("inf"), 1j, "ü", "\ud800", "\0"),
    *(b"x", bytearray(b"y"), bytes(10_000), bytearray(10_000), [1, 2**64, 3], [True, 1, 0]),
    *([], [1, [2]], (), (1, (2, 3)), {"a": {1, 2}}, {(1, ("x", None)): 1.5}, frozenset([1, (2,)]), set()),
    *(range(2, 10, 3), range(2**70), slice(1, None, 2), decimal.Decimal("-1.50"), decimal.Decimal("Infinity")),
    *(fractions.Fraction(-1, 3), uuid.UUID(int=2**127 + 4), datetime.date(2024, 2, 29), datetime.time(1, 2, 3, 4)),
    *(datetime.datetime(2024, 1, 1, 5, fold=1), datetime.datetime(2024, 1, 1, tzinfo=datetime.timezone.utc)),
    *(datetime.timedelta(-1, 5, 7), datetime.timezone(datetime.timedelta(hours=2), "CEST")),
    *(pathlib.PurePosixPath("a/../b"), pathlib.PureWindowsPath("c:/x"), pathlib.Path("/etc")),
    *(collections.OrderedDict(a=1, b=[2]), collections.deque([1, 2], 5), collections.defaultdict(None, {1: 2})),
]


@pytest.mark.parametrize("value", PLAIN, ids=lambda value: f"{value!r:.40}".encode("ascii", "replace").decode())
def test_plain_data_comes_back_as_it_was(value: object) -> None:
    found = again(value)
    assert type(found) is type(value)
    assert found == value
    assert repr(found) == repr(value)


trees = st.recursive(
    st.one_of(
        *(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(), st.binary()),
        *(st.dates(), st.times(), st.datetimes(), st.timedeltas(), st.uuids(), st.decimals(allow_nan=False)),
        *(st.fractions(), st.complex_numbers(allow_nan=False), st.binary().map(bytearray)),
        st.sampled_from([b"x" * 4095, b"x" * 4096]),
    ),
    lambda inner: st.one_of(
        st.lists(inner),
        st.lists(inner).map(tuple),
        st.dictionaries(st.one_of(st.text(), st.integers(), st.tuples(st.integers(), st.text())), inner),
        st.sets(st.one_of(st.text(), st.integers())),
        st.lists(inner).map(collections.deque),
    ),
    max_leaves=12,
)


@settings(deadline=None, max_examples=40)
@given(trees)
def test_any_plain_data_comes_back_as_it_was(value: object) -> None:
    assert again(value) == value


def test_not_a_number_comes_back() -> None:
    assert repr(again([float("nan"), decimal.Decimal("NaN"), complex("nan")])) == "[nan, Decimal('NaN'), (nan+0j)]"


def test_arrays_come_back_as_they_were() -> None:
    np = pytest.importorskip("numpy")
    cube = np.arange(24).reshape(2, 3, 4)
    arrays = [
        *(
            np.arange(5),
            np.arange(10_000.0),
            np.ones((3, 4), order="F"),
            np.array(3),
            np.zeros((2, 0)),
            np.array(["a"]),
        ),
        *(cube[:, ::2], cube.transpose(1, 0, 2), np.broadcast_to(np.arange(3), (2, 3))),
        *(np.arange(3).astype("M8[ns]"), np.array([1, 2], ">i4"), np.array([True]), np.ones(9000).reshape(90, -1).T),
        *(np.zeros(2, [("a", "i4"), ("b", "U3", (2,))]), np.zeros(1, np.dtype([("a", "i1"), ("b", "f8")], align=True))),
        *(np.array([], "S3"), np.frombuffer(b"read-only", "u1"), np.arange(3).astype("m8")),
    ]
    for array in arrays:
        found = again(array)
        assert (type(found), found.dtype, found.shape) == (np.ndarray, array.dtype, array.shape)
        assert found.tobytes() == array.tobytes()
        assert found.flags.writeable
    assert again(np.ones((90, 100), order="F")).flags.f_contiguous
    for scalar in (
        np.float64(2),
        np.bool_(True),
        np.str_("hi"),
        np.str_(""),
        np.bytes_(b""),
        np.datetime64("2020-01-01"),
        np.int8(-1),
    ):
        assert type(again({scalar: [scalar]})[scalar][0]) is type(scalar)
    assert again(np.dtype("f4")) == np.dtype("f4")


@pytest.mark.torch
def test_tensors_come_back_as_they_were() -> None:
    torch = pytest.importorskip("torch")
    whole = torch.arange(6.0).reshape(2, 3)
    tensors = [
        *(whole, whole.T, torch.tensor(1), torch.zeros(2, 0), torch.zeros(9000), torch.tensor([True])),
        *(torch.ones(2, requires_grad=True), torch.nn.Parameter(torch.ones(3)), torch.ones(4, dtype=torch.bfloat16)),
        *(torch.ones(3, dtype=torch.uint16), torch.ones(3, dtype=torch.complex64)),
        torch.rand(2, 3, 4, 5).contiguous(memory_format=torch.channels_last),
    ]
    for tensor in tensors:
        found = again(tensor)
        assert type(found) is type(tensor)
        assert (found.dtype, found.shape, found.stride()) == (tensor.dtype, tensor.shape, tensor.stride())
        assert found.requires_grad == tensor.requires_grad
        assert found.tolist() == tensor.tolist()
    for view in (whole[1:, ::2], whole.expand(4, 2, 3), torch.ones(2, dtype=torch.complex64).conj()):
        assert again(view).tolist() == view.tolist()
    assert again(whole.shape) == whole.shape
    assert again(torch.float32) is torch.float32


@pytest.mark.torch
def test_a_models_weights_come_back() -> None:
    torch = pytest.importorskip("torch")
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.BatchNorm1d(3))
    state = again(model.state_dict())
    assert state._metadata == model.state_dict()._metadata
    torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.BatchNorm1d(3)).load_state_dict(state)


@pytest.mark.parametrize(
    "error",
    [
        *(ValueError("x", 1), KeyError("k"), FileNotFoundError(2, "No such file", "name"), StopIteration(3)),
        *(ModuleNotFoundError("m", name="m"), UnicodeDecodeError("utf-8", b"x", 0, 1, "why"), ZeroDivisionError()),
    ],
    ids=repr,
)
def test_pythons_own_exceptions_come_back(error: Exception) -> None:
    error.__notes__ = ["a note"]
    payload = plain_data.dumps_exception(error)
    found = plain_data.loads_exception(payload.data, payload.buffers)
    assert (type(found), found.args, str(found)) == (type(error), error.args, str(error))
    assert found.__notes__ == ["a note"]
    assert getattr(found, "name", None) == getattr(error, "name", None)


# ---- other types are named by the host's encoder


class Thing:
    """Some class of the user's."""


class Broken(Exception):
    """An exception of the user's."""


def loop() -> list[Any]:
    row: list[Any] = [1]
    row.append(row)
    return row


@pytest.mark.parametrize(
    ("value", "named"),
    [
        (Thing(), "Thing"),
        ([{"a": (Thing(),)}], "Thing"),
        (Thing, "type"),
        (len, "builtin_function"),
        (ValueError("x"), "ValueError"),
        (collections.defaultdict(list), "factory"),
        (loop(), "contains itself"),
        (collections.namedtuple("Pair", "a b")(1, 2), "Pair"),  # type: ignore[call-arg]
        (collections.Counter("a"), "Counter"),
    ],
    ids=str,
)
def test_other_types_are_named(value: object, named: str) -> None:
    with pytest.raises(NotPlain, match=named):
        plain_data.dumps(value)


def test_other_arrays_are_named() -> None:
    np = pytest.importorskip("numpy")
    for value in (
        *(np.array([1, None], dtype=object), np.zeros(2, [("a", "O")]), np.dtype("O"), np.ma.array([1])),
        *(np.zeros(2).view(np.recarray), np.float64, np.sum),
    ):
        with pytest.raises(NotPlain):
            plain_data.dumps(value)


@pytest.mark.torch
def test_other_tensors_are_named() -> None:
    torch = pytest.importorskip("torch")
    for value in (torch.nn.Linear(1, 1), torch.zeros(3).to_sparse(), torch.zeros(3, device="meta"), torch.zeros):
        with pytest.raises(NotPlain):
            plain_data.dumps(value)


@pytest.mark.parametrize("error", [Broken("x"), SyntaxError("x"), ValueError(len)])
def test_other_exceptions_are_refused(error: Exception) -> None:
    with pytest.raises(NotPlain):
        plain_data.dumps_exception(error)


# ---- whatever a host sends, it is data or NotPlain


@contextlib.contextmanager
def watched() -> Iterator[list[str]]:
    """What this thread imports, opens, runs or compiles meanwhile."""
    done: list[str] = []
    _watchers[threading.get_ident()] = done
    try:
        yield done
    finally:
        del _watchers[threading.get_ident()]


_watchers: dict[int, list[str]] = {}
_WATCHED = ("import", "open", "exec", "compile", "os.", "subprocess.", "socket.", "pickle.find_class")


def _hear(event: str, arguments: tuple[Any, ...]) -> None:
    done = _watchers.get(threading.get_ident())
    if done is not None and event.startswith(_WATCHED):
        done.append(f"{event} {arguments[:1]}")


sys.addaudithook(_hear)


def refused(data: bytes, loads: Callable[..., Any] = plain_data.loads) -> None:
    """It is, and nothing is done or held."""
    tracemalloc.start()
    try:
        with watched() as done, pytest.raises(NotPlain) as caught:
            loads(data, [memoryview(bytearray(8))])
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert done == []
    assert peak < 5_000_000 + 20 * len(data)
    assert len(str(caught.value)) < 300
    assert str(caught.value).isprintable()


ONE = ["tuple", 1]
ARRAY = ["numpy.ndarray", "<f8", ONE, "C", 0]
HOSTILE: list[Any] = [
    *([], [[]], ["eval", "1"], [["list"]], [1], {}, ["list", {"a": 1}], ["os.system", "true"], [None]),
    *(["int", 5], ["int", "x"], ["bytes", 1], ["bytes", -1], ["bytes", True], ["bytes", "?"], ["bytes", [0]]),
    *(["bytes"], ["bytes", 10**12, ""], ["bytearray", 10**12, 0], ["bytes", "x", "ascii", ""]),
    *(["complex", "1", 2], ["complex", 1.0, 2.0, 3.0], ["range", 1.5], ["range", 1, 2, 0], ["slice", ["list"]]),
    *(["Decimal", "x"], ["Decimal", 5], ["Fraction", 1, 0], ["Fraction", ["int", "0x" + "f" * 20_000], 3]),
    *(["UUID", "x"], ["date", 0, 0, 0], ["date", "x"], ["datetime", 2024, 1, 1, 0, 0, 0, 0, "utc", 0], ["datetime"]),
    *(["timedelta", 10**12, 0, 0], ["timezone", 5], ["timezone", ["timedelta", 5, 0, 0]], ["PosixPath", 5]),
    *(["PosixPath", "\0", 1], ["set", ["list"]], ["frozenset", ["dict"]], ["deque", "x", 1], ["deque", -1]),
    *(["dict", 1], ["dict", ["list"], 1], ["OrderedDict"], ["OrderedDict", None, 1], ["defaultdict", ["list"], 1]),
    *(["numpy.ndarray", "O", ONE, "C", 0], ["numpy.ndarray", "<f8", ["tuple", 10**12], "C", 0]),
    *(["numpy.ndarray", "<f8", ["tuple", -1, -1], "C", 0], ["numpy.ndarray", "<f8", ["tuple", True], "C", 0]),
    *(["numpy.ndarray", "<f8", ["tuple", *[1] * 65], "C", 0], ["numpy.ndarray", "f8,f8", ONE, "C", 0]),
    *(["numpy.ndarray", "V999999999999", ONE, "C", 0], ["numpy.ndarray", ["list", ["tuple", "a", "O"]], ONE, "C", 0]),
    ["numpy.ndarray", ["list", ["tuple", "a", "<f8", ["tuple", 2**40]]], ONE, "C", 0],
    *([*ARRAY[:-1], 7], ["list", ARRAY, ARRAY], ["numpy.generic", "<f8", "AAAA"], ["numpy.dtype", "S0"]),
    *(["numpy.dtype", "no such type"], ["numpy.dtype", 5], ["numpy.dtype", ["list", ["tuple", "a"]]]),
    *(["numpy.dtype", ["list", ["tuple", 5, "<f8"]]], ["numpy.dtype", ["tuple", "O", ["tuple", 2]]]),
]


@pytest.mark.parametrize("document", HOSTILE, ids=lambda document: json.dumps(document)[:60])
def test_hostile_data_is_refused(document: Any) -> None:
    pytest.importorskip("numpy")
    refused(json.dumps(document).encode())


@pytest.mark.parametrize("kind", ["set", "frozenset", "dict", "OrderedDict"])
def test_keys_that_collide_are_refused(kind: str) -> None:
    """A large table of them would stop all threads for hours."""
    modulus = sys.hash_info.modulus
    for step, count, is_refused in ((modulus, 2000, True), (modulus, 100, False), (modulus + 1, 2000, False)):
        keys = [["int", hex(number * step)] for number in range(count)]
        values = keys if kind.endswith("set") else [one for key in keys for one in (key, None)]
        data = json.dumps([kind, *([None] if kind == "OrderedDict" else []), *values]).encode()
        if is_refused:
            with pytest.raises(NotPlain, match="many keys with the same hash"):
                plain_data.loads(data)
        else:
            assert len(plain_data.loads(data)) == count


@pytest.mark.torch
@pytest.mark.parametrize(
    "parts",
    [
        *(["torch.float32", [3], [1], "cpu", False, 0], ["torch.float32", [2], [2], "cpu", False, 0]),
        *(["torch.float32", [2], [-1], "cpu", False, 0], ["torch.float32", [10**12], [0], "cpu", False, 0]),
        *(["torch.float32", [2**62, 4], [1, 1], "cpu", False, 0], ["torch.float32", [2], [1, 1], "cpu", False, 0]),
        *(["torch.load", [2], [1], "cpu", False, 0], ["torch.float32", [2], [1], 5, False, 0]),
        *(["torch.int64", [1], [1], "cpu", True, 0], ["torch.float32", "x", [1], "cpu", False, 0]),
        *(["torch.float32", [True, 2], [1, 1], "cpu", False, 0], ["torch.float32", [2], [1], "cpu", "x", 0]),
    ],
)
def test_hostile_tensors_are_refused(parts: list[Any]) -> None:
    pytest.importorskip("torch")
    document = ["torch.Tensor", *(["tuple", *part] if isinstance(part, list) else part for part in parts)]
    refused(json.dumps(document).encode())
    fine = b'["torch.Tensor","torch.float32",["tuple",2],["tuple",1],"cpu",false,0]'
    assert plain_data.loads(fine, [memoryview(bytearray(8))]).tolist() == [0.0, 0.0]


@pytest.mark.parametrize(
    "data",
    [
        *(b"", b"\xff" * 100, b"[", "ü".encode(), '["list",1]'.encode("utf-16"), b'["list",' * 100_000),
        *(b'["list",' * 300 + b"1" + b"]" * 300, b'["deque",null,' * 300 + b"1" + b"]" * 300, b"1" * 5000),
        *(b"[" * 1_000_000 + b"]" * 1_000_000, b"\x80\x05N."),
    ],
    ids=lambda data: repr(data[:20]),
)
def test_what_is_not_a_document_is_refused(data: bytes) -> None:
    refused(data)


@pytest.mark.parametrize(
    "document",
    [
        *(["tuple"], ["tuple", "ValueError"], ["tuple", "eval", ["tuple", "1"], ["dict"]]),
        *(["tuple", "SystemExit", ["tuple"], ["dict"]], ["list", 1, 2, 3], "x"),
        *(["tuple", "ValueError", ["list"], ["dict"]], ["tuple", "OSError", ["tuple"], 5]),
        ["tuple", "SyntaxError", ["tuple", "x", ["range", 0, 10**12, 1]], ["dict"]],
        ["tuple", "ExceptionGroup", ["tuple", "x", ["list"]], ["dict"]],
        ["tuple", "UnicodeDecodeError", ["tuple", "x"], ["dict"]],
    ],
    ids=lambda document: json.dumps(document)[:60],
)
def test_what_is_not_an_exception_is_refused(document: Any) -> None:
    refused(json.dumps(document).encode(), plain_data.loads_exception)


NAMES = [*plain_data._TYPES, "eval", "ValueError"]
documents = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5), st.sampled_from(NAMES)),
    lambda inner: st.one_of(
        st.tuples(st.sampled_from(NAMES), st.lists(inner, max_size=9)).map(lambda pair: [pair[0], *pair[1]]),
        st.lists(inner, max_size=4),
        st.dictionaries(st.text(max_size=3), inner, max_size=2),
    ),
)


@settings(deadline=None, max_examples=70)
@given(documents)
def test_whatever_a_document_says_it_is_data_or_refused(document: Any) -> None:
    pytest.importorskip("numpy")
    pytest.importorskip("torch")
    data = json.dumps(document).encode()
    for loads in (plain_data.loads, plain_data.loads_exception):
        with watched() as done, contextlib.suppress(NotPlain):
            found = loads(data, [memoryview(bytearray(8))])
            assert not callable(found)
        assert done == []


@settings(deadline=None, max_examples=50)
@given(trees, st.data())
def test_damaged_data_is_data_or_refused(value: Any, draw: st.DataObject) -> None:
    payload = plain_data.dumps(value)
    data = bytearray(payload.data)
    for _ in range(draw.draw(st.integers(1, 4))):
        data[draw.draw(st.integers(0, len(data) - 1))] = draw.draw(st.sampled_from(b'[]{}",:0159aeE-.ntf\\\xff'))
    with watched() as done, contextlib.suppress(NotPlain):
        plain_data.loads(data, [memoryview(bytearray(buffer)) for buffer in payload.buffers])
    assert done == []


def test_nesting_as_people_have_it_is_accepted() -> None:
    value: Any = collections.deque([1])
    for _ in range(plain_data._DEEPEST // 2):
        value = collections.deque([collections.defaultdict(None, {"x": value})])
    assert again(value) == value
    with pytest.raises(NotPlain, match="nested"):
        plain_data.dumps([value])
