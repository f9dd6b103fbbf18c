"""The messages between client and agent: immutable objects that are encoded as JSON, and checked when decoded.

A message never contains user data. That follows as parts, whose sizes or blob names the message lists.
"""

from __future__ import annotations

import functools
import json

from skyfab.errors import ProtocolError

TYPE_CHECKING = False  # see frames.py
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from typing import Any, ClassVar, TypeVar

    from typing_extensions import dataclass_transform

    M = TypeVar("M", bound="Message")
    Part = Any
    """An `int`: the number of bytes that follow inline. ``[name, size]``: a blob that is in the host's store."""
else:

    def dataclass_transform(**_):
        return lambda kind: kind


@dataclass_transform(kw_only_default=True, frozen_default=True)
class Message:
    """Base class of all messages.

    The fields are the annotations, as in a dataclass; importing `dataclasses` would double an agent's first start time.
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
        """An encoded message, cached: the calls to a busy worker often differ only in their data."""
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
    "Sequence[str]": (list, tuple),
    "list[int]": list,
    "list[str]": list,
    "list[list[str]]": list,
}
_ELEMENTS: dict[str, Callable[[object], bool]] = {
    "Mapping[str, str]": lambda inner: isinstance(inner, str),
    "Sequence[Part]": lambda inner: type(inner) in (int, list),
    "Sequence[str]": lambda inner: isinstance(inner, str),
    "list[int]": lambda inner: type(inner) is int,
    "list[str]": lambda inner: isinstance(inner, str),
    "list[list[str]]": lambda inner: isinstance(inner, list) and all(isinstance(word, str) for word in inner),
}
_OFTEN = (b'{"op":"call"', b'{"op":"result"')


_dumps = json.JSONEncoder(separators=(",", ":")).encode  # ASCII: so that text with lone surrogates can be sent
_loads = json.JSONDecoder().decode


def decode(data: bytes) -> Message:
    """Decodes the message in `data`. Raises ProtocolError for anything else.

    Calls and results are cached, because the same ones arrive many times.
    """
    return _decode_often(data) if data.startswith(_OFTEN) and len(data) <= 512 else _decode(data)


def _decode(data: bytes) -> Message:
    try:
        document = _loads(data.decode())
        kind = _ALL[document.pop("op")]
        message = kind(**document)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ProtocolError(f"not a message: {data[:80]!r}") from error
    for name, (whole, element) in kind._checks.items():  # noqa: SLF001 - a message of this module
        value = getattr(message, name)
        fits = isinstance(value, whole) and (whole is bool or not isinstance(value, bool))
        if fits and element is not None:
            fits = all(map(element, value.values() if isinstance(value, dict) else value))
        if not fits:
            raise ProtocolError(f"{kind.op}.{name} is a {type(value).__name__} that does not belong there")
    return message


_decode_often = functools.lru_cache(maxsize=1024)(_decode)


def expect(kind: type[M], data: bytes) -> M:
    """Decodes the message in `data`. Raises ProtocolError if it is not of this kind."""
    message = decode(data)
    if not isinstance(message, kind):
        raise ProtocolError(f"{message.op} where {kind.op} was expected")
    return message


# ---- from the client to the agent


class Spawn(Message):
    """Start a worker process. Calls to the worker may follow at once."""

    op: ClassVar[str] = "spawn"
    worker: str
    generation: int
    """Distinguishes this process from earlier ones of the same worker name."""
    tree: str = ""
    """The digest of the project code that it imports; empty for none."""
    env: Mapping[str, str]
    info: Mapping[str, Any]
    """What `instance_info()` returns there."""
    port: int = 0
    """A port that was opened with Listen: the process inherits its listening socket."""
    workdir: str = ""
    """The working directory: a path, or the name of a project's folder in the cache; empty: the pool's own folder."""
    include: bool = True
    """Whether the tree's files for the working directory are copied into it."""
    pipelined: bool = False
    """Calls are passed on to the process as they arrive, and not one by one after the reply to the one before."""
    reported: bool = True
    """Whether Written tells of files that appear in the working directory from now on."""
    plain: bool = False
    """Results and exceptions are encoded as plain data: the client does not unpickle anything."""


class Call(Message):
    """Run a function in a worker. Reply: Result, Raised or Ended."""

    op: ClassVar[str] = "call"
    worker: str
    function: str
    parts: Sequence[Part]
    timeout: float | None = None
    each: bool = False
    """Call the function for every tuple of a list; the result is the duration in seconds, and the list of results."""


class Function(Message):
    """A packed function, which calls refer to by this digest. No reply."""

    op: ClassVar[str] = "function"
    digest: str
    parts: Sequence[Part]


class Forget(Message):
    """Delete functions that will not be called again. No reply."""

    op: ClassVar[str] = "forget"
    digests: list[str]


class Cancel(Message):
    """Stop the call on that stream: its reply is Ended. No reply to this message itself."""

    op: ClassVar[str] = "cancel"
    stream: int


class Unassign(Message):
    """Return those of these calls that have not begun: the reply to each is Ended. No reply to this message itself."""

    op: ClassVar[str] = "unassign"
    streams: list[int]


class StopWorker(Message):
    """Terminate a worker. No reply."""

    op: ClassVar[str] = "stop_worker"
    worker: str


class DumpStacks(Message):
    """Ask a worker for its stack traces. Reply: Done, with the traces that it wrote after the previous request."""

    op: ClassVar[str] = "dump_stacks"
    worker: str


class Detach(Message):
    """Go on without a client: keep the workers' output and replies in the folder of this run. Reply: Done.

    The agent stays until all calls have been answered.
    """

    op: ClassVar[str] = "detach"
    run: str
    about: Mapping[str, Any]


class Written(Message):
    """Ask which files were written in persistent working directories. Reply: Done, with a list in JSON."""

    op: ClassVar[str] = "written"
    fetched: Sequence[str] = ()
    """If there are any, nothing is asked: files that these paths and patterns name have been fetched by now, and are
    reported only if they are written again."""


class Has(Message):
    """Ask which of these blobs the store does not have. Reply: Missing."""

    op: ClassVar[str] = "has"
    names: list[str]


class Blob(Message):
    """Store this content under its name. Reply: Done or Failed."""

    op: ClassVar[str] = "blob"
    name: str
    parts: Sequence[Part]
    keep: bool = False
    """Whether to store it in the cache, for later pools too; else it is deleted with this pool."""


class Tree(Message):
    """Create a folder with these files, whose blobs are in the store. Reply: Done or Failed."""

    op: ClassVar[str] = "tree"
    digest: str
    files: list[list[str]]
    """Pairs of relative path and blob name."""


class Listen(Message):
    """Listen on a free TCP port until it is passed to a process or closed. Reply: Done, with the port number."""

    op: ClassVar[str] = "listen"
    address: str = ""
    """The address that peers will connect to; it determines IPv4 or IPv6."""
    word: str = ""
    """Sent to each peer that connects, at any address of the host. If empty, connections are not accepted."""


class Unlisten(Message):
    """Stop listening on a port. No reply."""

    op: ClassVar[str] = "unlisten"
    port: int


class ProbePeers(Message):
    """Check which of these peers accept connections, and that each is the expected host. Reply: PeersProbed."""

    op: ClassVar[str] = "probe_peers"
    peers: list[list[str]]
    """Address, port, and the word that is sent there (see Listen). Entries with one word are addresses of one host."""
    timeout: float
    """Timeout in seconds."""


# ---- from the agent to the client


class Result(Message):
    """The call returned; its parts are the pickled value."""

    op: ClassVar[str] = "result"
    parts: Sequence[Part]


class PlainResult(Result):
    """The call returned, in a worker that encodes results as plain data (see plain_data.py)."""

    op: ClassVar[str] = "plain_result"
    parts: Sequence[Part]


class Raised(Message):
    """The call raised; its parts are the pickled exception, or empty if that cannot be pickled."""

    op: ClassVar[str] = "raised"
    parts: Sequence[Part]
    kind: str
    text: str
    traceback: str
    item: int | None = None
    """Which item of the call it was, where the call is for each of several."""
    plain: bool = False
    """The exception is encoded as plain data instead."""


class Ended(Message):
    """The call ended without a result or an exception."""

    op: ClassVar[str] = "ended"
    why: str
    """exit, died, timeout, cancelled, unstarted, unassigned, unpicklable or not_plain."""
    text: str = ""
    exitcode: int | None = None
    traceback: str = ""


class Missing(Message):
    """The reply to Has."""

    op: ClassVar[str] = "missing"
    names: list[str]


class PeersProbed(Message):
    """The reply to ProbePeers."""

    op: ClassVar[str] = "peers_probed"
    found: list[list[str]]
    """For each peer, in order: the error or an empty string; and this host's own address on the route to the peer."""


class Done(Message):
    """The request succeeded."""

    op: ClassVar[str] = "done"
    text: str = ""


class Failed(Message):
    """The request failed on the host."""

    op: ClassVar[str] = "failed"
    text: str
    hint: str | None = None


class Log(Message):
    """The stdout or stderr of a worker follows on this stream, until the pool ends."""

    op: ClassVar[str] = "log"
    worker: str
    fd: int


class Importing(Message):
    """A worker has begun to import a package, or has done so."""

    op: ClassVar[str] = "importing"
    worker: str
    module: str
    """Empty when it has ended."""


class Exited(Message):
    """A worker exited. The replies to its calls follow; those that it had not begun are `unstarted`."""

    op: ClassVar[str] = "exited"
    worker: str
    generation: int
    text: str
    exitcode: int | None = None
    """None if it could not be started."""


# ---- hello


class ClientHello(Message):
    """The first message of the client on a connection."""

    op: ClassVar[str] = "client"
    protocol: int
    received: int
    lease: float
    name: str
    """The client's name for the host."""
    local: bool = False
    """The host is the client's own machine: a lost connection means that the program has ended, not the network."""


class AgentHello(Message):
    """The first message of the agent on a connection."""

    op: ClassVar[str] = "agent"
    protocol: int
    received: int
    python: str
    """major.minor: pickles of functions contain bytecode, which depends on it."""
    cloudpickle: str
    hostname: str
    address: str
    """The address at which the client reached it."""
    addresses: list[list[str]]
    """Addresses at which other hosts may reach it: interface, and address with prefix length."""
    network: str
    """Identifies its network stack: two agents on one machine report the same."""
    gpus: int
    cpus: int
    platform: str
    pid: int
    executable: str
    """The interpreter that runs the agent."""
