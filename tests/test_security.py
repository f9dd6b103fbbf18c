"""Security: the promises of docs/security.md that no other test proves. The document names the tests for each."""

from __future__ import annotations

import collections
import contextlib
import datetime
import decimal
import fractions
import os
import pathlib
import pickle
import re
import secrets
import struct
import subprocess
import sys
import threading
import traceback
import tracemalloc
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from stage import remote
from stage.remote import linger
from stage.spot import Spot

import skyfab as sky
from skyfab.calls.results import unpack_result
from skyfab.lab import Lab
from skyfab.protocol import codec, messages, safe_pickle
from skyfab.session.bundle import bundle
from skyfab.ui.events import Event

HOSTILE = """it's "quoted"; $(touch /tmp/pwned) `id` \\ $HOME\n-n ünï\t*\x01!"""
SECRET = secrets.token_hex(16)
"""In no file of the project, which hosts have."""


# ---- results="data": what is plain comes back as it was


def again(value: object) -> Any:
    """The value, on the way that a result takes to a pool that trusts nobody."""
    payload = codec.dumps(value)
    return safe_pickle.loads(payload.data, [memoryview(bytearray(buffer)) for buffer in payload.buffers])


PLAIN = [
    *(None, True, 0, -1, 2**200, 1.5, 1j, "ü", "\ud800", b"x", bytearray(b"y"), bytes(10_000), bytearray(10_000)),
    *([], [1, [2]], (), (1, (2, 3)), {"a": {1, 2}}, {(1, ("x", None)): 1.5}, frozenset([1, (2,)]), set()),
    *(range(2, 10, 3), slice(1, None, 2), decimal.Decimal("-1.50"), decimal.Decimal("NaN").copy_sign(1).is_nan()),
    *(
        fractions.Fraction(-1, 3),
        uuid.UUID(int=2**127 + 4),
        uuid.UUID(int=2**126 + 1),
        datetime.date(2024, 2, 29),
        datetime.time(1, 2, 3, 4),
    ),
    *(datetime.datetime(2024, 1, 1, 5, fold=1), datetime.datetime(2024, 1, 1, tzinfo=datetime.timezone.utc)),
    *(datetime.timedelta(-1, 5, 7), datetime.timezone(datetime.timedelta(hours=2), "CEST")),
    *(pathlib.PurePosixPath("a/../b"), pathlib.PureWindowsPath("c:/x"), pathlib.Path("/etc")),
    *(collections.OrderedDict(a=1, b=[2]), collections.deque([1, 2], 5), collections.defaultdict(None, {1: 2})),
]


@pytest.mark.parametrize("value", PLAIN, ids=lambda value: f"{value!r:.40}".encode("ascii", "replace").decode())
def test_plain_data_is_accepted_as_it_is(value: object) -> None:
    found = again(value)
    assert type(found) is type(value)
    assert found == value


trees = st.recursive(
    st.one_of(
        *(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(), st.binary()),
        *(st.dates(), st.times(), st.datetimes(), st.timedeltas(), st.uuids(), st.decimals(allow_nan=False)),
        *(st.fractions(), st.complex_numbers(allow_nan=False), st.binary().map(bytearray)),
    ),
    lambda inner: st.one_of(
        st.lists(inner),
        st.lists(inner).map(tuple),
        st.dictionaries(st.one_of(st.text(), st.integers(), st.tuples(st.integers(), st.text())), inner),
        st.sets(st.one_of(st.text(), st.integers())),
        st.lists(inner).map(collections.deque),
    ),
)


@settings(deadline=None, max_examples=50)
@given(trees)
def test_any_plain_data_is_accepted_as_it_is(value: object) -> None:
    assert again(value) == value


def test_what_is_shared_or_refers_to_itself_stays_so() -> None:
    row: list[Any] = [1]
    row.append(row)
    found, same = again([row, row])
    assert found is same
    assert found[1] is found


def test_arrays_are_accepted() -> None:
    np = pytest.importorskip("numpy")
    arrays = [
        *(
            np.arange(5),
            np.arange(10_000.0),
            np.ones((3, 4), order="F"),
            np.array(3),
            np.zeros((2, 0)),
            np.array(["a"]),
        ),
        *(np.arange(24).reshape(2, 3, 4)[:, ::2], np.arange(24).reshape(2, 3, 4).transpose(1, 0, 2)),
        *(np.arange(3).astype("M8[ns]"), np.array([1, 2], ">i4"), np.array([True]), np.ones(9000).reshape(90, -1).T),
        *(np.zeros(2, [("a", "i4"), ("b", "U3", (2,))]), np.zeros(1, np.dtype([("a", "i1"), ("b", "f8")], align=True))),
    ]
    for array in arrays:
        found = again(array)
        assert (type(found), found.dtype, found.shape) == (np.ndarray, array.dtype, array.shape)
        assert found.tobytes() == array.tobytes()
        assert found.flags.writeable
    for scalar in (np.float64(2), np.bool_(True), np.str_("hi"), np.datetime64("2020-01-01"), np.int8(-1)):
        assert again(scalar) == scalar
        assert type(again({scalar: [scalar]})[scalar][0]) is type(scalar)
    assert again(np.dtype("f4")) == np.dtype("f4")


@pytest.mark.torch
def test_tensors_are_accepted_and_stay_tied() -> None:
    torch = pytest.importorskip("torch")
    whole = torch.arange(6.0).reshape(2, 3)
    tensors = [
        *(whole, whole.T, whole[1:, ::2], torch.tensor(1), torch.zeros(2, 0), torch.zeros(9000), torch.tensor([True])),
        *(torch.ones(2, requires_grad=True), torch.nn.Parameter(torch.ones(3)), torch.ones(4, dtype=torch.bfloat16)),
        *(torch.ones(3, dtype=torch.uint16), torch.ones(3, dtype=torch.complex64)),
    ]
    for tensor in tensors:
        found = again(tensor)
        assert type(found) is type(tensor)
        assert (found.dtype, found.shape, found.stride()) == (tensor.dtype, tensor.shape, tensor.stride())
        assert found.requires_grad == tensor.requires_grad
        assert found.tolist() == tensor.tolist()
    one, part = again((whole, whole[1:]))
    one[1, 0] = 7
    assert part[0, 0] == 7
    assert again(whole.shape) == whole.shape


@pytest.mark.torch
def test_a_models_weights_are_accepted() -> None:
    torch = pytest.importorskip("torch")
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.BatchNorm1d(3))
    state = again(model.state_dict())
    assert state._metadata == model.state_dict()._metadata
    torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.BatchNorm1d(3)).load_state_dict(state)


# ---- results="data": and nothing else is


class Calls:
    """Pickled, it is a call of something."""

    def __init__(self, function: Any, *arguments: Any, state: Any = None) -> None:
        self.parts = (function, arguments) if state is None else (function, arguments, state)

    def __reduce__(self) -> Any:
        return self.parts

    def __call__(self) -> None:
        """Pickle wants what is called to be callable."""


class Thing:
    """Some class of the user's."""


def op(*codes: bytes) -> bytes:
    """A pickle by hand."""
    return pickle.PROTO + b"\5" + b"".join(codes) + pickle.STOP


def text(word: str) -> bytes:
    return pickle.SHORT_BINUNICODE + bytes([len(word.encode())]) + word.encode()


def name(module: str, word: str) -> bytes:
    return text(module) + text(word) + pickle.STACK_GLOBAL


def bomb(levels: int = 60) -> bytes:
    """A tuple of two, of two, of two …: a few bytes, and 2**levels things to hash."""
    codes = pickle.EMPTY_TUPLE + pickle.MEMOIZE
    for level in range(levels):
        codes += pickle.BINGET + bytes([level]) + pickle.TUPLE2 + pickle.MEMOIZE
    return codes


HUGE = struct.pack("<Q", 2**40)
TRILLION = pickle.LONG1 + b"\x06" + (10**12).to_bytes(6, "little")
RANGE = name("builtins", "range") + TRILLION + pickle.TUPLE1 + pickle.REDUCE


def evil(mark: str) -> dict[str, bytes]:
    """Pickles that would do harm; those that run something would leave a file at `mark`."""
    made: dict[str, Any] = {
        "os.system": Calls(os.system, f"touch {mark}"),
        "eval": Calls(eval, f"open({mark!r}, 'w').close()"),
        "exec": Calls(exec, f"open({mark!r}, 'w').close()"),
        "open": Calls(open, mark, "w"),
        "an import": Calls(__import__, "this"),
        "getattr": Calls(getattr, Calls(__import__, "os"), "system"),
        "a chain": Calls(Calls(getattr, Calls(__import__, "os"), "system"), f"touch {mark}"),
        "a path's method": Calls(Path.touch, Path(mark)),
        "a call within data": [1, {"a": (Calls(os.system, f"touch {mark}"),)}],
        "an instance": Thing(),
        "a class": Thing,
        "a plain class": datetime.date,
        "a numpy class": collections.OrderedDict,
        "a lambda": lambda: 1,
        "a builtin": len,
        "a module": os,
        "a factory": collections.defaultdict(list),
        "an exception": ValueError("x"),
        "the codec's own loads": Calls(codec.loads, pickle.dumps(Calls(os.system, f"touch {mark}"))),
        "the codec's exceptions": Calls(codec._exception, ValueError, ("x",), {}),
        "a packed object": Calls(codec.unpack, codec.pack(1)),
        "a memory of any size": Calls(bytearray, 10**12),
        "a list of any length": Calls(list, range(10**10)),
        "a fraction of any size": Calls(fractions.Fraction, "1e999999999"),
        "a deque of any length": Calls(collections.deque, range(10**10)),
        "an ordered dict of pairs": Calls(collections.OrderedDict, [(1, 2)]),
        "attributes of a list": Calls(collections.OrderedDict, state={"x": 1}),
    }
    found = {title: codec.dumps(value).data for title, value in made.items()}
    found |= {
        "GLOBAL": b"cos\nsystem\n" + b"(S'touch " + mark.encode() + b"'\ntR.",
        "INST": b"(S'touch " + mark.encode() + b"'\nios\nsystem\n.",
        "OBJ": b"(cos\nsystem\nS'touch " + mark.encode() + b"'\no.",
        "PERSID": b"Pthing\n.",
        "EXT": op(pickle.EXT1, b"\1"),
        "a dotted name": op(name("collections", "OrderedDict.fromkeys"), RANGE, pickle.TUPLE1, pickle.REDUCE),
        "attributes of a class": op(
            *(name("fractions", "Fraction"), b"N", pickle.EMPTY_DICT, text("numerator"), b"N", pickle.SETITEM),
            *(pickle.TUPLE2, pickle.BUILD),
        ),
        "a class's __init__": op(
            name("uuid", "UUID"), pickle.EMPTY_DICT, text("__init__"), b"N", pickle.SETITEM, pickle.BUILD
        ),
        "a call of data": op(text("x"), pickle.EMPTY_TUPLE, pickle.REDUCE),
        "an unfinished object": op(name("uuid", "UUID"), pickle.EMPTY_TUPLE, pickle.NEWOBJ),
        "items of a list": op(pickle.EMPTY_LIST, b"K\0", RANGE, pickle.SETITEM),
        "a slice of a list": op(
            *(pickle.EMPTY_LIST, name("builtins", "slice"), b"NNN", pickle.TUPLE3, pickle.REDUCE, RANGE),
            pickle.SETITEM,
        ),
        "a memory of any size, announced": op(pickle.BYTEARRAY8, HUGE),
        "bytes of any size": op(pickle.BINBYTES8, HUGE),
        "a text of any size": op(pickle.BINUNICODE8, HUGE),
        "a frame of any size": op(pickle.FRAME, HUGE),
        "a memo of any size": op(b"N", pickle.LONG_BINPUT, struct.pack("<I", 2**31 - 1)),
        "a key that takes for ever": op(pickle.EMPTY_DICT, bomb(), b"N", pickle.SETITEM),
        "a member that takes for ever": op(pickle.MARK, bomb(), pickle.FROZENSET),
        "nothing": b"",
        "half": pickle.dumps([1, 2, 3], 5)[:-3],
        "no pickle": b"\xff" * 100,
        "an empty stack": op(pickle.TUPLE3),
        "no buffer": op(pickle.NEXT_BUFFER),
    }
    return found


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
_WATCHED = ("import", "open", "exec", "compile", "os.", "subprocess.", "socket.", "ctypes.", "pickle.find_class")


def _hear(event: str, arguments: tuple[Any, ...]) -> None:
    done = _watchers.get(threading.get_ident())
    if done is not None and event.startswith(_WATCHED):
        done.append(f"{event} {arguments[:1]}")


sys.addaudithook(_hear)


def refused(data: bytes, loads: Callable[[bytes], Any] = safe_pickle.loads) -> str:
    """Why a pickle was refused. It was, at once, and without doing or holding anything."""
    tracemalloc.start()
    try:
        with watched() as done, pytest.raises(Exception) as caught:  # of any type: it is wrapped
            loads(data)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert done == []
    assert peak < 5_000_000
    return str(caught.value)


@pytest.mark.parametrize("title", evil(""))
def test_a_hostile_result_is_refused(title: str, tmp_path: Path) -> None:
    """Nothing is imported, called, opened or held because a pickle says so."""
    data = evil(str(tmp_path / "mark"))[title]
    refused(data)
    refused(data, safe_pickle.loads_exception) if title != "an exception" else None
    with pytest.raises(sky.UntrustedResult) as caught:
        unpack_result(
            messages.Result(parts=[len(data)]), [memoryview(data)], host="node1", rank=2, label="f", untrusted=True
        )
    assert (caught.value.host, caught.value.rank) == ("node1", 2)
    assert len(str(caught.value)) < 600
    assert str(caught.value).replace("\n", "").isprintable()
    assert list(tmp_path.iterdir()) == []
    assert fractions.Fraction(1, 2).numerator == 1


def test_the_hostile_results_are_hostile(tmp_path: Path) -> None:
    """Else the test above proves nothing: Python's own unpickler does as they say."""
    made = evil(str(tmp_path / "mark"))
    for title in ("os.system", "eval", "a chain", "GLOBAL", "INST", "OBJ", "the codec's own loads"):
        with contextlib.suppress(Exception):
            pickle.loads(made[title])
        assert (tmp_path / "mark").exists(), title
        (tmp_path / "mark").unlink()


def test_hostile_arrays_are_refused() -> None:
    """Objects in them, more elements than memory, types that numpy would make up."""
    np = pytest.importorskip("numpy")
    from numpy._core import multiarray, numeric

    kind = np.dtype("f8")
    many = (10**12,)
    for made in [
        np.array([1, None], dtype=object),
        np.zeros(2, [("a", "O")]),
        np.dtype("O"),
        np.ma.array([1]),
        np.zeros(2).view(np.recarray),
        np.ndarray,
        np.float64,
        np.sum,
        Calls(numeric._frombuffer, bytearray(8), kind, many, "C"),
        Calls(numeric._frombuffer, bytearray(8), kind, (-1,), "C"),
        Calls(numeric._frombuffer, bytearray(8), kind, (1,) * 65, "C"),
        Calls(numeric._frombuffer, range(8), kind, (1,), "C"),
        Calls(numeric._frombuffer, bytearray(8), "f8", (1,), "C"),
        Calls(numeric._frombuffer, bytearray(8), kind, (1,), "K", (5,)),
        Calls(multiarray._reconstruct, np.ndarray, many, b"b"),
        Calls(multiarray._reconstruct, np.ndarray, (0,), b"b", state=(1, many, kind, False, b"")),
        Calls(multiarray._reconstruct, np.ndarray, (0,), b"b", state=(1, (1,), kind, False, [Thing()])),
        Calls(multiarray._reconstruct, np.ma.MaskedArray, (0,), b"b"),
        Calls(multiarray.scalar, kind, b"x"),
        Calls(np.dtype, "V999999999999", state=(3, "|", None, None, None, -1, -1, 0)),
        Calls(np.dtype, "V8", state=(3, "|", None, ("a",), {"a": (kind, 10**9)}, 8, 1, 0)),
        Calls(np.dtype, "V8", state=(3, "|", (kind, (2**40,)), None, None, 8, 1, 0)),
        Calls(np.dtype, "f8", state=("x",)),
        Calls(np.load, "/dev/zero"),
        Calls(np.fromfile, "/dev/zero"),
        Calls(np.zeros, many),
    ]:
        refused(codec.dumps(made).data)


@pytest.mark.torch
def test_hostile_tensors_are_refused() -> None:
    """Outside their memory, with hooks, of kinds that torch does not check."""
    torch = pytest.importorskip("torch")
    memory = bytearray(32)
    storage = Calls(codec._typed, Calls(codec._storage, memory, "cpu"), torch.float32)
    rebuild, hooks = torch._utils._rebuild_tensor_v2, collections.OrderedDict()
    for made in [
        Calls(rebuild, storage, 0, (9,), (1,), False, hooks),
        Calls(rebuild, storage, 1, (8,), (1,), False, hooks),
        Calls(rebuild, storage, -1, (1,), (1,), False, hooks),
        Calls(rebuild, storage, 0, (2, 2), (-1, 1), False, hooks),
        Calls(rebuild, storage, 0, (10**12,), (0,), False, hooks),
        Calls(rebuild, storage, 0, (2**62, 4), (1, 1), False, hooks),
        Calls(rebuild, storage, 0, (2,), (1, 1), False, hooks),
        Calls(rebuild, storage, 10**6, (0,), (1,), False, hooks),
        Calls(rebuild, storage, 0, (2,), (1,), False, collections.OrderedDict({1: print})),
        Calls(rebuild, memory, 0, (2,), (1,), False, hooks),
        Calls(
            Calls(codec._rebuilder), Calls(codec._storage, memory, "cpu"), 0, (17,), (1,), False, hooks, torch.uint16
        ),
        Calls(codec._storage, 10**12, "cpu"),
        Calls(codec._typed, memory, torch.float32),
        Calls(torch._utils._rebuild_parameter, Thing(), True, hooks),
        Calls(torch.load, "/dev/zero"),
        Calls(torch.storage._load_from_bytes, b"x"),
        Calls(torch.zeros, 10**12),
        torch.nn.Linear(1, 1),
        torch.zeros(3).expand(5, 3),
        torch.zeros(3).to_sparse(),
        torch.float32.to_complex,
    ]:
        refused(codec.dumps(made).data)


CONTENT = bytes(10_000)
WORD = "1" * 10_000


def test_what_was_sent_once_is_not_copied_without_end() -> None:
    """A pickle can refer to the same bytes a thousand times: a few kilobytes became gigabytes."""
    np = pytest.importorskip("numpy")
    from numpy._core import multiarray

    kind, fields = np.dtype("u1"), {str(number): (np.dtype("u1"), number) for number in range(1000)}
    layout = (3, "|", None, tuple(fields), fields, 1000, 1, 0)
    copied: list[Callable[[], Calls]] = [
        lambda: Calls(
            multiarray._reconstruct, np.ndarray, (0,), b"b", state=(1, (len(CONTENT),), kind, False, CONTENT)
        ),
        lambda: Calls(multiarray.scalar, np.dtype(f"S{len(CONTENT)}"), CONTENT),
        lambda: Calls(np.dtype, "V1000", state=layout),
        lambda: Calls(decimal.Decimal, WORD),
        lambda: Calls(pathlib.PurePosixPath, WORD),
    ]
    for make in copied:
        assert len(safe_pickle.loads(codec.dumps([make()]).data)) == 1
        assert "sent once" in refused(codec.dumps([make() for _ in range(1000)]).data)


@pytest.mark.torch
def test_a_storage_that_was_sent_once_is_not_copied_without_end() -> None:
    pytest.importorskip("torch")
    assert "sent once" in refused(codec.dumps([Calls(codec._storage, CONTENT, "cpu") for _ in range(1000)]).data)


names = st.sampled_from(
    [
        *(
            ("os", "system"),
            ("builtins", "eval"),
            ("builtins", "getattr"),
            ("builtins", "slice"),
            ("builtins", "range"),
        ),
        *(("collections", "OrderedDict"), ("collections", "deque"), ("uuid", "UUID"), ("datetime", "timedelta")),
        *(("numpy", "dtype"), ("numpy", "ndarray"), ("numpy._core.numeric", "_frombuffer"), ("decimal", "Decimal")),
        *(("builtins", "ValueError"), ("builtins", "OSError"), ("builtins", "SyntaxError"), ("pathlib", "PosixPath")),
        *(("fractions", "Fraction"), ("datetime", "datetime"), ("builtins", "complex"), ("this", "s")),
    ]
)
steps = st.one_of(
    names.map(lambda pair: name(*pair)),
    st.sampled_from(
        [
            *(
                pickle.MARK,
                pickle.TUPLE,
                pickle.TUPLE1,
                pickle.TUPLE2,
                pickle.TUPLE3,
                pickle.EMPTY_TUPLE,
                pickle.REDUCE,
            ),
            *(pickle.REDUCE, pickle.REDUCE, pickle.BUILD, pickle.NEWOBJ, pickle.MEMOIZE, pickle.EMPTY_DICT),
            *(pickle.EMPTY_LIST, pickle.EMPTY_SET, pickle.APPEND, pickle.APPENDS, pickle.SETITEM, pickle.SETITEMS),
            *(pickle.ADDITEMS, pickle.FROZENSET, pickle.POP, pickle.POP_MARK, pickle.DUP, pickle.NEXT_BUFFER),
            *(pickle.READONLY_BUFFER, pickle.NEWOBJ_EX, pickle.NONE, pickle.NEWTRUE, TRILLION, RANGE),
            *(pickle.BYTEARRAY8 + struct.pack("<Q", 4) + b"abcd", pickle.SHORT_BINBYTES + b"\4abcd"),
        ]
    ),
    st.integers(0, 255).map(lambda number: pickle.BININT1 + bytes([number])),
    st.integers(0, 12).map(lambda place: pickle.BINGET + bytes([place])),
    st.sampled_from(["x", "f8", "1", "<", "C", "_metadata", "__class__", "__setstate__", "args"]).map(text),
    st.binary(max_size=6),
)


@settings(deadline=None, max_examples=500)
@given(st.lists(steps, max_size=40))
def test_no_pickle_at_all_makes_anything_but_data(codes: list[bytes]) -> None:
    """Whatever the program does: nothing is imported, opened or run, and what comes out is data."""
    data = op(*codes)
    for loads in (safe_pickle.loads, safe_pickle.loads_exception):
        with watched() as done:
            try:
                found = loads(data, [memoryview(bytearray(8))])
            except Exception:
                found = None
        assert done == []
        assert not callable(found)
        assert type(found).__module__ in ("builtins", "collections", "datetime", "decimal", "fractions", "uuid") or (
            type(found).__module__.startswith(("pathlib", "numpy"))
        )


def test_an_exception_cannot_grow_after_it_was_looked_at() -> None:
    """Its list is filled with something else when it is made already; or it copies all that it is given."""
    grows = op(
        *(name("builtins", "ValueError"), pickle.EMPTY_LIST, pickle.MEMOIZE, pickle.TUPLE1, pickle.REDUCE),
        *(pickle.BINGET, b"\0", bomb(0), pickle.APPEND, pickle.POP),
    )
    assert type(safe_pickle.loads_exception(grows)) is ValueError
    refused(grows.replace(bomb(0), name("collections", "deque")), safe_pickle.loads_exception)
    deep = op(name("builtins", "ValueError"), bomb(), pickle.TUPLE1, pickle.REDUCE)
    refused(deep, safe_pickle.loads_exception)
    copies = op(name("builtins", "SyntaxError"), text("x"), RANGE, pickle.TUPLE2, pickle.REDUCE)
    refused(copies, safe_pickle.loads_exception)


DEEP = """
import pickle, sys
sys.path.insert(0, sys.argv[1])
from skyfab.protocol import safe_pickle

COUNT = int(sys.argv[3])

def text(word):
    return pickle.SHORT_BINUNICODE + bytes([len(word)]) + word.encode()

def called(module, name, arguments=pickle.EMPTY_TUPLE):
    return text(module) + text(name) + pickle.STACK_GLOBAL + arguments + pickle.REDUCE

def get(place):
    return pickle.LONG_BINGET + place.to_bytes(4, "little")

deque, table, M = called("collections", "deque"), called("collections", "defaultdict"), pickle.MEMOIZE
CASES = {
    "deques, filled from within": lambda: deque + M + b"".join(
        deque + M + get(n) + pickle.APPEND for n in range(COUNT)),
    "deques, filled from without": lambda: deque + M + b"".join(
        deque + M + pickle.APPEND + get(n + 1) for n in range(COUNT)),
    "a ring of deques that is dropped": lambda: (deque + M + b"".join(
        deque + M + get(n) + pickle.APPEND for n in range(COUNT)) + get(0) + get(COUNT) + pickle.APPEND
        + pickle.POP * (COUNT + 2) + pickle.NONE),
    "tables": lambda: b"".join(table + text("x") for n in range(COUNT)) + pickle.NONE + pickle.SETITEM * COUNT,
    "slices": lambda: pickle.NONE + M + b"".join(
        text("builtins") + text("slice") + pickle.STACK_GLOBAL + get(n) + pickle.TUPLE1 + pickle.REDUCE + M
        for n in range(COUNT)),
}
data = pickle.PROTO + b"\\5" + CASES[sys.argv[2]]() + pickle.STOP
try:
    safe_pickle.loads(data)
except Exception as error:
    print("refused", repr(error)[:100])
"""


@pytest.mark.parametrize(
    ("case", "count"),
    [
        *[(f"deques, filled from {where}", 100_000) for where in ("within", "without")],
        *[("a ring of deques that is dropped", 100_000), ("tables", 200_000), ("slices", 1_000_000)],
    ],
)
@pytest.mark.slow
def test_no_nesting_crashes_this_program(case: str, count: int) -> None:
    """Python frees some containers by recursion: a few megabytes from a host overflowed its stack."""
    words = [sys.executable, "-c", DEEP, str(Path(sky.__file__).parents[1]), case, str(count)]
    ran = subprocess.run(words, capture_output=True, text=True, cwd="/")
    assert ran.returncode == 0, f"{ran.returncode}: {ran.stderr[-2000:]}"
    assert ran.stdout.startswith("refused")


def test_nesting_as_people_have_it_is_accepted() -> None:
    value: Any = collections.deque([1])
    for _ in range(100):
        value = collections.deque([collections.defaultdict(None, {"x": value})])
    assert again(value) == value
    wide = collections.defaultdict(None, {number: collections.deque([number]) for number in range(2000)})
    assert again([wide, wide]) == [wide, wide]
    ring: collections.deque[Any] = collections.deque()
    ring.append(ring)
    found = again(ring)
    assert found[0] is found


# ---- results="data": a pool


class Broken(Exception):
    """An exception of the user's."""


@sky.function
def returns(value: Any) -> Any:
    return value


@sky.function
def evil_return(mark: str) -> Any:
    return Calls(os.system, f"touch {mark}")


@sky.function
def fails(kind: str) -> None:
    if kind == "builtin":
        raise KeyError("k", 5)
    if kind == "own":
        raise Broken("mine")
    error = ValueError("x")
    error.args = (Calls(os.system, "touch /tmp/skyfab-pwned"),)
    raise error


@pytest.fixture(scope="module")
def untrusted(hosts_of: Callable[..., list[sky.Host]]) -> Iterator[sky.Compute]:
    with sky.Compute(hosts_of("local", 1), ranks=2, results="data", ui="none") as compute:
        yield compute


def test_a_wary_pool_takes_data_on_every_way(untrusted: sky.Compute) -> None:
    np = pytest.importorskip("numpy")
    for value in ({"a": [1, (2.5, None)]}, b"x" * 100_000):
        assert returns(value) >> untrusted == value
        assert returns(value) @ untrusted == [value] * 2
        assert (returns(value) > untrusted).result() == value
    assert untrusted.map(returns, [1, "two", (3,)]) == [1, "two", (3,)]
    assert (returns(np.arange(9000)) >> untrusted).sum() == np.arange(9000).sum()


def test_a_wary_pool_refuses_everything_else_and_names_it(untrusted: sky.Compute, tmp_path: Path) -> None:
    for run in (
        lambda: returns(Thing()) >> untrusted,
        lambda: (returns(Thing()) > untrusted).result(),
        lambda: untrusted.map(returns, [Thing()]),
        lambda: returns([Thing(), bytes(100_000)]) >> untrusted,
    ):
        with pytest.raises(sky.UntrustedResult, match="Thing") as caught:
            run()
        assert caught.value.host == "here1"
        assert 'results="any"' in str(caught.value.hint)
    with pytest.raises(sky.BroadcastError) as many:
        returns(Thing()) @ untrusted
    assert [type(error) for error in many.value.exceptions] == [sky.UntrustedResult] * 2
    with pytest.raises(sky.UntrustedResult, match=r"posix\.system"):
        evil_return(str(tmp_path / "mark")) >> untrusted
    assert list(tmp_path.iterdir()) == []
    assert returns(1) >> untrusted == 1, "the pool goes on"


def test_a_wary_pool_rebuilds_pythons_own_exceptions_alone(untrusted: sky.Compute) -> None:
    with pytest.raises(KeyError) as own:
        fails("builtin") >> untrusted
    assert own.value.args == ("k", 5)
    assert isinstance(own.value.__cause__, sky.RemoteTraceback)
    for kind, says in (("own", "Broken: mine"), ("hostile", "ValueError")):
        with pytest.raises(sky.RemoteError, match=says) as caught:
            fails(kind) >> untrusted
        assert caught.value.kind.endswith(says.partition(":")[0])
        assert isinstance(caught.value.__cause__, sky.RemoteTraceback)
    assert not Path("/tmp/skyfab-pwned").exists()


STEERING = "\x1b]0;owned\x07\x1b[2J\x9b1A\r"


def steering() -> list[Exception]:
    """Exceptions whose text would set a terminal's title, clear it and move its cursor."""
    import numpy as np

    noted = ValueError("noted")
    noted.__notes__ = [STEERING]
    zone = datetime.timezone(datetime.timedelta(0), STEERING)
    values = (STEERING, pathlib.PurePosixPath(STEERING), zone, np.str_(STEERING))
    missing = ModuleNotFoundError("missing")
    missing.__notes__ = STEERING  # type: ignore[assignment]
    return [*map(ValueError, values), OSError(5, STEERING), ImportError(STEERING, name=STEERING), noted, missing]


@pytest.mark.parametrize("untrusted", [True, False])
@pytest.mark.parametrize("number", range(8))
def test_no_failure_on_a_host_steers_the_terminal_when_python_prints_it(number: int, untrusted: bool) -> None:
    """With ``results="data"`` the exception either; without it a host may do here what it likes anyhow."""
    error = steering()[number]
    raised = messages.Raised(kind="X" + STEERING, text=STEERING, traceback=STEERING, parts=[1])
    payload = codec.dumps(error)
    buffers = [memoryview(payload.data), *payload.buffers]
    try:
        unpack_result(raised, buffers, host="h", rank=0, label=STEERING, untrusted=untrusted)
    except Exception as found:
        shown = "".join(traceback.format_exception(found))
        cause = str(found.__cause__)
    for text in (shown, cause) if untrusted else (cause,):
        assert not set(re.findall(r"[\x00-\x1f\x7f-\x9f]", text)) - {"\n"}


def test_our_own_errors_steer_no_terminal() -> None:
    """A host's words are in many of them; colours go, and nothing else is lost."""
    failed = sky.HostUnfit(f"\x1b[31mred\x1b[0m {STEERING}\ttab", host="h", hint=STEERING)
    assert str(failed) == f"h: red {ascii(STEERING)[1:-1]}\ttab\nhint: {ascii(STEERING)[1:-1]}"
    group = sky.PoolError(STEERING, [ValueError(STEERING), failed])
    assert not set(re.findall(r"[\x00-\x1f\x7f-\x9f]", str(group))) - {"\n", "\t"}


def test_a_pool_trusts_its_hosts_unless_told_otherwise(open_pool: Callable[..., sky.Compute]) -> None:
    assert type(returns(Thing()) >> open_pool()) is Thing
    with pytest.raises(sky.UsageError, match="results='some'"):
        sky.Compute("local", results="some")  # type: ignore[arg-type]


# ---- words travel as they are


variables = sky.function(remote.variables)


@pytest.mark.parametrize("by", ["local", "openssh", "fabric"])
def test_values_of_variables_travel_as_they_are(open_pool: Callable[..., sky.Compute], tmp_path: Path, by: str) -> None:
    """Those of the pool, of the image and of the inventory, to solo calls and to ranks."""
    pool = open_pool(
        by, env={"A": HOSTILE}, image=sky.Image(env={"B": HOSTILE + "b"}), host={"env": {"C": HOSTILE + "c"}}
    )
    expected = [HOSTILE, HOSTILE + "b", HOSTILE + "c"]
    assert variables("A", "B", "C") >> pool == expected
    assert variables("A", "B", "C") @ pool == [expected]
    assert (sky.function(os.path.exists)("/tmp/pwned") >> pool) is False


def test_a_variable_of_an_inventory_file_travels_as_it_is(tmp_path: Path) -> None:
    inventory = tmp_path / "inventory.toml"
    value = 'it\'s \\"q\\"; $(touch /tmp/pwned)\\n`id`'
    inventory.write_text(f'[hosts.here]\ntransport = "local"\ncache = "{tmp_path}/cache"\nenv = {{ A = "{value}" }}\n')
    with sky.Compute("here", inventory=inventory, ui="none") as pool:
        assert variables("A") >> pool == ['it\'s "q"; $(touch /tmp/pwned)\n`id`']


@pytest.mark.parametrize("env", [{"A=B": "x"}, {"": "x"}, {"A B": "x"}, {"A": "x\0y"}, {"A": 5}, {"$(id)": "x"}])
def test_a_variable_that_cannot_be_is_refused_at_once(env: Any) -> None:
    with pytest.raises(sky.UsageError, match=r"^env "):
        sky.Compute("local", env=env)


@pytest.mark.parametrize("by", ["local", "openssh", "fabric"])
def test_a_cache_may_have_any_printable_name(open_pool: Callable[..., sky.Compute], tmp_path: Path, by: str) -> None:
    """Also while files of the project, functions and blobs are stored there."""
    folder = '/it\'s "a" $(touch pwned); `id` & *{a,b} !x \\ ü'
    place = f"{tmp_path}{folder}" if by == "local" else f"~{folder}"
    pool = open_pool(by, host={"cache": place}, workdir="temp" if by == "local" else "auto")
    assert returns(b"x" * 3_000_000) @ pool == [b"x" * 3_000_000]
    found = sky.function(lambda: [str(Path.cwd()), *(str(p) for p in Path.home().glob("pwned"))])() >> pool
    assert len(found) == 1
    assert f"{folder}/{'run' if by == 'local' else 'files'}/" in found[0]
    pool.close()
    if by == "local":
        assert [entry.name for entry in tmp_path.iterdir()] == [folder[1:]]


# ---- secrets


def seen_in(folder: Path, secret: str) -> list[str]:
    """Files with it in their content or name."""
    found = []
    for path in folder.rglob("*"):
        with contextlib.suppress(OSError):
            if secret in path.name or (path.is_file() and secret.encode() in path.read_bytes()):
                found.append(str(path))
    return found


def started_with(secret: str) -> list[str]:
    """Processes of this machine, those of its lab included, that have it in their arguments or environment."""
    found = []
    for file in (*Path("/proc").glob("[0-9]*/cmdline"), *Path("/proc").glob("[0-9]*/environ")):
        with contextlib.suppress(OSError):
            if secret.encode() in file.read_bytes():
                found.append(f"{file} {file.with_name('cmdline').read_bytes()!r}")
    return found


@pytest.mark.parametrize("by", ["openssh", "fabric"])
@pytest.mark.slow
def test_a_secret_is_known_to_the_processes_that_need_it_alone(
    namespaces: Lab, open_pool: Callable[..., sky.Compute], spot: Spot, by: str
) -> None:
    """Not to argument lists and environments that `ps` shows, files, events, tracebacks, or what anything prints as."""
    pool = open_pool(
        by,
        user="ada",
        ranks=2,
        env={"TOKEN": SECRET},
        host={"env": {"TOKEN2": SECRET}},
        plugins=[sky.plugins.huggingface(token=SECRET)],
    )
    host = namespaces.hosts[0]
    events: list[Event] = []
    pool.events.subscribe(events.append)
    assert variables("TOKEN", "TOKEN2", "HF_TOKEN") @ pool == [[SECRET] * 3] * 2
    with pytest.raises(RuntimeError) as caught:
        sky.function(remote.stumble)() >> pool
    future = pool.submit(sky.function(linger)(spot / "rank"))
    spot.wait("rank")
    assert any("agent" in " ".join(p.cmdline) or "skyfab" in " ".join(p.cmdline) for p in host.processes())
    assert started_with(SECRET) == []
    cache = host.path("/home/ada/.cache/skyfab")
    assert list(cache.glob("run/*/*/agent.sock")), "the pool is in sight"
    assert list(cache.glob("logs/**/*"))
    assert seen_in(cache, SECRET) == []
    assert seen_in(host.path("/tmp"), SECRET) == []
    node = pool.hosts[0]
    shown = [f"{event} {event!r}" for event in events]
    shown += [repr(pool), repr(node), repr(node.host), repr(node.session), repr(pool.inventory)]
    shown += [repr(pool._images.plugins), repr(pool._images._env), str(caught.value), str(caught.value.__cause__)]
    assert SECRET not in "".join(shown)
    future.cancel()


@pytest.mark.slow
def test_a_detached_run_keeps_no_secret(namespaces: Lab, open_pool: Callable[..., sky.Compute]) -> None:
    """What its hosts keep of it are its answers and what it printed."""
    pool = open_pool("openssh", user="ada", env={"TOKEN": SECRET}, plugins=[sky.plugins.huggingface(token=SECRET)])
    run = pool.launch(sky.function(lambda: len(os.environ["TOKEN"] + os.environ["HF_TOKEN"]))(), name="quiet")
    assert run.result(timeout=170) == [2 * len(SECRET)]
    small = pool.launch(sky.function(len)(SECRET), on="one", name="small")  # the whole call is one small message
    assert small.result(timeout=170) == len(SECRET)
    cache = namespaces.hosts[0].path("/home/ada/.cache/skyfab")
    assert list(cache.glob(f"runs/{run.id}/result.*"))
    assert seen_in(cache, SECRET) == []


def test_the_login_that_hosts_see_has_no_secrets_of_this_program(
    open_pool: Callable[..., sky.Compute], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Variables of this process do not go along to a host."""
    monkeypatch.setenv("SKYFAB_TEST_SECRET", SECRET)
    assert variables("SKYFAB_TEST_SECRET") >> open_pool("openssh") == [None]
    assert variables("SKYFAB_TEST_SECRET") >> open_pool("fabric") == [None]


# ---- other users of a host, and its network


@pytest.mark.parametrize("by", ["openssh", "fabric"])
def test_a_run_folder_of_another_user_is_refused(
    namespaces: Lab, hosts_of: Callable[..., list[sky.Host]], monkeypatch: pytest.MonkeyPatch, by: str
) -> None:
    """Who guesses a pool's name could make its folder first, and listen at its socket."""
    host = namespaces.hosts[0]
    (target,) = hosts_of(by, 1, user="ada", cache="/tmp/run-folder")
    for owner, mode in (("root", "777"), ("ada", "750")):
        compute = sky.Compute([target], ui="none")
        monkeypatch.setattr("skyfab.pool.nodes.secrets.token_hex", lambda size: "0123456789abcdef")
        place = f"/tmp/run-folder/run/{host.name}/0123456789abcdef-0"
        host.run(["sh", "-c", f"umask 077; mkdir -p {place}; chown -R ada /tmp/run-folder"])
        host.run(["sh", "-c", f"chown {owner} {place}; chmod {mode} {place}"])
        try:
            with pytest.raises(sky.HostError, match="another user or is open to others"):
                compute.open()
        finally:
            host.run(["rm", "-rf", "/tmp/run-folder"])


def test_another_user_cannot_reach_an_agent(namespaces: Lab, open_pool: Callable[..., sky.Compute]) -> None:
    """Neither its socket nor what it keeps."""
    host = namespaces.hosts[0]
    host.add_user("eve")
    open_pool("openssh", user="ada")
    (sock,) = host.path("/home/ada/.cache/skyfab").glob("run/*/*/agent.sock")
    inside = "/home/ada/" + str(sock).partition("/home/ada/")[2]
    code = f"import socket; socket.socket(socket.AF_UNIX).connect({inside!r})"
    tried = host.run([host.python, "-c", code], user="eve", check=False)
    assert "PermissionError" in tried.stderr
    assert host.run(["ls", "/home/ada/.cache/skyfab"], user="eve", check=False).returncode != 0


def test_this_program_listens_nowhere(open_pool: Callable[..., sky.Compute]) -> None:
    """While it has pools over every transport, with ranks that have met."""
    for by in ("local", "openssh", "fabric"):
        assert returns(1) @ open_pool(by, ranks=2) == [1, 1]
    ours = {str(entry.readlink()) for entry in Path("/proc/self/fd").iterdir() if entry.is_symlink()}
    listening = [
        line.split()
        for file in ("/proc/self/net/tcp", "/proc/self/net/tcp6")
        for line in Path(file).read_text().splitlines()[1:]
        if line.split()[3] == "0A"
    ]
    assert [words for words in listening if f"socket:[{words[9]}]" in ours] == []


# ---- the document


@pytest.mark.parametrize("document", ["security.md", "reliability.md", "remote_device.md"])
def test_the_documents_name_tests_that_are_there(document: str) -> None:
    """A promise without its test is none."""
    root = next(folder for folder in Path(__file__).parents if (folder / "docs").is_dir())
    tests = "".join(path.read_text() for path in (root / "tests").rglob("test_*.py"))
    named = re.findall(r"`(test_\w+)`", (root / "docs" / document).read_text())
    assert [test for test in named if f"\ndef {test}(" not in tests] == []
    assert len(named) > 30


@pytest.mark.parametrize(
    ("owner", "mode", "says"),
    [("eve", "700", "another user"), ("eve", "755", "another user"), ("ada", "777", "open"), ("ada", "770", "open")],
)
def test_a_cache_of_another_user_is_refused(
    namespaces: Lab, hosts_of: Callable[..., list[sky.Host]], owner: str, mode: str, says: str
) -> None:
    """Who can write there could have put a bundle of their own in it: it would run as us."""
    host = namespaces.hosts[0]
    host.add_user("eve")
    cache, mark = "/tmp/cache-of-eve", "/tmp/cache-of-eve-ran"
    place = f"{cache}/bundles/{bundle().digest}"
    script = f'mkdir -p {place}; echo \'open("{mark}", "w")\' >{place}/__main__.py; chmod -R a+rX {cache};'
    host.run(["sh", "-c", f"{script} chown -R {owner} {cache}; chmod {mode} {cache}"])
    try:
        with pytest.raises(sky.HostUnfit, match=says):
            sky.Compute(hosts_of("openssh", 1, user="ada", cache=cache), ui="none").open()
        assert not host.path(mark).exists()
    finally:
        host.run(["rm", "-rf", cache, mark])
