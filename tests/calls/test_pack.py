"""parcel: a function travels once as long as it is the same, and anew as soon as anything it uses has changed."""

from __future__ import annotations

import gc
import math
import textwrap
import threading
import types
import weakref
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from skyfab import Call, Function, function
from skyfab.calls.pack import pack_arguments, pack_function
from skyfab.errors import NotPicklable
from skyfab.protocol import codec


def script(source: str, **names: Any) -> dict[str, Any]:
    """The globals of a script that no host can import: its functions travel by value."""
    space: dict[str, Any] = {"__name__": "script_of_a_user", "sky": types.SimpleNamespace(function=function), **names}
    exec(compile(textwrap.dedent(source), "<a script>", "exec"), space)
    return space


def unpack(payload: codec.Payload) -> Any:
    return codec.loads(payload.data, [memoryview(bytearray(view)) for view in payload.buffers])


def unpack_function(wanted: Function[..., Any], plugins: tuple[Any, ...] = ()) -> tuple[Any, ...]:
    """What follows the plugins."""
    payload = pack_function(wanted, plugins).payload
    load = codec.loader(payload.data, [memoryview(bytearray(view)) for view in payload.buffers])
    assert len(load()) == len(plugins)
    found: tuple[Any, ...] = load()
    return found


def there(wanted: Function[..., Any], *args: Any) -> Any:
    """What the function returns on a host that has just been sent it."""
    fn, by_name, *_ = unpack_function(wanted)
    return (fn.fn if by_name else fn)(*args)


# ---- the cache


def test_an_unchanged_function_is_packed_once() -> None:
    wanted = Function(script("a = 1\nimport math\ndef f(): return a, math.pi, len('x')")["f"])
    assert pack_function(wanted) is pack_function(wanted)


def test_a_function_that_is_packed_again_keeps_its_digest() -> None:
    """It uses a list, so it is looked at every time; a host is sent it once all the same."""
    space = script("items = [1, 2]\ndef helper(): return items\ndef f(): return helper()")
    wanted = Function(space["f"])
    assert len({pack_function(wanted).digest for _ in range(5)}) == 1
    space["items"].append(3)
    assert there(wanted) == [1, 2, 3]


atoms = st.sampled_from(
    [0, 1, False, True, 0.0, -0.0, 1.0, 1 + 0j, math.nan, math.inf, "", "1", b"", b"1", None, 2**70, "text"]
)


@settings(deadline=None, max_examples=100)
@given(st.lists(st.tuples(st.sampled_from(["a", "b", "default", "cell", "attribute", "inner"]), atoms), min_size=2))
def test_whatever_is_changed_the_host_gets_what_runs_here(changes: list[tuple[str, object]]) -> None:
    """Globals, defaults, closures, attributes: after every change the packed function returns what the function does.

    Values that compare equal and are not the same (1, True, 1.0; 0.0, -0.0) count as changes, too.
    """
    space = script(
        """
        def make(cell):
            def f(default=0):
                def nested():
                    return [inner for _ in (1,)][0]
                names = [default, cell]
                for name in ("a", "b"):
                    try:
                        names.append(a if name == "a" else b)
                    except NameError:
                        names.append("absent")
                return names, nested()
            return f
        inner = 0
        f = make(0)
        """
    )
    fn = space["f"]
    wanted = Function(fn)
    for what, value in changes:
        if what in ("a", "b") and value is None:
            space.pop(what, None)
        elif what in ("a", "b", "inner"):
            space[what] = value
        elif what == "default":
            fn.__defaults__ = (value,)
        elif what == "cell":
            fn.__closure__[0].cell_contents = value
        else:
            fn.marker = value
        assert repr(there(wanted)) == repr(fn())
        travelled, *_ = unpack_function(wanted)
        assert repr(getattr(travelled, "marker", "absent")) == repr(getattr(fn, "marker", "absent"))


IN_PLACE: dict[str, tuple[str, Callable[[dict[str, Any]], object]]] = {
    "a list": ("x = [1]\ndef f(): return len(x)", lambda s: s["x"].append(2)),
    "an object": ("class C: n = 1\nx = C()\ndef f(): return x.n", lambda s: setattr(s["x"], "n", 2)),
    "a class": ("class C: n = 1\ndef f(): return C.n", lambda s: setattr(s["C"], "n", 2)),
    "a method of a list": ("x = [1]\nlook = x.__len__\ndef f(): return look()", lambda s: s["x"].append(2)),
    "a default": ("def f(x=[1]): return len(x)", lambda s: s["f"].__defaults__[0].append(2)),
    "a closure": (
        "def make(x):\n  def f(): return len(x)\n  return f\nx = [1]\nf = make(x)",
        lambda s: s["x"].append(2),
    ),
    "a helper's global": ("n = 1\ndef g(): return n\ndef f(): return g()", lambda s: s.update(n=2)),
    "a helper": ("def g(): return 1\ndef f(): return g()", lambda s: s.update(g=lambda: 2)),
    "a nested function's global": ("n = 1\ndef f():\n  def g(): return n\n  return g()", lambda s: s.update(n=2)),
    "a partial": (
        "import functools\nx = [1]\ng = functools.partial(len, x)\ndef f(): return g()",
        lambda s: s["x"].append(2),
    ),
    "a name that appears": ("def f():\n  try: return n\n  except NameError: return 0", lambda s: s.update(n=2)),
    "one name for another": (
        "a = 1\ndef f():\n  try: return 'a', a\n  except NameError: return 'b', b",
        lambda s: s.update(b=s.pop("a")),
    ),
    "what a wrapper wraps": (
        "import functools\nn = 1\ndef g(): return n\n@functools.wraps(g)\ndef f(): return g()",
        lambda s: s.update(n=2),
    ),
    "the code": ("def f(): return 1", lambda s: setattr(s["f"], "__code__", (lambda: 2).__code__)),
    "another sky.function": (
        "n = 1\n@sky.function\ndef g(): return n\ndef f(): return g.fn()",
        lambda s: s.update(n=2),
    ),
    "a module made by hand": (
        "import types\nm = types.ModuleType('made_by_hand')\nm.n = 1\ndef f(): return m.n",
        lambda s: setattr(s["m"], "n", 2),
    ),
    "a true for a one": ("def f(x=1): return x", lambda s: setattr(s["f"], "__defaults__", (True,))),
}


@pytest.mark.parametrize(("source", "change"), IN_PLACE.values(), ids=IN_PLACE)
def test_a_change_is_noticed(source: str, change: Callable[[dict[str, Any]], object]) -> None:
    """Also of what is changed in place: the second call sees it."""
    space = script(source)
    wanted = Function(space["f"])
    before = space["f"]()
    assert there(wanted) == before
    change(space)
    after = space["f"]()
    assert repr(after) != repr(before), "the test changes nothing"
    assert repr(there(wanted)) == repr(after)


def test_the_cache_does_not_keep_functions_alive() -> None:
    """A notebook that defines a function a thousand times does not keep a thousand."""
    fn = script("n = 1\ndef f(): return n")["f"]
    pack_function(Function(fn))
    gone = weakref.ref(fn)
    fn.__globals__.pop("f")
    del fn
    gc.collect()
    assert gone() is None


def test_a_large_constant_travels_beside_the_pickle() -> None:
    np = pytest.importorskip("numpy")
    space = script("def f(): return float(x.sum())", x=np.ones(100_000))
    packed = pack_function(Function(space["f"]))
    assert [view.nbytes for view in packed.payload.buffers] == [800_000]
    assert len(packed.payload.data) < 20_000
    space["x"][0] = 5
    assert there(Function(space["f"])) == 100_004


# ---- by name


@function
def importable() -> int:
    return 7


def test_a_function_that_a_host_can_import_travels_by_name() -> None:
    fn, by_name, sources, _ = unpack_function(importable)
    assert by_name
    assert fn is importable
    assert sources == {}


# ---- arguments


def test_one_array_in_two_arguments_travels_once() -> None:
    np = pytest.importorskip("numpy")
    x = np.zeros(100_000)
    payload = pack_arguments(Call(importable, (x, [x]), {"again": x}))
    assert len(payload.buffers) == 1
    first, (second,), kwargs = unpack(payload)
    assert first is second is kwargs["again"]


# ---- what cannot travel


LOCKED = {
    "a global": "def f(): return gate, other",
    "a closure": "def make(gate):\n  def f(): return gate\n  return f\nf = make(gate)",
    "a nested function's global": "def f():\n  def g(): return gate\n  return g()",
    "a default": "def f(gate=gate): return gate",
    "beside an empty cell": "def make():\n  def f(): return gate, later\n  return f\n  later = 1\nf = make()",
}


@pytest.mark.parametrize("source", LOCKED.values(), ids=LOCKED)
def test_a_value_that_cannot_be_pickled_is_named(source: str) -> None:
    space = script(source, gate=threading.Lock(), other=1)
    with pytest.raises(NotPicklable, match="f cannot be pickled") as caught:
        pack_function(Function(space["f"]))
    assert "'gate', a lock" in (caught.value.hint or "")
