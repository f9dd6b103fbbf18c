"""The messages between client and agent: immutable objects that are encoded as JSON.

A message never contains user data. That follows as parts, whose sizes or blob names the message lists.
"""

from __future__ import annotations

import functools

from skyfab.protocol.message import Message as Message
from skyfab.protocol.message import decode as decode
from skyfab.protocol.message import expect as expect

TYPE_CHECKING = False  # see frames.py
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Any, ClassVar

    Part = Any
    """An `int`: the number of bytes that follow inline. ``[name, size]``: a blob that is in the host's store."""


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


@functools.lru_cache(maxsize=256)
def result_head(size: int) -> bytes:
    """The head of a result that is one pickle of this size, the most common reply."""
    return Result(parts=(size,)).encode()
