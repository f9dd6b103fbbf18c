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
    """An `int`: the number of bytes that follow inline; ``["bytes", size]``: the same, into the memory of such an
    object. ``[name, size]``: a blob that is in the host's store; ``[name, size, "bytes"]``: the same, as an object."""
else:

    def dataclass_transform(**_):
        return lambda kind: kind


@dataclass_transform(kw_only_default=True, frozen_default=True)
class Message:
    """Base class of all messages.

    The fields are the annotations, as in a dataclass; importing `dataclasses` would double an agent's first start time.
    """

    op: ClassVar[str]
    """Its name on the wire, made from that of the class: ``stop_worker`` for `StopWorker`."""
    _checks: ClassVar[dict[str, Callable[[Any], bool]]]
    """The names of the fields, each with the check of a value that was received."""

    def __init_subclass__(cls) -> None:
        fields = {name: kind for name, kind in cls.__annotations__.items() if not kind.startswith("ClassVar")}
        cls._checks = {name: _CHECKS[kind] for name, kind in fields.items()}
        cls.op = "".join(f"_{letter.lower()}" if letter.isupper() else letter for letter in cls.__name__)[1:]
        _ALL[cls.op] = cls

    def __init__(self, **values: Any) -> None:
        for name in self._checks:
            if name not in values and not hasattr(type(self), name):
                raise TypeError(f"{self.op} needs {name}")
        for name in values:
            if name not in self._checks:
                raise TypeError(f"{self.op} has no {name}")
        self.__dict__.update(values)

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"{self.op} is frozen")

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and self._document() == other._document()

    def __hash__(self) -> int:
        return hash(self.op)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{n}={getattr(self, n)!r}' for n in self._checks)})"

    def _document(self) -> dict[str, Any]:
        """Its fields, without those that have their default value."""
        fields = {name: getattr(self, name) for name in self._checks}
        kind = type(self)
        return {
            "op": self.op,
            **{name: found for name, found in fields.items() if found != getattr(kind, name, _UNSET)},
        }

    def encode(self) -> bytes:
        return _dumps(self._document()).encode()

    @classmethod
    @functools.lru_cache(maxsize=1024)
    def head(cls, **fields: Any) -> bytes:
        """An encoded message, cached: the calls to a busy worker often differ only in their data."""
        return cls(**fields).encode()


_ALL: dict[str, type[Message]] = {}
_UNSET = object()


def _of(*kinds: type) -> Callable[[Any], bool]:
    return lambda value: type(value) in kinds


def _list_of(*kinds: type) -> Callable[[Any], bool]:
    return lambda value: type(value) is list and all(type(one) in kinds for one in value)


_CHECKS: dict[str, Callable[[Any], bool]] = {
    "str": _of(str),
    "str | None": _of(str, type(None)),
    "int": _of(int),
    "int | None": _of(int, type(None)),
    "bool": _of(bool),
    "float": _of(int, float),
    "float | None": _of(int, float, type(None)),
    "Mapping[str, str]": lambda value: type(value) is dict and all(type(one) is str for one in value.values()),
    "Mapping[str, Any]": _of(dict),
    "Sequence[Part]": _list_of(int, list),
    "Sequence[str]": _list_of(str),
    "list[int]": _list_of(int),
    "list[str]": _list_of(str),
    "list[list[str]]": lambda value: type(value) is list and all(map(_list_of(str), value)),
}
"""For each type that a field may have: whether a value from JSON is of that type."""
_OFTEN = (b'{"op":"call"', b'{"op":"result"', b'{"op":"yielded"')


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
    for name, value in document.items():
        if not kind._checks[name](value):  # noqa: SLF001 - a message of this module
            raise ProtocolError(f"{kind.op}.{name} has a wrong value, a {type(value).__name__}")
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
    """The working folder: a path, or the name of a project's folder in the cache; empty: the pool's own folder."""
    owner: str = ""
    """The pool or run that works there, and not beside another one; empty: for one that only looks at or adds files."""
    include: bool = True
    """Whether the tree's files for the working folder are copied into it."""
    pipelined: bool = False
    """Calls are passed on to the process as they arrive, and not one by one after the reply to the one before."""
    reported: bool = True
    """Whether Written tells of files that appear in the working folder from now on."""
    plain: bool = False
    """Results and exceptions are encoded as plain data: the client does not unpickle anything."""
    threads: int = 1
    """How many calls it runs at a time."""


class Call(Message):
    """Run a function in a worker. Reply: Result, Raised or Ended."""

    worker: str
    function: str
    parts: Sequence[Part]
    timeout: float | None = None
    each: bool = False
    """The arguments are a group of tuples (protocol/batches.py): call the function for each. The result is a group of
    the duration in seconds and the results."""
    streams: bool = False
    """The client and the running call exchange values: see Exchange."""
    ask: int = 0
    """How many values of its generator one exchange asks for, at most."""
    same_gpus: bool = False
    """The client is on the same machine, and waits for the result: that may refer to memory of a GPU."""


class Exchange(Message):
    """Ask a running call for values, or give it some. Reply: Yielded."""

    worker: str
    call: int
    """The stream number of the call; 0: it is about the process."""
    what: str
    """`next`: values of its generator. `give`: values for an argument. `end`: that argument has no more; its parts are
    the exception that ended it, if any. `close`: end the generator, also if it waits or computes."""
    number: int = 0
    """Which argument it is about."""
    parts: Sequence[Part] = ()
    """The values that are given, as a group (protocol/batches.py)."""


class Function(Message):
    """A packed function, which calls refer to by this digest. No reply."""

    digest: str
    parts: Sequence[Part]


class Forget(Message):
    """Delete functions that will not be called again. No reply."""

    digests: list[str]


class Cancel(Message):
    """Stop these calls: the reply to each is Ended. No reply to this message itself."""

    streams: list[int]
    begun: bool = True
    """Whether calls that have begun are stopped too."""


class StopWorker(Message):
    """Terminate a worker. No reply."""

    worker: str


class DumpStacks(Message):
    """Ask a worker for its stack traces. Reply: Done, with the traces that it wrote after the previous request."""

    worker: str


class Detach(Message):
    """Go on without a client: keep the workers' output and replies in the folder of this run. Reply: Done.

    The agent stays until all calls have been answered.
    """

    run: str
    about: Mapping[str, Any]
    owner: str = ""
    """As in Spawn."""


class Written(Message):
    """Ask which files were written in persistent working folders. Reply: Done, with a list in JSON."""


class Has(Message):
    """Ask which of these blobs the store does not have. Reply: Missing."""

    names: list[str]


class Blob(Message):
    """Store this content under its name. Reply: Done or Failed."""

    name: str
    parts: Sequence[Part]
    keep: bool = False
    """Whether to store it in the cache, for later pools too; else it is deleted with this pool."""


class Tree(Message):
    """Create a folder with these files, whose blobs are in the store. Reply: Done or Failed."""

    digest: str
    files: list[list[str]]
    """The relative path and the blob name of each; and, if it may be executed, ``x``."""


class Listen(Message):
    """Listen on a free TCP port until it is passed to a process or closed. Reply: Done, with the port number."""

    address: str = ""
    """The address that peers will connect to; it determines IPv4 or IPv6."""
    word: str = ""
    """Sent to each peer that connects, at any address of the host. If empty, connections are not accepted."""


class Unlisten(Message):
    """Stop listening on a port. No reply."""

    port: int


class ProbePeers(Message):
    """Check which of these peers accept connections, and that each is the expected host. Reply: PeersProbed."""

    peers: list[list[str]]
    """Address, port, and the word that is sent there (see Listen). Entries with one word are addresses of one host."""
    timeout: float
    """Timeout in seconds."""


# ---- from the agent to the client


class Result(Message):
    """The call returned; its parts are the pickled value."""

    parts: Sequence[Part]
    plain: bool = False
    """The value is encoded as plain data instead (see plain_data.py)."""


class Raised(Message):
    """The call raised; its parts are the pickled exception, or empty if that cannot be pickled."""

    parts: Sequence[Part]
    kind: str
    text: str
    traceback: str
    item: int | None = None
    """Which item of the call it was, where the call is for each of several."""
    plain: bool = False
    """The exception is encoded as plain data instead."""
    unfit: bool = False
    """The worker could not begin: nothing of the call was executed."""


class Ended(Message):
    """The call ended without a result or an exception."""

    why: str
    """exit, died, timeout, cancelled, unstarted, unassigned, unstored, unpicklable or not_plain."""
    text: str = ""
    exitcode: int | None = None
    traceback: str = ""
    item: int | None = None
    """As in Raised."""


class Yielded(Message):
    """Values that a generator has yielded; of an exchange that is about something else, only that it is done."""

    parts: Sequence[Part] = ()
    """The values, as a group; none if there are no more."""
    plain: bool = False
    """The values are encoded as plain data instead."""


class Missing(Message):
    """The reply to Has."""

    names: list[str]


class PeersProbed(Message):
    """The reply to ProbePeers."""

    found: list[list[str]]
    """For each peer, in order: the error or an empty string; and this host's own address on the route to the peer."""


class Done(Message):
    """The request succeeded."""

    text: str = ""


class Failed(Message):
    """The request failed on the host."""

    text: str
    hint: str | None = None


class Log(Message):
    """The stdout or stderr of a worker follows on this stream, until the pool ends."""

    worker: str
    fd: int


class Importing(Message):
    """A worker has begun to import a package, or has done so."""

    worker: str
    module: str
    """Empty when it has ended."""


class Exited(Message):
    """A worker exited, or could not be started. The replies to its calls follow, which say why."""

    worker: str
    generation: int


# ---- hello


class ClientHello(Message):
    """The first message of the client on a connection."""

    protocol: int
    received: int
    lease: float
    local: bool = False
    """The host is the client's own machine: a lost connection means that the program has ended, not the network."""


class AgentHello(Message):
    """The first message of the agent on a connection."""

    protocol: int
    received: int
    python: str
    """major.minor: pickles of functions contain bytecode, which depends on it."""
    hostname: str
    address: str
    """The address at which the client reached it."""
    addresses: list[list[str]]
    """Addresses at which other hosts may reach it: interface, and address with prefix length."""
    network: str
    """Identifies its network stack: two agents on one machine report the same."""
    gpus: int
    platform: str
    pid: int
    executable: str
    """The interpreter that runs the agent."""
