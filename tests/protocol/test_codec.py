"""codec: user data comes back equal and of its own type; large data leaves as views and lands where it is received."""

from __future__ import annotations

import copyreg
import functools
import pickle
import tracemalloc
from collections import namedtuple
from dataclasses import dataclass
from typing import Any

import pytest

from skyfab.protocol import codec
from skyfab.protocol.blobs import inline_size
from skyfab.protocol.codec import IN_BAND, Payload, dumps, loads

np = pytest.importorskip("numpy")

Point = namedtuple("Point", "x y")


def land(payload: Payload) -> list[memoryview]:
    """The buffers as they arrive: in writable memory of their own."""
    return [memoryview(bytearray(view)) for view in payload.buffers]


def there(value: Any) -> Any:
    """`value` after the journey."""
    payload = dumps(value)
    return loads(payload.data, land(payload))


# ---- plain data


def test_a_fast_path_keeps_subclasses() -> None:
    """True is not 1, a named tuple is not a tuple, and an int with a class of its own keeps it."""
    assert there((True, 1, 1.0)) == (True, 1, 1.0)
    assert [type(v) for v in there((True, 1, 1.0, None, ""))] == [bool, int, float, type(None), str]
    assert type(there(Point(1, 2))) is Point


def test_values_that_are_pickled_together_come_back_one_by_one_and_share_objects() -> None:
    shared, data = [1], np.arange(10_000)
    payload = codec.dumps((shared, data), then=[shared, 5])
    load = codec.loader(payload.data, payload.buffers)
    (first, array), second = load(), load()
    assert first is second
    assert np.array_equal(array, data)
    assert load() == 5
    with pytest.raises(EOFError):
        load()


# ---- numpy

ARRAYS = {
    "C order": lambda: np.arange(6000.0).reshape(60, 100),
    "F order": lambda: np.asfortranarray(np.arange(6000.0).reshape(60, 100)),
    "transposed": lambda: np.arange(6000.0).reshape(60, 100).T,
    "a column": lambda: np.arange(6000.0).reshape(60, 100)[:, 7],
    "broadcast": lambda: np.broadcast_to(np.arange(10.0), (500, 10)),
    "zero size": lambda: np.zeros((0, 5)),
    "zero dim": lambda: np.array(3.5),
    "big endian": lambda: np.arange(9000, dtype=">i8"),
    "structured": lambda: np.array([(1, 2.5, "x")] * 900, dtype=[("a", "i4"), ("b", "f8"), ("c", "U3")]),
    "object": lambda: np.array([None, "x", [1, 2], {"a": 1}] * 500, dtype=object),
    "masked": lambda: np.ma.masked_array(np.arange(9000), mask=np.arange(9000) % 3 == 0),
}


@pytest.mark.parametrize("make", ARRAYS.values(), ids=ARRAYS)
def test_an_array_comes_back_equal_with_its_type_shape_and_order(make: Any) -> None:
    value = make()
    again = there(value)
    assert type(again) is type(value)
    assert again.dtype == value.dtype
    assert again.shape == value.shape
    assert np.array_equal(again, value)
    if value.flags.c_contiguous or value.flags.f_contiguous:
        assert again.flags.c_contiguous == value.flags.c_contiguous
        assert again.flags.f_contiguous == value.flags.f_contiguous


@pytest.mark.parametrize("size", [3, 511, 512, 100_000])
def test_an_array_can_be_written_to_afterwards_unless_it_is_read_only(size: int) -> None:
    """Below and above the size from which buffers travel beside the pickle."""
    value = np.arange(size)
    again = there(value)
    again += 1
    assert again[-1] == size
    value.flags.writeable = False
    assert not there(value).flags.writeable


def test_nothing_large_is_copied_on_either_side() -> None:
    """32 MB out and in costs kilobytes beyond the memory it is received in."""
    value = [np.ones(2_000_000), np.ones((1000, 2000), order="F")]
    tracemalloc.start()
    try:
        payload = dumps(value)
        _, out = tracemalloc.get_traced_memory()
        memory = land(payload)
        before, _ = tracemalloc.get_traced_memory()
        tracemalloc.reset_peak()
        again = loads(payload.data, memory)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert out < 200_000
    assert peak - before < 200_000
    assert np.array_equal(again[1], value[1])


def test_small_buffers_stay_in_the_pickle() -> None:
    assert dumps(np.zeros(IN_BAND // 8 - 1)).buffers == ()
    assert len(dumps(np.zeros(IN_BAND // 8)).buffers) == 1


def test_very_many_arrays_travel() -> None:
    """Ten thousand arrays are a few thousand buffers and a longer pickle: the parts of a message are limited."""
    values = [np.full(512, n) for n in range(10_000)]
    payload = dumps(values)
    inline_size([len(payload.data), *map(len, payload.buffers)])
    again = loads(payload.data, land(payload))
    assert [int(array[-1]) for array in again] == list(range(10_000))
    assert all(array.flags.writeable for array in again)


class Blob:
    def __init__(self, content: Any) -> None:
        self.content = content

    def __reduce_ex__(self, protocol: int) -> Any:
        return Blob, (pickle.PickleBuffer(self.content),)


# ---- functions with a cache


def test_a_function_with_a_cache_that_hosts_cannot_import_comes_back() -> None:
    """Its cache is empty; it may call itself, and be a method."""

    @functools.lru_cache(maxsize=90, typed=True)
    def fibonacci(n: int) -> int:
        """Adds."""
        return n if n < 2 else fibonacci(n - 1) + fibonacci(n - 2)

    class Model:
        @functools.cache  # noqa: B019
        def double(self, x: int) -> int:
            return 2 * x

    fibonacci(10)
    again = there(fibonacci)
    assert again is not fibonacci
    assert (again(80), again.cache_info().misses, fibonacci.cache_info().misses) == (23416728348467685, 81, 11)
    assert (again.__name__, again.__doc__, again.cache_parameters()) == (
        "fibonacci",
        "Adds.",
        fibonacci.cache_parameters(),
    )
    assert there(again)(30) == fibonacci(30)
    assert there(Model)().double(4) == 8
    assert there(importable) is importable


@functools.cache
def importable(x: int) -> int:
    """Hosts can import it."""
    return x


# ---- exceptions


class OwnConstructor(ValueError):
    """Its constructor takes something else than its `args`: Python's own way of pickling calls it with those."""

    def __init__(self, code: int, *, where: str) -> None:
        super().__init__(f"{code} at {where}")
        self.code = code
        constructed.append(code)


class OwnReduce(OwnConstructor):
    def __reduce__(self) -> Any:
        return _rebuilt, (self.code,)


class OwnReduceEx(OwnConstructor):
    def __reduce_ex__(self, protocol: Any) -> Any:
        return _rebuilt, (self.code,)


class OwnState(ValueError):
    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code

    def __setstate__(self, state: Any) -> None:
        self.__dict__.update(state, restored=True)


@dataclass(frozen=True)
class Frozen(Exception):
    code: int


class Missing(OSError):
    def __init__(self, path: str) -> None:
        super().__init__(2, "not there", path)
        self.path = path


class Unloaded(ImportError):
    def __init__(self, module: str) -> None:
        super().__init__("not loaded", name=module)


class Stopped(StopIteration):
    def __init__(self, *, after: int) -> None:
        super().__init__(after)


constructed: list[int] = []


def _rebuilt(code: int) -> tuple[str, int]:
    return "rebuilt", code


def test_an_exception_comes_back_without_its_constructor_being_called() -> None:
    error = OwnConstructor(7, where="home")
    error.later = "set afterwards"  # type: ignore[attr-defined]
    constructed.clear()
    again = there(error)
    assert type(again) is OwnConstructor
    assert again.args == ("7 at home",)
    assert str(again) == "7 at home"
    assert (again.code, again.later) == (7, "set afterwards")  # type: ignore[attr-defined]
    assert constructed == []


@pytest.mark.parametrize("kind", [OwnReduce, OwnReduceEx])
def test_an_exception_that_says_how_it_is_pickled_is_pickled_so(kind: type[OwnConstructor]) -> None:
    assert there(kind(7, where="home")) == ("rebuilt", 7)


def test_an_exception_that_says_how_it_is_restored_is_restored_so() -> None:
    again = there(OwnState(7))
    assert (again.code, again.restored) == (7, True)


def test_an_exception_that_forbids_assignments_comes_back() -> None:
    try:
        raise Frozen(3)
    except Frozen as error:
        payload = codec.dumps_exception(error)
    again = loads(payload.data)
    assert (type(again), again.code, again.args) == (Frozen, 3, (3,))


def test_an_own_constructor_of_an_exception_with_attributes_of_python_is_not_called() -> None:
    missing, unloaded = there(Missing("/a")), there(Unloaded("module"))
    assert (type(missing), missing.errno, missing.filename, missing.args) == (Missing, 2, "/a", (2, "not there"))
    assert (missing.path, str(missing)) == ("/a", str(Missing("/a")))
    assert (type(unloaded), unloaded.name, unloaded.args) == (Unloaded, "module", ("not loaded",))


def test_what_a_built_in_exception_keeps_beside_its_args_comes_back() -> None:
    again = there(Stopped(after=3))
    assert type(again) is Stopped
    assert again.value == 3


# ---- objects that were packed before


class Ready(codec.Packed):
    def __init__(self, value: object) -> None:
        self.memory, self.name = codec.pack(value), "its name"


def test_a_packed_object_comes_back_and_its_arrays_lie_aligned_in_its_memory() -> None:
    memory = codec.pack({"a": np.arange(3000), "b": np.arange(5000.0), "c": "text"})
    again = codec.unpack(memory)
    assert again["c"] == "text"
    for name, size in (("a", 3000), ("b", 5000)):
        assert (again[name] == np.arange(size)).all()
        assert again[name].ctypes.data % 64 == np.frombuffer(memory, np.uint8).ctypes.data % 64
    again["a"][0] = 7
    assert codec.unpack(memory)["a"][0] == 7


def test_a_reference_travels_as_a_name_and_comes_back_as_the_object() -> None:
    ready = Ready(np.arange(3000))
    payload = dumps([ready, np.arange(2000), ready])
    assert sorted(payload.refs.values()) == ["its name"]
    assert len(payload.buffers) == 2
    assert payload.size == len(payload.data) + 16_000, "without what a host is sent once"
    first, other, second = loads(payload.data, payload.buffers)
    assert (first == np.arange(3000)).all()
    assert len(other) == 2000
    assert first is second


def test_exceptions_do_not_need_tblib_on_the_other_side(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some libraries, as Dask, register it for all exceptions of a program."""
    support = pytest.importorskip("tblib.pickling_support")
    monkeypatch.setitem(copyreg.dispatch_table, TypeError, support.pickle_exception)
    payload = codec.dumps(TypeError("wrong"))
    assert b"tblib" not in payload.data
    assert repr(codec.loads(payload.data)) == "TypeError('wrong')"
