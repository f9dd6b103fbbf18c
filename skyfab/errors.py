"""The exceptions that skyfab raises: one class hierarchy; each error has an optional host, rank and hint.

::

    SkyfabError
    ├── UsageError (ValueError)              the caller asked for something that cannot be done
    │   └── InventoryError                   a mistake in an inventory file: file, table, key
    │       └── UnknownHost (KeyError)       a name that matches no host, group or pattern
    ├── HostError                            something failed on one host
    │   ├── Unreachable (ConnectionError)    no response, connection refused, or unknown host or jump host
    │   ├── AuthenticationRefused            it or its jump host rejected every key and password
    │   ├── HostKeyRefused                   the host's key is unknown, or differs from the known one
    │   ├── HostUnfit                        reached, but it cannot run skyfab: no Python, a full disk
    │   ├── PeersUnreachable                 reached from this machine, but not from another host
    │   └── HostLost (ConnectionError)       it was connected and is now lost
    ├── PoolError (ExceptionGroup)           several hosts failed; all failures are collected
    ├── ProtocolError                        received bytes that violate the protocol
    ├── NotPicklable (TypeError)             an argument, a function or a result cannot be pickled
    ├── CallError                            a call ended with neither a result nor its own exception
    │   ├── WorkerDied                       its process ended: exit code or signal
    │   │   └── ActorLost                    the process of an actor ended, and its state with it
    │   ├── DeviceError (RuntimeError)       an operation on a remote device failed; also of the type raised there
    │   ├── RemoteError                      its exception could not be pickled; has its type and text
    │   ├── UntrustedResult                  it returned more than the plain data that results="data" allows
    │   ├── CallTimeout (TimeoutError)
    │   └── CallCancelled
    └── BroadcastError (ExceptionGroup)      some ranks of a gang failed; `.results` has the others

    RemoteTraceback                          the cause of every exception from a host

The user's own exceptions are raised with their own type and are not in this hierarchy.
"""

from __future__ import annotations

import functools
import re
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Generic, TypeVar

if TYPE_CHECKING:
    from typing_extensions import Self

if sys.version_info >= (3, 11):
    from builtins import ExceptionGroup
else:
    try:
        from exceptiongroup import ExceptionGroup
    except ImportError:  # on a host, where only the standard library is guaranteed
        E = TypeVar("E")

        class ExceptionGroup(Exception, Generic[E]):
            """Replaces the builtin so that this module can be imported; hosts never raise it."""

            def __init__(self, message: str, exceptions: Sequence[Exception]) -> None:
                super().__init__(message, exceptions)
                self.exceptions = tuple(exceptions)


def printable(text: str) -> str:
    """Returns the text without colour sequences and with control characters escaped.

    Parts of it may come from a host, and Python prints it unchanged: it must not be able to control the terminal.
    """
    if text.isprintable():
        return text
    return _CONTROL.sub(lambda found: ascii(found[1])[1:-1] if found[1] else "", text)


_CONTROL = re.compile(
    r"\x1b\[[0-9;:]{0,64}m|([\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069])"
)


def located(host: str | None, rank: int | None) -> str:
    """Host and rank in messages: ``node1[0]``."""
    return host or "" if rank is None else f"{host or 'rank'}[{rank}]"


class SkyfabError(Exception):
    """Base class: what went wrong, where, and what to do next."""

    exit_code = 1

    def __init__(
        self,
        message: str,
        *,
        host: str | None = None,
        rank: int | None = None,
        hint: str | None = None,
    ) -> None:
        super().__init__(message)
        self.host = host
        self.rank = rank
        self.hint = hint

    @property
    def message(self) -> str:
        """What failed, without location and hint."""
        return str(self.args[0])

    def __str__(self) -> str:
        place = located(self.host, self.rank)
        tail = "" if self.hint is None else f"\nhint: {self.hint}"
        return printable(f"{place}{': ' if place else ''}{self.message}{tail}")

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.args, self.__dict__)

    def __copy__(self) -> SkyfabError:
        """For raising a stored error again: the stored one would keep the frames of the program in memory."""
        make, about = self.__reduce__()
        made: SkyfabError = make(*about)
        made.__cause__ = self.__cause__
        return made


def _rebuild(kind: type[SkyfabError], args: tuple[Any, ...], state: dict[str, Any]) -> SkyfabError:
    """Unpickles an error without calling its constructor, whose arguments are keyword-only."""
    error = kind.__new__(kind, *args)
    error.args = args
    error.__dict__.update(state)
    return error


class UsageError(SkyfabError, ValueError):
    """The caller asked for something that cannot be done as requested."""

    exit_code = 2


class InventoryError(UsageError):
    """A mistake in an inventory: the message names file, table and key."""


class UnknownHost(InventoryError, KeyError):
    """A selector names no host, group or pattern of the inventory."""


class HostError(SkyfabError):
    """Something failed on one host."""

    exit_code = 3


class Unreachable(HostError, ConnectionError):
    """The host does not respond, refuses the connection, or its name or its jump host's cannot be resolved."""


class AuthenticationRefused(HostError):
    """The host, or a jump host on the way, rejected every key and password.

    Also raised if the key file does not exist, and if a password, code or passphrase is needed but there is no
    terminal for a prompt. The message says which, and the hint what to do.
    """


class HostKeyRefused(HostError):
    """The host's key is unknown, or differs from the known one."""

    is_unknown = False
    """No key of the host is on record."""


class HostUnfit(HostError):
    """The host was reached but cannot run skyfab: no Python, no disk space, a version mismatch."""


class PeersUnreachable(HostError):
    """Two hosts of a pool cannot connect to each other, as the ranks of a gang must."""


class HostLost(HostError, ConnectionError):
    """The host was connected and no longer responds."""


class ProtocolError(SkyfabError):
    """The other side sent bytes that violate the protocol."""

    exit_code = 3


class NotPicklable(SkyfabError, TypeError):
    """An argument, a function or a result cannot be pickled; the message names the part."""


class CallError(SkyfabError):
    """A call ended with neither a result nor an exception of its own."""


class WorkerDied(CallError):
    """The process that ran the call has ended."""

    def __init__(self, message: str, *, exitcode: int | None = None, **place: Any) -> None:
        super().__init__(message, **place)
        self.exitcode = exitcode
        """As in `subprocess`: a negative value is the signal number."""


class ActorLost(WorkerDied):
    """The process of an actor has ended, and with it the actor's state."""


class DeviceError(CallError, RuntimeError):
    """An operation on a remote device failed on its host. It is also an IndexError if that raised one, and so on."""

    kind = ""
    """The name of the exception's type on the host."""

    @staticmethod
    def of(kind: str, message: str, **place: Any) -> DeviceError:
        """The error for an exception of the host whose type has this name."""
        return _device_class(kind)(message, **place)

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild_device, (self.kind, self.args, self.__dict__)


def _rebuild_device(kind: str, args: tuple[Any, ...], state: dict[str, Any]) -> SkyfabError:
    return _rebuild(_device_class(kind), args, state)


def _device_class(kind: str) -> type[DeviceError]:
    torch = sys.modules.get("torch")
    base = getattr(torch, kind, None) if kind == "OutOfMemoryError" else _DEVICE_KINDS.get(kind)
    return DeviceError if base is None else _derived_class(base)


@functools.cache
def _derived_class(base: type[Exception]) -> type[DeviceError]:
    return type("DeviceError", (DeviceError, base), {"__module__": __name__, "kind": base.__name__})


_DEVICE_KINDS = {
    kind.__name__: kind
    for kind in (
        AssertionError,
        IndexError,
        KeyError,
        MemoryError,
        NotImplementedError,
        OverflowError,
        ValueError,
        ZeroDivisionError,
    )
}
"""Not AttributeError and TypeError: `hasattr` and PyTorch's operators hide them, wherever they come from."""


class RemoteError(CallError):
    """The call raised an exception that cannot be pickled; this carries its type and text."""

    def __init__(self, message: str, *, kind: str = "", **place: Any) -> None:
        super().__init__(message, **place)
        self.kind = kind
        """The qualified name of the exception's type on the host."""


class UntrustedResult(CallError):
    """A host sent something other than plain data to a pool that accepts only that."""


class CallTimeout(CallError, TimeoutError):
    """The call ran longer than its timeout and was stopped on the host."""


class CallCancelled(CallError):
    """The call was cancelled and stopped on the host."""


class RemoteTraceback(Exception):
    """The traceback as text, as it was on the host; set as the cause of the exception that it belongs to."""

    def __init__(self, text: str, host: str = "", rank: int | None = None, item: int | None = None) -> None:
        super().__init__(text, host, rank)
        self.text = text
        self.host = host
        self.rank = rank
        self.item = item
        """Which item of a group in a `map` it was, as the host says."""

    @property
    def place(self) -> str:
        """Host and rank: ``node1[0]``."""
        return located(self.host, self.rank)

    def __str__(self) -> str:
        return printable(f"on {self.place}\n{self.text.rstrip()}")


class _Group(ExceptionGroup[Exception], SkyfabError):
    """Several failures as one error; ExceptionGroup provides `message` and `exceptions`."""

    def __new__(cls, message: str, errors: Sequence[Exception], *_rest: Any) -> Self:
        return super().__new__(cls, message, list(errors))

    def __init__(self, message: str, errors: Sequence[Exception]) -> None:
        self.host = self.rank = self.hint = None

    def __str__(self) -> str:
        lines = dict.fromkeys(f"  {_indent(error)}" for error in self.exceptions)
        return printable("\n".join([self.message, *lines]))

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.message, list(self.exceptions))


class PoolError(_Group):
    """Several hosts failed; every failure is in `.exceptions`."""

    exit_code = 3

    def derive(self, excs: Sequence[Exception], /) -> PoolError:  # type: ignore[override]
        return PoolError(self.message, excs)


class BroadcastError(_Group):
    """Some ranks of a gang failed; `.exceptions` begins with the first failure, without ranks that were stopped."""

    def __init__(self, message: str, errors: Sequence[Exception], results: Sequence[Any] = ()) -> None:
        super().__init__(message, errors)
        self.results = list(results)
        """One entry per rank: what it returned, or the exception it raised."""

    def __reduce__(self) -> tuple[Any, ...]:
        return BroadcastError, (self.message, list(self.exceptions), self.results)

    def derive(self, excs: Sequence[Exception], /) -> BroadcastError:  # type: ignore[override]
        return BroadcastError(self.message, excs, self.results)


def broadcast_error(label: str, failures: Sequence[Exception], results: Sequence[Any]) -> BroadcastError:
    """The error for a broadcast whose ranks failed. Those that were stopped because another one failed did not."""
    failed = [failure for failure in failures if not isinstance(failure, CallCancelled)]
    stopped = len(failures) - len(failed) if failed else 0
    where = f" on {len(failed) or len(failures)} of {len(results)} ranks" if len(results) > 1 else ""
    return BroadcastError(
        f"{label} failed{where}{f'; {stopped} stopped' if stopped else ''}", failed or failures, results
    )


def _indent(error: Exception) -> str:
    cause = error.__cause__
    try:
        text = str(error)
    except Exception as failure:  # the user's exception may be unable to describe itself
        text = f"(its __str__ raised {type(failure).__name__})"
    if not isinstance(error, SkyfabError):
        text = f"{type(error).__name__}: {text}"
        if isinstance(cause, RemoteTraceback):
            text = f"{cause.place} {text}"
    return text.replace("\n", "\n  ")
