"""Messages: what the two sides say, as frozen values that travel as JSON.

User data never stands in a message: it follows as parts, whose sizes or names the message lists.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, TypeVar

from skyfab.errors import ProtocolError

Part = Any
"""An `int`: so many bytes follow inline. ``[name, size]``: a blob that the host's store has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """Anything that opens on a stream."""

    op: ClassVar[str] = ""

    def encode(self) -> bytes:
        document = {"op": self.op}
        for name in _NAMES[type(self)]:
            document[name] = getattr(self, name)
        return _dumps(document).encode()

    @classmethod
    @functools.lru_cache(maxsize=1024)
    def head(cls, **fields: Any) -> bytes:
        """An encoded message, remembered: the calls of a busy seat differ in their data alone."""
        return cls(**fields).encode()


# ---- from this machine to a host


@dataclass(frozen=True, slots=True, kw_only=True)
class Spawn(Message):
    """Start a process in a seat. Calls to the seat may follow at once."""

    op: ClassVar[str] = "spawn"
    seat: str
    tree: str = ""
    """The digest of the project code it imports; empty for none."""
    env: Mapping[str, str] = field(default_factory=dict)
    info: Mapping[str, Any] = field(default_factory=dict)
    """What `instance_info()` says there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Call(Message):
    """Run a function in a seat; answered by Result, Raised or Ended."""

    op: ClassVar[str] = "call"
    seat: str
    function: str
    parts: Sequence[Part]
    timeout: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Function(Message):
    """The function that calls name by this digest. Not answered."""

    op: ClassVar[str] = "function"
    digest: str
    parts: Sequence[Part]


@dataclass(frozen=True, slots=True, kw_only=True)
class Forget(Message):
    """Functions that will not be called again. Not answered."""

    op: ClassVar[str] = "forget"
    digests: list[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cancel(Message):
    """Stop the call that was made on that stream: it is answered by Ended. Not answered itself."""

    op: ClassVar[str] = "cancel"
    stream: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Release(Message):
    """End the process in a seat. Not answered."""

    op: ClassVar[str] = "release"
    seat: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Has(Message):
    """Which of these blobs are missing? Answered by Missing."""

    op: ClassVar[str] = "has"
    names: list[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Blob(Message):
    """Keep this content under its name; answered by Done or Failed."""

    op: ClassVar[str] = "blob"
    name: str
    parts: Sequence[Part]
    keep: bool = False
    """In the cache, for later pools too; else it goes with this pool."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tree(Message):
    """Lay out these files, whose blobs the store has; answered by Done or Failed."""

    op: ClassVar[str] = "tree"
    digest: str
    files: list[list[str]]
    """Pairs of relative path and blob name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Port(Message):
    """A free TCP port on the host; answered by Done with its number as text."""

    op: ClassVar[str] = "port"


# ---- from a host to this machine


@dataclass(frozen=True, slots=True, kw_only=True)
class Result(Message):
    """The call returned; its parts are the pickled value."""

    op: ClassVar[str] = "result"
    parts: Sequence[Part]


@dataclass(frozen=True, slots=True, kw_only=True)
class Raised(Message):
    """The call raised; its parts are the pickled exception, absent where that cannot be pickled."""

    op: ClassVar[str] = "raised"
    parts: Sequence[Part]
    kind: str
    text: str
    traceback: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended(Message):
    """The call ended otherwise."""

    op: ClassVar[str] = "ended"
    why: str
    """exit, died, timeout, cancelled, unstarted, unpicklable, unloadable or refused."""
    text: str = ""
    exitcode: int | None = None
    traceback: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Missing(Message):
    """The answer to Has."""

    op: ClassVar[str] = "missing"
    names: list[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Done(Message):
    """It is done."""

    op: ClassVar[str] = "done"
    text: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed(Message):
    """It could not be done on the host."""

    op: ClassVar[str] = "failed"
    text: str
    hint: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Log(Message):
    """What a seat's process writes follows on this stream, until the pool ends."""

    op: ClassVar[str] = "log"
    seat: str
    fd: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Exited(Message):
    """A seat's process ended; calls that it had not begun were answered `unstarted`."""

    op: ClassVar[str] = "exited"
    seat: str
    text: str
    exitcode: int


# ---- hello


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientHello(Message):
    """The first thing this machine says on a connection."""

    op: ClassVar[str] = "client"
    protocol: int
    received: int
    lease: float
    name: str
    """How this machine calls the host."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentHello(Message):
    """The first thing a host says on a connection."""

    op: ClassVar[str] = "agent"
    protocol: int
    received: int
    python: str
    """major.minor: pickles of functions hold byte code."""
    cloudpickle: str
    hostname: str
    address: str
    """Where this machine reached it: what its peers may use."""
    gpus: int
    cpus: int
    platform: str
    pid: int


_ALL: dict[str, type[Message]] = {kind.op: kind for kind in Message.__subclasses__()}
_NAMES: dict[type[Message], tuple[str, ...]] = {kind: tuple(f.name for f in fields(kind)) for kind in _ALL.values()}
_TYPES: dict[str, type | tuple[type, ...]] = {
    "str": str,
    "str | None": (str, type(None)),
    "int": int,
    "int | None": (int, type(None)),
    "bool": bool,
    "float": (int, float),
    "float | None": (int, float, type(None)),
    "Mapping[str, str]": dict,
    "Mapping[str, Any]": dict,
}
_CHECKS: dict[type[Message], dict[str, type | tuple[type, ...]]] = {
    kind: {f.name: _TYPES.get(str(f.type), list) for f in fields(kind)} for kind in _ALL.values()
}
_dumps = json.JSONEncoder(separators=(",", ":"), ensure_ascii=False).encode
_loads = json.JSONDecoder().decode

M = TypeVar("M", bound=Message)


def decode(data: bytes) -> Message:
    """The message in `data`. Raises ProtocolError for anything else.

    Short ones are remembered: most of them come again and again.
    """
    return _decode_short(data) if len(data) <= 512 else _decode(data)


def _decode(data: bytes) -> Message:
    try:
        document = _loads(data.decode())
        kind = _ALL[document.pop("op")]
        message = kind(**document)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ProtocolError(f"not a message: {data[:80]!r}") from error
    for name, types in _CHECKS[kind].items():
        if not isinstance(getattr(message, name), types):
            raise ProtocolError(f"{kind.op}.{name} is {getattr(message, name)!r:.80}")
    return message


_decode_short = functools.lru_cache(maxsize=1024)(_decode)


def expect(kind: type[M], data: bytes) -> M:
    """The message in `data`, which must be of this kind."""
    message = decode(data)
    if not isinstance(message, kind):
        raise ProtocolError(f"{message.op} where {kind.op} was expected")
    return message
