"""Messages: what the two sides say, as frozen values that travel as JSON.

User data never stands in a message: it follows as parts, whose sizes or names the message lists.
"""

from __future__ import annotations

import functools
import json

from skyfab.errors import ProtocolError

TYPE_CHECKING = False  # see frames
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from typing import Any, ClassVar, TypeVar

    from typing_extensions import dataclass_transform

    Part = Any
    """An `int`: so many bytes follow inline. ``[name, size]``: a blob that the host's store has."""
    M = TypeVar("M", bound="Message")
else:

    def dataclass_transform(**_):
        return lambda kind: kind


@dataclass_transform(kw_only_default=True, frozen_default=True)
class Message:
    """Anything that opens on a stream.

    Its fields are its annotations, as in a dataclass; `dataclasses` itself would double a cold agent's start.
    """

    op: ClassVar[str] = ""
    _names: ClassVar[tuple[str, ...]]
    _checks: ClassVar[dict[str, tuple[Any, Any]]]

    def __init_subclass__(cls) -> None:
        fields = {name: kind for name, kind in cls.__annotations__.items() if not kind.startswith("ClassVar")}
        cls._names = tuple(fields)
        cls._checks = {name: (_TYPES[kind], _ELEMENTS.get(kind)) for name, kind in fields.items()}
        _ALL[cls.op] = cls

    def __init__(self, **values: Any) -> None:
        for name in self._names:
            if name not in values and not hasattr(type(self), name):
                raise TypeError(f"{self.op} needs {name}")
        for name in values:
            if name not in self._names:
                raise TypeError(f"{self.op} has no {name}")
        self.__dict__.update(values)

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"{self.op} is frozen")

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and self._document() == other._document()

    def __hash__(self) -> int:
        return hash(self.op)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{n}={getattr(self, n)!r}' for n in self._names)})"

    def _document(self) -> dict[str, Any]:
        return {"op": self.op, **{name: getattr(self, name) for name in self._names}}

    def encode(self) -> bytes:
        return _dumps(self._document()).encode()

    @classmethod
    @functools.lru_cache(maxsize=1024)
    def head(cls, **fields: Any) -> bytes:
        """An encoded message, remembered: the calls of a busy seat differ in their data alone."""
        return cls(**fields).encode()


_ALL: dict[str, type[Message]] = {}
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
    "Sequence[Part]": (list, tuple),
    "list[int]": list,
    "list[str]": list,
    "list[list[str]]": list,
}
_ELEMENTS: dict[str, Callable[[object], bool]] = {
    "Mapping[str, str]": lambda inner: isinstance(inner, str),
    "Sequence[Part]": lambda inner: type(inner) in (int, list),
    "list[int]": lambda inner: type(inner) is int,
    "list[str]": lambda inner: isinstance(inner, str),
    "list[list[str]]": lambda inner: isinstance(inner, list) and all(isinstance(word, str) for word in inner),
}
_OFTEN = (b'{"op":"call"', b'{"op":"result"')


# ---- from this machine to a host


class Spawn(Message):
    """Start a process in a seat. Calls to the seat may follow at once."""

    op: ClassVar[str] = "spawn"
    worker: str
    generation: int
    """Tells this process from those that had the seat before."""
    tree: str = ""
    """The digest of the project code it imports; empty for none."""
    env: Mapping[str, str]
    info: Mapping[str, Any]
    """What `instance_info()` says there."""
    port: int = 0
    """One that was asked for with Port: the process inherits the socket that listens there."""
    workdir: str = ""
    """Where its relative paths lead: a path, or the name of a project's folder in the cache; empty: the pool's own."""
    include: bool = True
    """What the tree has for the working folder is laid out there."""


class Call(Message):
    """Run a function in a seat; answered by Result, Raised or Ended."""

    op: ClassVar[str] = "call"
    worker: str
    function: str
    parts: Sequence[Part]
    timeout: float | None = None
    each: bool = False
    """Call it for every tuple of a list; the result is the seconds this took, and a list."""


class Function(Message):
    """The function that calls name by this digest. Not answered."""

    op: ClassVar[str] = "function"
    digest: str
    parts: Sequence[Part]


class Forget(Message):
    """Functions that will not be called again. Not answered."""

    op: ClassVar[str] = "forget"
    digests: list[str]


class Cancel(Message):
    """Stop the call that was made on that stream: it is answered by Ended. Not answered itself."""

    op: ClassVar[str] = "cancel"
    stream: int


class Unassign(Message):
    """Give these calls back, as far as they have not begun: each is answered by Ended. Not answered itself."""

    op: ClassVar[str] = "unassign"
    streams: list[int]


class StopWorker(Message):
    """End the process in a seat. Not answered."""

    op: ClassVar[str] = "stop_worker"
    worker: str


class DumpStacks(Message):
    """Where is the process in a seat? It is asked, and Done has what it said when it was asked the last time."""

    op: ClassVar[str] = "dump_stacks"
    worker: str


class Detach(Message):
    """From now on nobody may be there: what ranks write and answer is kept in the folder of this run; answered by Done.

    The agent stays until they have answered.
    """

    op: ClassVar[str] = "detach"
    run: str
    about: Mapping[str, Any]


class Written(Message):
    """What has been written in working folders that stay? Answered by Done, with a list in JSON."""

    op: ClassVar[str] = "written"


class Has(Message):
    """Which of these blobs are missing? Answered by Missing."""

    op: ClassVar[str] = "has"
    names: list[str]


class Blob(Message):
    """Keep this content under its name; answered by Done or Failed."""

    op: ClassVar[str] = "blob"
    name: str
    parts: Sequence[Part]
    keep: bool = False
    """In the cache, for later pools too; else it goes with this pool."""


class Tree(Message):
    """Lay out these files, whose blobs the store has; answered by Done or Failed."""

    op: ClassVar[str] = "tree"
    digest: str
    files: list[list[str]]
    """Pairs of relative path and blob name."""


class Listen(Message):
    """Listen at a free TCP port, until it is handed to a process or given up; answered by Done with its number."""

    op: ClassVar[str] = "listen"
    address: str = ""
    """The one that will be connected to; it says whether that is IPv6."""
    word: str = ""
    """What whoever connects is told, at any address of the host. Without it nobody is answered."""


class Unlisten(Message):
    """Stop listening at a port. Not answered."""

    op: ClassVar[str] = "unlisten"
    port: int


class ProbePeers(Message):
    """Which of these can be connected to, and does the right host answer? Answered by Reached."""

    op: ClassVar[str] = "probe_peers"
    peers: list[list[str]]
    """Address, port, and the word that is said there (see Port). Several with one word are one host's addresses."""
    patience: float
    """Seconds."""


# ---- from a host to this machine


class Result(Message):
    """The call returned; its parts are the pickled value."""

    op: ClassVar[str] = "result"
    parts: Sequence[Part]


class Raised(Message):
    """The call raised; its parts are the pickled exception, absent where that cannot be pickled."""

    op: ClassVar[str] = "raised"
    parts: Sequence[Part]
    kind: str
    text: str
    traceback: str


class Ended(Message):
    """The call ended otherwise."""

    op: ClassVar[str] = "ended"
    why: str
    """exit, died, timeout, cancelled, unstarted, unassigned or unpicklable."""
    text: str = ""
    exitcode: int | None = None
    traceback: str = ""


class Missing(Message):
    """The answer to Has."""

    op: ClassVar[str] = "missing"
    names: list[str]


class PeersProbed(Message):
    """The answer to Reach."""

    op: ClassVar[str] = "peers_probed"
    found: list[list[str]]
    """For each of them, in order: what went wrong, or nothing; and the address of this host that leads there."""


class Done(Message):
    """It is done."""

    op: ClassVar[str] = "done"
    text: str = ""


class Failed(Message):
    """It could not be done on the host."""

    op: ClassVar[str] = "failed"
    text: str
    hint: str | None = None


class Log(Message):
    """What a seat's process writes follows on this stream, until the pool ends."""

    op: ClassVar[str] = "log"
    worker: str
    fd: int


class Exited(Message):
    """A seat's process ended. The answers to its calls follow: those that it had not begun are `unstarted`."""

    op: ClassVar[str] = "exited"
    worker: str
    generation: int
    text: str
    exitcode: int | None = None
    """None: it could not be started."""


# ---- hello


class ClientHello(Message):
    """The first thing this machine says on a connection."""

    op: ClassVar[str] = "client"
    protocol: int
    received: int
    lease: float
    name: str
    """How this machine calls the host."""
    local: bool = False
    """It is this machine: a connection that ends is the end of the program, and not of a network."""


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
    """Where this machine reached it."""
    addresses: list[list[str]]
    """Where other hosts may reach it: interface, and address with the length of its prefix."""
    network: str
    """Names its network stack: two agents on one machine say the same."""
    gpus: int
    cpus: int
    platform: str
    pid: int
    executable: str
    """The interpreter that runs it."""


@functools.lru_cache(maxsize=256)
def result_head(size: int) -> bytes:
    """The head of a result that is one pickle of this size: what most calls are answered with."""
    return Result(parts=(size,)).encode()


_dumps = json.JSONEncoder(separators=(",", ":")).encode  # ASCII: text with lone surrogates travels too
_loads = json.JSONDecoder().decode


def decode(data: bytes) -> Message:
    """The message in `data`. Raises ProtocolError for anything else.

    Calls and results are remembered: most of them come again and again.
    """
    return _decode_often(data) if data.startswith(_OFTEN) and len(data) <= 512 else _decode(data)


def _decode(data: bytes) -> Message:
    try:
        document = _loads(data.decode())
        kind = _ALL[document.pop("op")]
        message = kind(**document)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ProtocolError(f"not a message: {data[:80]!r}") from error
    for name, (whole, element) in kind._checks.items():
        value = getattr(message, name)
        fits = isinstance(value, whole) and (whole is bool or not isinstance(value, bool))
        if fits and element is not None:
            fits = all(map(element, value.values() if isinstance(value, dict) else value))
        if not fits:
            raise ProtocolError(f"{kind.op}.{name} is a {type(value).__name__} that does not belong there")
    return message


_decode_often = functools.lru_cache(maxsize=1024)(_decode)


def expect(kind: type[M], data: bytes) -> M:
    """The message in `data`, which must be of this kind."""
    message = decode(data)
    if not isinstance(message, kind):
        raise ProtocolError(f"{message.op} where {kind.op} was expected")
    return message
