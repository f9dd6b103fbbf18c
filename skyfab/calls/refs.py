"""`Ref`: a reference to an object that is sent to a host once and used by many calls."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

from skyfab._util.signals import is_from_handler
from skyfab._util.sizes import readable
from skyfab.errors import NotPicklable
from skyfab.protocol.blobs import allocate, name_of
from skyfab.protocol.codec import Packed, pack, unpack

T = TypeVar("T")


@dataclass(frozen=True, eq=False, repr=False)
class Ref(Packed, Generic[T]):
    """Replaces an object in the arguments of calls; the function receives the object: ``ref = compute.put(model)``.

    It may be anywhere inside the arguments, or in the values that a function uses, and works with any pool. A host is
    sent the content when the first call there needs it. Every call gets its own copy: changes in place are not visible
    to other calls. An object that a function uses by name (a closure, a global) lives as long as the worker does, as
    usual.

    The content stays in this program's memory until the last reference to it is deleted, and on a host until the pool
    closes. A reference that a call returns also arrives as the object.
    """

    name: str
    """The sha256 of the content."""
    memory: memoryview
    """The content. Must not be modified."""
    kind: str
    """The name of the object's type."""

    @property
    def size(self) -> int:
        """Bytes that are sent to a host once."""
        return len(self.memory)

    def get(self) -> T:
        """A new copy of the object."""
        memory = allocate(len(self.memory))
        memory[:] = self.memory
        value: T = unpack(memory)
        return value

    def __repr__(self) -> str:
        return f"<sky.Ref {readable(self.size)} {self.kind}>"

    def __copy__(self) -> Ref[T]:
        return self

    def __deepcopy__(self, memo: object) -> Ref[T]:
        return self  # it is immutable


def put(obj: T) -> Ref[T]:
    """A reference to a copy of the object as it is now. Raises NotPicklable."""
    kind = type(obj).__qualname__
    try:
        memory = pack(obj)
    except Exception as error:
        if is_from_handler(error):
            raise
        raise NotPicklable(
            f"the object to put, a {kind}, cannot be pickled: {error}", hint="put the data that it is made from"
        ) from error
    return Ref(name_of(memory), memory, kind)
