"""Restricted unpickler for results of untrusted hosts: plain data only, and no import or call that the pickle chooses.

A pickle is a program. This unpickler knows only the opcodes that build data, looks names up in a table (see
`safe_types`) instead of importing them, and checks the finished object once more. A host can send invalid data, or too
much of it, but it cannot run code here.
"""

from __future__ import annotations

import collections
import datetime
import decimal
import fractions
import io
import pathlib
import pickle
import struct
import sys
import uuid
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Final

from skyfab.protocol.frames import Buffer
from skyfab.protocol.safe_types import Draft, Maker, find, find_exception, refuse

if TYPE_CHECKING:
    from typing_extensions import Self

_FEW: Final = 4096
"""Maximum number of parts of a key or an exception: a small pickle can build a tuple whose hash takes forever."""
_COPIES: Final = 64
"""How often what was received may be copied: a small pickle can make a thousand arrays of the same bytes."""
_ATTRIBUTES: Final = frozenset({"__notes__", "name", "path"})
"""The attributes that an exception keeps in addition to its arguments."""
_FRAGILE: Final = (collections.deque, collections.defaultdict)
"""Types that Python deallocates recursively: deep nesting overflows the C stack. (Other containers are protected.)"""
_DEEPEST: Final = 256
"""How deep they may be nested."""
_ROWS: Final = (list, tuple, set, frozenset, collections.deque)
_TABLES: Final = (dict, collections.OrderedDict, collections.defaultdict)
_ATOMS: Final = frozenset(
    (
        *(type(None), bool, int, float, complex, str, bytes, range, uuid.UUID, decimal.Decimal, fractions.Fraction),
        *(datetime.date, datetime.datetime, datetime.time, datetime.timedelta, datetime.timezone),
        *(pathlib.PurePosixPath, pathlib.PureWindowsPath, type(pathlib.Path())),
    )
)


def loads(data: Buffer, buffers: Sequence[memoryview] = ()) -> Any:
    """Unpickles an object that consists of plain data, numpy arrays and torch tensors.

    Raises `pickle.UnpicklingError`, which names the refused type, or whatever a damaged pickle raises.
    """
    with _Unpickler(data, buffers) as unpickler:
        found = unpickler.load()
        _survey(found)
        return found


def loads_exception(data: Buffer, buffers: Sequence[memoryview] = ()) -> Exception:
    """Unpickles a built-in exception that consists of plain data. Raises as `loads` does."""
    with _ExceptionUnpickler(data, buffers) as unpickler:
        found = unpickler.load()
        _small(unpickler.given)
        return found if isinstance(found, Exception) else refuse(type(found))


# ---- the unpickler

_Python: Any = pickle._Unpickler
"""The pure-Python unpickler. The one in C allocates whatever size a pickle announces."""


class _Unpickler(_Python):  # type: ignore[misc]  # it has no types
    def __init__(self, data: Buffer, buffers: Sequence[memoryview]) -> None:
        super().__init__(io.BytesIO(data), buffers=buffers)
        self._room = _COPIES * (len(data) + sum(map(len, buffers)))
        self._fragile: list[Any] = []
        """All deques and defaultdicts that were created. References are kept until their nesting has been checked,
        so that none is deallocated before."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        deep = _is_deep(self._fragile)
        if deep or kind is not None:
            for one in self._fragile:  # their elements are in this list too, so nothing is deallocated recursively
                one.clear()
        if deep and kind is None:
            refuse("a deque or defaultdict nested too deep")

    def _find(self, name: str) -> Any:
        return find(name)

    def _finish(self, target: Any, state: Any) -> None:
        """Sets the state of an object that has already been created."""
        if type(target) is not collections.OrderedDict or type(state) is not dict or [*state] != ["_metadata"]:
            refuse(f"attributes of a {type(target).__name__}")
        target._metadata = state["_metadata"]  # type: ignore[attr-defined]  # of a torch state_dict

    def _global(self) -> None:
        name, module = self.stack.pop(), self.stack.pop()
        if type(name) is not str or type(module) is not str:
            refuse("a name that is none")
        self.append(self._find(f"{module}.{name}"))

    def _call(self) -> None:
        arguments, maker = self.stack.pop(), self.stack[-1]
        if type(maker) is not Maker or type(arguments) is not tuple:
            refuse("a call of what cannot be called")
        self._charge(arguments)
        self.stack[-1] = made = maker.make(*arguments)
        if type(made) in _FRAGILE:
            self._fragile.append(made)

    def _build(self) -> None:
        state, target = self.stack.pop(), self.stack[-1]
        if type(target) is not Draft:
            self._finish(target, state)
            return
        self._charge(state)
        self.stack[-1] = target.finish(state)
        if target.place >= 0:
            self.memo[target.place] = self.stack[-1]

    def _charge(self, given: Iterable[Any]) -> None:
        """Counts what an object is made of, which it may copy. Refuses copies without end of what was sent once."""
        for one in given:
            if type(one) in (bytes, bytearray, memoryview, str):
                self._room -= len(one)
            elif type(one) in (tuple, dict):
                self._room -= _COPIES * len(one)
        if self._room < 0:
            refuse("many copies of what was sent once")

    def _memoize(self) -> None:
        if type(self.stack[-1]) is Draft:
            self.stack[-1].place = len(self.memo)
        self.memo[len(self.memo)] = self.stack[-1]

    def _bytearray(self) -> None:
        (size,) = struct.unpack("<Q", self.read(8))
        content = self.read(min(size, sys.maxsize))
        if len(content) != size:
            refuse("less than it says")
        self.append(bytearray(content))

    def _top(self, *kinds: type) -> Any:
        """The container on top of the stack."""
        return self.stack[-1] if type(self.stack[-1]) in kinds else refuse("content of what contains nothing")

    def _append(self) -> None:
        item = self.stack.pop()
        self._top(list, collections.deque).append(item)

    def _extend(self) -> None:
        items = self.pop_mark()
        self._top(list, collections.deque).extend(items)

    def _set(self) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        self._top(*_TABLES)[_key(key)] = value

    def _update(self) -> None:
        items = self.pop_mark()
        table = self._top(*_TABLES)
        for key, value in zip(items[::2], items[1::2], strict=True):
            table[_key(key)] = value

    def _add(self) -> None:
        items = self.pop_mark()
        self._top(set).update(map(_key, items))

    def _frozenset(self) -> None:
        items = self.pop_mark()
        self.append(frozenset(map(_key, items)))

    _KNOWN = (
        *(pickle.PROTO, pickle.FRAME, pickle.STOP, pickle.MARK, pickle.POP, pickle.POP_MARK),
        *(pickle.NONE, pickle.NEWTRUE, pickle.NEWFALSE, pickle.BINFLOAT),
        *(pickle.BININT, pickle.BININT1, pickle.BININT2, pickle.LONG1, pickle.LONG4),
        *(pickle.SHORT_BINBYTES, pickle.BINBYTES, pickle.BINBYTES8),
        *(pickle.SHORT_BINUNICODE, pickle.BINUNICODE, pickle.BINUNICODE8),
        *(pickle.EMPTY_TUPLE, pickle.TUPLE, pickle.TUPLE1, pickle.TUPLE2, pickle.TUPLE3),
        *(pickle.EMPTY_LIST, pickle.EMPTY_DICT, pickle.EMPTY_SET),
        *(pickle.BINGET, pickle.LONG_BINGET, pickle.NEXT_BUFFER, pickle.READONLY_BUFFER),
    )
    dispatch = {code[0]: _Python.dispatch[code[0]] for code in _KNOWN} | {
        pickle.STACK_GLOBAL[0]: _global,
        pickle.REDUCE[0]: _call,
        pickle.NEWOBJ[0]: _call,
        pickle.BUILD[0]: _build,
        pickle.MEMOIZE[0]: _memoize,
        pickle.BYTEARRAY8[0]: _bytearray,
        pickle.APPEND[0]: _append,
        pickle.APPENDS[0]: _extend,
        pickle.SETITEM[0]: _set,
        pickle.SETITEMS[0]: _update,
        pickle.ADDITEMS[0]: _add,
        pickle.FROZENSET[0]: _frozenset,
    }
    """The opcodes that current picklers write. All others are refused."""


class _ExceptionUnpickler(_Unpickler):
    def __init__(self, data: Buffer, buffers: Sequence[memoryview]) -> None:
        super().__init__(data, buffers)
        self.given: list[Any] = []
        """The arguments and attributes of exceptions. Checked at the end, because lists among them may still grow."""

    def _find(self, name: str) -> Any:
        kind = find_exception(name)
        return find(name) if kind is None else Maker(lambda *given: self._make(kind, given))

    def _make(self, kind: type[Exception], given: tuple[Any, ...]) -> Exception:
        self.given += given
        return kind(*given)

    def _finish(self, target: Any, state: Any) -> None:
        if isinstance(target, Exception) and type(state) is dict:
            for name in _ATTRIBUTES & state.keys():
                self.given.append(state[name])
                setattr(target, name, state[name])
        else:
            super()._finish(target, state)


# ---- checks of the finished object


def _key(key: Any) -> Any:
    """Returns the key of a dict or member of a set. Refuses one that is slow to hash or compare."""
    return key if type(key) in (str, int) else _small(key, rows=(tuple, frozenset), tables=(), leaf=_is_number)


def _small(root: Any, *, rows: Any = _ROWS, tables: Any = _TABLES, leaf: Any = None) -> Any:
    """Returns the object. Refuses one with too many parts, each counted as often as it appears, or not plain data."""
    todo, left = [root], _FEW
    while todo:
        one = todo.pop()
        kind, left = type(one), left - 1
        parts = one if kind in rows else (*one.keys(), *one.values()) if kind in tables else ()
        if len(parts) > left:
            refuse("more than a key or an exception may have")
        todo += parts
        if not (kind in _ATOMS or kind in rows or kind in tables or (leaf or _is_data)(kind)):
            refuse(kind)
    return root


def _survey(root: Any) -> None:
    """Refuses an object that contains anything but data."""
    seen: set[int] = set()
    todo = [root]
    while todo:
        one = todo.pop()
        kind = type(one)
        if kind in _ATOMS or id(one) in seen:
            continue
        seen.add(id(one))
        if kind in _ROWS:
            todo.extend(one)
        elif kind in _TABLES:
            todo.extend(one.keys())
            todo.extend(one.values())
            todo.append(getattr(one, "_metadata", None))
        elif kind is not slice and not _is_data(kind):
            refuse("a class or function" if kind in (Maker, Draft) else kind)


def _is_deep(fragile: Sequence[Any]) -> bool:
    """Whether some of these are nested too deep, or too many of them contain themselves."""
    if len(fragile) <= _DEEPEST:
        return False
    outer: dict[int, list[int]] = {}
    inner = dict.fromkeys(map(id, fragile), 0)
    for one in fragile:
        for part in one if type(one) is collections.deque else one.values():
            if type(part) in _FRAGILE:
                inner[id(one)] += 1
                outer.setdefault(id(part), []).append(id(one))
    level = [place for place, count in inner.items() if not count]
    for _ in range(_DEEPEST):
        above = [place for below in level for place in outer.get(below, ())]
        for place in above:
            inner[place] -= 1
        level = [place for place in dict.fromkeys(above) if not inner[place]]
    return sum(map(bool, inner.values())) > _DEEPEST


def _is_data(kind: type) -> bool:
    """Whether this is a type of leaf other than an atom: arrays, tensors, and their dtypes, shapes and storages."""
    np, torch = sys.modules.get("numpy"), sys.modules.get("torch")
    if np is not None and (kind is np.ndarray or issubclass(kind, (np.generic, np.dtype))):
        return True
    if torch is not None and kind in (torch.Tensor, torch.nn.Parameter, torch.Size, torch.dtype):
        return True
    return kind is bytearray or (torch is not None and kind in (torch.UntypedStorage, torch.storage.TypedStorage))


def _is_number(kind: type) -> bool:
    np = sys.modules.get("numpy")
    return np is not None and issubclass(kind, (np.number, np.bool_, np.character, np.datetime64))
